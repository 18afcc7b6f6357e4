"""Reads the logs that deleted pods left next to their checkpoints. The logs may be in a folder, a
pod or a bucket.

The launcher keeps the end of each log (`launcher/keep_log.py`). The job controls the names and the
contents of these files, so the files cannot be trusted. Therefore sizes are bounded, links are not
followed, and files with unexpected names are ignored. A claim can be read only from a pod that
mounts it, so `list_files` and `read_file` are also sent to a pod of the job and run there.

docs/decisions/0031 gives the reasons.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

from ddpjob_runtime.protocol import LOGS_FOLDER, MAX_KEPT_LOG, OLDER, kept_log_name, read_kept_log

from ddpjob.api.job_spec import Json
from ddpjob.client.backends.backend import LogOptions, Mistake, PodLine

GONE = "Gone"
"""The state shown for a pod that no longer exists but whose log was kept."""
_MARK = "kept logs:\n"
_MOST_FILES = 10_000


def list_files(path: str, most: int) -> list[tuple[str, int]]:
    """Return the names and sizes of the regular files in a folder.

    This function must be self-contained, because `in_pod` sends its source to a pod.
    """
    import os
    from itertools import islice

    found: list[tuple[str, int]] = []
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return found
    with os.scandir(folder) as entries:
        for entry in islice(entries, most):
            try:
                if entry.is_file(follow_symlinks=False):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
            except OSError:  # The file has been removed since the folder was listed.
                continue
    os.close(folder)
    return found


def read_file(path: str, name: str, most: int) -> bytes:
    """Return the last `most` bytes of a regular file; empty for anything else.

    This function must be self-contained, because `in_pod` sends its source to a pod.
    """
    import os
    import stat

    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
            os.close(folder)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b""
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except OSError:
        return b""


@dataclass(frozen=True)
class KeptLogs:
    """The kept logs of a job. `sizes` contains each file's size, and `read` returns its content."""

    job: str
    uid: str
    sizes: Mapping[str, int]
    read: Callable[[str], bytes] = field(repr=False)

    def pods(self, known: Iterable[str] = ()) -> list[PodLine]:
        """Return the pods whose logs are kept, ordered by slot and attempt.

        Pods whose names are in `known` are left out.
        """
        found = dict[tuple[int, int], PodLine]()
        for name in self.sizes:
            pod = (read_kept_log(name) or ("", ""))[0]
            numbers = re.fullmatch(rf"{re.escape(self.job)}-(\d{{1,9}})-(\d{{1,9}})", pod, re.ASCII)
            if numbers is None or pod in known or not self._files(pod):
                continue
            size = sum(self.sizes[each] for each in self._files(pod))
            index, attempt = int(numbers[1]), int(numbers[2])
            found[index, attempt] = PodLine(
                pod, "node", index, GONE, message=f"only the last {size:,} bytes of its log are kept", ended=True
            )
        return [found[key] for key in sorted(found)]

    def joined(self, more: KeptLogs) -> KeptLogs:
        """Return the logs of this object and of `more`.

        If both contain a file with the same name, it is read from this object.
        """

        def read(name: str) -> bytes:
            return self.read(name) if name in self.sizes else more.read(name)

        return replace(self, sizes={**more.sizes, **self.sizes}, read=read)

    def _files(self, pod: str) -> list[str]:
        """Return the names of the files that contain a pod's log, older file first."""
        name = kept_log_name(pod, self.uid)
        return [each for each in (name + OLDER, name) if each in self.sizes]

    def text(self, pod: str, options: LogOptions) -> bytes:
        """Return a pod's kept log.

        Raises Mistake if no log is kept, or if `options` has an option that kept logs do not
        support.
        """
        if options.since is not None:
            raise Mistake("--since: kept logs contain no timestamps; use --tail instead")
        files = self._files(pod)
        if options.previous or not files:
            lost = "the logs of its earlier containers were" if files else "its log was"
            raise Mistake(f"pod {pod} is gone, and {lost} not kept")
        text = b"".join(self.read(name) for name in files)[-MAX_KEPT_LOG:]
        return text if options.tail is None else b"".join(BytesIO(text).readlines()[-options.tail or len(text) :])


def in_folder(checkpoints: Path, job: str, uid: str) -> KeptLogs:
    """Return the kept logs in a checkpoint folder."""
    folder = str(checkpoints / LOGS_FOLDER)
    sizes = _valid(list_files(folder, _MOST_FILES))
    return KeptLogs(job, uid, sizes, lambda name: read_file(folder, name, MAX_KEPT_LOG))


def in_pod(run: Callable[[str], str], job: str, uid: str) -> KeptLogs:
    """Return the kept logs in a pod's checkpoint folder.

    `run` executes Python code in this pod and returns the output.
    """
    folder = f'__import__("os").environ.get("DDPJOB_CHECKPOINT_DIR", "") + "/{LOGS_FOLDER}"'

    def call(function: Callable[..., object], arguments: str, write: str) -> str:
        code = f"import json, sys\n{inspect.getsource(function)}\nfound = {function.__name__}({folder}, {arguments})\n"
        return run(f"{code}print({_MARK!r}, end='', flush=True)\n{write}\n").partition(_MARK)[2]

    def read(name: str) -> bytes:
        return call(read_file, f"{name!r}, {MAX_KEPT_LOG}", "sys.stdout.buffer.write(found)").encode()

    sizes = parse_listing(call(list_files, str(_MOST_FILES), "print(json.dumps(found))"))
    return KeptLogs(job, uid, sizes, read)


def parse_listing(text: str) -> dict[str, int]:
    """Return the sizes of kept logs by name, from the output of `list_files` in a pod.

    The pod can print anything, so everything that is not a kept log is ignored.
    """
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    pairs = [row for row in rows[:_MOST_FILES] if isinstance(row, list)] if isinstance(rows, list) else []
    return _valid((row[0], row[1]) for row in pairs if len(row) == 2)


def _valid(rows: Iterable[tuple[object, object]]) -> dict[str, int]:
    return {
        name: size
        for name, size in rows
        if isinstance(name, str) and read_kept_log(name) and type(size) is int and 0 <= size <= 2 * MAX_KEPT_LOG
    }


def in_bucket(checkpoints: Json, folder: str, job: str, uid: str) -> KeptLogs:
    """Return the kept logs in a job's folder in a bucket.

    `checkpoints` is the value of spec.storage.checkpoints. The bucket is read with the credentials
    in this shell's environment. Raises Mistake.
    """
    from ddpjob_bucket.stored import Bucket, BucketError, LibraryMissing

    from ddpjob.missing_package import INSTALL

    url = f"{str(checkpoints['url']).rstrip('/')}/{folder}"

    def explain(error: BucketError) -> Mistake:
        remedy = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in this shell"
        return Mistake(f"logs of terminated pods cannot be read: {error}; {remedy}")

    try:
        bucket = Bucket.open(
            url, endpoint=str(checkpoints.get("endpoint") or ""), region=str(checkpoints.get("region") or "")
        )
        listed = bucket.sizes(LOGS_FOLDER).items()
    except LibraryMissing:
        raise Mistake(f"reading the logs in {url} requires the package obstore: {INSTALL.format(extra='s3')}") from None
    except BucketError as error:
        raise explain(error) from None

    def read(name: str) -> bytes:
        try:
            return bucket.read_end(f"{LOGS_FOLDER}/{name}", MAX_KEPT_LOG)
        except BucketError as error:
            raise explain(error) from None

    return KeptLogs(job, uid, _valid((key.rpartition("/")[2], size) for key, size in listed), read)
