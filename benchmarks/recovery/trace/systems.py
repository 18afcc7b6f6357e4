"""The compared systems: stock torchrun, torchft and `ddpjob run`. Script and state size are the
same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER
from ddpjob.local import processes
from ddpjob.local.paths import RUNS_VARIABLE, JobFolder
from ddpjob.local.pod import CONTAINER_VARIABLE, UID_VARIABLE
from ddpjob.local.record import RequestRefused, ask, read_record

from benchmarks import CHECKOUT
from benchmarks.processes import descendants, free_port, kill_all
from benchmarks.recovery.groups import START_SECONDS, Group, Shape, Stock, listens
from benchmarks.recovery.trace import torchft_packages

TRAINING = Path(__file__).parents[1] / "training.py"
NODES = 2
LOST_SECONDS = 30.0
"""Seconds after which a silent node is replaced: the default of `recovery.nodeLostAfterSeconds`.
Kubernetes alone takes 40 s to mark a node as not ready, and minutes to evict its pods.
"""
AS_SHIPPED, TUNED = (10_000, 100, 5000), (100, 20, 500)
"""torchft's lighthouse: join timeout, tick of the quorum, heartbeat timeout, in milliseconds."""
_LIGHTHOUSE = """
import sys, time, torchft._torchft as parts
port, join, tick, heartbeat = map(int, sys.argv[1:])
server = parts.LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1, join_timeout_ms=join,
                                quorum_tick_ms=tick, heartbeat_timeout_ms=heartbeat)
while True:
    time.sleep(3600)
"""
_PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))}
Json = dict[str, Any]


class System(Protocol):
    """A training run under a system, and the failures of its nodes."""

    restarts: int
    """Number of times that everything had to be restarted."""

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node. Its replacement starts immediately."""

    def crash_worker(self, node: str) -> None:
        """Kill a worker (SIGKILL), but no other process of its node."""

    def silence_node(self, node: str) -> None:
        """Suspend all processes of a node forever. The node is replaced after LOST_SECONDS."""

    def join_node(self) -> None:
        """Add a node."""

    def tend(self) -> None:
        """Act as the orchestrator, without waiting."""

    def restart_all(self) -> None:
        """Kill the remaining processes, and restart everything."""


class Orchestrated(Group):
    """A group whose nodes are replaced by this benchmark, as an orchestrator would do."""

    script = TRAINING

    def __init__(self, folder: Path, options: tuple[str, ...], joins: int = 0) -> None:
        super().__init__(folder, Shape(NODES, minimum=1), options)
        self.restarts, self._joins = 0, joins
        self._silent: list[tuple[float, str]] = []

    def kill_node(self, node: str) -> None:
        if node in self.nodes:
            self.kill(node)
            self.replace()

    def crash_worker(self, node: str) -> None:
        kill_worker(self.folder, node)

    def silence_node(self, node: str) -> None:
        if node in self.nodes:
            leader = self.nodes[node].pid
            _stop([leader, *descendants(leader)])
            self._silent.append((time.monotonic() + LOST_SECONDS, node))

    def join_node(self) -> None:
        self.add()

    def tend(self) -> None:
        for due, node in list(self._silent):
            if time.monotonic() >= due:
                self._silent.remove((due, node))
                self.kill_node(node)
        if all(process.poll() is not None for process in self.nodes.values()):
            self.restart_all()

    def restart_all(self) -> None:
        self.restarts += 1
        self._silent.clear()
        self.close()
        self.start()

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return super()._launch(name, command, {**_PATH, **env})


class StockTorchrun(Orchestrated, Stock):
    """torchrun with its defaults and c10d, elastic from one node to all."""

    def _command(self) -> list[str]:
        most = f"--nnodes=1:{NODES + self._joins}"
        return [most if word.startswith("--nnodes=") else word for word in super()._command()]


class TorchFT(Orchestrated):
    """torchft's replicas, one process each, and its lighthouse, which is never killed."""

    settings = AS_SHIPPED

    def __init__(self, folder: Path, options: tuple[str, ...], joins: int = 0) -> None:
        super().__init__(folder, options, joins)
        self._python, self._port = torchft_packages.find_python(), free_port()
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def start_lighthouse(self) -> None:
        """Start torchft's coordinator."""
        command = [str(self._python), "-c", _LIGHTHOUSE, str(self._port), *map(str, self.settings)]
        self._lighthouse = self._launch("lighthouse", command, {})

    def start(self) -> None:
        self.start_lighthouse()
        self.wait("the lighthouse to listen", lambda: listens(self._port), START_SECONDS)
        super().start()

    def crash_worker(self, node: str) -> None:
        """Kill the only process of a node. Its supervisor restarts it."""
        self.kill_node(node)

    def check(self) -> None:
        if self.nodes:
            super().check()

    def close(self) -> None:
        super().close()
        if self._lighthouse is not None:
            kill_all(self._lighthouse)

    def _command(self) -> list[str]:
        return [str(self._python), str(self.script), str(self.folder), *self.options, "--torchft"]

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        address = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}"}
        return super()._launch(name, command, {**address, **env})


class TunedTorchFT(TorchFT):
    """torchft with a lighthouse that notices a loss ten times as fast, and may mistake a pause for
    a loss.
    """

    settings = TUNED


class Job(Group):
    """A DDPJob under `ddpjob run`, whose operator replaces pods itself."""

    spares = 0
    snapshots = "auto"

    def __init__(self, folder: Path, options: tuple[str, ...], joins: int = 0) -> None:
        super().__init__(folder, Shape(NODES, minimum=1, spares=self.spares), options)
        self.restarts, self._wanted, self._joins = 0, NODES, joins
        self._job = JobFolder(folder / "runs" / "trace")

    def manifest(self) -> Json:
        """Return the DDPJob, with defaults for all fields that do not matter for the comparison."""
        spec: Json = {
            "image": "any:1", "nodes": NODES, "gpusPerNode": 0, "spares": self.spares, "script": str(TRAINING),
            "args": [str(self.folder), *self.options], "elastic": {"minNodes": 1},
            "recovery": {"mode": "Fast", "snapshots": self.snapshots, "maxRestarts": 1000},
        }  # fmt: skip
        head = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": self._job.name}}
        return {**head, "spec": spec}

    def start(self) -> None:
        file = self.folder / "job.json"
        file.write_text(json.dumps(self.manifest()))
        command = [sys.executable, "-m", "ddpjob.cli", "run", str(file)]
        self.nodes["run"] = self._launch("run", command, {**_PATH, RUNS_VARIABLE: str(self.folder / "runs")})

    def spares_ready(self) -> int:
        return int(self._record().get("status", {}).get("nodes", {}).get("spare") or 0)

    def kill_node(self, node: str) -> None:
        with suppress(RequestRefused):
            ask(self._job, "kill", node)

    def crash_worker(self, node: str) -> None:
        kill_worker(self.folder, node)

    def silence_node(self, node: str) -> None:
        uid = self._record()["metadata"]["uid"]
        for container in (TRAINER_CONTAINER, COORDINATOR_CONTAINER):
            _stop(processes.find({UID_VARIABLE: uid, CONTAINER_VARIABLE: f"{node}/{container}"}))

    def join_node(self) -> None:
        self._wanted += 1
        with suppress(RequestRefused):
            ask(self._job, "scale", str(self._wanted))

    def tend(self) -> None:
        if self.nodes["run"].poll() is not None:
            self.restart_all()

    def restart_all(self) -> None:
        self.restarts += 1
        self.close()
        self.start()

    def close(self) -> None:
        """Stop the run with two signals. After the second one, the run does not wait for a
        checkpoint.
        """
        for _ in range(2):
            if (process := self.nodes.get("run")) is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2)
        super().close()

    def _record(self) -> Json:
        return read_record(self._job) or {}


class JobWithSpare(Job):
    """A `Job` with a spare."""

    spares = 1


class JobWithoutSnapshots(JobWithSpare):
    """A `Job` with a spare and with checkpoints, but without states in memory."""

    snapshots = "none"


SYSTEMS: dict[str, Callable[[Path, tuple[str, ...], int], Any]] = {
    "ddpjob": Job,
    "ddpjob-spare": JobWithSpare,
    "ddpjob-no-snapshots": JobWithoutSnapshots,
    "torchft": TorchFT,
    "torchft-tuned": TunedTorchFT,
    "stock": StockTorchrun,
}
"""Systems by their name on the command line."""


def kill_worker(folder: Path, node: str) -> bool:
    """Send SIGKILL to a node's newest worker, found by the name of its log. Return whether there
    was one.
    """
    logs = [path for path in folder.glob(f"steps-{node}-*.jsonl") if re.search(r"-(\d+)$", path.stem)]
    if not logs:
        return False
    newest = max(logs, key=lambda path: path.stat().st_mtime_ns)
    processes.send(int(newest.stem.rpartition("-")[2]), signal.SIGKILL)
    return True


def _stop(pids: Iterable[int]) -> None:
    for pid in pids:
        processes.send(pid, signal.SIGSTOP)
