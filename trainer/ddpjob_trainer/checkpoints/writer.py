"""Puts checkpoints on disk beside training: one at a time, in a thread of its own, and remembers how it went."""

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
class Landed:
    """A checkpoint that is on disk: after how many steps it was made, how long training stood still for it, how long the disk took."""

    step: int
    pause_seconds: float
    write_seconds: float


class Writer:
    """One rank's. `limit`: so many failures in a row are fatal; being fenced off is at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._thread: threading.Thread | None = None
        self._landed: deque[Landed] = deque()
        self._failures = 0
        self.failure: CheckpointError | None = None
        """Of the last checkpoint; None: it is on disk."""
        self.ended = time.monotonic()
        """When the last one was on disk or failed."""

    @property
    def busy(self) -> bool:
        """A checkpoint is on its way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def fatal(self) -> CheckpointError | None:
        """Why training must end: too many failures in a row, or another life has the folder."""
        failure = self.failure
        return failure if failure is not None and (self._failures >= self._limit or isinstance(failure, FencedError)) else None

    def start(self, act: Callable[[], None], path: Path, step: int, pause_seconds: float) -> None:
        """Write in the background: `act` puts `path` in place. To be called when not busy."""
        assert not self.busy
        self._thread = threading.Thread(target=self._work, args=(act, path, step, pause_seconds), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Until no checkpoint is on its way, or so long. `failure` tells how it went."""
        if self._thread is not None:
            self._thread.join(seconds)

    def landed(self) -> list[Landed]:
        """What has come to disk since the last call, oldest first."""
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def _work(self, act: Callable[[], None], path: Path, step: int, pause_seconds: float) -> None:
        began = time.monotonic()
        failure: CheckpointError | None = None
        try:
            act()
        except CheckpointError as error:
            failure = error
        except OSError as error:
            failure = CheckpointError(
                f"checkpoint {path} cannot be written: {error.strerror or error};"
                f" older ones in the folder are whole. Make room or mend the volume"
            )
        except Exception as error:
            traceback.print_exc()
            failure = CheckpointError(f"checkpoint {path} cannot be written: {type(error).__name__}: {error}")
        self.ended = time.monotonic()
        self._failures = 0 if failure is None else self._failures + 1
        self.failure = failure
        if failure is None:
            self._landed.append(Landed(step, pause_seconds, self.ended - began))
        elif self.fatal is None:
            again = f"failure {self._failures} of {self._limit} in a row; tries again when the next is due"
            print(f"warning: {failure} ({again})", file=sys.stderr, flush=True)
