"""Writes checkpoints to disk during training, one at a time, in a separate thread.

The writer remembers the outcome of the last save.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.errors import CheckpointError, FencedError


@dataclass(frozen=True)
class CompletedSave:
    """A checkpoint that is on disk.

    `pause_seconds` is how long training paused for the save, and `write_seconds` is how long
    writing took.
    """

    step: int
    pause_seconds: float
    write_seconds: float


class Writer:
    """Writes one rank's checkpoints.

    After `limit` failures in a row, or if the rank is fenced, training must end; see `fatal`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._thread: threading.Thread | None = None
        self._completed: deque[CompletedSave] = deque()
        self._failures = 0
        self.failure: CheckpointError | None = None
        """The error from the last save; None if the last save is on disk."""
        self.ended = time.monotonic()
        """The value of time.monotonic() when the last save completed or failed."""
        self.cost = 0.0
        """Cost of the last save in seconds: the pause in training plus the CPU time for writing."""

    @property
    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def fatal(self) -> CheckpointError | None:
        """The error that ends training, or None if training can continue.

        Training ends if too many saves in a row have failed, or if another incarnation has claimed
        the folder.
        """
        failure = self.failure
        return (
            failure
            if failure is not None and (self._failures >= self._limit or isinstance(failure, FencedError))
            else None
        )

    def start(self, act: Callable[[], None], path: Path, step: int, pause_seconds: float) -> None:
        """Run `act` in the background, to put the checkpoint `path` in place.

        Must not be called while a save is in progress.
        """
        assert not self.busy
        self._thread = threading.Thread(
            target=self._work, args=(act, path, step, pause_seconds), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait up to `seconds` for a save in progress.

        Once the save has ended, `failure` has its outcome.
        """
        if self._thread is not None:
            self._thread.join(seconds)

    def completed(self) -> list[CompletedSave]:
        """Return the saves that completed since the last call, oldest first."""
        return [self._completed.popleft() for _ in range(len(self._completed))]

    def _work(self, act: Callable[[], None], path: Path, step: int, pause_seconds: float) -> None:
        began, used = time.monotonic(), time.thread_time()
        failure: CheckpointError | None = None
        try:
            act()
        except CheckpointError as error:
            failure = error
        except OSError as error:
            failure = CheckpointError(
                f"checkpoint {path} cannot be written: {error.strerror or error};"
                f" older checkpoints in the folder are intact. Free some space or repair the volume"
            )
        except Exception as error:
            traceback.print_exc()
            failure = CheckpointError(f"checkpoint {path} cannot be written: {type(error).__name__}: {error}")
        self.ended = time.monotonic()
        self.cost = pause_seconds + time.thread_time() - used
        self._failures = 0 if failure is None else self._failures + 1
        self.failure = failure
        if failure is None:
            self._completed.append(CompletedSave(step, pause_seconds, self.ended - began))
        elif self.fatal is None:
            again = (
                f"consecutive failures: {self._failures}, limit {self._limit}; training continues, and the next "
                "save tries again"
            )
            print(f"warning: {failure} ({again})", file=sys.stderr, flush=True)
