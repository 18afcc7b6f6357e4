"""Where tortured jobs run, and what can be killed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ddpjob.local.paths import JobFolder
from ddpjob.local.record import ask, read_record

Json = dict[str, Any]


@dataclass
class Seen:
    """A job as it is now."""

    phase: str = ""
    step: int = 0
    counted: int = 0
    pods: list[str] = field(default_factory=list)
    coordinators: list[str] = field(default_factory=list)
    message: str = ""


class Arena(Protocol):
    """`extras`: what else can be killed, with its weight beside that of pods (see torture.WEIGHTS), and how; False: not now."""

    extras: dict[str, tuple[int, Callable[[], bool]]]

    def start(self, name: str, spec: Json) -> None:
        """Begin a job."""

    def look(self, name: str) -> Seen:
        """How it is."""

    def kill(self, name: str, pods: list[str]) -> None:
        """By force, as good as at once. A pod that has ended meanwhile is none."""

    def checkpoints(self, name: str) -> Path:
        """Where the job saves."""

    def close(self, name: str) -> None:
        """Nothing of the job is left."""


class Processes:
    """Jobs under `ddpjob run`: pods are process groups, and each job has its own operator in its runner."""

    def __init__(self, folder: Path) -> None:
        self.extras: dict[str, tuple[int, Callable[[], bool]]] = {}
        self._folder, self._runs = folder, folder / "runs"
        self._runners: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, spec: Json) -> None:
        manifest = self._folder / f"{name}.json"
        body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}, "spec": {"image": "any:1", **spec}}
        manifest.write_text(json.dumps(body))
        with (self._folder / f"{name}.out").open("wb") as out:
            command = [sys.executable, "-m", "ddpjob.cli", "run", str(manifest)]
            environment = {**os.environ, "DDPJOB_RUNS": str(self._runs), "OMP_NUM_THREADS": "1"}
            self._runners[name] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def look(self, name: str) -> Seen:
        record = read_record(JobFolder(self._runs / name))
        if record is None:
            if self._runners[name].poll() is not None:
                return Seen(phase="Failed", message=(self._folder / f"{name}.out").read_text()[-2000:])
            return Seen()
        seen = seen_in(record.get("status") or {})
        for pod in record["local"]["pods"]:
            if pod["state"] in ("Running", "Pending"):
                (seen.coordinators if pod["role"] == "coordinator" else seen.pods).append(pod["name"])
        if self._runners[name].poll() is not None and seen.phase not in ("Complete", "Failed"):
            seen.phase, seen.message = "Failed", (self._folder / f"{name}.out").read_text()[-2000:]
        return seen

    def kill(self, name: str, pods: list[str]) -> None:
        for pod in pods:
            ask(JobFolder(self._runs / name), "kill", pod)

    def checkpoints(self, name: str) -> Path:
        return self._runs / name / "checkpoints"

    def close(self, name: str) -> None:
        runner = self._runners.pop(name)
        if runner.poll() is None:
            runner.terminate()
            try:
                runner.wait(60)
            except subprocess.TimeoutExpired:
                runner.kill()  # Its guard ends the rest.
                runner.wait()


def seen_in(status: Json) -> Seen:
    """What a job's status tells."""
    failed = next((c for c in status.get("conditions", ()) if c["type"] == "Failed" and c["status"] == "True"), None)
    return Seen(
        phase=status.get("phase", ""),
        step=int(status.get("progress", {}).get("step") or 0),
        counted=int(status.get("restarts", {}).get("counted") or 0),
        message=f"{failed['reason']}: {failed['message']}" if failed else "",
    )
