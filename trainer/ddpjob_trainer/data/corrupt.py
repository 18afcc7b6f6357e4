"""Images that cannot be decoded: named when they are met, counted over all ranks, and too many of them end the training."""

from __future__ import annotations

import sys

import torch

from ddpjob_trainer.data.source import Corrupt, DataConfig, DataName
from ddpjob_trainer.errors import DataError
from ddpjob_trainer.group import Group

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

    def __init__(self, size: int, config: DataConfig) -> None:
        self._size, self._limit = size, config.corrupt_limit
        self._possible = config.name in (DataName.IMAGEFOLDER, DataName.SHARDS) and config.corrupt is Corrupt.SKIP
        self._met = self.epoch = 0

    def begin_epoch(self) -> None:
        """Count anew."""
        self._met = self.epoch = 0

    def met(self, unreadable: int) -> None:
        """So many in a micro-batch of this rank."""
        self._met += unreadable

    def add(self, group: Group) -> int:
        """How many in this step, over all ranks together. Raises DataError when the share of the training set gets too large."""
        if not self._possible:
            return 0
        step = int(group.sum(torch.tensor([self._met])).item())
        self._met = 0
        self.epoch += step
        if step and self.epoch > self._limit * self._size:
            raise DataError(
                f"{self.epoch} of {self._size} training images cannot be read, more than data.corrupt_limit={self._limit:g} allows"
                f" (warnings above name the first ones): mend or remove them, or raise data.corrupt_limit"
            )
        return step
