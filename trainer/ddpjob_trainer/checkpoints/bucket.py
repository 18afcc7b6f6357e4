"""Copies a checkpoint folder to a bucket, from which a starting job can fetch checkpoints.

The copies are uploaded in the background. If a checkpoint is in parts, the ranks first agree on its
manifest, which lists every file with its size and checksum. Each rank then uploads the files that
it has written. Rank 0 uploads the manifest last, once the bucket lists all of these files.
"""

from __future__ import annotations

import contextlib
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
from ddpjob_bucket.patience import patiently
from ddpjob_bucket.stored import sha256_of
from ddpjob_pod.file_lock import alone
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.checkpoints import dcp, torch_file
from ddpjob_trainer.checkpoints.retention import Entry, expendable
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.errors import CheckpointError, ConfigError

LOOK_SECONDS = 0.1, 2.0
"""Rank 0 checks repeatedly whether the other ranks have uploaded their files. The values are the
shortest and the longest pause between two checks, in seconds.
"""
T = TypeVar("T")


class FetchError(CheckpointError):
    """An intact checkpoint cannot be fetched: the bucket is unreachable, or the local disk fails.

    Training must not continue from an older checkpoint instead. The newer checkpoint would then be
    lost, because the bucket keeps only the history that the newest incarnation continues.
    """


def open_bucket(config: CheckpointConfig) -> Bucket:
    """Return the bucket of checkpoint.url. Raises ConfigError."""
    try:
        return Bucket.open(config.url)
    except LibraryMissing:
        raise ConfigError(
            f"checkpoint.url={config.url} needs the package obstore, which is not installed; run pip install obstore"
        ) from None
    except BucketError as error:
        raise ConfigError(f"checkpoint.url={error}") from None


class Share:
    """Uploads this rank's files in multi-part checkpoints. Rank 0 uses `Copies` instead."""

    def __init__(self, bucket: Bucket, term: int, mark: str) -> None:
        """Prepare to upload with the `term` and `mark` of rank 0's `Copies`."""
        self._bucket, self._mark, bucket.term = bucket, mark, term
        self._uploads = Uploads(bucket, lambda: None, _warn, publish=self._publish, in_turn=True)

    def offer(self, path: Path, step: int, names: Iterable[str]) -> None:
        """Queue the upload of `names`, this rank's files in a checkpoint.

        Uploads run in the background, in the order of the calls.
        """
        if names := tuple(names):
            self._uploads.offer(Waiting(path, step, names=names))

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the offered files. Return whether all of them are uploaded."""
        return self._uploads.wait(seconds)

    def _publish(self, waiting: Waiting) -> None:
        self._bucket.upload(waiting.path, self._bucket.data_of(waiting.step, self._mark), waiting.names)


@dataclass(frozen=True)
class Offered:
    """A complete checkpoint in the bucket, from which training may resume.

    If the checkpoint is a single file, it has already been downloaded. If it is in parts, each rank
    downloads only the files that it reads.
    """

    entry: Stored
    manifest: CopyManifest

    @property
    def in_parts(self) -> bool:
        """Whether the checkpoint is in parts. If so, its files have not been downloaded yet."""
        return self.manifest.name.endswith(dcp.SUFFIX)

    def written(self) -> bytes:
        """Return this checkpoint as bytes, to send to the other ranks."""
        return f"{self.entry.term} ".encode() + self.manifest.written(self.entry.step)

    @classmethod
    def read(cls, text: bytes, step: int) -> Offered:
        """Return the checkpoint of `step` from `text`, the bytes that `written` returned."""
        term, _, manifest = text.partition(b" ")
        entry = Stored(int(term), step)
        found = CopyManifest.read(manifest, entry)
        assert found is not None
        return cls(entry, found)

    def fetcher(self, bucket: Bucket, folder: Path, first: int) -> dcp.Fetch:
        """Return a function that takes file names and downloads the files that the folder lacks.

        Damaged files are downloaded again. If several processes share a folder, each file is
        downloaded only once. A process begins with the file at position `first`, modulo the number
        of files. Processes with different values of `first` therefore work in parallel. The
        function raises CheckpointError and FetchError.
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
    """The copies of a folder's checkpoints in the bucket at checkpoint.url.

    Rank 0 maintains these copies.
    """

    def __init__(self, bucket: Bucket, config: CheckpointConfig) -> None:
        self._bucket, self._config = bucket, config
        self._scores: dict[int, float] = {}
        self._uploads: Uploads | None = None
        self._mark = ""
        self._unreadable = set[Stored]()
        self._fetched: Stored | None = None
        """The checkpoint that `fetch_newer` last returned."""
        self.on_copied: Callable[[], None] = lambda: None
        """A function that is called in the upload thread after each upload, once the bucket and
        `figures` include the new checkpoint.
        """
        self._there = -1
        """The step of the newest complete checkpoint that the bucket had at startup; -1 if it had
        none.
        """

    @property
    def term(self) -> int:
        """The term of this incarnation in the bucket, which `begin` has taken."""
        return self._bucket.term

    def begin(self, mark: str, *, in_parts: bool) -> dict[int, float]:
        """Become the newest incarnation that writes to the bucket. Return the scores stored there.

        `mark` is eight hexadecimal digits that identify this incarnation. Raises CheckpointError if
        the bucket is unreachable, because a starting job must know which checkpoints the bucket
        has.
        """
        _patiently(self._bucket.take_term)
        self._mark = mark
        self._uploads = Uploads(
            self._bucket, self._tidy, _warn, publish=self._publish, in_turn=in_parts, done=lambda: self.on_copied()
        )
        return _patiently(lambda: self._bucket.scores(self._config.best_by.value))

    def fetch_newer(self, folder: Path, step: int) -> Offered | None:
        """Return the bucket's newest complete checkpoint from a step after `step`.

        A checkpoint in a single file is downloaded, but a checkpoint in parts is not. If a
        checkpoint is broken, a warning names it, and the next older one is tried. Return None if
        there is no checkpoint after `step`, or if all of them are broken. In the latter case, raise
        CheckpointError instead if `step` is negative, because no other checkpoint exists. Raises
        FetchError.
        """
        entries = _patiently(self._bucket.entries)
        newer = [entry for entry in entries if entry.step > step]
        for entry in (entry for entry in newer if entry not in self._unreadable):
            try:
                offered = self._fetch(entry, folder)
            except FetchError:
                raise
            except CheckpointError as error:
                _warn(f"warning: {error}; trying the next older checkpoint")
            else:
                print(f"checkpoint {offered.manifest.name} was fetched from {self._bucket.url}", flush=True)
                self._there, self._fetched = entry.step, entry
                return offered
        if newer and step < 0:
            raise CheckpointError(
                f"no checkpoint in {self._bucket.url} can be read (see the warnings); nothing was overwritten. Restore "
                "one, or set checkpoint.url to a different prefix to start from scratch"
            )
        self._there = max((entry.step for entry in entries if entry not in newer), default=-1)
        return None

    def _fetch(self, entry: Stored, folder: Path) -> Offered:
        """Return one of the bucket's checkpoints. If it is a single file, download it into
        `folder`.

        Raises FetchError. Raises CheckpointError if the checkpoint is broken.
        """
        offered = Offered(entry, _patiently(lambda: self._bucket.manifest(entry)))
        name = offered.manifest.name
        if name != f"step-{entry.step:09d}{dcp.SUFFIX if offered.in_parts else torch_file.SUFFIX}":
            raise CheckpointError(
                f"the manifest {self._bucket.url}/{entry.key} names {name}, which is from a different step"
            )
        if not offered.in_parts:
            with _disk(folder / name):
                _patiently(lambda: self._bucket.fetch(entry, folder))
        return offered

    def cannot_be_read(self, offered: Offered, problem: str) -> None:
        """Print a warning that includes `problem`, and do not fetch this checkpoint again."""
        self._unreadable.add(offered.entry)
        name = f"{self._bucket.url}/{offered.entry.key}"
        _warn(f"warning: checkpoint {offered.manifest.name} ({name}) is {problem}; trying the next older checkpoint")

    def pass_over(self, step: int) -> None:
        """Do not download this step's checkpoint again, because its file is unreadable."""
        if self._fetched is not None and self._fetched.step == step:
            self._unreadable.add(self._fetched)

    def has(self, step: int) -> bool:
        """Return whether `fetch_newer` saw a bucket checkpoint for this or a later step."""
        return self._there >= step

    def offer(self, entry: Entry, scores: dict[int, float], names: Iterable[str] = ()) -> None:
        """Upload a checkpoint from the disk in the background.

        If other ranks upload their own files of the checkpoint, `names` lists the files that this
        rank uploads. After the upload, `scores` replace the scores in the bucket.
        """
        self._scores = scores
        if self._uploads is not None:
            self._uploads.offer(Waiting(entry.path, entry.step, entry.epoch, time.time(), tuple(names)))

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for offered checkpoints. Return whether all are in the bucket."""
        return self._uploads is None or self._uploads.wait(seconds)

    def holds(self, path: Path) -> bool:
        """Return whether a checkpoint is waiting for its upload, or is being uploaded."""
        return self._uploads is not None and self._uploads.holds(path)

    def completed(self) -> list[int]:
        """Return the steps of the checkpoints uploaded since the last call, oldest first."""
        done = self._uploads.completed if self._uploads is not None else None
        return [done.popleft() for _ in range(len(done))] if done is not None else []

    def figures(self) -> dict[str, float]:
        """Return figures about the uploads to report: copyStep, copyTime and copyBehind.

        copyStep and copyTime (Unix seconds) describe the newest checkpoint in the bucket.
        copyBehind is how many seconds checkpoints have been waiting without a completed upload; 0
        if none is waiting.
        """
        found = self._uploads.figures() if self._uploads is not None else {}
        return {"copyStep": self._there, **found} if self._there >= 0 else found

    def finish(self, scores: dict[int, float], waited: float) -> bool:
        """Return whether the last checkpoint is in the bucket, and print a warning if it is not.

        `waited` is the limit of the caller's wait, in seconds. It is used only in the warning.
        """
        if self._uploads is None:
            return True
        self._scores = scores
        if not self._uploads.wait(0.0) or self._uploads.lost:
            newest = self._uploads.newest
            there = "no checkpoint of this process has been uploaded" if newest is None else f"latest: step {newest}"
            _warn(f"warning: after {waited:.0f} s, the last checkpoint is still not in {self._bucket.url} ({there})")
            return False
        try:
            self._tidy()
        except BucketError as error:
            _warn(f"warning: {error}; older checkpoints stay in the bucket")
        return True

    def _publish(self, waiting: Waiting) -> None:
        """Upload a checkpoint.

        If other ranks upload parts of the checkpoint, wait for their files before writing the
        manifest that completes the checkpoint.
        """
        if not waiting.names:
            self._bucket.publish(waiting.path, waiting.step, waiting.epoch)
            return
        try:
            contents = dcp.contents(waiting.path)
        except CheckpointError as error:
            if not (waiting.path / dcp.MANIFEST).exists():
                raise Vanished(f"{waiting.path} was removed before it was copied to {self._bucket.url}") from error
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
        """Write the scores to the bucket, and delete the checkpoints that the folder's retention
        rules do not keep.
        """
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


def _patiently(act: Callable[[], T]) -> T:
    """Run `act`, and retry it for a while if the bucket fails.

    Raises CheckpointError if the content of the bucket is damaged, and FetchError for other errors.
    """
    try:
        return patiently(act, lambda text: _warn(f"warning: {text}"))
    except Damaged as error:
        raise CheckpointError(str(error)) from error
    except BucketError as error:
        raise FetchError(str(error)) from error


def _fetch_once(bucket: Bucket, manifest: CopyManifest, file: File, path: Path) -> None:
    """Download a file unless an intact copy exists.

    If another process on this machine is already downloading the file, wait for that process.
    """
    # The temporary file and the lock are in the parent of the checkpoint's own folder, because a
    # starting job removes leftovers there.
    start = f".{path.parent.name}.{path.name}"
    with _disk(path), alone(path.parent.parent / f"{start}.lock.tmp"):
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
    """Replace OSError with FetchError, because the fault is in this machine's disk, not in the
    bucket.
    """
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"the fetched checkpoint {path} cannot be written: {error.strerror or error}. Free some space or "
            "repair the volume"
        ) from error


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
