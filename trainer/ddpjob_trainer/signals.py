"""SIGTERM as a flag that the ranks agree on at a step's end; with it goes whether to save, and whether each rank still can.

Python runs a signal handler in the main thread only, and not while that is blocked in a collective. The C level writes the signal's
number to the wake-up descriptor at once, and a thread reads it there. A thread in sigwait would know as soon, but needs SIGTERM blocked in
every other thread: those that torch, gloo and OpenMP have started before would take it and end the process, and every process started from
here, loaders and compilers, would inherit the block and outlive its own end.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from ddpjob_trainer.errors import CheckpointError, ConfigError
from ddpjob_trainer.group import Group, Reduction

EXIT_STEPPED_ASIDE = 75
EXIT_TERMINATED = 128 + signal.SIGTERM
_PATIENCE_SECONDS, _TORCHRUNS_SECONDS = 4.0, 30.0  # the latter between its SIGTERM and its SIGKILL
_GRACE_VARIABLE, _LAUNCHERS_SECONDS, _OWN_SECONDS = "DDPJOB_GRACE_SECONDS", 2.0, 1.0


class Due(enum.IntEnum):
    """Whether a checkpoint is to be saved after a step."""

    NO = 0
    WHEN_FREE = 1
    """Once no rank has one on its way."""
    NOW = 2
    """After this very step."""


@dataclass(frozen=True)
class SaverState:
    """How a rank's writer of checkpoints is: one on its way; it cannot save any more; another life of the job has the folder."""

    busy: bool = False
    failed: bool = False
    fenced: bool = False


class Saver(Protocol):
    """What saves checkpoints beside training."""

    @property
    def state(self) -> SaverState:
        """At this moment, on this rank."""

    def failure(self, fenced: bool) -> CheckpointError:
        """Why training ends on all ranks, when a rank has failed."""


class StopRequest:
    """Knows whether SIGTERM has come, lets the ranks agree on it, and ends this process when they no longer can."""

    def __init__(self, group: Group, saver: Saver | None = None) -> None:
        self._group, self._saver = group, saver
        self._requested = threading.Event()
        self._agreed = threading.Event()
        self._last_step = time.monotonic()
        self._slowest_step = 0.0
        self._saving = False
        self._grace = grace_from_env()

    def listen(self) -> None:
        """From now on SIGTERM does not end the process but sets the flag. To be called in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_as_it_was)
        threading.Thread(target=self._watch, args=(reader,), name="sigterm", daemon=True).start()

    @property
    def requested(self) -> bool:
        """SIGTERM has come to this rank."""
        return self._requested.is_set()

    def over(self) -> None:
        """Training has come to its end: SIGTERM does not cut short what is still to be written, for which nobody needs to agree."""
        self._agreed.set()

    def agreement(self, save_due: int = Due.NO) -> Agreement:
        """Begin to agree, while the step runs, on whether to stop and whether to save after it (see `Due`)."""
        now = time.monotonic()
        self._slowest_step = max(self._slowest_step * 0.95, now - self._last_step)
        self._last_step = now
        state = self._saver.state if self._saver else SaverState()
        flags = torch.tensor([float(flag) for flag in (self.requested, save_due, state.busy, state.failed, state.fenced)])
        return Agreement(self._group.sum_begin(flags), self)

    def _watch(self, reader: int) -> None:
        while signal.SIGTERM not in os.read(reader, 64):
            pass
        self._requested.set()
        patience = self._patience()
        what = "is at its end, writes what is left" if self._agreed.is_set() else "saves after this step"
        print(f"SIGTERM: rank {self._group.rank} {what} and leaves", file=sys.stderr, flush=True)
        if not self._agreed.wait(patience):
            waited = f"the other ranks do not answer in {patience:.1f} s"
            print(f"SIGTERM, and {waited}: rank {self._group.rank} leaves without a checkpoint", file=sys.stderr, flush=True)
            os._exit(EXIT_TERMINATED)

    def _patience(self) -> float:
        """Seconds that the ranks have to agree. Until the pod's end there is still the launcher's share, and one second to say so.

        Where nobody says when the end comes, a step must do; or a checkpoint that a rank had on its way, for which the others may wait.
        """
        if self._grace is None:
            return _TORCHRUNS_SECONDS - _OWN_SECONDS if self._saving else _PATIENCE_SECONDS + 2 * self._slowest_step
        return max(0.5, self._grace - _LAUNCHERS_SECONDS - _OWN_SECONDS)

    def _settled(self, stop: bool, busy: bool) -> None:
        self._saving = busy
        if stop:
            self._agreed.set()

    def _give_up(self, fenced: bool) -> None:
        """Raises CheckpointError, on every rank."""
        if self._saver is not None:
            raise self._saver.failure(fenced)


class Agreement:
    """What the ranks agree on at the end of a step."""

    def __init__(self, flags: Reduction, request: StopRequest) -> None:
        self._flags, self._request = flags, request

    def wait(self) -> tuple[bool, bool]:
        """(stop, save): the same on every rank. Raises CheckpointError on every rank when one cannot save any more."""
        stop, due, busy, failed, fenced = (float(flag) for flag in self._flags.wait())
        if failed:
            self._request._give_up(fenced > 0)
        self._request._settled(stop > 0, busy > 0)
        return stop > 0, due >= Due.NOW or (due >= Due.WHEN_FREE and not busy)


def grace_from_env() -> float | None:
    """Seconds between SIGTERM and the pod's end; None outside of a job. Raises ConfigError."""
    text = os.environ.get(_GRACE_VARIABLE, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"{_GRACE_VARIABLE}={text!r}: must be a number of seconds; leave it to the operator, or unset it") from None


def _hold() -> None:
    """Around a fork SIGTERM waits: a child that got it before `_as_it_was` would write into the pipe of its parent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _as_it_was() -> None:
    """In a forked process SIGTERM ends that, and does not reach the rank's pipe, which it has inherited."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
