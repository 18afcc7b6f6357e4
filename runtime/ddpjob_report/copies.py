"""Copies of a script's checkpoints in the job's bucket (storage.checkpoints.url), and what a start continues from."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import pickle
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from ddpjob_bucket import Bucket, BucketError, Damaged, Stored, Uploads, Waiting
from ddpjob_bucket.stored import discard, files_of
from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_report import link

RECORD = ".ddpjob-newest.json"
"""Without a bucket: names the newest checkpoint in the folder."""
_FETCHED, _LOCK, _LINKS = ".ddpjob-fetched.json", ".ddpjob-fetch.lock", ".ddpjob-copy-"
LAST_SECONDS = 600.0
"""How long the end of the script waits for its last copy."""
_TRIES, _PAUSE = 5, 1.0
LARGEST_STEP = 10**9 - 1


class _CopyState:
    bucket: Bucket | None = None
    uploads: Uploads | None = None
    keep = 3
    restored: Stored | None = None
    """What all ranks continue from; None: nothing is there."""
    process = 0
    leaves = False
    """The end of this process waits for no copy: the grace period is over."""


def url() -> str:
    """The job's folder in the bucket; empty: checkpoints are not copied."""
    return JobEnvironment.read().checkpoint_url


# ---- a start


def restore(folder: Path) -> Path | None:
    """The newest checkpoint of the bucket, in the folder; None: there is none. The same on all ranks.

    Raises BucketError, OSError, ValueError.
    """
    bucket = _joined()
    entry = _CopyState.restored
    if entry is None:  # A folder that lasts, as on one machine, may have one from before the job got its bucket.
        return recorded(folder) if JobEnvironment.read().shares_checkpoints else None
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        found = _fetched(folder, entry)
        if found is None:
            for leftover in [*folder.glob(".*.fetch.tmp"), *folder.glob(".*.old.tmp")]:
                discard(leftover)  # Of a process that was killed while it fetched: this one is alone here.
            found = _patiently(lambda: _fetch(bucket, entry, folder))
            _note_fetched(folder, entry, found)
            sys.stdout.write(f"ddpjob_report: checkpoint {found.name} of step {entry.step} is from {bucket.url}\n")
    return found


class _DamagedCopy(BucketError):
    """To fetch it again would not help."""


def _fetch(bucket: Bucket, entry: Stored, folder: Path) -> Path:
    try:
        return bucket.fetch(entry, folder)
    except Damaged as error:
        raise _DamagedCopy(
            f"{error}; to continue from the copy before this one, delete {bucket.url}/{entry.key}"
        ) from error


def _joined() -> Bucket:
    """The bucket, where this process is one of the ranks that have agreed on what they continue from."""
    if _CopyState.bucket is None or _CopyState.process != os.getpid():
        opened = Bucket.open(url())
        _CopyState.restored = _patiently(lambda: opened.join(JobEnvironment.read().uid, _order()))
        _CopyState.bucket, _CopyState.uploads, _CopyState.process = opened, None, os.getpid()
    return _CopyState.bucket


def _order() -> tuple[int, ...]:
    """Of this start among the job's: generation and round, as the launcher gives them to all ranks alike.

    A program of `command` starts its ranks itself: torchrun there counts its restarts.
    """
    job = JobEnvironment.read()
    fence = job.fence or f"{job.generation or 0}.0"
    numbers = [*fence.split("."), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
    try:
        return tuple(int(number) for number in numbers)
    except ValueError:
        raise BucketError(f"DDPJOB_FENCE={fence!r} and TORCHELASTIC_RESTART_COUNT must be numbers") from None


def _patiently(act: Callable[[], Any]) -> Any:
    """What a moment's absence of the bucket should not end."""
    for number in range(_TRIES):
        try:
            return act()
        except _DamagedCopy:
            raise
        except BucketError as error:
            if number == _TRIES - 1:
                raise
            _say(f"{error}; tried again")
            time.sleep(_PAUSE * 2**number)
    raise AssertionError


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of the folder at a time: the ranks of a node share what one of them has fetched. Raises OSError."""
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            text = f"{error.strerror}: the folder of checkpoints must be on a file system that can lock files"
            raise OSError(error.errno, text, str(folder / _LOCK)) from None
        yield


def _fetched(folder: Path, entry: Stored) -> Path | None:
    """What an earlier process has fetched, if nothing of it has changed since."""
    try:
        known = json.loads((folder / _FETCHED).read_text())
        path = folder / known["name"]
        same = known["key"] == entry.key and known["url"] == url() and known["files"] == _signatures(path)
    except (OSError, ValueError, KeyError, TypeError, BucketError):
        return None
    return path if same else None


def _note_fetched(folder: Path, entry: Stored, path: Path) -> None:
    known = {"url": url(), "key": entry.key, "name": path.name, "files": _signatures(path)}
    (folder / _FETCHED).write_text(json.dumps(known))


def _signatures(path: Path) -> dict[str, list[int]]:
    states = {str(file.relative_to(path.parent)): file.stat() for file in files_of(path)}
    return {name: [state.st_size, state.st_mtime_ns, state.st_ino] for name, state in states.items()}


# ---- copies


def copy(path: Path, step: int, keep: int) -> None:
    """Upload a checkpoint in the background, as it is now. Raises BucketError, OSError, ValueError."""
    _check_parts(path)
    bucket = _joined()
    _CopyState.keep = keep
    if _CopyState.uploads is None:
        for leftover in path.parent.glob(f"{_LINKS}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        link.prepare()  # First: what is registered for the exit runs in reverse, and the last copy is posted as well.
        _CopyState.uploads = Uploads(bucket, lambda: _tidy(bucket), _say, _release, done=_post)
        atexit.register(_at_exit)
    _CopyState.uploads.offer(Waiting(_linked(path), step, None, time.time()))


class _FilesOfIndex(pickle._Unpickler):
    """Finds the names of files in an index of torch.distributed.checkpoint, without torch, and runs nothing of it.

    It is Python's slow unpickler, because the fast one allocates as large a memo as nine bytes of a pickle ask for. The
    opcode that allocates a bytearray of any size is unknown here.
    """

    dispatch: ClassVar[Any] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        names = self.names

        class Anything:
            def __new__(cls, *args: Any) -> Anything:
                return super().__new__(cls)

            def __init__(self, *args: Any) -> None:
                """Whatever it is made of."""

            def __setstate__(self, state: Any) -> None:
                if name == "_StorageInfo" and isinstance(state, dict) and isinstance(state.get("relative_path"), str):
                    names.add(state["relative_path"])

        return Anything


def _check_parts(path: Path) -> None:
    """Raise ValueError for a folder of torch.distributed.checkpoint of which other nodes have parts."""
    for index in path.rglob(".metadata") if path.is_dir() else ():
        with index.open("rb") as file:
            found = _FilesOfIndex(file)
            try:
                found.load()
            except Exception:
                continue  # Of something else, or a torch to come: it is copied as it is.
        lacking = sorted(name for name in found.names if not (index.parent / name).exists())
        if lacking:
            raise ValueError(
                f"ddpjob_report.copy_checkpoint: path {path} lacks {lacking[0]} ({len(lacking)} of {len(found.names)}"
                " parts), which other nodes have written to disks of their own, and rank 0's copy could not be loaded:"
                " save the full state on rank 0 (get_model_state_dict with full_state_dict=True), or use a volume that"
                " every node sees (storage.checkpoints.claimName)"
            )


def _linked(path: Path) -> Path:
    """The checkpoint under another name, by links: the script may replace or remove its own while this is uploaded."""
    files = files_of(path)
    folder = path.parent.absolute() / f"{_LINKS}{secrets.token_hex(4)}"  # The script may change its folder meanwhile.
    try:
        for file in files:
            to = folder / file.relative_to(path.parent)
            to.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.resolve(), to)
            except OSError:
                shutil.copy2(file, to)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / path.name


def _release(waiting: Waiting) -> None:
    shutil.rmtree(waiting.path.parent, ignore_errors=True)


def _tidy(bucket: Bucket) -> None:
    bucket.remove(bucket.entries()[_CopyState.keep :])
    bucket.sweep()


def _post() -> None:
    """Say that a copy is in the bucket: the script's next report may be far off, or there may be none."""
    link.post({"metrics": figures()})


def finish(seconds: float | None) -> bool:
    """Wait until the last copy is in the bucket, at most so long (None: without a limit). Returns whether it is."""
    uploads = _CopyState.uploads
    return uploads is None or _CopyState.process != os.getpid() or (uploads.wait(seconds) and not uploads.lost)


def leave(seconds: float) -> None:
    """Wait for the last copy at most so long, and not again at the end of the process, which may come then."""
    _CopyState.leaves = True
    if not finish(seconds):
        _say("the last checkpoint is not in the bucket when the grace period ends")


def figures() -> dict[str, float]:
    """What is reported of the copies; empty: this process makes none."""
    if _CopyState.process != os.getpid():
        return {}
    found = _CopyState.uploads.figures() if _CopyState.uploads is not None else {}
    return {"copyStep": _CopyState.restored.step, **found} if found and _CopyState.restored is not None else found


def _at_exit() -> None:
    """A script has not ended well before its result is in the bucket: the folder goes with the pod."""
    if _CopyState.process != os.getpid() or _CopyState.leaves or finish(0) or _has_failed():
        return
    if not finish(LAST_SECONDS):
        _say(f"error: the last checkpoint is not in {url()}: the job must not end without it")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _has_failed() -> bool:
    """Whether an exception ends the script: then its job restarts at once, from the copy before."""
    written = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return hasattr(sys, "last_type") or (bool(written) and Path(written).exists())


# ---- without a bucket


def record(folder: Path, path: Path, step: int) -> None:
    """Note a checkpoint of the folder as its newest. Raises OSError; ValueError where it is elsewhere."""
    made, home = path.resolve(), folder.resolve()
    if not made.is_relative_to(home):
        raise ValueError(f"ddpjob_report.copy_checkpoint: path {path} is not in checkpoint_dir(), which is {folder}")
    name = made.relative_to(home).as_posix()
    temporary = folder / f"{RECORD}.{secrets.token_hex(4)}"
    try:
        with temporary.open("w") as file:
            json.dump({"name": name, "step": step}, file)
            file.flush()
            os.fsync(file.fileno())  # Else a power cut may leave an empty one, which names nothing.
        temporary.replace(folder / RECORD)
    except OSError:
        discard(temporary)
        raise


def recorded(folder: Path) -> Path | None:
    """The checkpoint that was noted last, if it is still there.

    Raises OSError, ValueError: a start that does not know what there is must not begin from scratch.
    """
    try:
        text = (folder / RECORD).read_text()
    except FileNotFoundError:
        return None
    try:
        path = folder / json.loads(text)["name"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder / RECORD}, which names the newest checkpoint, is damaged: to continue from one, write its name"
            f' there as {{"name": "snapshot.pt"}}; to begin from scratch, remove the file'
        ) from None
    return path if path.exists() else None


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"ddpjob_report: {text}\n")
        sys.stderr.flush()
