"""Fetches spec.code.archive, verifies it and unpacks it before the workers start.

Anyone who can write to the shared bucket can replace an archive. A crafted archive could escape
from its folder, fill the disk or exhaust the memory. Therefore, three rules apply.

1. The archive is not read until its SHA-256 is known to equal spec.code.digest.
2. Only ordinary files and folders are unpacked, and only below one folder. A link, a device, a
   sparse file, an absolute path, a path with `..` or a name that occurs twice ends the job
   (InitFailure).
3. Sizes and counts are limited (protocol.MOST_*). They are measured while the archive is read,
   because the numbers in an archive's headers may be wrong.

Example: a small archive that unpacks to 100 GiB of zeros is refused after 8 GiB, because unpacked
bytes are counted. An archive that claims a header of 4 GiB is refused immediately, because no
single read may exceed 1 MiB.

    NAME                      a file of the archive
    .ddpjob-code-DIGEST       marker: the archive with this digest has been unpacked completely
    .ddpjob-part-code         the archive while it is being fetched
    .ddpjob-lock              held by the fetching pod; the kernel releases it when the pod ends

Pods of a job share the folder if they run on the same machine, and the first pod fetches the
archive. If a launcher finds the marker, it changes nothing in the folder, so files that the program
has written there are kept.

Why: docs/decisions/0029.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import os
import re
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime.launcher.fetch_data import (
    FIRST_NEWS_SECONDS,
    OWN,
    WRONG_TRIES,
    FetchAbandoned,
    Unfit,
    pause_after,
    size_text,
    take_keys,
    why_not_a_file,
)
from ddpjob_runtime.launcher.s3_reader import (
    PIECE,
    Away,
    BucketPlace,
    BucketRefusal,
    Changed,
    Credentials,
    Reader,
    region_of,
)
from ddpjob_runtime.launcher.shutdown import log
from ddpjob_runtime.protocol import MOST_CODE_BYTES, MOST_CODE_FILES, MOST_UNPACKED_BYTES

_MARKER, _PART, _LOCK = OWN + "code-", OWN + "part-code", OWN + "lock"
_LARGEST_READ = 2**20
"""Maximum size in bytes of a single read from an archive. Python's tarfile would otherwise read a
header of any size at once.
"""
_MALFORMED = (
    tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ValueError, OverflowError, RecursionError, LookupError,
    struct.error, TypeError, AttributeError,
)  # fmt: skip
"""The exceptions that tarfile and gzip raise for malformed archives, in all supported versions of
Python together.
"""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_CLASHING = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ)


class BadArchive(Exception):
    """The archive cannot be unpacked safely. The message says why."""


@dataclass(frozen=True)
class CodeSettings:
    """The place of the archive, its checksum, and the folder to unpack it into."""

    place: BucketPlace
    name: str
    sha256: str
    credentials: Credentials
    folder: Path

    @classmethod
    def take(cls) -> CodeSettings | None:
        """Read the DDPJOB_CODE_* variables; return None if the job has no archive.

        Also remove the credentials from the environment, so that no worker gets them. Raises
        BucketRefusal if the variables are invalid.
        """
        job, keys = JobEnvironment.read(), take_keys("CODE")
        if not job.code_url:
            return None
        url, _, name = job.code_url.rpartition("/")
        digest = re.fullmatch(r"sha256:([0-9a-f]{64})", job.code_digest)
        if digest is None or not name:
            raise BucketRefusal(f"{job.code_url} {job.code_digest}: must be s3://BUCKET/FILE and sha256:DIGITS")
        endpoint = job.code_endpoint or os.environ.get("AWS_ENDPOINT_URL", "")
        place = BucketPlace.read(url, endpoint, region_of(job.code_region), "code")
        credentials = Credentials(keys or dict(os.environ), place.region, "code")
        return cls(place, name, digest[1], credentials, Path(job.code_dir))


class CodeFetch:
    """Fetches the archive once, when a launcher starts.

    The fetch calls `report(text)` at intervals to update the job's status, and `report("")` at the
    end. It is abandoned as soon as `cancelled()` returns true.
    """

    def __init__(self, settings: CodeSettings, cancelled: Callable[[], bool], report: Callable[[str], None]) -> None:
        self._settings, self._cancelled, self._report = settings, cancelled, report
        self._folder, self._url = settings.folder, f"{settings.place.url}/{settings.name}"
        self._began, self._reported = time.monotonic(), ""
        self._due = self._began + FIRST_NEWS_SECONDS

    def run(self) -> None:
        """Fetch and unpack the archive, unless the folder already contains the unpacked archive.

        Raises BucketRefusal, Unfit, FetchAbandoned, OSError.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._hold_lock():
                marker = self._folder / f"{_MARKER}{self._settings.sha256}"
                if not marker.exists():
                    self._fetch()
                    marker.touch()
        except OSError as error:
            where = error.filename or self._folder
            if error.errno in _FULL:
                raise Unfit(f"the disk of {self._folder} is full: {error.strerror}") from None
            if error.errno in _UNWRITABLE:
                text = f"the container's user cannot write to {where}: {error.strerror}"
                raise BucketRefusal(f"{text}; remove workingDir, or set fsGroup in podTemplate") from None
            raise
        finally:
            if self._reported:
                self._report("")

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        with (self._folder / _LOCK).open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._pause(0.1)
            yield

    def _fetch(self) -> None:
        part = self._folder / _PART
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        try:
            size = self._download(part)
            try:
                count = unpack(part, self._folder)
            except BadArchive as error:
                raise BucketRefusal(f"{self._url}: {error}") from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
        took = time.monotonic() - self._began
        log(f"code: {count} files from {self._url}, {size_text(size)}, fetched in {took:.1f} s and verified")

    def _download(self, part: Path) -> int:
        """Download the archive, retrying while the bucket is unreachable, and return the archive's
        size.
        """
        failures = wrong = 0
        while True:
            reader = Reader(self._settings.place, self._settings.credentials)
            try:
                size, digest = self._download_once(reader, part)
            except Changed as error:
                raise BucketRefusal(f"{error}; submit the job again, to upload the code again") from None
            except Away as error:
                failures += 1
                pause = pause_after(failures)
                log(f"code: {error}; retrying in {pause:.0f} s")
                self._say(f"waiting for the bucket with the code: {error}")
                self._pause(pause)
                continue
            finally:
                reader.close()
            if digest == self._settings.sha256:
                return size
            wrong += 1
            text = f"the SHA-256 of {self._url} is {digest} and differs from code.digest"
            log(f"code: {text} (download {wrong} of {WRONG_TRIES})")
            if wrong == WRONG_TRIES:
                raise BucketRefusal(f"{text}, because the archive was replaced or is damaged; submit the job again")

    def _download_once(self, reader: Reader, part: Path) -> tuple[int, str]:
        expected, pieces = reader.open_object(self._settings.name)
        if expected > MOST_CODE_BYTES:
            raise BucketRefusal(
                f"the size of {self._url} is {size_text(expected)}, but the maximum is {size_text(MOST_CODE_BYTES)}"
            )
        digest, size = hashlib.sha256(), 0
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            for piece in pieces:
                size += len(piece)
                if size > expected:
                    break
                digest.update(piece)
                file.write(piece)
                self._say(f"fetching the code: {size_text(size)} of {size_text(expected)}")
                if self._cancelled():
                    raise FetchAbandoned
        if size != expected:
            raise Away(f"the download of {self._url} ended after {size} of {expected} bytes")
        return size, digest.hexdigest()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._cancelled():
                raise FetchAbandoned
            time.sleep(min(0.1, left))

    def _say(self, text: str) -> None:
        """Report `text` to the coordinator, but at most once every FIRST_NEWS_SECONDS."""
        if (now := time.monotonic()) >= self._due and text != self._reported:
            self._due, self._reported = now + FIRST_NEWS_SECONDS, text
            self._report(text)


class _Unpacked:
    """The uncompressed bytes of an archive, as a file that can only be read forward.

    There is a limit on the size of each read, and a limit on the total number of bytes.
    """

    def __init__(self, packed: IO[bytes], most: int) -> None:
        self._packed, self._most, self._position = gzip.GzipFile(fileobj=packed), most, 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LARGEST_READ:
            raise BadArchive(f"it has a header of {size} bytes")
        found = self._packed.read(size)
        self._position += len(found)
        if self._position > self._most:
            raise BadArchive(f"it unpacks to more than {size_text(self._most)}")
        return found

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        """Skip forward to a position.

        Raises BadArchive if the position is behind the current one. tarfile seeks backward only if
        a header has a negative size.
        """
        if whence or position < self._position:
            raise BadArchive("a header has a negative size")
        while self._position < position:
            if not self.read(min(_LARGEST_READ, position - self._position)):
                break
        return self._position


def unpack(archive: Path, folder: Path, most: int = MOST_UNPACKED_BYTES, most_files: int = MOST_CODE_FILES) -> int:
    """Unpack an untrusted .tar.gz into a folder, and return the number of files.

    If a file already exists, it is replaced, so an interrupted call can be repeated. Files that
    their owner may execute get mode 755, and all others get mode 644. Raises BadArchive, OSError.
    """
    names, count = set[str](), 0
    with archive.open("rb") as packed, _malformed():
        # In addition to the files' own bytes, allow 2 KiB per file for headers and padding.
        plain: Any = _Unpacked(packed, most + 2048 * most_files)
        tar: Any = tarfile.TarFile(fileobj=plain, mode="r")
        unpacked = 0
        while (member := tar.next()) is not None:
            tar.members = []  # Without this line, tarfile would keep every header in memory.
            name = _checked(member)
            if not name:
                continue
            if name in names or len(names) >= most_files:
                why = f"{name[:200]!r} occurs twice" if name in names else f"it has more than {most_files} files"
                raise BadArchive(why)
            names.add(name)
            if member.isdir():
                with _clashes(name):
                    (folder / name).mkdir(parents=True, exist_ok=True)
                continue
            unpacked += member.size
            if unpacked > most:
                raise BadArchive(f"it unpacks to more than {size_text(most)}")
            content = tar.extractfile(member)
            assert content is not None
            _write(folder, name, content, member)
            count += 1
    _sync(folder, names)
    return count


def _sync(folder: Path, names: Iterable[str]) -> None:
    """Wait until the files and folders are on the disk, so that they survive a power failure."""
    paths = {Path(name) for name in names}
    paths.update({parent for path in paths for parent in path.parents}, {Path()})
    for path in paths:
        descriptor = os.open(folder / path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Some file systems cannot sync folders.
                raise
        finally:
            os.close(descriptor)


def _checked(member: tarfile.TarInfo) -> str:
    """Return a member's path relative to the folder to unpack into; empty for that folder itself.

    Raises BadArchive if the member must not be unpacked.
    """
    name = member.name
    while name.startswith("./"):
        name = name[2:]
    shown = f"{member.name[:200]!r}"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or member.sparse is not None:
        raise BadArchive(f"{shown} is neither a file nor a folder; links, devices and sparse files are not unpacked")
    if member.size < 0:
        raise BadArchive(f"{shown} has a negative size")
    if member.isdir():
        name = name.rstrip("/") if name.strip("/") else name
        if name in ("", "."):
            return ""
    if why := why_not_a_file(name):
        raise BadArchive(f"{shown} cannot be unpacked: {why}")
    return name


def _write(folder: Path, name: str, content: IO[bytes], member: tarfile.TarInfo) -> None:
    target, new = folder / name, folder / f"{OWN}new"
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    mode, left = (0o755 if member.mode & 0o100 else 0o644), member.size
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
        while piece := content.read(min(PIECE, left)):
            file.write(piece)
            left -= len(piece)
    if left:
        raise BadArchive(f"it ends within {name[:200]!r}")
    with _clashes(name):
        target.parent.mkdir(parents=True, exist_ok=True)
        new.replace(target)


@contextlib.contextmanager
def _malformed() -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        raise BadArchive(f"it is not a readable .tar.gz ({type(error).__name__}: {str(error)[:200]})") from None


@contextlib.contextmanager
def _clashes(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _CLASHING:
            raise BadArchive(f"{name[:200]!r} cannot be unpacked: {error.strerror}") from None
        raise
