"""The simulated world: one job with its operator, coordinators and pods, on one clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Self

from ddpjob.engine.reconcile import reconcile

from .clock import Clock
from .coordinator import CoordinatorProcess
from .invariants import Invariants
from .kubelet import Host, Machines, Pod
from .network import Network, Pace
from .operator_port import KEY, Killed, MemoryCluster
from .store import Json, Store
from .training import Training

CALM = Pace()


class Simulation:
    """A world as the module describes it. The job ends after `steps`; `pace` and `chance` determine
    the durations.
    """

    cluster_class: type[MemoryCluster] = MemoryCluster
    clock_class: type[Clock] = Clock

    def __init__(
        self, spec: Json, steps: int = 20, pace: Pace = CALM, chance: random.Random | None = None, trace: bool = False
    ) -> None:
        self.random = chance or random.Random(0)
        self.clock = self.clock_class()
        self.store = Store(self.clock)
        self.network = Network(self.clock, self.random, pace)
        self.training = Training(self.network, steps)
        self.machines = Machines(self.store, self.network, self.training, self.random)
        self.cluster = self.cluster_class(self.clock, self.store, self.machines, self.network, self.random)
        self.story: list[str] = []
        if trace:
            self.network.log = self.tell_story
        self.invariants = Invariants(self)
        self.wake: float | None = 0.0
        self.job_body = self.store.create(
            "DDPJob",
            {
                "metadata": {"name": KEY.name, "uid": "job-uid"},
                "spec": {"image": "image", "script": "train.py", "nodes": 2, "gpusPerNode": 0, **spec},
                "status": {"schema": 1},
            },
        )

    # ---- the story

    def tell_story(self, text: str) -> None:
        """Add one line to the story, with the time."""
        self.story.append(f"{self.now:9.3f}  {text}")

    # ---- time

    @property
    def now(self) -> float:
        return self.clock.now

    def advance(self, seconds: float) -> None:
        """Let time pass for everything except the operator."""
        until = self.clock.now + seconds
        while self.clock.step(until):
            pass

    async def one_pass(self, *, fresh: bool = True) -> bool:
        """Reconcile once. Return False if the operator died during it. Unless `fresh` is true,
        earlier lists are used.
        """
        if fresh:
            self.cluster.changed()
        try:
            self.wake = await reconcile(self.cluster, KEY, self.clock.moment)
        except Killed:
            self.cluster.restart()
            return False
        self.invariants.after_reconcile()
        return True

    async def until(self, reached: Callable[[], bool], limit: int = 400) -> None:
        """Reconcile once a second until `reached` returns true."""
        for _ in range(limit):
            await self.one_pass()
            if reached():
                return
            self.advance(1)
        raise AssertionError(f"not reached after {limit} s: {self.status}\n{self.inventory()}")

    async def until_phase(self, phase: str, limit: int = 400) -> None:
        """Reconcile until the status shows the phase."""
        await self.until(lambda: self.phase == phase, limit)

    async def begun(self) -> Self:
        """Let time pass until the job runs, and return this simulation."""
        await self.until_phase("Running")
        return self

    async def passes(self, seconds: int) -> None:
        """Reconcile once a second for `seconds`."""
        for _ in range(seconds):
            await self.one_pass()
            self.advance(1)

    async def suspended(self) -> None:
        """Suspend the job, and wait until all pods have ended."""
        self.change_spec({"runPolicy": {"suspend": True}})
        await self.until(lambda: self.phase == "Suspended" and not self.pods)

    async def resumed(self, phase: str = "Running") -> None:
        """Resume the job."""
        self.change_spec({"runPolicy": {"suspend": False}})
        await self.until_phase(phase)

    def inventory(self) -> str:
        """Describe the pods and the coordinators, for the message of a failing test."""
        pods = [(p.name, p.state, p.main.exit_code if p.containers else None, p.node, p.launcher and p.launcher.workers)
                for p in self.machines.pods.values()]  # fmt: skip
        groups = {c.pod.name: c.status() for c in self.network.coordinators}
        return f"{pods}\n{groups}"

    # ---- state

    @property
    def job(self) -> Json | None:
        return self.store.find("DDPJob", KEY.name)

    @property
    def spec(self) -> Json:
        spec: Json = self.job_body["spec"]
        return spec

    @property
    def status(self) -> Json:
        status: Json = self.job_body.get("status", {})
        return status

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def fast(self) -> bool:
        return bool(self.spec.get("recovery", {}).get("mode") == "Fast")

    @property
    def pods(self) -> dict[str, Pod]:
        """Pods that have an object, by name."""
        return {p.name: p for p in self.machines.pods.values() if not p.removed}

    def nodes(self) -> list[Pod]:
        """Return the pods of slots that have an object."""
        return [p for p in self.machines.pods.values() if p.is_node and not p.removed]

    def running(self) -> list[Pod]:
        """Return the pods of slots whose launcher runs."""
        return [p for p in self.nodes() if p.running]

    def coordinator(self) -> CoordinatorProcess:
        """Return the newest coordinator."""
        return max(self.network.coordinators, key=lambda c: (c.generation, c.attempt))

    def report(self) -> Json:
        """Return the newest coordinator's report."""
        report: Json = json.loads(self.coordinator().status())
        return report

    # ---- faults and changes

    def force_delete(self, name: str) -> None:
        """Delete a pod as `kubectl delete --force` does."""
        self.network.say(f"FAULT: {name} is force-deleted")
        self.store.delete("Pod", name, grace=0)

    def delete(self, name: str) -> None:
        """Delete a pod as `kubectl delete` does."""
        self.network.say(f"FAULT: {name} is deleted")
        self.store.delete("Pod", name)

    def end(self, name: str, exit_code: int, reason: str = "Error") -> None:
        """Terminate the launcher's process."""
        self.network.say(f"FAULT: the launcher of {name} ends with {exit_code} ({reason})")
        pod = self.pods[name]
        if pod.coordinator is not None and pod.launcher is None:
            pod.coordinator.stop(exit_code)
        else:
            assert pod.launcher is not None
            pod.launcher.crash(exit_code, reason, reason if reason == "OOMKilled" else "")

    def worker_fails(self, name: str, message: str = "ValueError: lunch", code: int = 1, **how: bool) -> bool:
        """Let a worker of the pod fail. Return False if no worker of the pod is training."""
        launcher = self.pods[name].launcher
        if launcher is None or launcher.round is None or not self.training.runs(launcher.round):
            return False
        failed = launcher.worker_ends(message, code, **how)
        if failed:
            self.network.say(f"FAULT: a worker of {name} ends with {code}: {message}")
        return failed

    def cut(self, node: str, noticed_after: float | None = 9.0) -> None:
        """Cut the host's network."""
        self.network.say(f"FAULT: host {node} is cut off")
        self.machines.cut(self.machines.hosts[node], noticed_after)

    def heal(self, node: str) -> None:
        """Repair the host's network."""
        self.network.say(f"host {node} is back")
        self.machines.heal(self.machines.hosts[node])

    def change_spec(self, change: Json) -> None:
        """Change the spec, as the user."""
        self.network.say(f"FAULT: the spec changes: {change}")
        self.job_body["spec"] = {**self.spec, **change}
        self.job_body["metadata"]["generation"] += 1
        self.store.changed("DDPJob", self.job_body)

    def host_of(self, name: str) -> Host:
        """Return the host on which a pod runs."""
        return self.pods[name].host


def conditions(simulation: Simulation) -> dict[str, Any]:
    """Return the conditions of the status by their type."""
    return {c["type"]: c for c in simulation.status.get("conditions", ())}
