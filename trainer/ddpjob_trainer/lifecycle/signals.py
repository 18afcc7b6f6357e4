"""Turns SIGTERM into a flag on which the ranks agree at the end of a step.

A reduction combines the flags of all ranks. In the same reduction, the ranks agree on whether to
save a checkpoint, and learn whether every rank can still save. `ddpjob_pod.sigterm` holds the flag.

The reduction costs each rank about as much as the rest of its bookkeeping. If steps are short, the
ranks therefore agree about ten times a second instead of after each step. They all skip the same
steps, because the number of steps to skip follows from the mean step time, which the ranks compute
together in the reduction. Example: with steps of 20 ms, they agree after every sixth step. Training
still stops only after a complete step, and after the same step on all ranks.
"""

from __future__ import annotations

import enum
import math
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from ddpjob_pod.job_environment import JobEnvironment, VariableError
from ddpjob_pod.sigterm import SigtermFlag

from ddpjob_trainer.distributed.process_group import Group, Reduction
from ddpjob_trainer.errors import CheckpointError, ConfigError

EXIT_STEPPED_ASIDE = 75
EXIT_TERMINATED = 128 + signal.SIGTERM
# _TORCHRUNS_SECONDS is the time between torchrun's SIGTERM and its SIGKILL.
_PATIENCE_SECONDS, _TORCHRUNS_SECONDS = 4.0, 30.0
_LAUNCHERS_SECONDS, _OWN_SECONDS = 2.0, 1.0
PACE_SECONDS, _MOST_SKIPPED = 0.1, 10


class Due(enum.IntEnum):
    """Whether to save a checkpoint after a step."""

    NO = 0
    WHEN_FREE = 1
    """Save, unless a rank is still saving an earlier checkpoint."""
    NOW = 2
    """Save after exactly this step, even if a rank is still saving an earlier checkpoint."""


@dataclass(frozen=True)
class SaverState:
    """The state of a rank's checkpoint writer.

    The writer can be saving a checkpoint (`busy`), permanently unable to save (`failed`), or fenced
    by another incarnation of the job (`fenced`).
    """

    busy: bool = False
    failed: bool = False
    fenced: bool = False


class Saver(Protocol):
    """Saves checkpoints while training continues."""

    @property
    def state(self) -> SaverState:
        """The current state of this rank's checkpoint writer."""

    def failure(self, fenced: bool) -> CheckpointError:
        """Return the error that ends training on all ranks after one rank's writer has failed."""


class StopRequest:
    """Records SIGTERM, and lets the ranks agree on when to stop.

    If the ranks do not agree in time, this process exits.
    """

    def __init__(self, group: Group, saver: Saver | None = None) -> None:
        self._group, self._saver = group, saver
        self._requested = threading.Event()
        self._agreed = threading.Event()
        self._last_step = self._last_begun = self._last_answer = time.monotonic()
        self._slowest_step = 0.0
        self._steps, self._skip = 0, 0
        self._saving = False
        self._grace = grace_from_env()

    def listen(self) -> None:
        """Make SIGTERM set the flag instead of ending the process.

        Must be called in the main thread.
        """
        SigtermFlag(self._leave_in_time).listen(at_once=True)

    @property
    def requested(self) -> bool:
        """Whether this rank has received SIGTERM."""
        return self._requested.is_set()

    def over(self) -> None:
        """Record that training is over.

        After this call, SIGTERM does not end the process, because it only has to write its last
        output.
        """
        self._agreed.set()

    @property
    def seconds_left(self) -> float:
        """Seconds left before a pod may be killed, once the ranks have agreed to stop."""
        return max(0.0, self._last_answer + self._patience() - 2 * self._slowest_step - time.monotonic())

    def is_due(self, certain: bool) -> bool:
        """Count a step, and return whether the ranks should call `agreement` after this step.

        The result is the same on every rank. If `certain` is set, the result is always true.
        """
        self._steps += 1
        self._note_step()
        return certain or self._steps > self._skip

    def agreement(self, save_due: int = Due.NO, unreadable: int = 0) -> Agreement:
        """Start agreeing with the other ranks on whether to stop or save after the current step.

        `save_due` states whether this rank wants to save (see `Due`). The same reduction also adds
        up the unreadable samples of all ranks. It begins while the step is still running.
        """
        now = time.monotonic()
        if not self._steps:
            self._note_step()
        # No steps are counted during an evaluation, so the mean step time is unknown right after an
        # evaluation.
        mean = (now - self._last_begun) / self._steps if self._steps else math.inf
        self._last_begun, self._steps = now, 0
        state = self._saver.state if self._saver else SaverState()
        flags = torch.tensor(
            [
                float(flag)
                for flag in (self.requested, save_due, state.busy, state.failed, state.fenced, mean, unreadable)
            ]
        )
        return Agreement(self._group.sum_begin(flags), self)

    def _note_step(self) -> None:
        now = time.monotonic()
        self._slowest_step = max(self._slowest_step * 0.95, now - self._last_step)
        self._last_step = now

    def _leave_in_time(self) -> None:
        """Wait until the ranks agree on a stop. Exit from this process if they take too long."""
        asked = time.monotonic()
        self._requested.set()
        over = self._agreed.is_set()
        what = (
            "has finished, and only writes its last output"
            if over
            else "saves a checkpoint after one of the next steps"
        )
        print(f"SIGTERM: rank {self._group.rank} {what}, then exits", file=sys.stderr, flush=True)
        while (left := self._until(asked) - time.monotonic()) > 0:
            if self._agreed.wait(left):
                return
        waited = f"the other ranks did not respond within {self._patience():.1f} s"
        print(
            f"SIGTERM: {waited}, so rank {self._group.rank} exits without a checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_TERMINATED)

    def _until(self, asked: float) -> float:
        """Return the time, on the monotonic clock, at which this rank gives up waiting.

        `asked` is the time at which SIGTERM arrived. If the grace period is unknown, every
        agreement extends the wait, so this rank waits for slow ranks as long as they respond.
        """
        return self._patience() + (asked if self._grace is not None else max(asked, self._last_answer))

    def _patience(self) -> float:
        """Return how many seconds the ranks have to agree on a stop.

        If the grace period is known, they have all of it except the launcher's share and one second
        for a message. If the grace period is unknown, they have enough time for the next few steps.
        While a checkpoint is being saved, they have enough time for the save instead, because other
        ranks may be waiting for it to finish.
        """
        if self._grace is None:
            return (
                _TORCHRUNS_SECONDS - _OWN_SECONDS
                if self._saving
                else _PATIENCE_SECONDS + (2 + self._skip) * self._slowest_step
            )
        return max(0.5, self._grace - _LAUNCHERS_SECONDS - _OWN_SECONDS)

    def _settled(self, stop: bool, saving: bool, step_seconds: float) -> None:
        if self._group.world > 1:
            self._skip = int(min(_MOST_SKIPPED, PACE_SECONDS * self._group.world / max(step_seconds, 1e-6)))
        self._saving, self._last_answer = saving, time.monotonic()
        if stop:
            self._agreed.set()

    def _give_up(self, fenced: bool) -> None:
        """Raise the error that ends training on every rank."""
        if self._saver is not None:
            raise self._saver.failure(fenced)


class Agreement:
    """An agreement that the ranks reach at the end of a step."""

    def __init__(self, flags: Reduction, request: StopRequest) -> None:
        self._flags, self._request = flags, request

    def wait(self) -> tuple[bool, bool]:
        """Wait for the agreement, and return (stop, save), which are the same on every rank.

        Raises CheckpointError on every rank if a rank can no longer save.
        """
        stop, due, busy, failed, fenced, step_seconds, _ = self._flags.wait().tolist()
        if failed:
            self._request._give_up(fenced > 0)
        save = due >= Due.NOW or (due >= Due.WHEN_FREE and not busy)
        self._request._settled(stop > 0, save or busy > 0, step_seconds)
        return stop > 0, save

    def unreadable(self) -> int:
        """Return the number of unreadable samples in the step, over all ranks."""
        return int(self._flags.wait()[-1])


def grace_from_env() -> float | None:
    """Return the seconds between SIGTERM and the end of the pod, or None outside a job.

    Raises ConfigError if the grace period is malformed.
    """
    try:
        return JobEnvironment.read().grace
    except VariableError as error:
        raise ConfigError(str(error)) from None
