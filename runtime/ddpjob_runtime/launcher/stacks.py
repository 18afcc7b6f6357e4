"""Python stacks of workers that hang: each writes them to a file of its own at a signal, even while blocked in C++."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.shutdown import log

SIGNAL = signal.SIGRTMIN + 7  # one that neither Python, torch nor a batch system uses
WRITING_SECONDS = 1.0
ENVIRONMENT = "DDPJOB_STACKS_DIR"
PREFIX = "ddpjob-worker-stacks-"


def prepare() -> None:
    """Create a folder for the files, named in the environment that workers inherit; without one there are no stacks."""
    try:
        for old in Path(tempfile.gettempdir()).glob(PREFIX + "*"):  # of launchers that were killed
            with contextlib.suppress(OSError):
                descriptor = _locked(old)
                shutil.rmtree(old)
                os.close(descriptor)
        made = Path(tempfile.mkdtemp(prefix="new-" + PREFIX))  # which no other launcher removes before it is locked
        prepare.lock = _locked(made)  # type: ignore[attr-defined]
        os.environ[ENVIRONMENT] = str(made.rename(made.with_name(made.name[len("new-") :])))
    except OSError as error:
        log(f"no stacks of hanging workers: {error}; give the pod a writable /tmp")


def remove() -> None:
    """Remove the folder: this launcher ends."""
    folder = os.environ.pop(ENVIRONMENT, "")
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int:
    """A descriptor that keeps the folder from others, until this process ends. Raises OSError: another has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def collect(ranks: Mapping[int, int]) -> dict[int, str]:
    """{global rank: stacks} of the workers {global rank: pid}; also logged, and kept in the checkpoint folder."""
    folder = os.environ.get(ENVIRONMENT)
    if not folder:
        return {}
    files = {rank: Path(folder) / f"{rank}.txt" for rank in ranks}
    before = {rank: _size(path) for rank, path in files.items()}
    ended = set()
    for rank, pid in ranks.items():
        try:
            if catches(pid, SIGNAL):
                os.kill(pid, SIGNAL)
        except (FileNotFoundError, ProcessLookupError):
            ended.add(rank)
    time.sleep(WRITING_SECONDS)
    found = {}
    for rank, path in files.items():
        text = path.read_bytes()[before[rank] :].decode(errors="replace") if path.exists() else ""
        found[rank] = of_the_script(text) or (
            protocol.RANK_ENDED if rank in ended else "(this rank has written no stack)"
        )
        log(f"stacks of rank {rank}:\n{found[rank]}")
    _keep(found)
    return found


def of_the_script(text: str) -> str:
    """The stack without the frames of the runtime and of Python's `-m`, below which the script runs."""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not _OWN_FRAME.match(line)]
    return "".join(kept) if any(line.startswith("  File ") for line in kept) else text


_OWN_FRAME = re.compile(
    rf'  File "(?:{re.escape(str(Path(__file__).resolve().parents[1]))}/|<frozen runpy>|[^"]*/runpy\.py)'
)


def catches(pid: int, number: int) -> bool:
    """Whether the process handles the signal, which else ends it: not before it is prepared, nor as another program.

    Raises FileNotFoundError or ProcessLookupError: there is none.
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _keep(found: Mapping[int, str]) -> None:
    root = os.environ.get("DDPJOB_CHECKPOINT_DIR")
    if not root or not Path(root).is_dir():
        return
    mark = os.environ.get("DDPJOB_FENCE", "0.0")
    folder = Path(root) / "stacks"
    try:
        folder.mkdir(exist_ok=True)
        for rank, text in found.items():
            (folder / f"round-{mark}-rank-{rank}.txt").write_text(
                f"{protocol.iso(protocol.time_of(time.time()))} no step\n{text}"
            )
    except OSError as error:
        log(f"cannot keep stacks in {folder}: {error}")
        return
    log(f"stacks are kept in {folder}")
