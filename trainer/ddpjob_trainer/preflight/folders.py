"""The checkpoint folder and the data folder of each node."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.data.shard_index import FILE as INDEX
from ddpjob_trainer.preflight.check import Check, Context, Result, Seen, Status, gigabytes, odd

_LOOK_AGAIN_SECONDS = 3.0
"""Longer than what NFS keeps a folder's list for after a change that it has seen itself (acdirmin is 30 s, but a look-up of a name that was
never asked for goes to the server)."""


@dataclass(frozen=True)
class Checkpoints:
    """`problem`: why it cannot be written; bytes that are free, and of the largest checkpoint there is."""

    path: str
    problem: str = ""
    free: int = 0
    largest: int = 0
    files_left: int = -1


def look_checkpoints(context: Context) -> Checkpoints:
    """Write, sync and read back a small file in the folder that training would write to. Rank 0's stays until the end."""
    path = context.config.checkpoint_dir
    mark = token_path(context)
    try:
        path.mkdir(parents=True, exist_ok=True)
        own = mark if context.group.rank == 0 else mark.with_name(f"{mark.name}-{context.group.rank}")
        with own.open("wb") as file:
            file.write(context.token.encode())
            os.fsync(file.fileno())
        if own.read_bytes() != context.token.encode():
            return Checkpoints(str(path), "what is written there reads otherwise")
        if own != mark:
            own.unlink()
        counts = os.statvfs(path)
        largest = max((_size(entry) for entry in path.iterdir() if entry.name.startswith("step-")), default=0)
    except OSError as error:
        return Checkpoints(str(path), error.strerror or str(error))
    return Checkpoints(str(path), "", shutil.disk_usage(path).free, largest, counts.f_favail if counts.f_files else -1)


def _size(path: Path) -> int:
    return sum(_size(entry) for entry in path.iterdir()) if path.is_dir() else path.stat().st_size


def judge_checkpoints(seen: Seen[Checkpoints]) -> Result:
    """FAIL where it cannot be written, WARN where it is nearly full."""
    name = "checkpoint folder"
    wrong = [rank for rank, value in seen.values.items() if value.problem]
    if wrong:
        value = seen.values[wrong[0]]
        remedy = f"mount it writable for uid {os.getuid()}, or set checkpoint.dir to another folder (a DDPJob: storage.checkpoints)"
        return Result(name, Status.FAIL, f"{value.path} cannot be written: {value.problem}", seen.nodes.names(wrong), remedy)
    least = min(seen.values.values(), key=lambda value: value.free)
    needed = {rank: max(int(seen.config.preflight.free_gb * 2**30), 2 * value.largest) for rank, value in seen.values.items()}
    full = [rank for rank, value in seen.values.items() if value.free < needed[rank] or 0 <= value.files_left < 16]
    if full:
        remedy = (
            f"make room, lower checkpoint.keep, or take a larger volume; {gigabytes(max(needed.values()))} are wanted (preflight.free_gb)"
        )
        return Result(name, Status.WARN, f"{gigabytes(least.free)} free in {least.path}", seen.nodes.names(full), remedy)
    return Result(name, Status.OK, f"{least.path}, {gigabytes(least.free)} free")


def token_path(context: Context) -> Path:
    """The file by which nodes see whether they share the folder."""
    return context.config.checkpoint_dir / f".preflight-{context.token}"


def sees_token(context: Context) -> bool:
    """Whether rank 0's file is here too."""
    deadline = time.monotonic() + _LOOK_AGAIN_SECONDS
    shared = context.config.checkpoint.shared
    while not token_path(context).exists():
        if not shared or time.monotonic() > deadline:  # Where none is expected, one look is enough.
            return False
        time.sleep(0.1)
    return True


def judge_shared(sees: dict[int, bool], seen: Seen[Checkpoints]) -> Result:
    """FAIL when checkpoint.shared says otherwise than the folders are. `sees`: by node's leader, without rank 0's node."""
    name, shared = "shared folder", seen.config.checkpoint.shared
    first = seen.values.get(0)
    if len(seen.nodes.leaders) == 1 or not sees:
        return Result(name, Status.OK, "one node")
    if first is None or first.problem:
        return Result(name, Status.SKIPPED, "rank 0 could not write there")
    wrong = [rank for rank, found in sees.items() if found != shared]
    if not wrong:
        return Result(name, Status.OK, f"checkpoint.shared={str(shared).lower()}, and so it is")
    if shared:
        remedy = "mount the same volume on all nodes, or set checkpoint.shared=false (each node then writes its own)"
        return Result(name, Status.FAIL, f"{first.path} is not rank 0's there", seen.nodes.names(wrong), remedy)
    remedy = "set checkpoint.shared=true: several nodes would write the same files"
    return Result(name, Status.FAIL, f"{first.path} is rank 0's there", seen.nodes.names(wrong), remedy)


@dataclass(frozen=True)
class Data:
    """`needed`: the data set has a folder. `classes`: entries of the first two levels; `files`: all; -1 when counting took too long."""

    path: str
    needed: bool = True
    problem: str = ""
    classes: int = 0
    files: int = -1


def look_data(context: Context) -> Data:
    """List the folder, read a byte of one file, and count what is in it for half a step's time at most."""
    data = context.config.data
    if data.name.value in ("digits", "synthetic") or (data.dir is None and data.url):
        return Data(data.url or data.name.value, needed=False)
    if data.dir is None:
        return Data("", problem=f"data.name={data.name.value} needs data.dir")
    path = str(data.dir)
    if data.download and not data.dir.exists():
        return Data(path, needed=False)
    try:
        return _count(data.dir, context.config.preflight.step_seconds / 2)
    except OSError as error:
        return Data(path, problem=f"{error.strerror}: {error.filename}")


def _count(root: Path, seconds: float) -> Data:
    """Level by level, so that the first two are known soon. What a file system, a desktop or one node's first start leaves is no data."""
    deadline = time.monotonic() + seconds
    upper = files = 0
    read = False
    waiting = deque([(str(root), 0)])
    while waiting:
        folder, depth = waiting.popleft()
        for entry in os.scandir(folder):
            if entry.name.startswith(".") or entry.name in (INDEX, "lost+found"):
                continue
            upper += depth < 2
            if entry.is_dir():
                waiting.append((entry.path, depth + 1))
                continue
            files += 1
            if not read:
                with Path(entry.path).open("rb") as file:
                    file.read(1)
                read = True
        if waiting and time.monotonic() > deadline:
            return Data(str(root), classes=upper if all(depth > 1 for _, depth in waiting) else -1)
    return Data(str(root), problem="" if files else "it is empty", classes=upper, files=files)


def judge_data(seen: Seen[Data]) -> Result:
    """FAIL where it is missing, cannot be read, or holds another number of files than elsewhere."""
    name = "data folder"
    first = next((value for value in seen.values.values() if value.needed), next(iter(seen.values.values())))
    if not first.needed:
        return Result(name, Status.OK, f"not needed ({first.path})")
    wrong = [rank for rank, value in seen.values.items() if value.problem]
    if wrong:
        value = seen.values[wrong[0]]
        remedy = "mount the data there, or correct data.dir (a DDPJob: storage.data)"
        return Result(name, Status.FAIL, f"{value.path or 'no folder'}: {value.problem}", seen.nodes.names(wrong), remedy)
    there = {rank: value for rank, value in seen.values.items() if value.needed}  # data.download fetches it to the others.
    counted = all(value.files >= 0 for value in there.values())
    counts = {rank: value.files if counted else value.classes for rank, value in there.items()}
    known = {rank: str(count) for rank, count in counts.items() if count >= 0}
    if not known:
        return Result(name, Status.OK, f"{first.path}, too many entries to count in preflight.step_seconds")
    norm, ranks = odd(known)
    what = "files" if counted else "entries in its first two levels (too many files to count)"
    if ranks:
        remedy = "copy the data anew there: ranks must see the same samples"
        return Result(name, Status.FAIL, f"{norm} {what}, but {known[ranks[0]]}", seen.nodes.names(ranks), remedy)
    return Result(name, Status.OK, f"{first.path}, {norm} {what}")


CHECKPOINTS = Check("checkpoint folder", Checkpoints, look_checkpoints, judge_checkpoints, per_node=True)
CHECKS = (CHECKPOINTS, Check("data folder", Data, look_data, judge_data, per_node=True))
