"""The Python stacks of workers that do not move: each writes them to a file of its own at a signal, even while it is blocked in C++."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import wire
from departure import say

SIGNAL = signal.SIGRTMIN + 7  # one that neither Python, torch nor a batch system uses
WRITING_SECONDS = 1.0
ENVIRONMENT = "DDPJOB_STACKS_DIR"


def prepare() -> None:
    """A folder for the files, named in the environment that workers inherit; where none can be written, stacks cannot be had."""
    try:
        os.environ[ENVIRONMENT] = tempfile.mkdtemp(prefix="ddpjob-stacks-")
    except OSError as error:
        say(f"no stacks of hanging workers: {error}; give the pod a writable /tmp")


def collect(ranks: Mapping[int, int]) -> dict[int, str]:
    """{global rank: stacks} of the workers {global rank: pid}; also written to the log, and to the checkpoint folder."""
    folder = os.environ.get(ENVIRONMENT)
    if not folder:
        return {}
    files = {rank: Path(folder) / f"{rank}.txt" for rank in ranks}
    before = {rank: _size(path) for rank, path in files.items()}
    for rank, pid in ranks.items():
        if files[rank].exists():  # else the worker has not come so far, and the signal would end it
            os.kill(pid, SIGNAL)
    time.sleep(WRITING_SECONDS)
    found = {}
    for rank, path in files.items():
        text = path.read_bytes()[before[rank] :].decode(errors="replace") if path.exists() else ""
        found[rank] = text or "(this rank has written no stack)"
        say(f"stacks of rank {rank}:\n{found[rank]}")
    _keep(found)
    return found


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
            (folder / f"round-{mark}-rank-{rank}.txt").write_text(f"{wire.iso(time.time())} no step\n{text}")
    except OSError as error:
        say(f"cannot keep stacks in {folder}: {error}")
        return
    say(f"stacks are kept in {folder}")
