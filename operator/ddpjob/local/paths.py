"""Where the process backend keeps things: RUNS/JOB holds what outlives a run, RUNS/JOB/RUN what belongs to one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ddpjob.core.world import COORDINATOR_CONTAINER

RUNS_VARIABLE = "DDPJOB_RUNS"


def runs_folder() -> Path:
    """$DDPJOB_RUNS, else ./runs; absolute."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs").absolute()


@dataclass(frozen=True)
class RunFolder:
    """One run of a job: logs, termination messages, pod files, the manifest as it was read."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def pods(self) -> Path:
        return self.path / "pods"

    @property
    def pod_files(self) -> Path:
        return self.path / "podfiles"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def manifest(self) -> Path:
        return self.path / "job.json"

    def log(self, pod: str, container: str) -> Path:
        """The log of one container; the pod's only, or its trainer's, has the pod's name."""
        second = container == COORDINATOR_CONTAINER and "-coordinator-" not in pod
        return self.pods / (f"{pod}.{container}.log" if second else f"{pod}.log")

    def termination(self, pod: str, container: str) -> Path:
        """Where the container writes why it ended."""
        return self.log(pod, container).with_suffix(".end")


@dataclass(frozen=True)
class JobFolder:
    """A job's folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        return self.path / "data"

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)


def job_folder(name: str) -> JobFolder:
    return JobFolder(runs_folder() / name)
