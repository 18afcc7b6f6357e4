"""Copies of a checkpoint folder in an object store: put there in the background, and what a start fetches from it.

Of a checkpoint in parts each rank uploads what it has written. All ranks know the manifest, which names every file with
size and checksum, since before the upload. Rank 0 writes it into the bucket when the bucket itself shows all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ddpjob_bucket import (
    Bucket,
    BucketError,
    CopyManifest,
    Damaged,
    File,
    LibraryMissing,
    Stored,
    Uploads,
    Vanished,
    Waiting,
)
from ddpjob_bucket.stored import sha256_of
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.checkpoints import dcp, torch_file
from ddpjob_trainer.checkpoints.retention import Entry, expendable
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.errors import CheckpointError, ConfigError

FIRST_PAUSE = 1.0
"""Seconds between the first two tries of a start that cannot reach the bucket; doubled each time."""
LOOK_SECONDS = 0.1, 2.0
"""Between two looks of rank 0 at what other ranks have uploaded: at first, and at most."""
T = TypeVar("T")


class FetchError(CheckpointError):
    """A copy was not fetched, and it is not to blame: the bucket is away, or the disk is full.

    To continue from an older one would lose it: the bucket keeps what the newest incarnation continues from.
    """


def open_bucket(config: CheckpointConfig) -> Bucket:
    """By checkpoint.url. Raises ConfigError."""
    try:
        return Bucket.open(config.url)
    except LibraryMissing:
        raise ConfigError(
            f"checkpoint.url={config.url} needs the library obstore, which this image lacks; pip install obstore"
        ) from None
    except BucketError as error:
        raise ConfigError(f"checkpoint.url={error}") from None


class Share:
    """What a rank other than the first uploads of checkpoints in parts: the files that it has written."""

    def __init__(self, bucket: Bucket, term: int, mark: str) -> None:
        """`term`, `mark`: those of rank 0's `Copies`."""
        self._bucket, self._mark, bucket.term = bucket, mark, term
        self._uploads = Uploads(bucket, lambda: None, _warn, publish=self._publish, in_turn=True)

    def offer(self, path: Path, step: int, names: Iterable[str]) -> None:
        """Upload files of a checkpoint that is on disk, in the background, after those that were offered before."""
        if names := tuple(names):
            self._uploads.offer(Waiting(path, step, names=names))

    def wait(self, seconds: float) -> bool:
        """Wait until all is uploaded, at most so long. Returns whether it is."""
        return self._uploads.wait(seconds)

    def _publish(self, waiting: Waiting) -> None:
        self._bucket.upload(waiting.path, self._bucket.data_of(waiting.step, self._mark), waiting.names)


@dataclass(frozen=True)
class Offered:
    """A complete checkpoint of the bucket: a file that was fetched, or one in parts, which the ranks read together."""

    entry: Stored
    manifest: CopyManifest

    @property
    def in_parts(self) -> bool:
        """Whether it is in parts, of which nothing was fetched."""
        return self.manifest.name.endswith(dcp.SUFFIX)

    def written(self) -> bytes:
        """For the other ranks."""
        return f"{self.entry.term} ".encode() + self.manifest.written(self.entry.step)

    @classmethod
    def read(cls, text: bytes, step: int) -> Offered:
        """The reverse of `written`."""
        term, _, manifest = text.partition(b" ")
        entry = Stored(int(term), step)
        found = CopyManifest.read(manifest, entry)
        assert found is not None
        return cls(entry, found)

    def fetcher(self, bucket: Bucket, folder: Path, first: int) -> dcp.Fetch:
        """What gets files of it into a folder, those that are not there as they should be.

        Processes that fetch into one folder do not fetch a file twice; each begins with another one, by `first`.
        Raises CheckpointError, and FetchError.
        """
        files = {file.path.partition("/")[2]: file for file in self.manifest.files}
        certain = set[str]()

        def fetch(names: Iterable[str]) -> None:
            wanted = [name for name in names if name not in certain]
            at = first % len(wanted) if wanted else 0
            for name in wanted[at:] + wanted[:at]:
                if name not in files or "/" in name:
                    raise CheckpointError(f"{self.manifest.name} in {bucket.url} has no file {name}")
                _fetch_once(bucket, self.manifest, files[name], folder / name)
                certain.add(name)

        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return fetch


class Copies:
    """The copies of one folder's checkpoints in checkpoint.url, as rank 0 keeps them."""

    def __init__(self, bucket: Bucket, config: CheckpointConfig) -> None:
        self._bucket, self._config = bucket, config
        self._scores: dict[int, float] = {}
        self._uploads: Uploads | None = None
        self._mark = ""
        self._unreadable = set[Stored]()
        self._fetched: Stored | None = None
        """What `fetch_newer` returned last."""
        self.on_copied: Callable[[], None] = lambda: None
        """Called in the uploads' thread when a checkpoint has come into the bucket and `figures` say so."""
        self._there = -1
        """Step of the newest complete checkpoint in the bucket when this process began."""

    @property
    def term(self) -> int:
        """The number that `begin` took for this incarnation."""
        return self._bucket.term

    def begin(self, mark: str, *, in_parts: bool) -> dict[int, float]:
        """Become the newest incarnation that writes to the bucket. Returns the scores of what is there.

        `mark`: eight hexadecimal digits of this incarnation. Raises CheckpointError where the bucket is away: a start
        must know what it holds.
        """
        _patiently(self._bucket.take_term)
        self._mark = mark
        self._uploads = Uploads(
            self._bucket, self._tidy, _warn, publish=self._publish, in_turn=in_parts, done=lambda: self.on_copied()
        )
        return _patiently(lambda: self._bucket.scores(self._config.best_by.value))

    def fetch_newer(self, folder: Path, step: int) -> Offered | None:
        """The newest complete checkpoint, if it is newer than `step`: a file is downloaded, one in parts is not.

        One that is broken is named in a warning, and the next older one is tried. Raises CheckpointError when all
        newer ones are broken, and FetchError.
        """
        entries = _patiently(self._bucket.entries)
        newer = [entry for entry in entries if entry.step > step]
        for entry in (entry for entry in newer if entry not in self._unreadable):
            try:
                offered = self._fetch(entry, folder)
            except FetchError:
                raise
            except CheckpointError as error:
                _warn(f"warning: {error}; trying the next older one")
            else:
                print(f"checkpoint {offered.manifest.name} is from {self._bucket.url}", flush=True)
                self._there, self._fetched = entry.step, entry
                return offered
        if newer and step < 0:
            raise CheckpointError(
                f"no checkpoint in {self._bucket.url} can be read (the warnings name each); nothing was overwritten."
                " Restore one, or set checkpoint.url to another prefix, to start from scratch"
            )
        self._there = max((entry.step for entry in entries if entry not in newer), default=-1)
        return None

    def _fetch(self, entry: Stored, folder: Path) -> Offered:
        """A checkpoint of the bucket, a file in the folder. Raises CheckpointError where it is broken, FetchError."""
        offered = Offered(entry, _patiently(lambda: self._bucket.manifest(entry)))
        name = offered.manifest.name
        if name != f"step-{entry.step:09d}{dcp.SUFFIX if offered.in_parts else torch_file.SUFFIX}":
            raise CheckpointError(f"{self._bucket.url}/{entry.key} names {name}, not that of its step")
        if not offered.in_parts:
            with _disk(folder / name):
                _patiently(lambda: self._bucket.fetch(entry, folder))
        return offered

    def cannot_be_read(self, offered: Offered, problem: str) -> None:
        """Pass a checkpoint over, with a warning: `problem`."""
        self._unreadable.add(offered.entry)
        name = f"{self._bucket.url}/{offered.entry.key}"
        _warn(f"warning: checkpoint {offered.manifest.name} of {name} is {problem}; trying the next older one")

    def pass_over(self, step: int) -> None:
        """Do not fetch a file again that cannot be read, if it was fetched."""
        if self._fetched is not None and self._fetched.step == step:
            self._unreadable.add(self._fetched)

    def has(self, step: int) -> bool:
        """Whether the bucket had a checkpoint that is as new, when `fetch_newer` looked."""
        return self._there >= step

    def offer(self, entry: Entry, scores: dict[int, float], names: Iterable[str] = ()) -> None:
        """Upload a checkpoint that is on disk, in the background.

        `names`: of its files those that this rank has written, where the others upload theirs.
        """
        self._scores = scores
        if self._uploads is not None:
            self._uploads.offer(Waiting(entry.path, entry.step, entry.epoch, time.time(), tuple(names)))

    def wait(self, seconds: float) -> bool:
        """Wait until what was offered is in the bucket, at most so long. Returns whether it is."""
        return self._uploads is None or self._uploads.wait(seconds)

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

    def finish(self, scores: dict[int, float], waited: float) -> bool:
        """Whether the bucket has the last checkpoint, after its upload was waited for, for `waited` seconds at most.

        Says what is missing.
        """
        if self._uploads is None:
            return True
        self._scores = scores
        if not self._uploads.wait(0.0) or self._uploads.lost:
            newest = self._uploads.newest
            there = "none of this process is" if newest is None else f"the newest is of step {newest}"
            _warn(f"warning: the last checkpoint is not in {self._bucket.url} after {waited:.0f} s: {there} there")
            return False
        try:
            self._tidy()
        except BucketError as error:
            _warn(f"warning: {error}; older checkpoints stay in the bucket")
        return True

    def _publish(self, waiting: Waiting) -> None:
        """Upload one, and of one in parts what the others have uploaded makes it complete."""
        if not waiting.names:
            self._bucket.publish(waiting.path, waiting.step, waiting.epoch)
            return
        try:
            contents = dcp.contents(waiting.path)
        except CheckpointError as error:
            if not (waiting.path / dcp.MANIFEST).exists():
                raise Vanished(f"{waiting.path} was removed before it was in {self._bucket.url}") from error
            raise BucketError(f"{waiting.path} cannot be copied to {self._bucket.url}: it is {error}") from error
        files = (File(f"{waiting.path.name}/{name}", size, digest) for name, (size, digest) in contents.items())
        data = self._bucket.data_of(waiting.step, self._mark)
        manifest = CopyManifest(waiting.path.name, data, tuple(files), waiting.epoch)
        self._bucket.upload(waiting.path, data, waiting.names)
        pause, longest = LOOK_SECONDS
        while self._bucket.lacking(manifest):
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)
        self._bucket.commit(waiting.step, manifest)

    def _tidy(self) -> None:
        """The same retention as in the folder."""
        scores = self._scores
        if scores:
            self._bucket.put_scores(scores, self._config.best_by.value)
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

    Raises CheckpointError for what is damaged there, FetchError for the rest.
    """
    for number in range(1, tries + 1):
        try:
            return act()
        except Damaged as error:
            raise CheckpointError(str(error)) from error
        except BucketError as error:
            if number == tries:
                raise FetchError(str(error)) from error
            _warn(f"warning: {error}; tried again")
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))
    raise AssertionError


def _fetch_once(bucket: Bucket, manifest: CopyManifest, file: File, path: Path) -> None:
    """Get one file, unless it is there: another process of this machine may be getting it."""
    start = f".{path.parent.name}.{path.name}"  # Beside the folder, where a start removes what is left of others.
    with _disk(path), _alone(path.parent.parent / f"{start}.lock.tmp"):
        if path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256:
            return
        writer = f"{JobEnvironment.read().host}.{os.getpid()}"
        temporary = path.parent.parent / f"{start}.{writer}.tmp"
        try:
            _patiently(lambda: bucket.fetch_file(manifest, file, temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Where a fault of this disk ends a start: the copy is whole in the bucket. Raises FetchError."""
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"{path} cannot be fetched: {error.strerror or error}. Free space or repair the volume"
        ) from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; where a file system has no locks, several may do the same work."""
    with path.open("a") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
