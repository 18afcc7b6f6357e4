"""Runs tortured jobs, either under `ddpjob run` or on a cluster, and kills parts of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ddpjob.local.paths import JobFolder
from ddpjob.local.record import ask, read_record
from ddpjob_runtime import protocol

from benchmarks.torture.standstill import FARTHEST, Standstill, of_container, set_clock

Json = dict[str, Any]
COPY_KILL = "worker in a copy"
"""The kill of a worker while it copies its state. The job counts this as its own failure."""
COPY_POINTS = ("tensor", "mark", "begin", "made", "neighbour")
"""Points in a copy at which the worker dies (clocks/copy_kills.py)."""


@dataclass
class Observed:
    """The state of a job."""

    phase: str = ""
    step: int = 0
    counted: int = 0
    round: int = 0
    """Number of times that the group has formed again."""
    start: str = ""
    """The newest round whose workers have reported the step at which they continue. All nodes then
    have that state.
    """
    at_risk: int = 1
    """Complete steps that a loss would repeat."""
    pods: list[str] = field(default_factory=list)
    coordinators: list[str] = field(default_factory=list)
    message: str = ""


class Arena(Protocol):
    """Runs jobs and kills their pods.

    `extras` maps additional victims to a weight (like those in torture.WEIGHTS) and to a function
    that kills the victim, or returns False if that is impossible now.
    """

    extras: dict[str, tuple[int, Callable[[], bool]]]

    def start(self, name: str, spec: Json) -> None:
        """Start a job."""

    def observe(self, name: str) -> Observed:
        """Return the state of the job."""

    def kill(self, name: str, pods: list[str]) -> None:
        """Force-kill the pods, nearly at the same time; pods that have ended are ignored."""

    def checkpoints(self, name: str) -> Path:
        """Return the job's checkpoint folder."""

    def missed(self, name: str) -> int:
        """Return how many kills in a copy have not happened, because no worker came to the point."""

    def close(self, name: str) -> None:
        """Stop and remove everything that belongs to the job."""


class Processes:
    """Runs jobs under `ddpjob run`. Pods are process groups, and each runner contains its job's
    operator.

    Args:
        cuts: whether connections can be cut, which requires root and a separate network namespace.
        copies: whether workers are killed in the middle of copies of their state.
    """

    def __init__(self, folder: Path, *, cuts: bool = False, copies: bool = False) -> None:
        self.extras: dict[str, tuple[int, Callable[[], bool]]] = {}
        self.faults: dict[str, tuple[int, Callable[[str, Observed], str]]] = {
            "paused coordinator": (2, lambda name, seen: self._hurt(name, seen.coordinators, "coordinator", "main")),
            "paused launcher": (2, lambda name, seen: self._hurt(name, seen.pods, "trainer", "main")),
            "paused worker": (2, lambda name, seen: self._hurt(name, seen.pods, "trainer", "workers")),
            "paused pod": (2, lambda name, seen: self._hurt(name, seen.pods, "trainer", "all")),
            "clock set": (2, lambda name, seen: self._set_clock([*seen.pods, *seen.coordinators])),
        }
        if cuts:
            self.faults |= {
                "cut coordinator": (2, lambda name, seen: self._hurt(name, seen.coordinators, "coordinator", "cut")),
                "cut pod": (2, lambda name, seen: self._hurt(name, seen.pods, "trainer", "cut")),
            }
        if copies:
            self.faults |= {COPY_KILL: (8, lambda name, seen: self._kill_in_copy(seen.pods))}
        self._standstill = Standstill()
        self._folder, self._runs, self._clocks = folder, folder / "runs", folder / "clocks"
        self._clocks.mkdir()
        self._copies = folder / "copies"
        self._copies.mkdir()
        self._runners: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, spec: Json) -> None:
        manifest = self._folder / f"{name}.json"
        body = {
            "apiVersion": "ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name},
            "spec": {"image": "any:1", **spec},
        }
        manifest.write_text(json.dumps(body))
        with (self._folder / f"{name}.out").open("wb") as out:
            command = [sys.executable, "-m", "ddpjob.cli", "run", str(manifest)]
            environment = {**os.environ, "DDPJOB_RUNS": str(self._runs), "OMP_NUM_THREADS": "1", **self.skewed()}
            self._runners[name] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def observe(self, name: str) -> Observed:
        record = read_record(JobFolder(self._runs / name))
        if record is None:
            if self._runners[name].poll() is not None:
                return Observed(phase="Failed", message=(self._folder / f"{name}.out").read_text()[-2000:])
            return Observed()
        observed = observed_in(record.get("status") or {})
        for pod in record["local"]["pods"]:
            if pod["state"] in ("Running", "Pending"):
                (observed.coordinators if pod["role"] == "coordinator" else observed.pods).append(pod["name"])
        if self._runners[name].poll() is not None and observed.phase not in ("Complete", "Failed"):
            observed.phase, observed.message = "Failed", (self._folder / f"{name}.out").read_text()[-2000:]
        return observed

    def kill(self, name: str, pods: list[str]) -> None:
        for pod in pods:
            ask(JobFolder(self._runs / name), "kill", pod)

    def missed(self, name: str) -> int:
        orders = list(self._copies.glob(f"{name}-*"))  # A worker deletes its order when it dies.
        for order in orders:
            order.unlink(missing_ok=True)
        return len(orders)

    def skewed(self) -> dict[str, str]:
        """Environment variables that give pods' processes adjustable clocks."""
        path = filter(None, (str(Path(__file__).with_name("clocks")), os.environ.get("PYTHONPATH")))
        folders = {"TORTURE_CLOCKS": str(self._clocks), "TORTURE_COPY_KILLS": str(self._copies)}
        return {"PYTHONPATH": os.pathsep.join(path), **folders}

    def _set_clock(self, pods: list[str]) -> str:
        """Set a running pod's clock to at most two minutes behind this machine's clock."""
        if not pods:
            return ""
        pod, behind = random.SystemRandom().choice(pods), random.SystemRandom().uniform(0, FARTHEST)
        return f"{pod} to {behind:.0f} s behind" if set_clock(self._clocks / pod, behind) else ""

    def _kill_in_copy(self, pods: list[str]) -> str:
        """Make a worker in a randomly chosen pod die during one of its next two snapshot copies."""
        if not pods:
            return ""
        pod, point = random.SystemRandom().choice(pods), random.SystemRandom().choice(COPY_POINTS)
        (self._copies / pod).write_text(point)
        return f"{pod} at {point}"

    def _hurt(self, name: str, pods: list[str], container: str, what: str) -> str:
        """Suspend or disconnect one of the pods' processes."""
        record = read_record(JobFolder(self._runs / name))
        if record is None or not pods:
            return ""
        pod = random.SystemRandom().choice(pods)
        main, workers = of_container(record["metadata"]["uid"], pod, container)
        pids = {"main": main, "workers": workers}.get(what, main + workers)
        if not pids:
            return ""
        seconds = self._standstill.cut(pids) if what == "cut" else self._standstill.pause(pids)
        return f"{pod} for {seconds:.1f} s"

    def checkpoints(self, name: str) -> Path:
        return self._runs / name / "checkpoints"

    def close(self, name: str) -> None:
        self._standstill.wait()
        runner = self._runners.pop(name)
        if runner.poll() is None:
            runner.terminate()
            try:
                runner.wait(60)
            except subprocess.TimeoutExpired:
                runner.kill()  # The runner's guard process kills the other processes.
                runner.wait()


def observed_in(status: Json) -> Observed:
    """Return the state described by a job's status."""
    failed = next((c for c in status.get("conditions", ()) if c["type"] == "Failed" and c["status"] == "True"), None)
    return Observed(
        phase=status.get("phase", ""),
        step=int(status.get("progress", {}).get("step") or 0),
        counted=int(status.get("restarts", {}).get("counted") or 0),
        round=int(status.get("round") or 0),
        at_risk=int(status.get("progress", {}).get(protocol.AT_RISK) or 1),
        start=status.get("restarts", {}).get("seen", {}).get("start") or "",
        message=f"{failed['reason']}: {failed['message']}" if failed else "",
    )
