"""Skips a step on all ranks, with a warning, if its loss or gradient is not finite.

Too many consecutive skipped steps end the training. If the loss is not finite on one rank, the
summed gradient is not finite on any rank, so every rank skips the step without any communication.
Only afterwards do the ranks tell each other which ranks and samples had a loss that is not finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.optim.precision import Update

_SCALE_STEPS = 40
"""Number of steps that a dynamic loss scale takes to fall from 65536 to a uselessly small value.
While the scale falls, skipped steps are normal, because each skipped step lowers the scale.
"""
_NUMBERS_SHOWN = 16
_NUMBERS_COMMON = 3
"""Maximum number of common samples that a message lists. If the steps with a non-finite loss have
more samples in common, the message lists none.
"""

Notify = Callable[[int, str, dict[int, list[int]]], None]
"""Called for a skipped step with (step, text, samples). `samples` maps each rank whose loss was not
finite to its sample numbers.
"""


@dataclass(frozen=True)
class _Taken:
    """A step whose outcome is not checked yet, because checking means waiting for the device."""

    step: int
    samples: Sequence[int]
    losses: torch.Tensor
    skipped: bool | torch.Tensor


class NonFiniteGuard:
    """Finds out which steps were skipped, and reports them. All ranks must make the same calls."""

    def __init__(
        self,
        limit: int,
        group: Group,
        notify: Notify,
        *,
        dynamic_scale: bool = False,
        left_out: Callable[[int], None] | None = None,
    ) -> None:
        """End the training after `limit` consecutive skipped steps.

        `left_out` is called with the number of each skipped step. If `dynamic_scale` is set, steps
        that are skipped because of an overflow do not count while the loss scale is still adapting.
        Raises ConfigError if `limit` is below 1.
        """
        if limit < 1:
            raise ConfigError(
                f"train.nonfinite_limit={limit}: must be at least 1; 1 ends the training at the first "
                "loss that is not finite"
            )
        self._limit, self._group, self._notify, self._dynamic = limit, group, notify, dynamic_scale
        self._left_out = left_out
        self._pending: list[_Taken] = []
        self._in_a_row = self._overflows = 0
        self._common: set[int] = set()
        """Numbers of the samples that the latest steps with a non-finite loss have in common."""
        self.skipped = 0
        """Number of steps skipped in this incarnation of the job."""

    def record(
        self, step: int, samples: Sequence[int], losses: torch.Tensor, count: int, update: Update
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Record whether step `step` was skipped. Return the step's losses and number of samples.

        `samples` is this rank's share of a global batch of `count` samples, and `losses` is the sum
        of these samples' losses. If the step was skipped, both results are zero. If the outcome
        cannot be known without waiting for the device, the results are tensors on the device.

        Raises TrainingError on all ranks if too many consecutive steps were skipped. If the outcome
        is not known yet, `check` raises this error later.
        """
        self._pending.append(_Taken(step, samples, losses, update.skipped))
        if isinstance(update.skipped, torch.Tensor):
            return torch.where(update.skipped, torch.zeros_like(losses), losses), ~update.skipped * count
        self.check()
        return (torch.zeros_like(losses), 0) if update.skipped else (losses, count)

    def check(self) -> None:
        """Check all steps that have been recorded since the last call.

        Raises TrainingError on all ranks if too many consecutive steps were skipped.
        """
        pending, self._pending = self._pending, []
        for taken in pending:
            if bool(taken.skipped):
                self._skipped(taken)
            else:
                self._in_a_row = self._overflows = 0

    def _skipped(self, taken: _Taken) -> None:
        self.skipped += 1
        if self._left_out is not None:
            self._left_out(taken.step)
        loss = float(taken.losses)
        saw = self._group.gather(not math.isfinite(loss))
        if not any(saw) and self._dynamic and self._overflows < _SCALE_STEPS:
            self._overflows += 1
            return
        self._in_a_row += 1
        samples = {rank: self._samples_of(rank, taken.samples) for rank, bad in enumerate(saw) if bad}
        where = f"the loss is not finite on {_by_rank(samples)}" if samples else "the gradient overflows"
        what = f"step {taken.step}: {where}{self._note_common(samples)}"
        if self._in_a_row >= self._limit:
            row = "the step was" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row were"
            raise TrainingError(
                f"{what}; {row} skipped (train.nonfinite_limit={self._limit}). Lower optim.lr, lengthen"
                " optim.warmup_epochs, set optim.clip_norm, or inspect these samples; checkpoints are from earlier "
                "steps"
            )
        self._notify(
            taken.step,
            f"{what}; the step is skipped on all ranks (consecutive steps: {self._in_a_row}, limit {self._limit})",
            samples,
        )

    def _note_common(self, samples: dict[int, list[int]]) -> str:
        """Return a remark on the samples that the latest steps with a non-finite loss share.

        The remark is empty if there are no such samples, or too many to name.
        """
        found = {number for numbers in samples.values() for number in numbers}
        shared = self._common & found
        self._common = shared or found or self._common
        if not 0 < len(shared) <= _NUMBERS_COMMON:
            return ""
        names = ", ".join(map(str, sorted(shared)))
        return f", as in earlier steps with these samples, whose data may be the cause: {names}"

    def _samples_of(self, rank: int, mine: Sequence[int]) -> list[int]:
        content = json.dumps(list(mine)).encode() if rank == self._group.rank else None
        found: list[int] = json.loads(self._group.broadcast_bytes(content, rank))
        return found


def _by_rank(samples: dict[int, list[int]]) -> str:
    def shown(numbers: list[int]) -> str:
        more = f" and {len(numbers) - _NUMBERS_SHOWN} more" if len(numbers) > _NUMBERS_SHOWN else ""
        return ", ".join(map(str, numbers[:_NUMBERS_SHOWN])) + more

    return "; ".join(f"rank {rank} (samples {shown(numbers)})" for rank, numbers in samples.items())
