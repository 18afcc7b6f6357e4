"""Copies a script's checkpoints to the job's bucket, and restores the newest copy.

All ranks must continue from the same checkpoint, an upload must not stop training, and an
incomplete copy must not be read. So:

- When the job starts, the ranks agree on the newest checkpoint in the bucket (`Bucket.join`). One
  rank of each node downloads it, under a lock, and the node's other ranks find it in the folder.
- The script may replace its files at any time. `copy` therefore links them into a hidden folder,
  and uploads them from there in the background (`ddpjob_bucket.uploads`). The newest `keep` copies
  stay in the bucket.
- When the script ends, it waits up to LAST_SECONDS for the last copy, and fails if that copy is not
  complete by then. `saved_and_leave` waits for as long as the pod's grace period allows.
- Without a bucket, a file in the checkpoint folder names the newest checkpoint (`record`).

Example: rank 0 copies the checkpoints from steps 100 and 200, and is killed while the second one is
being uploaded. Its successors on new nodes all continue from step 100.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from ddpjob_bucket import Bucket, BucketError, Damaged, Stored, Uploads, Waiting
from ddpjob_bucket.patience import patiently
from ddpjob_bucket.stored import discard, files_of
from ddpjob_pod.file_lock import alone
from ddpjob_pod.job_environment import JobEnvironment, VariableError

from ddpjob_report import link

RECORD = ".ddpjob-newest.json"
"""Name of the file that records which checkpoint in the folder is the newest. Used only if the job
has no bucket.
"""
_FETCHED, _LOCK, _LINKS = ".ddpjob-fetched.json", ".ddpjob-fetch.lock", ".ddpjob-copy-"
LAST_SECONDS = 600.0
"""Maximum number of seconds that an ending script waits for its last copy."""


class _CopyState:
    bucket: Bucket | None = None
    uploads: Uploads | None = None
    keep = 3
    restored: Stored | None = None
    """The checkpoint in the bucket that all ranks continue from; None if there is none."""
    recorded: tuple[int, Path] | None = None
    """The step and the path that this process has recorded last; None if it has not recorded any
    since it started or since the last call of `recorded`.
    """
    process = 0
    leaves = False
    """Whether `leave` was called, because the pod is being stopped. If so, this process does not
    wait for copies again at exit.
    """


def url() -> str:
    """Return the URL of the job's folder in the bucket; empty if the job has no bucket for
    checkpoints.
    """
    return JobEnvironment.read().checkpoint_url


# ---- at startup


def restore(folder: Path) -> Path | None:
    """Download the newest checkpoint into the folder, and return its path; None if there is none.

    All ranks get the same checkpoint. Raises BucketError, OSError, ValueError.
    """
    bucket = _joined()
    entry = _CopyState.restored
    # The bucket is empty, but a persistent folder may hold a checkpoint from before the job had a
    # bucket.
    if entry is None:
        return recorded(folder) if JobEnvironment.read().shares_checkpoints else None
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / _LOCK, strict=True):
        found = _fetched(folder, entry)
        if found is None:
            for leftover in [*folder.glob(".*.fetch.tmp"), *folder.glob(".*.old.tmp")]:
                discard(leftover)  # This process holds the lock, so a leftover must be from a process that was killed.
            found = _fetch(bucket, entry, folder)
            _note_fetched(folder, entry, found)
            sys.stdout.write(f"ddpjob_report: restored checkpoint {found.name} (step {entry.step}) from {bucket.url}\n")
    return found


def _fetch(bucket: Bucket, entry: Stored, folder: Path) -> Path:
    try:
        return patiently(lambda: bucket.fetch(entry, folder), _say)
    except Damaged as error:
        raise BucketError(f"{error}; to continue from the previous copy, delete {bucket.url}/{entry.key}") from error


def _joined() -> Bucket:
    """Return the bucket.

    In the first call, the ranks agree on the checkpoint to continue from.
    """
    if _CopyState.bucket is not None and _CopyState.process != os.getpid():
        raise BucketError(
            f"{url()} cannot be used in a forked process, because obstore's threads are not forked; copy checkpoints in"
            " the process that restored them, or start the other process with spawn, not fork"
        )
    if _CopyState.bucket is None:
        opened = Bucket.open(url())
        _CopyState.restored = patiently(lambda: opened.join(JobEnvironment.read().uid, _order()), _say)
        _CopyState.bucket, _CopyState.uploads, _CopyState.process = opened, None, os.getpid()
    return _CopyState.bucket


def _order() -> tuple[int, ...]:
    """Return the position of this start among all starts of the job; the same on all ranks.

    The position consists of the generation, the round and torchrun's restart count. The launcher
    sets the generation and the round. The count is needed because a program in `command` may start
    the ranks itself.
    """
    job = JobEnvironment.read()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return *(job.group or (job.number("generation"), 0)), int(restarts)
    except VariableError as error:
        raise BucketError(str(error)) from None
    except ValueError:
        what = "must be whole numbers"
        raise BucketError(
            f"DDPJOB_GENERATION={job.generation!r}, TORCHELASTIC_RESTART_COUNT={restarts!r}: {what}"
        ) from None


def _fetched(folder: Path, entry: Stored) -> Path | None:
    """Return the path of the checkpoint `entry` if an earlier process has fetched it into the
    folder.

    Return None if the checkpoint's files have changed since then.
    """
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
    """Upload the present content of a checkpoint in the background.

    Raises BucketError, OSError, ValueError.
    """
    _check_parts(path)
    bucket = _joined()
    _CopyState.keep = keep
    if _CopyState.uploads is None:
        for leftover in path.parent.glob(f"{_LINKS}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Exit handlers run in reverse order. Register the handler of `link` first, so that it runs
        # last and also posts the last copy.
        link.prepare()
        _CopyState.uploads = Uploads(bucket, lambda: _tidy(bucket), _say, _release, done=_post)
        atexit.register(_at_exit)
    _CopyState.uploads.offer(Waiting(_linked(path), step, None, time.time()))


class _FilesOfIndex(pickle._Unpickler):
    """Finds the file names in the index of a torch.distributed.checkpoint folder without running
    code from the index.

    The class does not need torch. It uses Python's slow unpickler, because nine bytes of a pickle
    can make the fast unpickler allocate a memo of any size. The opcode that allocates a bytearray
    of any size is disabled.
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
                """Accept any arguments, because the real class is unknown."""

            def __setstate__(self, state: Any) -> None:
                if name == "_StorageInfo" and isinstance(state, dict) and isinstance(state.get("relative_path"), str):
                    names.add(state["relative_path"])

        return Anything


def _check_parts(path: Path) -> None:
    """Raise ValueError if a torch.distributed.checkpoint folder lacks parts.

    Parts are missing if other nodes wrote them to their own disks.
    """
    for index in path.rglob(".metadata") if path.is_dir() else ():
        with index.open("rb") as file:
            found = _FilesOfIndex(file)
            try:
                found.load()
            except Exception:
                # The format of the index is unknown, perhaps because torch is newer, so the parts
                # cannot be checked.
                continue
        lacking = sorted(name for name in found.names if not (index.parent / name).exists())
        if lacking:
            raise ValueError(
                f"ddpjob_report.copy_checkpoint: path {path} lacks {len(lacking)} of {len(found.names)} parts, such as"
                f" {lacking[0]}. Other nodes wrote these parts to their own disks, so rank 0's copy could not be"
                " loaded. Save the full state on rank 0 (get_model_state_dict with full_state_dict=True), or use a"
                " volume that every node sees (storage.checkpoints.claimName)"
            )


def _linked(path: Path) -> Path:
    """Link the files of a checkpoint into a hidden folder, because the script may replace the
    originals. Return the new path.
    """
    files = files_of(path)
    # The path is absolute, because the script may change its working directory.
    folder = path.parent.absolute() / f"{_LINKS}{secrets.token_hex(4)}"
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
    """Post the figures about copies now, because a copy has reached the bucket.

    The script's next report may come much later, or never.
    """
    link.post({"metrics": figures()})


def finish(seconds: float | None) -> bool:
    """Wait for the last copy, and return whether it has reached the bucket.

    Wait at most `seconds`; None means no limit.
    """
    uploads = _CopyState.uploads
    return uploads is None or _CopyState.process != os.getpid() or (uploads.wait(seconds) and not uploads.lost)


def leave(seconds: float) -> None:
    """Wait at most `seconds` for the last copy, because the process is about to exit.

    At exit, the process does not wait again.
    """
    _CopyState.leaves = True
    if not finish(seconds):
        _say("the last checkpoint did not reach the bucket before the grace period was over")


def figures() -> dict[str, float]:
    """Return the figures to report about copies; empty if this process has not made any copy."""
    if _CopyState.process != os.getpid():
        return {}
    found = _CopyState.uploads.figures() if _CopyState.uploads is not None else {}
    return {"copyStep": _CopyState.restored.step, **found} if found and _CopyState.restored is not None else found


def _at_exit() -> None:
    """Wait for the last copy when the script ends. If the copy fails, end with exit code 1, because
    the job's result would be lost.
    """
    if _CopyState.process != os.getpid() or _CopyState.leaves or finish(0) or _has_failed():
        return
    if not finish(LAST_SECONDS):
        _say(f"error: the last checkpoint did not reach {url()}, so the job is not complete")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _has_failed() -> bool:
    """Whether the script is ending because of an exception. In that case, the script does not wait
    for the last copy, because the job restarts anyway.
    """
    written = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return hasattr(sys, "last_type") or (bool(written) and Path(written).exists())


# ---- without a bucket


def record(folder: Path, path: Path, step: int) -> None:
    """Record that a checkpoint in the folder is the newest one.

    Do nothing if this process has recorded a checkpoint with a higher step that still exists. After
    a restart, a lower step is recorded, because training may continue from an older state.

    Raises OSError, or ValueError if the checkpoint is not in the folder.
    """
    made, home = path.resolve(), folder.resolve()
    if not made.is_relative_to(home):
        raise ValueError(
            f"ddpjob_report.copy_checkpoint: path {path} is not in checkpoint_dir(), which is {folder}; save the "
            "checkpoint there"
        )
    highest = _CopyState.recorded
    if highest is not None and highest[0] > step and highest[1].exists():
        return
    name = made.relative_to(home).as_posix()
    temporary = folder / f"{RECORD}.{secrets.token_hex(4)}"
    try:
        with temporary.open("w") as file:
            json.dump({"name": name, "step": step}, file)
            file.flush()
            os.fsync(file.fileno())  # Without fsync, the file may be empty after a power failure.
        temporary.replace(folder / RECORD)
        _CopyState.recorded = step, made
    except OSError:
        discard(temporary)
        raise


def recorded(folder: Path) -> Path | None:
    """Return the checkpoint that was recorded last; None if there is none or it has been deleted.

    Raises OSError or ValueError if the record cannot be read. Training must not begin from scratch
    while it is unknown whether there is a checkpoint.
    """
    _CopyState.recorded = None
    try:
        text = (folder / RECORD).read_text()
    except FileNotFoundError:
        return None
    try:
        path: Path = folder / json.loads(text)["name"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{folder / RECORD}, which names the newest checkpoint, is damaged. To start from scratch, remove the file;"
            f' to continue from a checkpoint, write the name of the checkpoint to it: {{"name": "snapshot.pt"}}'
        ) from None
    try:
        path.stat()  # Since Python 3.14, Path.exists returns False if the folder cannot be read.
    except (FileNotFoundError, NotADirectoryError):
        return None
    return path


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"ddpjob_report: {text}\n")
        sys.stderr.flush()
