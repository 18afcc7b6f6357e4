"""What is counted over the samples of an evaluation, on one rank and then over all."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch
from torch import nn

from ddpjob_trainer.errors import ConfigError, DataError, TrainingError
from ddpjob_trainer.group import Group
from ddpjob_trainer.metrics.curves import BinnedCurves, Curves, CurveTally, ExactCurves

_MOST_CLASSES_IN_MATRIX = 4096


class PrKind(enum.StrEnum):
    """How precision-recall curves are computed."""

    NONE = "none"
    EXACT = "exact"
    BINNED = "binned"


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """What an evaluation reports beside loss, top-1, top-5 and MAE (train.eval_every and eval_batch say when and in what batches)."""

    pr: PrKind = PrKind.NONE
    """Precision-recall curve and average precision per class, macro and micro, equal to scikit-learn's. exact: all scores are gathered
    on rank 0, which needs about 35 bytes per test sample and class for it. binned: 16 bytes per class and bin on each rank, whatever
    the size of the test set; scores in one bin count as equal."""
    pr_bins: int = 2000
    """binned: number of bins, of equal width in log odds. Average precision is about 0.001 lower than the exact one with 2000."""
    confusion: bool = True
    """Confusion matrix, and precision, recall and F1 of each class from it: 8 bytes per pair of classes; not above 4096 classes."""
    pictures: bool = True
    """Draw curve and matrix as PNG beside the numbers in RUN/eval, in a process of its own."""


@dataclass(frozen=True)
class Evaluation:
    """Over the whole test set, every sample once. The same on every rank, up to what `Curves` says."""

    loss: float
    """Mean cross entropy (natural logarithm)."""
    accuracy: float
    """Share of samples whose highest score is their class (top-1); of equal scores the first class counts as the highest."""
    top5: float
    """Share of samples whose class is among the five highest scores."""
    mae: float
    """Mean of |predicted class - class|, both as numbers: what tutorials report as the mean absolute error of a classifier."""
    samples: int
    nonfinite: int = 0
    """Samples with a score that is no finite number."""
    unreadable: int = 0
    """Test samples that could not be read; they count nowhere."""
    confusion: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """int64 (classes, classes): row true class, column predicted class."""
    curves: Curves | None = field(default=None, compare=False, repr=False)

    def scalars(self) -> dict[str, float]:
        """Every number by the name that logs give it."""
        values = {"loss": self.loss, "accuracy": self.accuracy, "top5": self.top5, "mae": self.mae}
        if self.curves is not None:
            values |= {"macroAP": self.curves.macro, "microAP": self.curves.micro}
        return values


class Tally:
    """Counts this rank's samples; `reduce` adds up over the ranks."""

    def __init__(self, classes: int, config: EvalConfig) -> None:
        if config.pr is PrKind.BINNED and config.pr_bins < 2:
            raise ConfigError(f"eval.pr_bins: {config.pr_bins} is less than 2; 2000 bins are a good choice")
        self._classes = classes
        self._sums = torch.zeros(5, dtype=torch.float64)
        with_matrix = config.confusion and classes <= _MOST_CLASSES_IN_MATRIX
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64) if with_matrix else None
        self._curves: CurveTally | None = None
        if config.pr is not PrKind.NONE:
            self._curves = ExactCurves(classes) if config.pr is PrKind.EXACT else BinnedCurves(classes, config.pr_bins)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Scores (n, classes) of a model and true classes (n,). Raises TrainerError when they do not fit each other."""
        if logits.shape != (len(labels), self._classes):
            raise TrainingError(
                f"the model's output has the shape {tuple(logits.shape)} for {len(labels)} samples of {self._classes} classes;"
                f" give a model whose last layer has {self._classes} outputs"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self._classes:
            raise DataError(f"the test set holds a label outside 0..{self._classes - 1}: {labels.min()}..{labels.max()}; mend the labels")
        logits = logits.detach().float()
        finite = torch.isfinite(logits).all(1)
        scores = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none").cpu().double()
        guesses, places = scores.argmax(1).cpu(), place_of_label(scores, labels).cpu()
        truth = labels.cpu()
        counts = [(places < 1).sum(), (places < 5).sum(), (guesses - truth).abs().sum(), (~finite).sum()]
        self._sums += torch.stack([losses.sum(), *(count.cpu().double() for count in counts)])
        if self._confusion is not None:
            self._confusion += torch.bincount(truth * self._classes + guesses, minlength=self._classes**2).view(self._classes, -1)
        if self._curves is not None:
            self._curves.add(logits.softmax(1).nan_to_num(nan=0.0), labels)

    def reduce(self, group: Group, counted: int, unreadable: int) -> Evaluation:
        """The result over all ranks, of which this one has counted `counted` samples. Every rank must call it."""
        *sums, samples, lost = group.sum(torch.cat([self._sums, torch.tensor([counted, unreadable], dtype=torch.float64)])).tolist()
        confusion = group.sum(self._confusion) if self._confusion is not None else None
        curves = self._curves.reduce(group) if self._curves is not None and samples else None
        loss, top1, top5, error, nonfinite = sums
        many = max(1.0, samples)
        return Evaluation(
            loss / many, top1 / many, top5 / many, error / many, int(samples), int(nonfinite), int(lost), confusion=confusion, curves=curves
        )


def place_of_label(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many classes come before each sample's own (n,) by score (n, classes); of equal scores the lower class is first, as in argmax."""
    own = scores.gather(1, labels[:, None])
    numbers = torch.arange(scores.shape[1], device=scores.device)
    return ((scores > own) | ((scores == own) & (numbers < labels[:, None]))).sum(1)
