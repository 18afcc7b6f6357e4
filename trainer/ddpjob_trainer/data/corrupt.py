"""Counts unreadable images, reports the first of them, and ends the run if there are too many."""

from __future__ import annotations

import sys

from ddpjob_trainer.config.sections import Corrupt, DataConfig, DataName
from ddpjob_trainer.errors import DataError

_NAMED = 5


class Warnings:
    """Reports only a process's first few unreadable images by name.

    Later ones are only counted: those of the training set by `CorruptCount`, and those of the test
    set during the evaluation.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def skipped(self, name: str, reason: str) -> None:
        """Report that an image is skipped because it cannot be read."""
        if name in self._names:
            return
        self._names.add(name)
        if len(self._names) <= _NAMED:
            print(
                f"warning: image {name} cannot be read ({reason}); it is skipped (weight zero)",
                file=sys.stderr,
                flush=True,
            )
        if len(self._names) == _NAMED:
            print("warning: from now on, unreadable images are counted but not listed", file=sys.stderr, flush=True)


class CorruptCount:
    """Counts an epoch's unreadable images over all ranks.

    If there are too many, training ends at the same step on any number of ranks, because the count
    is global.
    """

    def __init__(self, size: int, config: DataConfig) -> None:
        self._size, self._limit = size, config.corrupt_limit
        self._possible = config.name in (DataName.IMAGEFOLDER, DataName.SHARDS) and config.corrupt is Corrupt.SKIP
        self._met = self.epoch = 0

    def begin_epoch(self) -> None:
        """Reset the counts at the beginning of an epoch."""
        self._met = self.epoch = 0

    def met(self, unreadable: int) -> None:
        """Count the unreadable images in one of this rank's micro-batches."""
        self._met += unreadable

    @property
    def possible(self) -> bool:
        """Whether this data set can have unreadable images that are skipped."""
        return self._possible

    def take(self) -> int:
        """Return how many unreadable images this rank has found since the last call."""
        met, self._met = self._met, 0
        return met

    def add(self, step: int) -> int:
        """Add `step`, the number of unreadable images in a step on all ranks, and return it.

        Raises DataError if the epoch now has more unreadable images than data.corrupt_limit allows.
        """
        self.epoch += step
        if step and self.epoch > self._limit * self._size:
            raise DataError(
                f"{self.epoch} of {self._size} training images cannot be read, more than"
                f" data.corrupt_limit={self._limit:g} allows (warnings above name the first ones); repair or"
                " remove them, or raise data.corrupt_limit"
            )
        return step


def check_test_images(unreadable: int, size: int, config: DataConfig) -> None:
    """Raise DataError if all test images, or more than data.corrupt_limit allows, were unreadable.

    The remaining images are a different test set, whose score must not decide which checkpoint is
    the best.
    """
    if unreadable > config.corrupt_limit * size or unreadable == size:
        raise DataError(
            f"{unreadable} of {size} test images cannot be read (data.corrupt_limit={config.corrupt_limit:g};"
            " warnings above name the first ones); repair or remove them, or raise data.corrupt_limit"
        )
