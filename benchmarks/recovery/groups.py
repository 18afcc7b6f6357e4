"""Groups of nodes on 127.0.0.1, with stock torchrun or the project's coordinator and launchers."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddpjob_runtime import protocol

from benchmarks.processes import free_port, kill_all
from benchmarks.recovery.digits import write_digits
from benchmarks.recovery.step_log import Incarnation, StepLog

RUNTIME = Path(protocol.__file__).parent
SCRIPT = Path(__file__).with_name("steps.py")
START_SECONDS = 120.0
SETTLE_STEPS = 30


class NotRecovered(Exception):
    """The group took no more steps; the message says how that was noticed."""


@dataclass(frozen=True)
class Shape:
    """The size of a group, which is elastic if `minimum` is less than `nodes`."""

    nodes: int = 2
    minimum: int = 2
    spares: int = 0
    procs: int = 1


class Group:
    """A group whose nodes are process trees. `folder` is for logs, step logs and the checkpoint."""

    script = SCRIPT

    def __init__(self, folder: Path, shape: Shape, options: tuple[str, ...] = ()) -> None:
        self.folder, self.shape, self.options = folder, shape, options
        self.log = StepLog(folder)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._attempts: dict[int, int] = {}

    def start(self) -> None:
        """Start all nodes and spares."""
        for _ in range(self.shape.nodes + self.shape.spares):
            self.add()

    def add(self) -> None:
        """Start a node in the first free slot."""
        taken = {int(name.split("-")[1]) for name in self.nodes}
        index = min(set(range(len(taken) + 1)) - taken)
        attempt = self._attempts[index] = self._attempts.get(index, -1) + 1
        name = f"node-{index}-{attempt}"
        env = {"DDPJOB_POD": name, "DDPJOB_INDEX": str(index), "DDPJOB_ATTEMPT": str(attempt)}
        self.nodes[name] = self._launch(name, self._command(), env)

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )

    def spares_ready(self) -> int:
        """Return the number of spares that are ready to take over."""
        return 0

    def follows_another(self) -> bool:
        """Whether a new coordinator replaced the generation's first one, and its group trains."""
        return False

    def settle(self) -> Incarnation:
        """Wait until the complete group has taken a few steps and its spares are ready."""

        def settled() -> Incarnation | None:
            incarnation = self.log.refresh().newest
            if (
                incarnation is None
                or incarnation.world != self.shape.nodes * self.shape.procs
                or self.spares_ready() < self.shape.spares
            ):
                return None
            return incarnation if min(len(times) for times in incarnation.steps.values()) >= SETTLE_STEPS else None

        incarnation: Incarnation = self.wait("the group trains", settled, START_SECONDS)
        return incarnation

    def wait(self, what: str, ready: Callable[[], Any], seconds: float) -> Any:
        """Wait for a true value of `ready()`, and return it.

        Raises NotRecovered after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := ready():
                return value
            self.check()
            time.sleep(0.02)
        raise NotRecovered(f"not within {seconds:.0f} s: {what} (logs in {self.folder})")

    def pick(self, incarnation: Incarnation, number: int) -> tuple[str, str]:
        """Return (node, description): rank 0's node for odd numbers, otherwise the last rank's."""
        return (incarnation.nodes[0], "rank 0") if number % 2 else (incarnation.nodes[max(incarnation.nodes)], "other")

    def check(self) -> None:
        """Raise NotRecovered if no node is left."""
        if all(process.poll() is not None for process in self.nodes.values()):
            raise NotRecovered("lost: no node is left")

    def kill(self, *names: str) -> float:
        """Send SIGKILL to all processes of the nodes.

        Return the time just before, in Unix seconds.
        """
        return kill_all(*(self.nodes.pop(name) for name in names))

    def replace(self) -> None:
        """Start a new node in the dead one's slot, as an orchestrator does."""
        self.add()

    def created(self, node: str) -> float | None:
        """Return the Unix time at which a node was created.

        The result is None if a replacement starts at the moment of the kill, without being created
        first.
        """
        return None

    def kill_coordinator(self) -> float:
        """Kill the coordinator, restart what the operator would restart, and return the Unix time
        just before.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop all processes of the group."""
        kill_all(*self.nodes.values())
        self.nodes.clear()


class Stock(Group):
    """A group under torchrun with its defaults (c10d, store in node 0), except --max-restarts.

    By default, torchrun never restarts.
    """

    def __init__(self, folder: Path, shape: Shape, options: tuple[str, ...] = ()) -> None:
        super().__init__(folder, shape, options)
        self._port, self._id = free_port(), secrets.token_hex(4)

    def _command(self) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.shape.minimum}:{self.shape.nodes}",
            f"--nproc-per-node={self.shape.procs}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-id={self._id}", "--max-restarts=100", str(self.script), str(self.folder), *self.options,
        ]  # fmt: skip

    def start(self) -> None:
        """Start node 0 first, because it hosts the store."""
        self.add()
        self.wait("node 0 hosts the store", lambda: listens(self._port), START_SECONDS)
        for _ in range(1, self.shape.nodes):
            self.add()

    def pick(self, incarnation: Incarnation, number: int) -> tuple[str, str]:
        """Return the store's node for odd numbers, otherwise the other node.

        The outcome depends on the choice of the node.
        """
        host = next(name for name in self.nodes if name.startswith("node-0-"))
        return (host, "store's host") if number % 2 else (next(name for name in self.nodes if name != host), "other")


class Coordinated(Group):
    """The project's coordinator and launchers, started as the operator starts them."""

    mode = "Standard"

    def __init__(self, folder: Path, shape: Shape, options: tuple[str, ...] = ()) -> None:
        super().__init__(folder, shape, options)
        self.port, self.store_port, self._token = free_port(), free_port(), secrets.token_hex(8)
        self._id, self._attempt, self.generation = secrets.token_hex(4), 0, 0
        self.coordinator: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the coordinator and all nodes."""
        self.start_coordinator()
        super().start()

    def start_coordinator(self) -> None:
        """Start the next attempt of the coordinator."""
        command = [
            sys.executable, str(RUNTIME), "coordinator", "--host", "127.0.0.1", "--port", str(self.port),
            "--nodes", str(self.shape.nodes), "--min-nodes", str(self.shape.minimum), "--mode", self.mode,
            "--attempt", str(self._attempt),
        ]  # fmt: skip
        if self.mode == "Standard":
            command += ["--store-port", str(self.store_port)]
        self.coordinator = self._launch(f"coordinator-{self.generation}-{self._attempt}", command, {})
        self._attempt += 1

    def kill_coordinator(self) -> float:
        """Kill the coordinator.

        Fast starts a new attempt after a second, Standard a new generation immediately.
        """
        assert self.coordinator is not None
        moment = kill_all(self.coordinator)
        if self.mode == "Fast":
            time.sleep(1)
            self.start_coordinator()
        else:
            self._begin_generation()
        return moment

    def _begin_generation(self) -> None:
        """Replace the coordinator and every node, as the operator does.

        A node is replaced only after its predecessor has ended.
        """
        self.generation, self._attempt = self.generation + 1, 0
        self.port, self.store_port = free_port(), free_port()
        self.start_coordinator()
        for name, process in list(self.nodes.items()):
            process.wait(30)
            del self.nodes[name]
            self.add()

    def _identity(self, pod: str) -> dict[str, str]:
        return {
            "DDPJOB_TOKEN": self._token, "DDPJOB_GENERATION": str(self.generation), "DDPJOB_NAME": "bench",
            "DDPJOB_NAMESPACE": "default", "DDPJOB_COORDINATOR": f"127.0.0.1:{self.port}",
            "DDPJOB_POD": pod, "DDPJOB_UID": self._id, 
            "DDPJOB_TERMINATION_LOG": str(self.folder / f"{pod}.end"), "DDPJOB_RECOVERY": self.mode,
        }  # fmt: skip

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return super()._launch(name, command, {**self._identity(name), **env})

    def _command(self) -> list[str]:
        return [
            sys.executable, str(RUNTIME), "launcher", f"--nnodes={self.shape.nodes}:{self.shape.nodes}",
            f"--nproc-per-node={self.shape.procs}", *self._rendezvous(), f"--rdzv-id={self._id}-{self.generation}",
            "--max-restarts=1000000", "--local-addr=127.0.0.1", str(self.script), str(self.folder), *self.options,
        ]  # fmt: skip

    def _rendezvous(self) -> list[str]:
        conf = (
            "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=600,"
            "read_timeout=60"
        )
        endpoint = f"--rdzv-endpoint=127.0.0.1:{self.store_port}"
        return ["--rdzv-backend=c10d", endpoint, f"--rdzv-conf={conf}", "--monitor-interval=0.1"]

    def spares_ready(self) -> int:
        return sum(member["state"] == "Ready" for member in self._report().get("members", ()))

    def follows_another(self) -> bool:
        report = self._report()
        return report.get("attempt", 0) > 0 and report["state"] == "Running"

    def _report(self) -> dict[str, Any]:
        """Return the coordinator's report; empty if it has not responded yet."""
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.port}/status", headers={"Authorization": f"Bearer {self._token}"}
            )
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, ConnectionError):
            return {}

    def close(self) -> None:
        super().close()
        if self.coordinator is not None:
            kill_all(self.coordinator)


class Standard(Coordinated):
    """A group with recovery.mode Standard."""


class Fast(Coordinated):
    """A group with recovery.mode Fast."""

    mode = "Fast"

    def _rendezvous(self) -> list[str]:
        return ["--rdzv-backend=ddpjob", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--monitor-interval=0.02"]


def listens(port: int) -> bool:
    """Whether a process listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


AnyGroup = TypeVar("AnyGroup", bound=Group)


@contextmanager
def training(make: Callable[[Path], AnyGroup]) -> Iterator[AnyGroup]:
    """Provide the group that `make` makes in a temporary folder, once it trains."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        write_digits(Path(folder))
        group = make(Path(folder))
        try:
            group.start()
            group.settle()
            yield group
        finally:
            group.close()
