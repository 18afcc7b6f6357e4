"""Folders of the process backend: RUNS/JOB outlives a run, and RUNS/JOB/RUN belongs to a single
run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddpjob_pod.stack_signal import FOLDER as STACKS
from ddpjob_runtime.protocol import ROUNDS_FILE

from ddpjob.core.world import COORDINATOR_CONTAINER

RUNS_VARIABLE = "DDPJOB_RUNS"
_DISPOSABLE = "checkpoints-go-with-job"
_CURVES = Path("run", "metrics.jsonl")


def memory_folder(uid: str) -> Path:
    """Return the folder in which a run keeps its latest training states.

    If the machine has an in-memory file system, the folder is there. The watchdog deletes the
    folder when the run ends.
    """
    shared = Path("/dev/shm")
    return (shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())) / f"ddpjob-{uid}"


def runs_folder() -> Path:
    """Return $DDPJOB_RUNS or ./runs as a normalized absolute path."""
    folder = Path(os.environ.get(RUNS_VARIABLE) or "runs").absolute()
    return folder.resolve() if ".." in folder.parts else folder


class _Below:
    """Descriptor that returns the path of `name`, a file or folder in the instance's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: _Folder, owner: type[_Folder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class _Folder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class RunFolder(_Folder):
    """The folder of one run: logs, termination messages, and the manifest as it was read."""

    pods = _Below("pods")
    events = _Below("events.jsonl")
    manifest = _Below("job.json")
    torchrun_python = _Below("torchrun-python")
    """The program that torchrun runs instead of Python to start workers, if the job's `command`
    starts torchrun.
    """
    earlier = _Below("earlier-checkpoints")
    """Checkpoints of earlier runs, which were moved here if this run started from scratch
    (--fresh).
    """
    disposable = _Below(_DISPOSABLE)
    """A file that exists if the earlier checkpoints were disposable (see `JobFolder`)."""

    def log(self, pod: str, container: str) -> Path:
        """Return the path of one container's log.

        The log is named after the pod. If the coordinator is the second container of a node pod,
        the name of its log also contains `coordinator`.
        """
        second = container == COORDINATOR_CONTAINER and "-coordinator-" not in pod
        return self.pods / (f"{pod}.{container}.log" if second else f"{pod}.log")

    def termination(self, pod: str, container: str) -> Path:
        """Return the path of the file for the container's termination message."""
        return self.log(pod, container).with_suffix(".end")


@dataclass(frozen=True)
class JobFolder(_Folder):
    """The folder of a job, which all its runs share.

    It contains the job's record, lock, requests, code, checkpoints and data.
    """

    status = _Below("status.json")
    lock = _Below("lock")
    requests = _Below("requests")
    checkpoints = _Below("checkpoints")
    disposable = _Below(_DISPOSABLE)
    """A file that exists while all of the job's checkpoints are disposable.

    Checkpoints are disposable if every run that used them had a claimTemplate with `whenDeleted:
    Delete`.
    """
    data = _Below("data")
    code = _Below("code")
    """Code that was submitted as text rather than as a file, such as the source of a function."""
    fetched_code = _Below("fetched-code")
    """The code that was fetched for spec.code. Each archive has its own subfolder."""

    def has_checkpoints(self) -> bool:
        """Return whether `checkpoints` has files other than the record of rounds.

        Raises OSError.
        """
        return holds_checkpoints(self.checkpoints)

    def is_resumable(self) -> bool:
        """Return whether `checkpoints` has files that a run can resume from.

        The record of rounds does not count. Neither do the curves from `ddpjob_report.report`, nor
        the stacks that the launcher writes after a hang. Raises OSError.
        """
        more = holds_checkpoints(self.checkpoints / _CURVES.parent, but=(_CURVES.name,))
        return holds_checkpoints(self.checkpoints, but=(STACKS,) if more else (STACKS, _CURVES.parent.name))

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)


def holds_checkpoints(folder: Path, but: Collection[str] = ()) -> bool:
    """Return whether a folder has files other than the record of rounds and those named in `but`.

    Raises OSError.
    """
    return folder.is_dir() and any(
        not path.name.startswith(ROUNDS_FILE) and path.name not in but for path in folder.iterdir()
    )


def job_folder(name: str) -> JobFolder:
    """Return RUNS/NAME, whether or not it exists."""
    return JobFolder(runs_folder() / name)
