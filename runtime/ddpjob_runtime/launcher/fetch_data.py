"""Fetches spec.storage.data.url once per folder before workers start, verifies the files, and
resumes after an interruption.

    NAME                      a whole object, renamed to this name once size and checksum (if any) match
    .ddpjob-fetched.jsonl     a line per fetched object: name, ETag, size, time of the file
    .ddpjob-part-HASH         an object that is being fetched
    .ddpjob-lock              held by the fetching pod; the kernel releases it when the pod ends

All pods that mount the folder wait for the lock. The first pod fetches the objects, and the others
then find them all in the folder. If a pod starts again with the same folder, it downloads only what
has changed:

- The bucket is listed. An object counts as fetched if its ETag is in the record and its file still
  has the recorded size and time. If an object is gone from the bucket, its recorded file is
  deleted.
- THREADS threads download the missing objects. They continue partial downloads that began after the
  host was last booted.
- A part is renamed only if its size and checksums match. The job fails if WRONG_TRIES downloads of
  one object have a wrong checksum.
- While the bucket is unreachable, requests are retried indefinitely. A full disk makes the node
  unfit, so that the operator replaces its pod on a different host. If the bucket changes during the
  fetch, it is listed again.

Example: the pod is killed after it has fetched 60 of 100 objects. Its successor lists the bucket
and finds 60 objects in the record. It reads the partial downloads of the other 40 objects to
compute their checksums, and then continues these downloads.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.s3_reader import (
    MOST_OBJECTS,
    PIECE,
    Away,
    BucketPlace,
    BucketRefusal,
    Changed,
    Credentials,
    Reader,
    Remote,
    region_of,
)
from ddpjob_runtime.launcher.shutdown import log

THREADS = 8
"""Number of objects to download at the same time. Each download has its own connection, and holds
at most two pieces of its object in memory.
"""
OWN = ".ddpjob-"
LONGEST_PAUSE = 60.0
LOG_SECONDS = 30.0
FIRST_NEWS_SECONDS = 3.0
"""A fetch is reported to the coordinator only if it takes longer than this many seconds."""
WRONG_TRIES = 3
"""Maximum number of downloads of an object whose checksum is wrong."""
LISTINGS = 5
"""Maximum number of times that one fetch lists the bucket. The bucket is listed again if it changes
during the fetch.
"""
_RECORD, _PART, _LOCK = OWN + "fetched.jsonl", OWN + "part-", OWN + "lock"
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)

_Found = TypeVar("_Found")


class Unfit(Exception):
    """This host's disk cannot hold the data, but a different host's disk might."""


class FetchAbandoned(Exception):
    """The fetch was cancelled because the data is no longer needed."""


def take_keys(what: str) -> dict[str, str]:
    """Remove the variables DDPJOB_`what`_AWS_* from the environment, so that no worker gets them.

    Return a dict that maps the names of AWS's own variables to the removed values.
    """
    return {name: value for name in _SECRETS if (value := os.environ.pop(f"DDPJOB_{what}_{name}", ""))}


@dataclass(frozen=True)
class FetchSettings:
    """The place of the data, and the folder to fetch it into."""

    place: BucketPlace
    credentials: Credentials
    folder: Path

    @classmethod
    def take(cls) -> FetchSettings | None:
        """Read the DDPJOB_DATA_* variables; return None if there is nothing to fetch.

        Also remove the credentials from the environment, so that no worker gets them. Raises
        BucketRefusal if the variables are invalid.
        """
        job, keys = JobEnvironment.read(), take_keys("DATA")
        if not job.data_url:
            return None
        place = BucketPlace.read(job.data_url, job.data_endpoint, region_of(job.data_region))
        return cls(place, Credentials(keys or dict(os.environ), place.region), Path(job.data_dir))


class Fetch:
    """Fetches the data once, when a launcher starts.

    The fetch calls `report(text)` at intervals to update the job's status, and `report("")` at the
    end. It is abandoned as soon as `cancelled()` returns true.
    """

    def __init__(self, settings: FetchSettings, cancelled: Callable[[], bool], report: Callable[[str], None]) -> None:
        self._settings, self._cancelled, self._report = settings, cancelled, report
        self._folder, self._url = settings.folder, settings.place.url
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._problem = ""
        self._record: Any = None
        self._objects = self._total = self._had = self._done = 0
        self._began = self._logged = time.monotonic()
        self._reported = ""

    def run(self) -> None:
        """Fetch objects until the folder contains every object in the bucket.

        Raises BucketRefusal, Unfit, FetchAbandoned, OSError.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._hold_lock():
                self._fetch()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise Unfit(f"the disk of {self._folder} is full: {error.strerror}") from None
            if error.errno in _NO_LOCKS:
                text = f"the file system of {self._folder} does not support file locks ({error.strerror})"
                raise Unfit(f"{text}; set storage.data.cache to a folder on a disk of the Kubernetes node") from None
            if error.errno in _NOT_ALLOWED:
                text = f"cannot write to {error.filename or self._folder} ({error.strerror})"
                raise Unfit(f"{text}; set storage.data.cache to a folder that the pods' user can write to") from None
            raise
        finally:
            if self._reported:
                self._report("")

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Acquire the folder's lock, and hold it for the duration of this context.

        It is a kernel lock, so no timeout is involved: the kernel releases the lock if the process
        is killed.
        """
        with (self._folder / _LOCK).open("a") as file:
            self._began, waited = time.monotonic(), False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waited:
                        log(f"data: waiting for another pod on this Kubernetes node, which is fetching {self._url}")
                    waited = True
                self._pause(0.5, self._cancelled)
                self._say(protocol.DATA_WAITS)
            yield

    def _fetch(self) -> None:
        for attempt in range(LISTINGS):
            try:
                return self._fetch_listed()
            except Changed as error:
                log(f"data: {error}; listing the bucket again")
                self._pause(pause_after(attempt + 1), self._cancelled)
        raise BucketRefusal(
            f"{self._url} keeps changing while it is listed; point storage.data.url at a folder that nothing writes to"
        )

    def _fetch_listed(self) -> None:
        reader = Reader(self._settings.place, self._settings.credentials)
        try:
            objects = self._retry(lambda: list(reader.objects()), self._cancelled)
        finally:
            reader.close()
        check_names(objects, self._url)
        known = self._read_record()
        kept = {o.name: known[o.name] for o in objects if self._is_there(o, known)}
        self._forget(known, {o.name for o in objects})
        missing = [o for o in objects if o.name not in kept]
        self._objects, self._total = len(objects), sum(o.size for o in objects)
        self._had = self._done = self._total - sum(o.size for o in missing)
        self._began = self._logged = time.monotonic()
        if missing:
            self._clear_parts({self._part(o).name for o in missing})
            self._check_room(missing)
            text = f"data: fetching {len(missing)} of {len(objects)} objects from {self._url}"
            log(f"{text}; already present: {self._figures()}")
        self._write_record(kept)
        if missing:
            self._download_all(missing)
        took = time.monotonic() - self._began
        fetched = f"{size_text(self._total - self._had)} fetched in {took:.1f} s" if missing else "all were present"
        log(f"data: {len(objects)} objects, {size_text(self._total)}, in {self._folder}; {fetched}")

    # --- what is there

    def _read_record(self) -> dict[str, list[Any]]:
        """Return the recorded objects by name.

        The entry of an object is a list of its name, its ETag, its size, and the time of its file
        in nanoseconds. Malformed lines are skipped.
        """
        found: dict[str, list[Any]] = {}
        with contextlib.suppress(FileNotFoundError), (self._folder / _RECORD).open("rb") as file:
            while line := file.readline(16384):
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                ours = isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str)
                if ours and len(found) < 2 * MOST_OBJECTS and not why_not_a_file(entry[0]):
                    found[entry[0]] = entry
        return found

    def _write_record(self, kept: Mapping[str, list[Any]]) -> None:
        new = self._folder / f"{_RECORD}.new"
        with new.open("w") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in kept.values())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._folder / _RECORD)

    def _is_there(self, remote: Remote, known: Mapping[str, list[Any]]) -> bool:
        entry = known.get(remote.name)
        if entry is None or entry[1:3] != [remote.etag, remote.size]:
            return False
        try:
            found = os.lstat(self._folder / remote.name)
        except OSError:
            return False
        return [found.st_size, found.st_mtime_ns] == [remote.size, entry[3]]

    def _forget(self, known: Iterable[str], wanted: set[str]) -> None:
        """Remove fetched files whose objects are no longer in the bucket.

        Files that are not in the record are left alone.
        """
        for name in known:
            if name in wanted:
                continue
            # A name in the record might not be valid as a file name.
            with contextlib.suppress(OSError, ValueError):
                (self._folder / name).unlink()
                for folder in list((self._folder / name).parents)[: name.count("/")]:
                    # If the folder is not empty, `rmdir` raises an error that ends this loop.
                    folder.rmdir()

    def _part(self, remote: Remote) -> Path:
        """Return the path for the partial download of this version of an object.

        The path depends on the host's boot ID. A download is therefore not continued after the host
        has booted again, because a power failure may have truncated the file.
        """
        text = f"{remote.name}\0{remote.etag}\0{_read_boot_id()}"
        return self._folder / (_PART + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32])

    def _clear_parts(self, wanted: set[str]) -> None:
        for path in self._folder.glob(f"{_PART}*"):
            if path.name not in wanted:
                path.unlink()

    def _check_room(self, missing: list[Remote]) -> None:
        begun = sum(path.stat().st_size for path in self._folder.glob(f"{_PART}*"))
        disk = os.statvfs(self._folder)
        free, needed = disk.f_bavail * disk.f_frsize, sum(o.size for o in missing) - begun
        if needed > free:
            text = f"the disk of {self._folder} has {size_text(free)} free"
            raise Unfit(
                f"{text}, but {size_text(needed)} must still be fetched from {self._url}; free some space, or set "
                "storage.data.cache to a folder on a larger disk"
            )

    # --- downloads

    def _download_all(self, missing: list[Remote]) -> None:
        left, problems = iter(missing), list[BaseException]()

        def work() -> None:
            reader = Reader(self._settings.place, self._settings.credentials)
            try:
                while not self._stop.is_set():
                    with self._lock:
                        remote = next(left, None)
                    if remote is None:
                        return
                    self._download(reader, remote)
            except BaseException as error:
                problems.append(error)
                self._stop.set()
            finally:
                reader.close()

        self._stop.clear()
        with (self._folder / _RECORD).open("a") as self._record:
            threads = [
                threading.Thread(target=work, name=f"ddpjob-data-{n}", daemon=True)
                for n in range(min(THREADS, len(missing)))
            ]
            for thread in threads:
                thread.start()
            try:
                while any(thread.is_alive() for thread in threads):
                    self._pause(0.1, self._cancelled)
                    self._say(f"fetching data {self._figures()}{self._trouble()}")
            finally:
                self._stop.set()
                for thread in threads:
                    thread.join()
        if problems:
            raise problems[0]

    def _download(self, reader: Reader, remote: Remote) -> None:
        for tried in range(1, WRONG_TRIES + 1):
            part = self._part(remote)
            problem = self._retry(partial(self._fill, reader, remote, part), self._stop.is_set)
            if not problem:
                return self._keep(remote, part)
            part.unlink()
            with self._lock:
                self._done -= remote.size
            log(f"data: {self._url}/{remote.name}: {problem} (download {tried} of {WRONG_TRIES})")
        raise BucketRefusal(
            f"{self._url}/{remote.name} is damaged in the bucket: {problem} (after {WRONG_TRIES} downloads); upload it"
            " again"
        )

    def _fill(self, reader: Reader, remote: Remote, part: Path) -> str:
        """Download the rest of an object into its part, and verify the part's checksums.

        Return what is wrong with the part; empty if it is correct. Raises Away, Changed,
        BucketRefusal, OSError.
        """
        sums, counted = Sums(remote), 0
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b") as file:
            try:
                if os.fstat(file.fileno()).st_size > remote.size:
                    # This file is longer than the object, so it is not a partial download.
                    file.truncate(0)
                while piece := file.read(PIECE):
                    sums.update(piece)
                    counted = self._count(counted, piece)
                if counted < remote.size or not remote.size:
                    headers, pieces = reader.open(remote, counted)
                    sums.expect(headers)
                    with self._lock:
                        # The bucket responds again. Clear the problem now, because the download may
                        # take hours.
                        self._problem = ""
                    for piece in pieces:
                        if counted + len(piece) > remote.size:
                            reader.close()
                            raise Changed(f"{self._url}/{remote.name} is longer than the listing says")
                        sums.update(piece)
                        file.write(piece)
                        counted = self._count(counted, piece)
                        if self._stop.is_set():
                            raise FetchAbandoned
                if counted < remote.size:
                    reader.close()
                    raise Away(
                        f"the download of {self._url}/{remote.name} ended after {counted} of {remote.size} bytes"
                    )
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                with self._lock:
                    self._done -= counted
                raise
        return sums.problem()

    def _keep(self, remote: Remote, part: Path) -> None:
        target = self._folder / remote.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            # This object's name was the name of a folder in an earlier version of the bucket.
            target.rmdir()
        part.replace(target)
        line = json.dumps([remote.name, remote.etag, remote.size, target.stat().st_mtime_ns])
        with self._lock:
            self._record.write(line + "\n")
            self._record.flush()
            self._problem = ""

    def _count(self, before: int, piece: bytes) -> int:
        """Count the bytes of a piece, and return the number of bytes of the object so far."""
        with self._lock:
            self._done += len(piece)
        return before + len(piece)

    # --- patience

    def _retry(self, act: Callable[[], _Found], ended: Callable[[], bool]) -> _Found:
        """Call `act` until it succeeds, retrying while the bucket is unreachable, and return its
        result.

        Give up once `ended()` returns true. Raises BucketRefusal, Changed, FetchAbandoned, OSError.
        """
        failures = 0
        while True:
            try:
                return act()
            except Away as error:
                failures += 1
                pause = pause_after(failures)
                with self._lock:
                    known, self._problem = self._problem, str(error)
                # If the bucket is unreachable, all downloads fail. Only one of them should log
                # that.
                if not known or failures > 3:
                    log(f"data: {error}; retrying in {pause:.0f} s")
                if not self._total:
                    self._say(f"waiting for the bucket with the data: {error}")
            self._pause(pause, ended)

    def _pause(self, seconds: float, ended: Callable[[], bool]) -> None:
        """Sleep for `seconds`. Raise FetchAbandoned as soon as `ended()` returns true."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if ended():
                raise FetchAbandoned
            time.sleep(min(0.1, left))

    def _figures(self) -> str:
        return f"{size_text(self._done)} of {size_text(self._total)}"

    def _trouble(self) -> str:
        return f" ({self._problem})" if self._problem else ""

    def _say(self, text: str) -> None:
        """Log `text`, but at most once every LOG_SECONDS.

        Also report `text` to the coordinator after each 5 % of the data, and whenever the problem
        changes.
        """
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log(f"data: {text}")
        news = f"{20 * self._done // max(1, self._total)} {self._problem}" if self._total else text
        if now - self._began >= FIRST_NEWS_SECONDS and news != self._reported:
            self._reported = news
            self._report(text)


class Sums:
    """Compares the bytes of a downloaded object with the checksums that the server sent."""

    def __init__(self, remote: Remote) -> None:
        self._etag = remote.etag
        self._md5 = hashlib.new("md5", usedforsecurity=False) if re.fullmatch("[0-9a-f]{32}", self._etag) else None
        self._sha256, self._crc32 = hashlib.sha256(), 0
        self._headers: Mapping[str, str] = {}

    def update(self, piece: bytes) -> None:
        """Add the next bytes of the object."""
        if self._md5 is not None:
            self._md5.update(piece)
        self._sha256.update(piece)
        self._crc32 = zlib.crc32(piece, self._crc32)

    def expect(self, headers: Mapping[str, str]) -> None:
        """Store the headers of the server's response, which contain checksums of the whole object."""
        self._headers = headers

    def problem(self) -> str:
        """Return what is wrong with the checksums; empty if all of them match.

        An object's ETag is its MD5 if the object was uploaded in one part and is not encrypted with
        a KMS key or a customer's key.
        """
        said = self._headers.get
        encrypted = said("x-amz-server-side-encryption", "AES256") != "AES256"
        encrypted = encrypted or "x-amz-server-side-encryption-customer-algorithm" in self._headers
        if self._md5 is not None and not encrypted and self._md5.hexdigest() != self._etag:
            return f"its MD5 is {self._md5.hexdigest()}, but its ETag is {self._etag}"
        for kind, found in (("sha256", self._sha256.digest()), ("crc32", self._crc32.to_bytes(4, "big"))):
            text, own = said(f"x-amz-checksum-{kind}", ""), base64.b64encode(found).decode()
            if text and "-" not in text and said("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT" and text != own:
                return f"its {kind.upper()} is {own}, but the server reports {text[:100]}"
        return ""


def check_names(objects: list[Remote], url: str) -> None:
    """Raise BucketRefusal unless each object can be a separate file below the folder.

    Also raise it if there are no objects.
    """
    if not objects:
        raise BucketRefusal(f"{url} contains no objects; check storage.data.url, which must be a folder in the bucket")
    names = set[str]()
    for remote in objects:
        why = why_not_a_file(remote.name)
        if not why and remote.name in names:
            why = "it is listed twice"
        if why:
            raise BucketRefusal(
                f"{url}: the object {remote.name[:200]!r} cannot be stored as a file, because {why}; rename or "
                "remove it"
            )
        names.add(remote.name)
    for name in names:
        above = name
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in names:
                raise BucketRefusal(
                    f"{url}: the object {above[:200]!r} cannot be stored as a file, because it is also "
                    f"the folder of {name[:200]!r}; rename or remove it"
                )


def why_not_a_file(name: str) -> str:
    """Return the reason why an object's name cannot be a path below a folder; empty if it can."""
    if re.search(r"[\x00-\x1f\x7f]", name):
        return "its name contains a control character"
    if "\\" in name or re.match(r"[A-Za-z]:", name):
        return "its name is a Windows path"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a part of its name is empty, '.' or '..'"
    if parts[0].startswith(OWN):
        return f"names that start with {OWN} are reserved for the runtime"
    if any(len(part.encode(errors="surrogatepass")) > 255 for part in parts):
        return "a part of its name is longer than 255 bytes"
    return ""


def pause_after(failures: int) -> float:
    """Return how many seconds to wait before the next attempt after `failures` failures.

    The pause is random, so that the pods of a job do not all retry at the same moment.
    """
    return min(LONGEST_PAUSE, 2.0 ** (min(failures, 10) - 1)) * random.Random().uniform(0.5, 1.5)


def size_text(size: float) -> str:
    """Format a number of bytes, for example as 3.2 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
