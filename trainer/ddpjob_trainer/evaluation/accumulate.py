"""Adds up the results of an evaluation's samples, first on each rank and then over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ddpjob_trainer.config.sections import EvalConfig, PrKind
from ddpjob_trainer.data.dataset import Targets, check_probabilities
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, DataError, TrainingError
from ddpjob_trainer.evaluation.curves import BinnedCurves, CurveAccumulator, Curves, ExactCurves

_MOST_CLASSES_IN_MATRIX = 4096


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on the whole test set, with every sample counted once.

    The result is the same on every rank, except for the curves (see `Curves`).
    """

    loss: float
    """Mean of optim.loss over all samples, without label smoothing. optim.loss is usually
    the cross entropy (natural logarithm).
    """
    accuracy: float | None
    """Share of samples whose highest score belongs to their class (top-1). If scores are equal, the
    first class counts as the highest. For optim.loss=bce with float targets, this is the share of
    values whose probability is on the correct side of 0.5. For regression, it is None.
    """
    top5: float | None
    """Share of samples whose class is among the five highest scores."""
    mae: float | None
    """Mean absolute error: the mean of |predicted class - class|, with classes as numbers. For
    regression, it is the mean of |score - target| over all values.
    """
    samples: int
    nonfinite: int = 0
    """Number of samples with a score that is not finite."""
    unreadable: int = 0
    """Number of test samples that could not be read. They are excluded from all other numbers."""
    confusion: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The confusion matrix, int64 (classes, classes): a row per true class, a column per predicted
    class.
    """
    curves: Curves | None = field(default=None, compare=False, repr=False)
    rmse: float | None = None
    """Root of the mean of (score - target)^2 over all values, for regression."""
    f1: float | None = None
    """F1 over all values together (micro average), for optim.loss=bce with float targets. It is 0
    if there are no positives.
    """
    own: Mapping[str, float] = field(default_factory=dict)
    """The metrics that the user's callbacks compute, by name."""

    def scalars(self) -> dict[str, float]:
        """Return every number, keyed by its name in the logs."""
        numbers = {"accuracy": self.accuracy, "top5": self.top5, "mae": self.mae, "rmse": self.rmse, "f1": self.f1}
        values = {"loss": self.loss} | {name: value for name, value in numbers.items() if value is not None}
        if self.curves is not None:
            values |= {"macroAP": self.curves.macro, "microAP": self.curves.micro}
        return values | dict(self.own)


Each = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps the scores and targets of n samples to the samples' losses (n,)."""


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="none")


class Adding(Protocol):
    """Adds up the results of an evaluation, batch by batch."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the scores and targets of some of this rank's samples."""

    def reduce(self, group: Group, counted: int, unreadable: int = 0) -> Evaluation:
        """Return the result over all ranks. All ranks must call this together."""


class ValueAccumulator:
    """Adds up the results of an evaluation whose targets are numbers rather than classes.

    The loss is always computed. If the targets are floats with the same shape as the scores, there
    are two more results: mae and rmse or, if `decisions` is set (targets from 0 to 1), accuracy and
    f1. All of them are computed from sums over all values on all ranks.
    """

    def __init__(self, each: Each, *, decisions: bool = False) -> None:
        self._each, self._decisions = each, decisions
        self._sums = torch.zeros(7, dtype=torch.float64)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the model's scores (n, ...) and the targets (n, ...) of some samples.

        If `decisions` is set, raises ConfigError for a target that is not between 0 and 1.
        """
        if not len(labels):
            return
        scores = logits.detach().float()
        loss, finite = self._each(scores, labels).double().sum(), torch.isfinite(scores).reshape(len(labels), -1).all(1)
        found, truth = (values.reshape(len(labels), -1).double() for values in (scores, labels))
        sums = [torch.zeros_like(loss)] * 5
        if labels.is_floating_point() and found.shape == truth.shape:
            if self._decisions:
                # Check again, because training on an accelerator skips this check to avoid waiting
                # for the device.
                check_probabilities(labels)
                guesses, positive = found > 0, truth > 0.5
                right = (guesses == positive) & ~found.isnan()
                counts = [right, guesses & positive, guesses, positive, torch.ones_like(positive)]
                sums = [count.sum().double() for count in counts]
            else:
                errors = (found - truth).abs()
                sums = [errors.sum(), errors.square().sum(), *sums[2:4], torch.ones_like(errors).sum()]
        self._sums += torch.stack([loss, *sums, (~finite).sum().double()]).cpu()

    def reduce(self, group: Group, counted: int, unreadable: int = 0) -> Evaluation:
        """Return the result over all ranks. All ranks must call this together."""
        numbers = torch.tensor([counted, unreadable], dtype=torch.float64)
        loss, first, second, third, fourth, values, nonfinite, samples, lost = group.sum(
            torch.cat([self._sums, numbers])
        ).tolist()
        regression = values and not self._decisions
        return Evaluation(
            loss / max(1.0, samples),
            first / values if values and self._decisions else None,
            None,
            first / values if regression else None,
            int(samples),
            int(nonfinite),
            int(lost),
            rmse=math.sqrt(second / values) if regression else None,
            f1=2 * second / max(1.0, third + fourth) if values and self._decisions else None,
        )


def open_accumulator(targets: Targets, classes: int, each: Each, config: EvalConfig, *, decisions: bool) -> Adding:
    """Return the accumulator for a data set: an `Accumulator` or a `ValueAccumulator`.

    Raises ConfigError if `config` requests numbers that cannot be computed for these targets.
    """
    if targets is Targets.CLASSES:
        return Accumulator(classes, config, each, apart=decisions)
    if config.pr is not PrKind.NONE:
        raise ConfigError(
            f"eval.pr={config.pr.value} needs class numbers as targets, but the targets are "
            f"{targets.value}; leave out eval.pr"
        )
    return ValueAccumulator(each, decisions=decisions)


class Accumulator:
    """Adds up the evaluation results of this rank's samples. Targets must be class numbers.

    `reduce` combines the results of all ranks.
    """

    def __init__(
        self, classes: int, config: EvalConfig | None = None, each: Each | None = None, *, apart: bool = False
    ) -> None:
        """Start with empty sums.

        `each` maps float32 scores (n, classes) and class numbers (n,) to losses (n,). The default
        is cross entropy. If `apart` is set, the probability of a class depends only on that class's
        score, as in binary cross entropy.
        """
        config = config or EvalConfig()
        if config.pr is PrKind.BINNED and config.pr_bins < 2:
            raise ConfigError(f"eval.pr_bins={config.pr_bins}: must be at least 2; 2000 is a good choice")
        self._classes, self._each, self._added, self._apart = classes, each or _cross_entropy, 0, apart
        self._sums = torch.zeros(5, dtype=torch.float64)
        with_matrix = config.confusion and classes <= _MOST_CLASSES_IN_MATRIX
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64) if with_matrix else None
        self._curves: CurveAccumulator | None = None
        if config.pr is not PrKind.NONE:
            self._curves = ExactCurves(classes) if config.pr is PrKind.EXACT else BinnedCurves(classes, config.pr_bins)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the model's scores (n, classes) for n samples, and the samples' true classes (n,).

        Raises TrainerError if the shapes do not match, or a class number is out of range.
        """
        if logits.shape != (len(labels), self._classes):
            raise TrainingError(
                f"the model's output has the shape {tuple(logits.shape)} for {len(labels)} samples of"
                f" {self._classes} classes; use a model whose last layer has {self._classes} outputs"
            )
        if len(labels):
            least, most = torch.stack(torch.aminmax(labels)).tolist()
            if not 0 <= least <= most < self._classes:
                raise DataError(
                    f"the test set has labels from {least} to {most}, but they must be from 0 to "
                    f"{self._classes - 1}; correct the labels"
                )
        self._added += len(labels)
        logits = logits.detach().float()
        scores = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        found = [self._each(logits, labels), scores.argmax(1), rank_of_label(scores, labels), labels]
        # Copy once, because each copy waits for the device. Float32 can hold every class number,
        # and some devices do not support float64.
        dtype = torch.promote_types(found[0].dtype, torch.float32)
        copied = torch.stack([values.to(dtype) for values in (*found, ~torch.isfinite(logits).all(1))]).cpu()
        losses, numbers = copied[0].double(), copied[1:].to(torch.int64)
        guesses, ranks, truth, nonfinite = numbers
        # If all scores of a sample are NaN, argmax returns class 0. This guess must not count as
        # correct, so replace it if class 0 is the sample's true class.
        guesses = (guesses + ((guesses == truth) & (ranks > 0))) % self._classes
        counts = [(ranks < 1).sum(), (ranks < 5).sum(), (guesses - truth).abs().sum(), nonfinite.sum()]
        self._sums += torch.stack([losses.sum(), *(count.double() for count in counts)])
        if self._confusion is not None:
            self._confusion += torch.bincount(truth * self._classes + guesses, minlength=self._classes**2).view(
                self._classes, -1
            )
        if self._curves is not None:
            chances = logits.sigmoid() if self._apart else logits.softmax(1)
            self._curves.add(chances.nan_to_num(nan=0.0), labels)

    def reduce(self, group: Group, counted: int, unreadable: int = 0) -> Evaluation:
        """Return the result over all ranks. All ranks must call this together.

        `counted` is the number of samples that this rank has added, and `unreadable` is the number
        of samples that it could not read. Raises TrainingError if `add` has received a different
        number of samples than `counted`.
        """
        if counted != self._added:
            raise TrainingError(
                f"Accumulator.reduce: counted={counted} on rank {group.rank}, but {self._added} samples were"
                " added; pass their number"
            )
        *sums, samples, lost = group.sum(
            torch.cat([self._sums, torch.tensor([counted, unreadable], dtype=torch.float64)])
        ).tolist()
        confusion = group.sum(self._confusion) if self._confusion is not None else None
        curves = self._curves.reduce(group) if self._curves is not None and samples else None
        loss, top1, top5, error, nonfinite = sums
        many = max(1.0, samples)
        return Evaluation(
            loss / many,
            top1 / many,
            top5 / many,
            error / many,
            int(samples),
            int(nonfinite),
            int(lost),
            confusion=confusion,
            curves=curves,
        )


def rank_of_label(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return, for each sample, how many classes have a higher score than its true class.

    Scores are (n, classes), and the result is (n,). If scores are equal, the lower class ranks
    first, as in argmax. A true class whose score is -inf ranks after all classes.
    """
    own = scores.gather(1, labels[:, None])
    numbers = torch.arange(scores.shape[1], device=scores.device)
    return ((scores > own) | ((scores == own) & (numbers < labels[:, None])) | own.isneginf()).sum(1)
