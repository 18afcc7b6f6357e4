"""Keeps the end of a pod's output next to its checkpoints, where it outlives the pod.

Problem: once a pod is gone, `kubectl logs` cannot show its log. This happens when a pod is evicted
or its Kubernetes node is lost.

Rule: the launcher and its workers write into two pipes instead of the container's output. PID 1
(pid1.py), which the container has anyway, reads these pipes. It passes each piece of output on
unchanged, and adds the piece to a bounded buffer. A thread writes the buffer to a file or to the
bucket.

    worker, launcher --pipe--> PID 1 --> container's output    as fast as its reader takes it
                                    '-> buffer --> file        by a thread

- Adding to the buffer never waits, so a full or hung volume costs only the kept log. A line in the
  pod's own log reports such a problem once, and the kept log states the number of missing bytes.
- Closing the log takes at most three seconds, or a quarter of the grace period if that is shorter.
  The grace period of the launcher and its workers is reduced by this time, so that PID 1 returns
  the exit code before the pod is killed.
- PID 1 outlives the launcher and the workers, so their last lines are kept no matter what ends
  them. If the whole container is killed without warning, the output of the last second is lost. If
  the log is kept in a bucket, the output of the last minute is lost.
- A pod keeps at most MAX_KEPT_LOG bytes. When it starts, it removes the oldest logs of its slot.
  DDPJOB_LOGS_KEPT is the number of logs to keep per slot. If the variable is 0 or unset, no logs
  are kept.

Example: DDPJOB_LOGS_KEPT is 3. When the pod `first-1-7` starts, it removes the log of `first-1-2`
and leaves those of `first-1-4` and `first-1-5`. The attempt in the name determines which log is
older, because the clocks of hosts may differ.

Why: docs/decisions/0031.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import GRACE_SECONDS, JobEnvironment, VariableError

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.shutdown import log

PIECE = 65536
"""Maximum number of bytes to read at once, which is also the capacity of a pipe."""
FILE_BYTES = protocol.MAX_KEPT_LOG // 2
"""Maximum size in bytes of each of a log's two files. A full file is renamed and replaces the older
one.
"""
_NOTE_BYTES = 100
_FILE_SECONDS, _BUCKET_SECONDS = 1.0, 60.0
"""Seconds between writes of new output. Writes to a bucket are less frequent, because an object can
only be replaced as a whole.
"""
_CLOSE_SECONDS = 3.0
"""Maximum number of seconds for passing on and writing the last output. The limit prevents a hung
volume from delaying the end of the pod.
"""


class Tail:
    """A buffer for the latest bytes of the output, which drops and counts older bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._data, self._dropped, self._added = bytearray(), 0, 0

    def add(self, data: bytes) -> None:
        """Add bytes to the buffer, without waiting for the writing thread."""
        with self._lock:
            self._data += data
            self._added += len(data)
            # Dropping old bytes moves all bytes after them, so do not drop any at each addition.
            if len(self._data) > 2 * self._limit:
                self._drop(len(self._data) - self._limit)

    def _drop(self, count: int) -> None:
        del self._data[:count]
        self._dropped += count

    def read(self, take: bool) -> tuple[bytes, int, int]:
        """Return the buffered bytes, the number of bytes dropped before them, and the number of
        bytes ever added.

        With `take`, also remove the returned bytes from the buffer.
        """
        with self._lock:
            if len(self._data) > self._limit:
                self._drop(len(self._data) - self._limit)
            data, dropped = bytes(self._data), self._dropped
            if take:
                self._data.clear()
                self._dropped = 0
            return data, dropped, self._added


class FileKeeper:
    """Appends the output to a file. When the file is full, it replaces an older file, and a new one
    is started.
    """

    seconds = _FILE_SECONDS

    def __init__(self, checkpoints: Path, name: str) -> None:
        self._folder = checkpoints / protocol.LOGS_FOLDER
        self.place = self._folder / name
        self.tail = Tail(FILE_BYTES - _NOTE_BYTES)
        self._lost = 0

    def names(self) -> list[str]:
        """Return the file names of all kept logs. Raises OSError."""
        return [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove a file of a kept log. Raises OSError."""
        (self._folder / name).unlink()

    def write(self) -> None:
        """Append the new output to the file. If this fails, the output is lost.

        Raises OSError.
        """
        data, dropped, _ = self.tail.read(take=True)
        self._lost += dropped
        if not data:
            return
        left = bytearray(_note(self._lost) + data)
        try:
            # Do not create the checkpoint folder. Without the volume, the folder would be on the
            # host's own disk.
            if self._folder.parent.is_dir():
                self._append(left)
        finally:
            # The next note must count the bytes that were not written. If even the current note was
            # cut off, the next one must also count what the current note reports.
            self._lost = len(left) if len(left) <= len(data) else self._lost + len(data)

    def _append(self, left: bytearray) -> None:
        """Append `left` to the file, removing the written bytes from `left`.

        A full volume may accept only some of the bytes.
        """
        self._folder.mkdir(exist_ok=True)
        size = self.place.lstat().st_size if self.place.exists() else 0
        if size + len(left) > FILE_BYTES:
            self.place.replace(self.place.with_name(self.place.name + protocol.OLDER))
        with open(self.place, "ab", buffering=0, opener=_open_file) as file:
            while left:
                del left[: file.write(left)]


def _open_file(path: str, flags: int) -> int:
    # Use the same mode as for checkpoints. Programs that read the file, such as a dashboard, may
    # run as other users.
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class BucketKeeper:
    """Uploads the latest output to a bucket, as a single object."""

    seconds = _BUCKET_SECONDS

    def __init__(self, url: str, name: str) -> None:
        self.place = f"{url}/{protocol.LOGS_FOLDER}/{name}"
        self.tail = Tail(protocol.MAX_KEPT_LOG - _NOTE_BYTES)
        self._written = 0
        self._url, self._name = url, name
        self._open: Any = None

    def _writer(self) -> Any:
        if self._open is None:
            from ddpjob_runtime.launcher.s3_reader import BucketPlace, BucketWriter, Credentials, region_of

            url, field = f"{self._url}/{protocol.LOGS_FOLDER}", "storage.checkpoints"
            place = BucketPlace.read(url, os.environ.get("AWS_ENDPOINT_URL", ""), region_of(), field)
            self._open = BucketWriter(place, Credentials(dict(os.environ), place.region, field))
        return self._open

    def names(self) -> list[str]:
        """Return the object names of all kept logs. Raises BucketRefusal, Away."""
        return [remote.name for remote in self._writer().objects()]

    def remove(self, name: str) -> None:
        """Remove the object of a kept log. Raises BucketRefusal, Away."""
        self._writer().delete(name)

    def write(self) -> None:
        """Replace the object if there is new output.

        Raises BucketRefusal, Away.
        """
        data, dropped, added = self.tail.read(take=False)
        if added > self._written:
            writer = self._writer()
            # The server closes a connection that has been idle for a minute, so open a new one.
            writer.close()
            writer.put(self._name, _note(dropped) + data)
            self._written = added


def _note(missing: int) -> bytes:
    return f"({missing} bytes are missing here)\n".encode() if missing else b""


class KeptLog:
    """Passes on the output of this container, and keeps the last part of it.

    `keeper` is a FileKeeper or a BucketKeeper. `kept` is the number of logs to keep for this pod's
    slot.
    """

    def __init__(self, keeper: Any, job: JobEnvironment, kept: int) -> None:
        self._keeper, self._job, self._kept = keeper, job, kept
        self._pipes = {1: os.pipe(), 2: os.pipe()}
        """The pipes that replace standard output (1) and standard error (2). Each pipe is a pair
        (read end, write end).
        """
        self._end = os.pipe()
        self._rests = {1: b"", 2: b""}
        """The incomplete last line of each stream."""
        self._grace = _read_grace(job)
        known = GRACE_SECONDS if self._grace is None else self._grace
        self._close_seconds = max(0.5, min(_CLOSE_SECONDS, known / 4))
        self._over, self._failed = threading.Event(), False
        self._relays: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._write, name="ddpjob-log", daemon=True)

    @classmethod
    def prepare(cls) -> KeptLog | None:
        """Create the pipes, and return a KeptLog; return None if this pod's log should not be kept.

        If the container has a terminal, its log is not kept, because programs behave differently
        when they write to a pipe.
        """
        job = JobEnvironment.read()
        kept = int(job.logs_kept) if job.logs_kept.isdecimal() else 0
        name = protocol.kept_log_name(job.pod, job.uid)
        if not kept or protocol.read_kept_log(name) is None or os.isatty(1) or os.isatty(2):
            return None
        if job.checkpoint_url:
            return cls(BucketKeeper(job.checkpoint_url, name), job, kept)
        return cls(FileKeeper(Path(job.checkpoint_dir), name), job, kept) if job.checkpoint_dir else None

    def divert(self) -> None:
        """Redirect the output of this process, the launcher, into the pipes.

        Also shorten the launcher's grace period, so that the launcher ends before PID 1 must end.
        The workers inherit the pipes and the shorter grace period.
        """
        if self._grace is not None:
            os.environ["DDPJOB_GRACE_SECONDS"] = str(max(0.0, self._grace - self._close_seconds))
        for target, (_, writer) in self._pipes.items():
            os.dup2(writer, target)
        for descriptor in (*self._end, *(end for pipe in self._pipes.values() for end in pipe)):
            os.close(descriptor)

    def begin(self) -> None:
        """Start threads that pass on and keep the launcher's output.

        Call this while signals are blocked. They then stay blocked in the threads, so the kernel
        delivers them to the main thread.
        """
        for target, (reader, writer) in self._pipes.items():
            os.close(writer)
            relay = threading.Thread(target=self._relay, args=(reader, target), name="ddpjob-output", daemon=True)
            self._relays.append(relay)
            relay.start()
        self._thread.start()

    def finish(self) -> None:
        """Pass on and write the remaining output after the launcher has ended.

        Do not wait for the pipes to close, because other processes may still hold them open.
        """
        os.close(self._end[1])
        deadline = time.monotonic() + self._close_seconds
        for relay in self._relays:
            relay.join(max(0.0, deadline - time.monotonic()))
        for rest in self._rests.values():
            self._keeper.tail.add(rest)
        self._over.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _relay(self, reader: int, target: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        poll.register(self._end[0], select.POLLIN)
        while True:
            if reader not in dict(poll.poll()):
                return  # The launcher has ended, and the pipe is empty.
            piece = os.read(reader, PIECE)
            if not piece:
                return
            self._keep(target, piece)
            _pass_on(target, piece)

    def _keep(self, target: int, piece: bytes) -> None:
        """Add only whole lines to the buffer, so that the lines of the two streams do not mix."""
        lines, newline, rest = (self._rests[target] + piece).rpartition(b"\n")
        # Do not hold back a very long line that has not ended, such as a progress bar.
        if len(rest) > PIECE:
            lines, newline, rest = lines + newline + rest, b"", b""
        self._rests[target] = rest
        if lines or newline:
            self._keeper.tail.add(lines + newline)

    def _write(self) -> None:
        self._attempt(self._prune)
        over = False
        while not over:
            over = self._over.wait(self._keeper.seconds)
            self._attempt(self._keeper.write)

    def _attempt(self, act: Any) -> None:
        try:
            act()
            self._failed = False
        except Exception as error:
            if not self._failed:
                log(f"cannot save this pod's log to {self._keeper.place}: {error}; training continues")
            self._failed = True

    def _prune(self) -> None:
        for name in surplus(self._keeper.names(), self._job, self._kept):
            self._keeper.remove(name)


def _read_grace(job: JobEnvironment) -> float | None:
    try:
        return job.grace
    except VariableError:
        return None  # The launcher itself will report the invalid value.


def surplus(names: Iterable[str], job: JobEnvironment, kept: int) -> list[str]:
    """Return the logs of this pod's slot that must be removed so that only `kept` logs remain.

    This pod's own log is one of the `kept` logs. Logs of an earlier job with the same name count as
    older than logs of this job.
    """
    found: dict[tuple[bool, int, str], list[str]] = {}
    own = protocol.read_kept_log(protocol.kept_log_name(job.pod, job.uid))
    for name in names:
        log_of = protocol.read_kept_log(name)
        match = re.fullmatch(rf"{re.escape(job.name)}-{job.index}-(\d{{1,9}})", log_of[0]) if log_of else None
        if log_of is not None and match is not None and own is not None and log_of != own:
            found.setdefault((log_of[1] == own[1], int(match[1]), log_of[1]), []).append(name)
    old = sorted(found)[: max(0, len(found) - kept + 1)]
    return [name for key in old for name in found[key]]


def _pass_on(target: int, piece: bytes) -> None:
    """Write bytes to the container's output, however long it takes.

    If the output is broken, the bytes are lost.
    """
    left = memoryview(piece)
    while left:
        try:
            left = left[os.write(target, left) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(target, select.POLLOUT)
            poll.poll(1000)
        except OSError:
            return
