"""Decides which checkpoints to delete, as a pure function of the folder's contents."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.config.sections import CheckpointConfig, Metric


@dataclass(frozen=True, order=True)
class Entry:
    """A checkpoint in the folder.

    `epoch` is the number of epochs completed when it was saved, or None if it was saved within an
    epoch. `whole` is False if the checkpoint is known to be broken.
    """

    step: int
    path: Path
    epoch: int | None = None
    whole: bool = True


def expendable(found: Collection[Entry], scores: dict[int, float], config: CheckpointConfig) -> list[Entry]:
    """Return the checkpoints to delete.

    Three groups of intact checkpoints are kept: the newest `keep`, the best `keep_best`, and those
    at the end of every `keep_every_epochs`th epoch. A broken checkpoint is deleted if it is older
    than all of the newest `keep` intact ones.
    """
    whole = sorted((entry for entry in found if entry.whole), reverse=True)
    newest = whole[: config.keep]
    best = ranked(whole, scores, config.best_by)[: config.keep_best]
    for_good = [
        entry
        for entry in whole
        if entry.epoch and config.keep_every_epochs and entry.epoch % config.keep_every_epochs == 0
    ]
    kept = {*newest, *best, *for_good}
    oldest = newest[-1].step if len(newest) == config.keep else 0
    return sorted(entry for entry in found if entry not in kept and (entry.whole or entry.step < oldest))


def ranked(found: Collection[Entry], scores: dict[int, float], metric: Metric) -> list[Entry]:
    """Return the checkpoints that have been evaluated, best first.

    If scores are equal, the older checkpoint comes first. Infinite and undefined scores come last.
    """
    sign = -1 if metric is Metric.ACCURACY else 1

    def order(entry: Entry) -> tuple[float, int]:
        score = scores[entry.step]
        return (sign * score if math.isfinite(score) else math.inf, entry.step)

    return sorted((entry for entry in found if entry.step in scores), key=order)
