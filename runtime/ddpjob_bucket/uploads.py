"""Uploads checkpoints to a bucket beside training, the newest first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob_bucket.stored import Bucket, BucketError, Vanished

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries of an upload that fails; doubled each time."""
LONGEST_AWAITED = 5.0
"""The longest of them while the process waits for its last upload: the pod may have seconds left."""
MOST_COMPLETED = 100
"""Uploads of which it is known that they are complete, where nobody asks."""


@dataclass(frozen=True)
class Waiting:
    """A checkpoint on this machine's disk that is to be uploaded."""

    path: Path
    step: int
    epoch: int | None = None
    time: float = 0.0
    """When it was saved, in Unix seconds."""
    names: tuple[str, ...] = ()
    """Of a folder whose files several processes upload: those of this one. Empty: it uploads all."""


class Uploads:
    """Uploads checkpoints beside training, the newest first; one that waits gives way to a newer one.

    `tidy` is called after each upload, in the thread; `release` with each that is not needed any more. A failure is
    tried again with growing pauses and never ends anything; of what has vanished the upload is given up. `publish`:
    what uploads one, in place of `bucket.publish`. `in_turn`: all are uploaded, the oldest first; for what other
    processes upload in part. `done` is called in the thread when one is there and `figures` say so, before those who
    wait for it are woken.
    """

    def __init__(
        self,
        bucket: Bucket,
        tidy: Callable[[], None],
        say: Callable[[str], None],
        release: Callable[[Waiting], None] = lambda waiting: None,
        publish: Callable[[Waiting], Any] | None = None,
        *,
        in_turn: bool = False,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._tidy, self._say, self._release = tidy, say, release
        self._publish = publish or (lambda one: bucket.publish(one.path, one.step, one.epoch))
        self._in_turn, self._done = in_turn, done
        self._changed = threading.Condition()
        self._waiting = deque[Waiting]()
        self._current: Waiting | None = None
        self._closing = False
        self._awaited = False
        self._newest: Waiting | None = None
        self.completed = deque[int](maxlen=MOST_COMPLETED)
        """Steps of those that nobody has asked for yet, the newest of them."""
        self.failures = 0
        """Uploads that have failed in a row."""
        self.lost = False
        """Whether the last one was given up."""
        self._behind_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> int | None:
        """Step of the newest checkpoint that this process has uploaded."""
        return self._newest.step if self._newest is not None else None

    def offer(self, waiting: Waiting) -> None:
        """Upload this checkpoint when it is its turn, unless a newer one is offered before."""
        with self._changed:
            passed = [] if self._in_turn else list(self._waiting)
            self._waiting = deque([*(self._waiting if self._in_turn else ()), waiting])
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            self._changed.notify_all()
        for one in passed:
            self._release(one)

    def holds(self, path: Path) -> bool:
        """Whether a file is still needed: it is being uploaded, or waits."""
        with self._changed:
            return any(one is not None and one.path == path for one in (*self._waiting, self._current))

    @property
    def behind_seconds(self) -> float:
        """For how long a checkpoint has been on this machine alone while none reached the bucket; 0: none is."""
        with self._changed:
            return 0.0 if self._behind_since is None else time.monotonic() - self._behind_since

    def figures(self) -> dict[str, float]:
        """What is reported: step and time of the newest in the bucket, once there is one, and how far it is behind."""
        newest, behind = self._newest, {"copyBehind": round(self.behind_seconds, 1)}
        return behind if newest is None else {"copyStep": newest.step, "copyTime": round(newest.time), **behind}

    def wait(self, seconds: float | None) -> bool:
        """Wait until nothing is left to upload, at most so long (None: without a limit). Returns whether that is so."""
        limit = None if seconds is None else max(0.0, seconds)
        with self._changed:
            self._awaited = limit != 0
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._waiting and self._current is None, limit)
            finally:
                self._awaited = False

    def close(self) -> None:
        """Begin no more uploads. One in progress ends with the process: without its list it does not exist."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                current = self._current = self._waiting.popleft()
            problem = self._upload(current)
            if self.lost:
                self._say(f"warning: {problem}; the checkpoint of step {current.step} is not copied")
                problem = ""
            if not problem:
                self._release(current)  # Before those who wait for it are woken.
                with self._changed:
                    self._behind_since = time.monotonic() if self._waiting else None
                self._done()
            with self._changed:
                passed = bool(problem) and bool(self._waiting) and not self._in_turn
                if problem:
                    # Tried again unless a newer one waits, after a pause.
                    self._waiting.extendleft([] if passed else [current])
                    self.failures += 1
                else:
                    self.failures = 0
                self._current = None
                self._changed.notify_all()
            if passed:
                self._release(current)
            if problem:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.failures - 1, 10))
                self._say(f"warning: {problem}; training continues, and the upload is tried again in {pause:.0f} s")
                self._rest(pause)

    def _rest(self, seconds: float) -> None:
        """The pause before the next try, cut short where somebody waits for the upload."""
        began = time.monotonic()
        with self._changed:
            while not self._closing:
                pause = min(seconds, LONGEST_AWAITED) if self._awaited else seconds
                if (left := began + pause - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def _upload(self, waiting: Waiting) -> str:
        """Why it failed; empty: it is complete."""
        self.lost = False
        try:
            self._publish(waiting)
            self._newest = waiting
            self.completed.append(waiting.step)
        except Exception as error:  # No memory, no thread: without this one, all who wait for it would wait for ever.
            self.lost = isinstance(error, Vanished)
            return _words(error)
        try:
            self._tidy()
        except Exception as error:
            self._say(f"warning: {_words(error)}; older checkpoints stay in the bucket until the next upload")
        return ""


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, (BucketError, OSError)) else f"{type(error).__name__}: {error}"
