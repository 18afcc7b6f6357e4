"""The GPU seconds in a job's status, compared with the time for which the simulated Kubernetes
reserved GPUs.
"""

from __future__ import annotations

import pytest
from ddpjob.api.job_spec import Json

from .simulated import Simulation

GPUS = 4
FAST: Json = {"gpusPerNode": GPUS, "recovery": {"mode": "Fast"}}


class Reserved:
    """Watches the store, and counts the GPU seconds of pods that have a node and have not ended. It
    also counts how often these pods change.
    """

    def __init__(self, s: Simulation) -> None:
        self.s, self.seconds, self.changes, self.since = s, 0.0, 0, s.now
        self.pods: dict[str, int] = {}
        s.store.watchers.append(self._observe)

    def _observe(self, kind: str, what: str, body: Json) -> None:
        if kind != "Pod":
            return
        self.pass_time()
        ended = what == "DELETED" or body.get("status", {}).get("phase") in ("Succeeded", "Failed")
        limits = body["spec"]["containers"][0].get("resources", {}).get("limits", {})
        gpus = int(limits.get("nvidia.com/gpu", 0)) if body["spec"].get("nodeName") and not ended else 0
        uid = body["metadata"]["uid"]
        self.changes += self.pods.get(uid, 0) != gpus
        self.pods[uid] = gpus

    def pass_time(self) -> None:
        self.seconds += (self.s.now - self.since) * sum(self.pods.values())
        self.since = self.s.now

    def agree(self, away: float = 0.0) -> None:
        """Check that the status agrees with this count. Each change may cost two seconds, because
        the operator reconciles each second and writes whole seconds. `away` is the time without an
        operator.
        """
        self.pass_time()
        counted = self.s.status.get("gpuSeconds", 0)
        allowed = (2.0 * self.changes + away) * GPUS
        assert abs(counted - self.seconds) <= allowed, f"{counted} counted, {self.seconds} reserved"
        assert counted >= 0.9 * self.seconds - away * GPUS and self.seconds > 10 * GPUS, (
            "the allowed difference is small compared with the total"
        )


async def settled(s: Simulation) -> None:
    """Wait until no pod holds a GPU and the status reports this."""
    await s.until(lambda: "gpuUse" not in s.status)


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_pods_count_while_they_hold_gpus_including_restarts_and_spares(mode: str) -> None:
    s = Simulation({**FAST, "spares": 1, "recovery": {"mode": mode}}, steps=100)
    reserved = Reserved(s)
    await s.until_phase("Running")
    await s.until(lambda: s.status.get("gpuUse", {}).get("held") == 3 * GPUS, limit=30)
    s.force_delete("job-0-0")
    await s.passes(10)
    s.end("job-1-0", 1)
    await s.until_phase("Complete")
    await settled(s)
    reserved.agree()
    final = s.status["gpuSeconds"]
    await s.passes(30)
    assert s.status["gpuSeconds"] == final, "a finished job costs nothing"


async def test_the_count_pauses_during_a_suspension_and_continues_afterwards() -> None:
    s = Simulation(FAST, steps=10**6)
    reserved = Reserved(s)
    await s.until_phase("Running")
    await s.passes(30)
    await s.suspended()
    await settled(s)
    before = s.status["gpuSeconds"]
    await s.passes(60)
    assert s.status["gpuSeconds"] == before > 0 and "gpuUse" not in s.status
    await s.resumed()
    await s.passes(30)
    await s.suspended()
    await settled(s)
    reserved.agree()
    assert s.status["gpuSeconds"] > 1.5 * before


async def test_a_resized_job_is_counted_by_its_current_size() -> None:
    s = Simulation({**FAST, "elastic": {"minNodes": 1, "maxNodes": 4}}, steps=10**6)
    reserved = Reserved(s)
    await s.until_phase("Running")
    for nodes in (4, 1, 2):
        s.change_spec({"nodes": nodes})
        await s.until(lambda n=nodes: s.status["gpuUse"]["held"] == n * GPUS)  # type: ignore[misc]
        await s.passes(20)
    await s.suspended()
    await settled(s)
    reserved.agree()


async def test_time_without_an_operator_is_counted_once() -> None:
    s = Simulation(FAST, steps=10**6)
    reserved = Reserved(s)
    await s.until_phase("Running")
    for away in (100, 200):
        s.cluster.restart()
        s.advance(away)
        await s.passes(5)
    reserved.agree()
    s.cluster.restart()
    s.advance(50)
    s.force_delete("job-1-0")
    s.advance(40)
    await s.passes(20)
    assert s.status["gpuUse"]["held"] == 2 * GPUS
    await s.suspended()
    await settled(s)
    reserved.agree(away=40)
    assert s.status["gpuSeconds"] > reserved.seconds, "the lost pod is counted until the operator is back"


async def test_a_job_on_the_cpu_has_no_gpu_seconds() -> None:
    s = Simulation({"recovery": {"mode": "Fast"}, "spares": 1})
    await s.until_phase("Complete")
    assert not {"gpuSeconds", "gpuUse"} & s.status.keys()


async def test_the_status_is_written_only_every_ten_minutes_if_only_gpu_seconds_change() -> None:
    s = Simulation(FAST, steps=10**6)
    await s.until_phase("Running")
    await s.passes(20)
    writes: list[float] = []
    s.store.watchers.append(lambda kind, what, body: writes.append(s.now) if kind == "DDPJob" else None)
    s.training.progress = False
    begun = s.now
    while s.now < begun + 1500:
        await s.one_pass()
        s.advance(15)
    assert 2 <= len(writes) <= 3, writes
    assert s.status["gpuSeconds"] >= 2 * GPUS * (s.now - begun - 615)
