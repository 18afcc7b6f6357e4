"""Images that cannot be decoded: named when they are met, counted over all ranks, and too many of them end the training."""

from __future__ import annotations

import sys

from ddpjob_trainer.errors import DataError

_NAMED = 5


class Warnings:
    """Names the first few of a process; the others are only counted."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def skipped(self, name: str, reason: str) -> None:
        """An image was met that cannot be decoded."""
        if name in self._names:
            return
        self._names.add(name)
        if len(self._names) <= _NAMED:
            print(f"warning: image {name} cannot be read ({reason}): skipped, it weighs nothing", file=sys.stderr, flush=True)
        if len(self._names) == _NAMED:
            print("warning: further images that cannot be read are counted and not named", file=sys.stderr, flush=True)


class CorruptCount:
    """Unreadable images of an epoch, over all ranks: the same number, and the same end, on any number of ranks."""

    def __init__(self, size: int, limit: float) -> None:
        self._size, self._limit = size, limit
        self.epoch = 0

    def begin_epoch(self) -> None:
        """Count anew."""
        self.epoch = 0

    def add(self, unreadable: int) -> None:
        """So many in a step, over all ranks. Raises DataError when more than the share `limit` of the training set cannot be read."""
        self.epoch += unreadable
        if unreadable and self.epoch > self._limit * self._size:
            raise DataError(
                f"{self.epoch} of {self._size} training images cannot be read, more than data.corrupt_limit={self._limit:g} allows"
                f" (warnings above name the first ones): mend or remove them, or raise data.corrupt_limit"
            )
