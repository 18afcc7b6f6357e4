"""Uploads checkpoints to a bucket, newest first, while training continues.

An upload can take longer than the time between two checkpoints, and the bucket can be unreachable
for hours. Even then, training must continue, and the disk must not fill up. Therefore:

- Checkpoints are uploaded one at a time, and only the latest one waits. If a newer checkpoint
  replaces the waiting one, `release` is called with the replaced checkpoint, and the caller can
  delete it.
- A failed upload is retried after 1, 2, 4, ... 60 s. While the process waits for its last upload,
  the pause is at most 5 s. A newer checkpoint replaces the failed one.
- If files of a checkpoint have vanished, its upload is abandoned (`lost`).

Example: step 100 is being uploaded when 200 and 300 are saved. 300 replaces 200, and 200 is
released. 300 is uploaded once 100 is complete or has failed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob_bucket.stored import Bucket, BucketError, Vanished

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""The first and the longest pause between two attempts to upload, in seconds. After each failure,
the next pause is twice as long."""
LONGEST_AWAITED = 5.0
"""The longest pause, in seconds, while the process waits for its last upload before it ends. The
pod may have only seconds left.
"""
MOST_COMPLETED = 100
"""Maximum number of steps in `completed`. If nothing removes them, older steps are dropped."""


@dataclass(frozen=True)
class Waiting:
    """A checkpoint on the local disk that is waiting to be uploaded."""

    path: Path
    step: int
    epoch: int | None = None
    time: float = 0.0
    """When the checkpoint was saved, as a Unix time in seconds."""
    names: tuple[str, ...] = ()
    """Names of the files that this process uploads, if several processes share the upload of a
    folder. If empty, this process uploads all files.
    """


class Uploads:
    """Uploads checkpoints in a thread. A newer checkpoint replaces a waiting one.

    A failed upload never ends the process.

    `tidy` is called in the thread after each successful upload. `release` is called with each
    checkpoint that no longer needs to be uploaded. `publish`, if given, is called for each upload
    instead of `bucket.publish`. With `in_turn`, no checkpoint is replaced, and the oldest one is
    uploaded first, because other processes upload their parts of each checkpoint. `done` is called
    in the thread after each completed upload. By then, `figures` includes the upload, but callers
    of `wait` have not been woken up yet.
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
        self._tidy, self._say, self._release = tidy, _harmless(say), _harmless(release)
        self._publish = publish or (lambda one: bucket.publish(one.path, one.step, one.epoch))
        self._in_turn, self._done = in_turn, _harmless(done)
        self._changed = threading.Condition()
        self._waiting = deque[Waiting]()
        self._current: Waiting | None = None
        self._closing = False
        self._awaited = False
        self._newest: Waiting | None = None
        self.completed = deque[int](maxlen=MOST_COMPLETED)
        """The steps of the last completed uploads. A reader removes the steps that it has seen."""
        self.failures = 0
        """The number of failed uploads since the last successful one."""
        self.lost = False
        """Whether the last upload was abandoned because its files have vanished."""
        self._behind_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> int | None:
        """Step of the latest checkpoint that this process has uploaded; None if there is none."""
        return self._newest.step if self._newest is not None else None

    def offer(self, waiting: Waiting) -> None:
        """Add a checkpoint to the queue of uploads.

        Unless `in_turn` is set, the new checkpoint replaces a waiting one.
        """
        with self._changed:
            passed = [] if self._in_turn else list(self._waiting)
            self._waiting = deque([*(self._waiting if self._in_turn else ()), waiting])
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            self._changed.notify_all()
        for one in passed:
            self._release(one)

    def holds(self, path: Path) -> bool:
        """Whether the checkpoint at this path is waiting or being uploaded.

        Such a checkpoint must not be deleted.
        """
        with self._changed:
            return any(one is not None and one.path == path for one in (*self._waiting, self._current))

    @property
    def behind_seconds(self) -> float:
        """How long uploads have been behind, in seconds; 0 if the latest checkpoint is uploaded.

        Each completed upload resets this time to 0. An abandoned upload does not.
        """
        with self._changed:
            return 0.0 if self._behind_since is None else time.monotonic() - self._behind_since

    def figures(self) -> dict[str, float]:
        """Return the figures to report: the newest copy's step and time, and the copies' delay."""
        newest, behind = self._newest, {"copyBehind": round(self.behind_seconds, 1)}
        return behind if newest is None else {"copyStep": newest.step, "copyTime": round(newest.time), **behind}

    def wait(self, seconds: float | None) -> bool:
        """Wait until all uploads are done. Return False if that takes more than `seconds`.

        If `seconds` is None, wait as long as necessary, and return True.
        """
        limit = None if seconds is None else max(0.0, seconds)
        with self._changed:
            self._awaited = limit != 0
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._waiting and self._current is None, limit)
            finally:
                self._awaited = False

    def close(self) -> None:
        """Start no more uploads.

        An upload in progress is cut off when the process ends. Its files have no manifest, so
        readers ignore them.
        """
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
            # Call `_release` and `_done` before callers of `wait` are woken up.
            if self.lost:
                self._say(f"warning: {problem}; the checkpoint of step {current.step} will not be copied")
                problem = ""
                self._release(current)
            elif not problem:
                self._release(current)
                with self._changed:
                    self._behind_since = time.monotonic() if self._waiting else None
                self._done()
            with self._changed:
                passed = bool(problem) and bool(self._waiting) and not self._in_turn
                if problem:
                    # Upload the checkpoint again after a pause, unless a newer checkpoint has
                    # replaced it.
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
                self._say(f"warning: {problem}; training continues, and the upload will be retried in {pause:.0f} s")
                self._rest(pause)

    def _rest(self, seconds: float) -> None:
        """Pause before the next attempt.

        While a caller waits for the uploads, the pause lasts at most LONGEST_AWAITED seconds.
        """
        began = time.monotonic()
        with self._changed:
            while not self._closing:
                pause = min(seconds, LONGEST_AWAITED) if self._awaited else seconds
                if (left := began + pause - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def _upload(self, waiting: Waiting) -> str:
        """Upload one checkpoint. Return the reason for a failure; empty if the upload succeeded."""
        self.lost = False
        try:
            self._publish(waiting)
            self._newest = waiting
            self.completed.append(waiting.step)
        # Catch every error, even MemoryError. If an error ended this thread, callers would wait
        # forever.
        except Exception as error:
            self.lost = isinstance(error, Vanished)
            return _words(error)
        try:
            self._tidy()
        except Exception as error:
            self._say(f"warning: {_words(error)}; older checkpoints stay in the bucket until the next upload")
        return ""


def _harmless(act: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls `act` and ignores its errors.

    An error must not end the thread, and the most common one, a full disk under the log, cannot be
    logged.
    """

    def quiet(*given: Any) -> None:
        with suppress(Exception):
            act(*given)

    return quiet


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, (BucketError, OSError)) else f"{type(error).__name__}: {error}"
