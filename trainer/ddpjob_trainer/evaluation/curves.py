"""Precision-recall curves and average precision, one class against the rest, as in scikit-learn.

Exact curves use all scores, gathered on rank 0. Binned curves use two histograms per class, whose
memory does not grow with the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ddpjob_trainer.distributed.process_group import Group

_LOGIT_RANGE = 16.0  # In float32, 1 - sigmoid(x) is 0 from about x = 16.6 on.
_POINTS_OF_ALL_CLASSES, _POINTS_POOLED = 20_000, 1_000


@dataclass(frozen=True)
class Curve:
    """A curve as returned by sklearn.metrics.precision_recall_curve.

    The thresholds (t,) are ascending. Precision and recall (t + 1,) have one more value: the last
    precision is 1, and the last recall is 0.
    """

    precision: torch.Tensor
    recall: torch.Tensor
    thresholds: torch.Tensor

    @property
    def average_precision(self) -> float:
        """The sum over thresholds of (R_n - R_(n-1)) P_n (sklearn.metrics.average_precision_score).

        It is 0 for a class without positives.
        """
        return float(-(self.recall.diff() * self.precision[:-1]).sum())

    def thin(self, limit: int) -> Curve:
        """Return a curve with at most about `limit` points, which are evenly spaced over recall.

        The points at both ends are included. If points have equal recall, the most precise one is
        kept.
        """
        if len(self.thresholds) <= limit:
            return self
        wanted = torch.linspace(1.0, 0.0, limit - 1, dtype=torch.float64)
        keep = torch.searchsorted(-self.recall[:-1].contiguous(), -wanted, right=True) - 1
        keep = torch.unique_consecutive(torch.cat([keep, torch.tensor([0])]).sort().values)
        ends = torch.cat([keep, torch.tensor([len(self.thresholds)])])
        return Curve(self.precision[ends], self.recall[ends], self.thresholds[keep])


@dataclass(frozen=True)
class Curves:
    """Precision-recall curves and average precisions, for each class and for all decisions.

    `average_precision` has a value for each class, `macro` is the mean over classes, and `micro` is
    the average precision of all decisions pooled. `of_class` and `pooled` are the curves. The
    curves are thinned for storage and drawing, and exist only on rank 0.
    """

    average_precision: list[float]
    macro: float
    micro: float
    of_class: list[Curve]
    pooled: Curve | None


class CurveAccumulator(Protocol):
    """Collects one rank's scores, batch by batch."""

    def add(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        """Add scores float32 (n, classes) and labels int64 (n,), on any device."""

    def reduce(self, group: Group) -> Curves:
        """Return the curves for all ranks' samples. All ranks must call this together."""


def curve(scores: torch.Tensor, positive: torch.Tensor) -> Curve:
    """Return the exact curve for scores (n,), of which `positive` (n,) marks the positive samples.

    n must be above 0. Equal scores share one threshold.
    """
    ordered, order = torch.sort(scores, descending=True)
    hits = positive[order].to(torch.int64).cumsum(0)
    last = torch.ones(len(ordered), dtype=torch.bool)
    last[:-1] = ordered[:-1] != ordered[1:]
    positions = last.nonzero()[:, 0]
    return _from_counts(hits[positions], positions + 1, ordered[positions])


def _from_counts(hits: torch.Tensor, taken: torch.Tensor, thresholds: torch.Tensor) -> Curve:
    """Return a curve, given counts for each threshold, from the highest threshold to the lowest.

    `hits` is the number of positive samples whose score is at or above the threshold. `taken` is
    the number of all samples whose score is at or above the threshold.
    """
    found = hits.double()
    precision = (found / taken).flip(0)
    recall = (found / found[-1] if hits[-1] > 0 else torch.ones_like(found)).flip(0)
    end = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return Curve(torch.cat([precision, end[:1]]), torch.cat([recall, end[1:]]), thresholds.flip(0))


class ExactCurves:
    """Keeps every score: 4 bytes per sample and class on each rank.

    Rank 0 gathers all scores, and needs about 30 bytes per score to sort them.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._scores: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def add(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep the scores and labels on the CPU."""
        self._scores.append(probabilities.float().cpu())
        self._labels.append(labels.cpu())

    def reduce(self, group: Group) -> Curves:
        """Compute the curves on rank 0, and send the average precisions to all ranks."""
        scores = _gather(torch.cat([torch.empty(0, self._classes), *self._scores]), group).reshape(-1, self._classes)
        labels = _gather(torch.cat([torch.empty(0, dtype=torch.int64), *self._labels]), group)
        curves: list[Curve] = []
        if group.rank == 0:
            truth = labels[:, None] == torch.arange(self._classes)
            curves = [curve(scores[:, number], truth[:, number]) for number in range(self._classes)]
            curves.append(curve(scores.flatten(), truth.flatten()))
        return _share(curves, self._classes, group)


class BinnedCurves:
    """Counts scores in bins of equal width in log odds, between -16 and 16.

    The histograms take 16 bytes per class and bin. With bins of equal width in probability, all
    confident scores of a well-trained model would fall into a single bin.
    """

    def __init__(self, classes: int, bins: int) -> None:
        self._classes, self._bins = classes, bins
        self._counts: torch.Tensor | None = None

    def add(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the scores on the device that holds them."""
        positions = (
            bin_of(probabilities.float(), self._bins) + torch.arange(self._classes, device=labels.device) * self._bins
        )
        size = self._classes * self._bins
        own = positions.gather(1, labels[:, None])[:, 0]
        counts = torch.stack([torch.bincount(part.flatten(), minlength=size) for part in (own, positions)])
        self._counts = counts if self._counts is None else self._counts + counts

    def reduce(self, group: Group) -> Curves:
        """Sum the histograms, compute the curves on rank 0, and send the average precisions."""
        counts = (
            torch.zeros(2, self._classes * self._bins, dtype=torch.int64)
            if self._counts is None
            else self._counts.cpu()
        )
        positive, taken = group.sum(counts).reshape(2, self._classes, self._bins)
        curves: list[Curve] = []
        if group.rank == 0:
            curves = [self._curve(positive[number], taken[number]) for number in range(self._classes)]
            curves.append(self._curve(positive.sum(0), taken.sum(0)))
        return _share(curves, self._classes, group)

    def _curve(self, positive: torch.Tensor, taken: torch.Tensor) -> Curve:
        used = taken.flip(0).nonzero()[:, 0]
        edges = torch.linspace(-_LOGIT_RANGE, _LOGIT_RANGE, self._bins + 1, dtype=torch.float64)[:-1].sigmoid()
        return _from_counts(positive.flip(0).cumsum(0)[used], taken.flip(0).cumsum(0)[used], edges.flip(0)[used])


def bin_of(probabilities: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the number of the bin, 0 to bins - 1, that each probability falls into.

    The bins have equal width in log odds.
    """
    odds = (torch.log(probabilities) - torch.log1p(-probabilities)).clamp(-_LOGIT_RANGE, _LOGIT_RANGE)
    return ((odds + _LOGIT_RANGE) * (bins / (2 * _LOGIT_RANGE))).to(torch.int64).clamp(0, bins - 1)


def _gather(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """Return all ranks' tensors, flattened and concatenated, on rank 0.

    The other ranks get an empty tensor. While the tensors are gathered, the other ranks hold only
    one rank's part at a time.
    """
    if group.world == 1:
        return mine.flatten()
    parts = []
    for source in range(group.world):
        content = group.broadcast_bytes(mine.numpy().tobytes() if source == group.rank else None, source)
        if group.rank == 0 and content:
            parts.append(torch.frombuffer(bytearray(content), dtype=mine.dtype))
    return torch.cat([torch.empty(0, dtype=mine.dtype), *parts])


def _share(curves: list[Curve], classes: int, group: Group) -> Curves:
    """Return the average precisions on every rank, and the curves on rank 0.

    On rank 0, `curves` contains a curve for each class, followed by the curve for all decisions. On
    other ranks, `curves` is empty.
    """
    values = torch.zeros(classes + 1, dtype=torch.float64)
    if group.rank == 0:
        values = torch.tensor([each.average_precision for each in curves], dtype=torch.float64)
    *of_class, micro = group.sum(values).tolist()
    each = max(20, _POINTS_OF_ALL_CLASSES // classes)
    pooled = curves[-1].thin(_POINTS_POOLED) if curves else None
    return Curves(of_class, sum(of_class) / classes, micro, [curve.thin(each) for curve in curves[:-1]], pooled)
