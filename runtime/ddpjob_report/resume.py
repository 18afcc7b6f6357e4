"""Finds the checkpoint from which a framework resumes, and selects the figures that its callback
reports.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_runtime import protocol

from ddpjob_report import as_number, restore_checkpoint

_NAMED = re.compile(r"(\d+)(?:-v(\d+))?(?:\.\w+)?$")


def listed(folder: str | Path, pattern: str) -> Iterator[Path]:
    """Yield the paths in a folder whose names match the pattern; none if the folder does not exist.

    Path.glob would also yield none if the folder cannot be read. Training must not begin from
    scratch while it is unknown whether there is a checkpoint, so OSError is raised in this case.
    """
    try:
        paths = [*Path(folder).iterdir()]
    except FileNotFoundError:
        return
    yield from (path for path in paths if fnmatch.fnmatchcase(path.name, pattern))


def newest(paths: Iterable[Path], is_whole: Callable[[Path], bool]) -> Path | None:
    """Return the checkpoint to resume from; None if there is none.

    In a job with a bucket, all ranks get the newest checkpoint in the bucket. Without a bucket, or
    if the bucket is empty, return the complete checkpoint in `paths` whose name ends in the highest
    number, before any file extension. If two numbers are equal, the higher version counts, because
    Lightning appends -v1, -v2, ... to a name that already exists. Unless the bucket has a
    checkpoint, return None if each node has its own folder, because ranks would resume from
    different steps.

    `is_whole` returns False for an incomplete checkpoint, and raises OSError if the checkpoint
    cannot be read. In that case, an older one must not be used.
    """
    if JobEnvironment.read().checkpoint_url:
        found = restore_checkpoint()
        if found is not None or not JobEnvironment.read().shares_checkpoints:
            return found
    job = JobEnvironment.read()
    if job.shares_checkpoints is False and job.has_several_nodes:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                "ddpjob_report: no checkpoint is used, because the nodes do not share a checkpoint folder; "
                "set spec.storage.checkpoints to a volume that every node sees\n"
            )
        return None
    numbered = [(int(m[1]), int(m[2] or 0), path) for path in paths if (m := _NAMED.search(path.name))]
    return next((path for *_, path in sorted(numbered, reverse=True) if is_whole(path)), None)


def step_of(checkpoint: Path | None) -> int:
    """Return the number at the end of a checkpoint's name; 0 if there is no checkpoint or no
    number.
    """
    named = None if checkpoint is None else _NAMED.search(checkpoint.name)
    return int(named[1]) if named else 0


class Refusal(RuntimeError):
    """An error that a restart cannot fix.

    The worker exits with the exit code for invalid configurations, so the job fails without a
    restart.
    """

    ddpjob_refusal = True


def check_group(framework: str, processes: int, remedy: str) -> None:
    """Raise Refusal, a RuntimeError, if each of the job's ranks would train alone.

    In that case, the ranks would overwrite each other's models.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if processes == 1 and world != "1" and JobEnvironment.read().coordinator:
        what = f"{framework} has not formed a group, so each of the job's {world} ranks would train a separate model"
        raise Refusal(f"ddpjob_report: {what}; {remedy}")


def figures(values: dict[str, Any]) -> dict[str, Any]:
    """Return the logged values that are numbers, but at most half as many as a report can hold.

    Loggers accept any value under any name, so other values are dropped and long names are
    shortened.
    """
    read = {str(name)[: protocol.MAX_FIGURES]: as_number(value) for name, value in values.items()}
    known = {name: number for name, number in read.items() if number is not None}
    return dict(list(known.items())[: protocol.MAX_FIGURES // 2])
