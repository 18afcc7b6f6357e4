"""The training loss of a micro-batch: a sum over its samples.

The strategy determines the sum's weight in the global batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ddpjob_trainer.config.loader import check_name
from ddpjob_trainer.config.sections import DataConfig, OptimConfig
from ddpjob_trainer.data.dataset import UNREADABLE, Batch, Targets, check_probabilities
from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.own_functions import load_function

Each = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps float32 scores and targets, both of the shape (samples, values), to losses of that shape."""


def _huber(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.huber_loss(scores, targets, reduction="none")


def _bce(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")


_OF_VALUES: dict[str, Each] = {
    "bce": _bce,
    "mse": lambda scores, targets: (scores - targets).square(),
    "l1": lambda scores, targets: (scores - targets).abs(),
    "huber": _huber,
}
"""Losses that are computed for each value of a target. The loss of a sample is the mean over the
sample's values.
"""
_NAMES = ("cross_entropy", *_OF_VALUES)


class Loss:
    """The loss that `optim.loss` names."""

    def __init__(self, config: OptimConfig) -> None:
        """Choose the loss. Raises ConfigError for an unknown name."""
        self.name, self._smoothing = config.loss, config.label_smoothing
        self._own = load_function("optim.loss", config.loss) if ":" in config.loss else None
        self._classes = 0
        check_name("optim.loss", self.name, _NAMES)

    @property
    def of_decisions(self) -> bool:
        """Whether the loss interprets float targets as probabilities, most of which are 0 or 1."""
        return self.name == "bce"

    def check(self, data: DataConfig, targets: Targets, classes: int) -> None:
        """Raise ConfigError if the targets do not suit the loss, or if a setting has no effect.

        After this call, `sum` raises an error if scores do not have exactly `classes` classes.
        """
        if self._smoothing and self.name != "cross_entropy":
            raise ConfigError(
                f"optim.label_smoothing={self._smoothing} has no effect with optim.loss={self.name}; "
                "leave it out, or set optim.loss=cross_entropy"
            )
        mixed = next((key for key in ("mixup", "cutmix") if getattr(data, key)), "")
        if mixed and targets is not Targets.CLASSES:
            raise ConfigError(
                f"data.{mixed} mixes classes, but the targets of data.name={data.name} are "
                f"{targets.value}; leave out data.{mixed}"
            )
        if mixed and self._own is not None:
            raise ConfigError(
                f"data.{mixed} turns classes into fractions of classes, but optim.loss={self.name} "
                f"does not support fractions; leave out data.{mixed}, or set optim.loss=cross_entropy "
                "or bce"
            )
        fitting = {
            Targets.CLASSES: ("cross_entropy", "bce"),
            Targets.VALUES: tuple(_OF_VALUES),
            Targets.NUMBERS: (),
        }[targets]
        if self._own is None and self.name not in fitting:
            raise ConfigError(
                f"optim.loss={self.name} does not support the targets of data.name={data.name}"
                f" ({targets.value}); set optim.loss to"
                f" {', '.join([*fitting, 'package.module:function'])}"
            )
        self._classes = classes if targets is Targets.CLASSES else 0

    def sum(self, scores: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a micro-batch's samples, in float32.

        An unreadable sample has a loss of zero. Raises the same errors as `each`. Also raises
        TrainingError for scores of a wrong shape that would otherwise fail only in the first
        evaluation, hours later.
        """
        return self.total(scores, batch.labels, batch.unreadable)

    def total(self, scores: torch.Tensor, labels: torch.Tensor, unreadable: int) -> torch.Tensor:
        """Return the summed loss, as `sum` does. If `unreadable` is 0, all labels are valid."""
        self._check_scores(scores)
        targets = labels[: len(scores)]
        if self.name == "cross_entropy":
            return loss_sum(scores, targets, self._smoothing)
        if not unreadable:
            return self.each(scores, targets).sum()
        readable = targets.sum(1) > 0 if targets.is_floating_point() else targets != UNREADABLE
        losses = self.each(scores, targets if targets.is_floating_point() else targets.clamp(min=0))
        return torch.where(readable, losses, torch.zeros_like(losses)).sum()

    def each(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample as a tensor (n,), without label smoothing.

        Raises ConfigError if the user's own loss function returns anything else, and TrainingError
        if the model's output does not fit the targets.
        """
        scores = scores.float()
        if self.name == "cross_entropy":
            return nn.functional.cross_entropy(scores, targets, reduction="none")
        if self._own is not None:
            return self._checked(self._own(scores, targets), len(scores))
        if not targets.is_floating_point():
            targets = nn.functional.one_hot(targets, scores.shape[1]).float()
        scores, targets = rows(scores), rows(targets)
        if scores.shape != targets.shape:
            raise TrainingError(
                f"optim.loss={self.name}: the model returns {scores.shape[1]} scores per sample, but a target"
                f" has {targets.shape[1]} values; set model.name to a model whose last layer has"
                f" {targets.shape[1]} outputs"
            )
        # Check only on the CPU, because reading the targets from an accelerator would mean waiting
        # for the accelerator.
        if self.of_decisions and targets.device.type == "cpu":
            check_probabilities(targets)
        return _OF_VALUES[self.name](scores, targets).mean(1)

    def _check_scores(self, scores: object) -> None:
        if not isinstance(scores, torch.Tensor):
            raise TrainingError(f"the model returns {type(scores).__name__}; return a tensor of scores (n, classes)")
        if self._classes and scores.shape[1:] != (self._classes,):
            other = ", or use targets of shape (1,) (evaluations then compute only the loss)" if self._own else ""
            raise TrainingError(
                f"the model's output has the shape {tuple(scores.shape)} for {len(scores)} samples of {self._classes}"
                f" classes; use a model whose last layer has {self._classes} outputs{other}"
            )

    def _checked(self, losses: object, count: int) -> torch.Tensor:
        if isinstance(losses, torch.Tensor) and losses.shape == (count,):
            return losses.float()
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ConfigError(
            f"optim.loss={self.name} returned {found} for {count} samples; return one loss per sample, of"
            f" shape ({count},), for example with reduction='none' and a mean over each sample's values"
        )


def rows(values: torch.Tensor) -> torch.Tensor:
    """Flatten (n, ...) to (n, number of values of a sample)."""
    return values[:, None] if values.ndim == 1 else values.flatten(1)


def loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the samples' cross entropies, as a float32 scalar.

    `logits` are (n, classes). `labels` are class numbers (n,), or each sample's shares of the
    classes (n, classes). Label smoothing (Szegedy et al. 2015) takes the fraction `smoothing` from
    each label and spreads this fraction over all classes. Each sample's loss is multiplied by its
    value in `weights` (n,). The loss of a sample is zero if its label is -100, or if its shares are
    all 0.
    """
    if labels.is_floating_point() and smoothing:
        # torch's own smoothing would also give shares to a sample whose shares are all 0.
        labels = labels * (1 - smoothing) + labels.sum(1, keepdim=True) * (smoothing / labels.shape[1])
        smoothing = 0.0
    if weights is None:
        return nn.functional.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing)
    return (
        nn.functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing) * weights
    ).sum()
