"""Losses and gradients that are not finite: the step is left out on all ranks and told; several in a row end the training.

A loss that is not finite on one rank makes the summed gradient so on every rank, by which every rank leaves the step out. So the ranks
need no message to agree on it, and only after such a step do they tell each other who saw it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.group import Group
from ddpjob_trainer.precision import Update

_SCALE_STEPS = 40
"""A dynamic loss scale falls from 65536 to below any that helps in so many steps; until then leaving steps out is its way to adapt."""
_NUMBERS_SHOWN = 16

Tell = Callable[[int, str, dict[int, list[int]]], None]
"""Takes (step, text, {rank: samples of its part, where the loss was not finite})."""


@dataclass(frozen=True)
class _Taken:
    """A step whose end has not been looked at, for that would wait for the device."""

    step: int
    samples: Sequence[int]
    losses: torch.Tensor
    left_out: bool | torch.Tensor


class NonFiniteGuard:
    """Watches what becomes of steps. All ranks must call it alike."""

    def __init__(self, limit: int, group: Group, tell: Tell, *, dynamic_scale: bool = False) -> None:
        """`limit`: so many steps in a row that are left out end the training. Raises ConfigError."""
        if limit < 1:
            raise ConfigError(f"train.nonfinite_limit: {limit} is less than 1; 1 ends the training at the first loss that is not finite")
        self._limit, self._group, self._tell, self._dynamic = limit, group, tell, dynamic_scale
        self._pending: list[_Taken] = []
        self._in_a_row = self._overflows = 0
        self.skipped = 0
        """Steps left out so far, in this life of the job."""

    def took(
        self, step: int, samples: Sequence[int], losses: torch.Tensor, count: int, update: Update
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Step `step` was taken or left out; `losses` is this rank's sum over `samples`, its part of a global batch of `count`.

        Returns losses and count; zeros for both when the step was left out, on the device where looking would wait for it.
        Raises TrainingError on all ranks when too many in a row were left out; where looking would wait, `look` does.
        """
        self._pending.append(_Taken(step, samples, losses, update.skipped))
        if isinstance(update.skipped, torch.Tensor):
            return torch.where(update.skipped, torch.zeros_like(losses), losses), ~update.skipped * count
        self.look()
        return (torch.zeros_like(losses), 0) if update.skipped else (losses, count)

    def look(self) -> None:
        """At the steps since the last look. Raises TrainingError, on all ranks."""
        pending, self._pending = self._pending, []
        for taken in pending:
            if bool(taken.left_out):
                self._left_out(taken)
            else:
                self._in_a_row = self._overflows = 0

    def _left_out(self, taken: _Taken) -> None:
        self.skipped += 1
        loss = float(taken.losses)
        saw = self._group.gather(not math.isfinite(loss))
        if not any(saw) and self._dynamic and self._overflows < _SCALE_STEPS:
            self._overflows += 1
            return
        self._in_a_row += 1
        samples = {rank: self._samples_of(rank, taken.samples) for rank, bad in enumerate(saw) if bad}
        where = f"the loss is not finite on {_parts(samples)}" if samples else "the gradient overflows"
        what = f"step {taken.step}: {where}"
        if self._in_a_row >= self._limit:
            row = "it was" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row were"
            raise TrainingError(
                f"{what}; {row} left out (train.nonfinite_limit={self._limit})."
                f" Lower optim.lr, lengthen optim.warmup_epochs, set optim.clip_norm, or look at these samples; checkpoints are from before"
            )
        self._tell(taken.step, f"{what}; the step is left out on all ranks ({self._in_a_row} of {self._limit} in a row)", samples)

    def _samples_of(self, rank: int, mine: Sequence[int]) -> list[int]:
        content = json.dumps(list(mine)).encode() if rank == self._group.rank else None
        found: list[int] = json.loads(self._group.broadcast_bytes(content, rank))
        return found


def _parts(samples: dict[int, list[int]]) -> str:
    def shown(numbers: list[int]) -> str:
        more = f" and {len(numbers) - _NUMBERS_SHOWN} more" if len(numbers) > _NUMBERS_SHOWN else ""
        return ", ".join(map(str, numbers[:_NUMBERS_SHOWN])) + more

    return "; ".join(f"rank {rank} (samples {shown(numbers)})" for rank, numbers in samples.items())
