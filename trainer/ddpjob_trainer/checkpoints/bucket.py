"""Copies of a checkpoint folder in an object store: put there in the background, and what a start fetches from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddpjob_bucket import Bucket, BucketError, LibraryMissing, Stored, Uploads, Waiting

from ddpjob_trainer.checkpoints.retention import Entry, expendable
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.errors import CheckpointError, ConfigError

FIRST_PAUSE = 1.0
"""Seconds between the first two tries of a start that cannot reach the bucket; doubled each time."""
T = TypeVar("T")


class Copies:
    """The copies of one folder's checkpoints in checkpoint.url, as rank 0 keeps them."""

    def __init__(self, bucket: Bucket, config: CheckpointConfig) -> None:
        self._bucket, self._config = bucket, config
        self._scores: dict[int, float] = {}
        self._uploads: Uploads | None = None
        self._there = -1
        """Step of the newest complete checkpoint in the bucket when this process began."""

    @classmethod
    def open(cls, config: CheckpointConfig) -> Copies:
        """By checkpoint.url. Raises ConfigError."""
        try:
            return cls(Bucket.open(config.url), config)
        except LibraryMissing:
            raise ConfigError(
                f"checkpoint.url={config.url} needs the library obstore, which this image lacks; pip install"
                " 'ddpjob[s3]'"
            ) from None
        except BucketError as error:
            raise ConfigError(f"checkpoint.url={error}") from None

    def begin(self) -> dict[int, float]:
        """Become the newest incarnation that writes to the bucket. Returns the scores of what is there.

        Raises CheckpointError where the bucket is away: a start must know what it holds.
        """
        _patiently(self._bucket.take_term)
        self._uploads = Uploads(self._bucket, self._tidy, _warn)
        return self._bucket.scores()

    def fetch_newer(self, folder: Path, step: int) -> bool:
        """Download the newest complete checkpoint, if it is newer than `step`. Returns whether there was one.

        One that is broken is named in a warning, and the next older one is tried. Raises CheckpointError when all
        newer ones are broken, or the bucket is away.
        """
        entries = _patiently(self._bucket.entries)
        newer = [entry for entry in entries if entry.step > step]
        for entry in newer:
            try:
                path = self._bucket.fetch(entry, folder)
            except BucketError as error:
                _warn(f"warning: {error}; trying the next older one")
            else:
                print(f"checkpoint {path.name} is from {self._bucket.url}", flush=True)
                self._there = entry.step
                return True
        if newer and step < 0:
            raise CheckpointError(
                f"no checkpoint in {self._bucket.url} can be read (the warnings name each); nothing was overwritten."
                " Restore one, or set checkpoint.url to another prefix, to start from scratch"
            )
        self._there = max((entry.step for entry in entries if entry not in newer), default=-1)
        return False

    def has(self, step: int) -> bool:
        """Whether the bucket had a checkpoint that is as new, when `fetch_newer` looked."""
        return self._there >= step

    def offer(self, entry: Entry, scores: dict[int, float]) -> None:
        """Upload a checkpoint that is on disk, in the background."""
        self._scores = scores
        if self._uploads is not None:
            self._uploads.offer(Waiting(entry.path, entry.step, entry.epoch, time.time()))

    def holds(self, path: Path) -> bool:
        """Whether a file is still to be uploaded."""
        return self._uploads is not None and self._uploads.holds(path)

    def completed(self) -> list[int]:
        """Steps of the checkpoints that were uploaded since the last call, oldest first."""
        done = self._uploads.completed if self._uploads is not None else None
        return [done.popleft() for _ in range(len(done))] if done is not None else []

    def figures(self) -> dict[str, float]:
        """copyStep and copyTime (Unix seconds) of the newest checkpoint in the bucket, and copyBehind: for how many
        seconds one has been on this machine alone while none reached the bucket.
        """
        found = self._uploads.figures() if self._uploads is not None else {}
        return {"copyStep": self._there, **found} if self._there >= 0 else found

    def finish(self, scores: dict[int, float], seconds: float | None = None) -> bool:
        """Wait for the last upload, at most `seconds`; None: checkpoint.url_wait_seconds. Says what is missing.

        Returns whether the bucket has it.
        """
        if self._uploads is None:
            return True
        self._scores = scores
        wait = self._config.url_wait_seconds if seconds is None else seconds
        if not self._uploads.wait(wait):
            newest = self._uploads.newest
            there = "none of this process is" if newest is None else f"the newest is of step {newest}"
            _warn(f"warning: the last checkpoint is not in {self._bucket.url} after {wait:.0f} s: {there} there")
            return False
        try:
            self._tidy()
        except BucketError as error:
            _warn(f"warning: {error}; older checkpoints stay in the bucket")
        return True

    def _tidy(self) -> None:
        """The same retention as in the folder."""
        scores = self._scores
        if scores:
            self._bucket.put_scores(scores)
        whole = {entry.step: entry for entry in self._bucket.entries()}
        found = [Entry(step, Path(one.key), self._epoch(one)) for step, one in whole.items()]
        self._bucket.remove(whole[entry.step] for entry in expendable(found, scores, self._config))
        self._bucket.sweep()

    def _epoch(self, entry: Stored) -> int | None:
        if not self._config.keep_every_epochs:
            return None
        return self._bucket.manifest(entry).epoch


def _patiently(act: Callable[[], T], tries: int = 5) -> T:
    """At a start, of all ranks together: what a moment's absence of the bucket should not end.

    Raises CheckpointError.
    """
    for number in range(1, tries + 1):
        try:
            return act()
        except BucketError as error:
            if number == tries:
                raise CheckpointError(str(error)) from error
            _warn(f"warning: {error}; tried again")
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))
    raise AssertionError


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
