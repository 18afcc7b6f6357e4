"""Gang scheduling in simulated time: a job starts with all its pods or none, also after losses,
resizing, faults and crashes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.core.world import Role
from ddpjob.engine.ports import Refused

from . import test_crashes as crashes
from .kubelet import Pod
from .operator_port import MemoryCluster
from .simulated import Simulation, conditions
from .store import Json
from .story import Story

FAST: Json = {"recovery": {"mode": "Fast"}}
SEEDS = int(os.environ.get("DDPJOB_SEEDS", "300")) // 20


class WithGangs(Simulation):
    """A cluster that serves PodGroups. Other jobs wait for room in it."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.cluster.serves_gangs = self.cluster.others_wait = True


def bound(s: Simulation) -> list[Pod]:
    """Return the pods of slots that are bound to a host."""
    return [p for p in s.nodes() if p.node and not p.ended]


def groups(s: Simulation) -> dict[str, int]:
    """Return the minimum pod count of each PodGroup."""
    return {g["metadata"]["name"]: g["spec"]["schedulingPolicy"]["gang"]["minCount"] for g in s.store.all("PodGroup")}


def grouped(s: Simulation) -> set[str]:
    return {name for name, p in s.pods.items() if "schedulingGroup" in p.body["spec"]}


# --- the start


@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
async def test_a_gang_occupies_no_node_until_all_its_pods_fit(placement: str) -> None:
    s = WithGangs({"nodes": 4, "rendezvous": {"placement": placement}}, steps=20)
    s.machines.capacity = 3
    await s.passes(60)
    assert not any(p.node for p in s.pods.values())
    assert groups(s) == {"job-gang-0": 5 if placement == "Dedicated" else 4}
    assert conditions(s)["Scheduled"]["message"].startswith("waits for room for 4 nodes at once")
    s.machines.capacity = 4
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


async def test_without_a_gang_the_same_job_occupies_every_free_node() -> None:
    """This shows that the test above can fail."""
    s = WithGangs({"nodes": 4, "scheduling": {"gang": False}})
    s.machines.capacity = 3
    await s.passes(60)
    assert len(bound(s)) == 3 and not groups(s)


@pytest.mark.parametrize(
    "spec",
    [
        {"scheduling": {"schedulerName": "another"}},
        {"podTemplate": {"spec": {"schedulingGroup": {"podGroupName": "ours"}}}},
    ],
)
async def test_a_job_with_its_own_scheduler_or_group_gets_a_gang_only_if_it_asks(spec: Json) -> None:
    for gang, wanted in ((None, set()), (True, {"job-gang-0"})):
        scheduling = {**spec.get("scheduling", {}), **({} if gang is None else {"gang": gang})}
        s = WithGangs({"nodes": 2, **spec, "scheduling": scheduling})
        await s.passes(3)
        assert len(s.nodes()) == 2 and set(groups(s)) == wanted


async def test_a_job_for_volcano_gets_a_gang_unless_its_pods_already_name_one() -> None:
    for named, wanted in (({}, {"job-gang-0"}), ({"scheduling.k8s.io/group-name": "ours"}, set())):
        template = {"metadata": {"annotations": named}}
        s = WithGangs({"nodes": 2, "podTemplate": template, "scheduling": {"schedulerName": "volcano"}})
        await s.one_pass()
        await s.one_pass()
        assert len(s.nodes()) == 2 and {g["metadata"]["name"] for g in s.store.all("PodGroup")} == wanted
        hint = "read the events of PodGroup job-gang-0 (podgroups.scheduling.volcano.sh)"
        assert (hint in conditions(s)["Scheduled"]["message"]) is bool(wanted), "its scheduler has reported nothing"
    s = Simulation({"nodes": 2, "scheduling": {"schedulerName": "volcano", "gang": True}})
    await s.passes(3)
    assert "does not serve Volcano PodGroups" in conditions(s)["Scheduled"]["message"] and not s.nodes()


@pytest.mark.parametrize("gang", [True, False])
async def test_two_jobs_that_each_need_the_whole_cluster_deadlock_only_without_gangs(gang: bool) -> None:
    """The other job takes free nodes as this job does: one by one, or all together."""
    s = WithGangs({"nodes": 2, "scheduling": {"gang": gang}}, steps=20)
    s.machines.capacity = 1  # the other job's first pod holds the other half
    await s.passes(30)
    rival_waits_forever = len(bound(s)) == 1
    assert rival_waits_forever is not gang
    if gang:
        s.machines.capacity = 0  # the other job gets its second half, and ends
        await s.passes(30)
        s.machines.capacity = 2
        await s.until_phase("Complete")


async def test_spares_and_elastic_nodes_are_created_after_the_gang_is_placed() -> None:
    s = WithGangs({"nodes": 3, "spares": 1, "elastic": {"minNodes": 2}, **FAST}, steps=1000)
    s.machines.capacity = 1
    await s.passes(30)
    assert sorted(p.index for p in s.nodes()) == [0, 1] and not bound(s)
    s.machines.capacity = 3
    await s.until_phase("Running")
    assert grouped(s) == {"job-0-0", "job-1-0", "job-coordinator-0"} and groups(s) == {"job-gang-0": 3}
    s.machines.capacity = 4
    await s.until(lambda: s.status["nodes"]["display"] == "3/3 +1")


async def test_a_single_node_needs_no_gang() -> None:
    s = WithGangs({"nodes": 1}, steps=20)
    await s.until_phase("Complete")
    assert not groups(s)


async def test_a_pod_that_is_lost_before_placement_rejoins_its_gang() -> None:
    s = WithGangs({"nodes": 2}, steps=20)
    s.machines.capacity = 1
    await s.passes(10)
    s.force_delete("job-1-0")
    await s.passes(10)
    assert {"job-0-0", "job-1-1"} <= grouped(s) and not bound(s)
    s.machines.capacity = 2
    await s.until_phase("Complete")


@pytest.mark.parametrize(
    ("change", "size"), [({"nodes": 2}, 3), ({"nodes": 4}, 5), ({"elastic": {"minNodes": 2}}, 3), ({"nodes": 1}, None)]
)
async def test_a_waiting_gang_is_resized_with_its_job(change: Json, size: int | None) -> None:
    s = WithGangs({"nodes": 3}, steps=20)
    s.machines.capacity = 0
    await s.passes(10)
    s.change_spec(change)
    await s.passes(10)
    assert groups(s) == ({"job-gang-1": size} if size else {}) and not bound(s)
    s.machines.capacity = 4
    await s.until_phase("Complete")
    assert s.status["restarts"]["counted"] == 0


# --- what the cluster serves


async def test_a_job_that_requires_a_gang_waits_for_a_cluster_that_serves_it() -> None:
    s = Simulation({"scheduling": {"gang": True}}, steps=20)
    await s.passes(30)
    assert not s.pods
    scheduled = conditions(s)["Scheduled"]
    assert scheduled["reason"] == "GangNotServed" and "leave scheduling.gang out" in scheduled["message"]
    s.cluster.serves_gangs = True
    await s.until_phase("Complete")


async def test_gang_apis_installed_later_do_not_affect_running_jobs() -> None:
    s = await Simulation({}, steps=1000).begun()
    for serves in (True, False):
        s.cluster.serves_gangs = serves
        before = set(s.pods)
        await s.passes(20)
        assert set(s.pods) == before and s.status["restarts"]["total"] == 0


async def test_a_waiting_job_starts_without_a_gang_if_the_cluster_stops_serving_gangs() -> None:
    s = WithGangs({}, steps=20)
    s.machines.capacity = 0
    await s.passes(10)
    s.cluster.serves_gangs = False
    await s.passes(10)
    assert not grouped(s)
    s.machines.capacity = 2
    await s.until_phase("Complete")


# --- losses


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_replacement_for_a_pod_of_a_placed_gang_is_scheduled_alone(mode: str) -> None:
    s = await WithGangs({"nodes": 3, "recovery": {"mode": mode}}, steps=1000).begun()
    s.force_delete("job-1-0")
    await s.until(lambda: s.phase == "Running" and "job-1-1" in s.pods)
    assert "job-1-1" not in grouped(s) and s.status["rendezvous"]["generation"] == 0


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_group_that_cannot_train_releases_its_nodes_and_waits_as_a_gang(mode: str) -> None:
    s = await WithGangs({"nodes": 3, "recovery": {"mode": mode, "maxRestarts": 0}}, steps=60).begun()
    s.machines.capacity = 2
    s.force_delete("job-1-0")
    await s.passes(20)
    assert len(bound(s)) == 2, "nodes are not released yet, because room may become available soon"
    await s.passes(60)
    assert not bound(s) and groups(s) == {"job-gang-1": 4}
    await s.passes(300)
    assert s.status["restarts"]["recent"][-1]["reason"] == "Yielded" and s.status["restarts"]["total"] == 2, "once"
    s.machines.capacity = 3
    await s.until_phase("Complete")
    assert s.status["restarts"]["counted"] == 0


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_job_does_not_release_its_only_copy_while_no_other_job_needs_the_room(mode: str) -> None:
    """Regression: 30 s after a cordon, the only copy of a job's progress was deleted although no
    pod needed its node.
    """
    s = await WithGangs({"nodes": 2, "recovery": {"mode": mode}}, steps=10**6).begun()
    await s.until(lambda: s.status.get("trained"))
    s.cluster.others_wait = False
    s.machines.capacity = 1
    s.force_delete("job-1-0")
    await s.passes(300)
    assert [p.name for p in bound(s)] == ["job-0-0"]
    assert "because only they hold the newest state" in conditions(s)["Scheduled"]["message"]
    assert [e.reason for e in s.cluster.events].count("OnlyCopy") == 1
    s.machines.capacity = 2
    await s.until_phase("Running")
    assert "job-0-0" in s.pods and s.status["restarts"]["recent"][-1]["reason"] != "Yielded"


@pytest.mark.parametrize(
    ("waits", "spec"),
    [(True, {}), (False, {"storage": {"checkpoints": {"claimName": "c"}}})],
    ids=["another job waits for room", "checkpoints are elsewhere"],
)
async def test_a_job_yields_its_nodes_if_another_copy_exists_or_another_job_waits(waits: bool, spec: Json) -> None:
    s = WithGangs({"nodes": 2, **spec}, steps=10**6)
    if spec:
        s.store.create("PersistentVolumeClaim", {"metadata": {"name": "c"}, "spec": {"accessModes": ["ReadWriteMany"]}})
    await s.begun()
    await s.until(lambda: s.status.get("trained"))
    s.cluster.others_wait = waits
    s.machines.capacity = 1
    s.force_delete("job-1-0")
    await s.until(lambda: not bound(s))
    last = s.status["restarts"]["recent"][-1]
    assert last["reason"] == "Yielded" and waits == ("the only copy of the newest state" in last["message"])


async def test_a_scale_down_keeps_the_pod_with_the_only_copy() -> None:
    """Normally the highest slots are removed, but one of them may hold the only copy of the job's
    progress.
    """
    s = await WithGangs({"nodes": 2, "scheduling": {"gang": False}}, steps=10**6).begun()
    await s.until(lambda: s.status.get("trained"))
    s.machines.capacity = 1
    s.force_delete("job-0-0")
    await s.passes(10)
    s.change_spec({"nodes": 1})
    await s.until_phase("Running")
    assert [p.name for p in bound(s)] == ["job-1-0"], "the pod with the only copy trains alone"
    assert "pod job-1-0 is kept until another pod trains" in conditions(s)["Scheduled"]["message"]


async def test_a_job_may_yield_more_often_than_the_history_has_entries() -> None:
    s = WithGangs({"nodes": 2, "recovery": {"maxRestarts": 0}}, steps=10**6)
    for _ in range(8):
        s.machines.capacity = 2
        await s.until_phase("Running")
        s.machines.capacity = 1
        s.force_delete(max(p.name for p in bound(s)))
        await s.until(lambda: not bound(s))
    assert s.status["restarts"]["uncounted"] == 16 and s.status["restarts"]["counted"] == 0
    said = s.status["restarts"]["recent"][-1]["message"]
    assert said.startswith(
        "1 pod has held a Kubernetes node for 30 s without training, because there is no room for pod job-"
    )
    assert said.endswith(". The job releases its pods and waits for room for 2 nodes at once")
    s.machines.capacity = 2
    await s.until_phase("Running")


async def test_a_group_that_trains_with_fewer_nodes_keeps_its_nodes() -> None:
    s = await WithGangs({"nodes": 3, "elastic": {"minNodes": 2}}, steps=10**6).begun()
    s.machines.capacity = 2
    s.force_delete("job-2-0")
    await s.until(lambda: s.status["nodes"]["display"] == "2/3" and s.phase == "Running")
    await s.passes(200)
    assert len(bound(s)) == 2 and s.phase == "Running"


def preempt(s: Simulation, name: str) -> None:
    """Preempt a pod as kube-scheduler does: a condition, then the deletion."""
    pod = s.pods[name]
    why = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}
    pod.body["status"] = {**pod.body["status"], "conditions": [*pod.body["status"]["conditions"], why]}
    s.store.changed("Pod", pod.body)
    s.delete(name)


@pytest.mark.parametrize(
    "spec", [{}, FAST, {"script": None, "command": ["train"]}], ids=["Standard", "Fast", "command"]
)
async def test_a_preempted_job_releases_its_other_pods_immediately(spec: Json) -> None:
    spec = {key: value for key, value in {"script": "train.py", **spec}.items() if value is not None}
    s = WithGangs({"nodes": 3, **spec}, steps=10**6)
    if "command" in spec:
        s.spec.pop("script", None)
    await s.until_phase("Running")
    s.machines.capacity = 2
    preempt(s, "job-1-0")
    await s.one_pass()
    await s.until(lambda: not bound(s), limit=60)
    assert groups(s) == {"job-gang-1": 4}
    assert {r["reason"] for r in s.status["restarts"]["recent"]} == {"Preempted"}
    s.machines.capacity = 3
    await s.until_phase("Running")
    assert s.status["restarts"]["counted"] == 0


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_preempted_job_leaves_its_nodes_to_the_preempting_gang(nodes: int) -> None:
    """The scheduler reserves no room for a gang, and retries it a while later."""
    s = await WithGangs({"nodes": nodes}, steps=10**6).begun()
    for index in range(nodes):
        preempt(s, f"job-{index}-0")
    await s.until(lambda: not bound(s), limit=10)
    left = s.clock.now
    assert "its room is reserved for the pods that preempted it" in conditions(s)["Scheduled"]["message"]
    await s.until(lambda: len(bound(s)) > 0, limit=30)
    assert 8 <= s.clock.now - left <= 12
    await s.until_phase("Running")
    assert s.status["restarts"]["counted"] == 0


async def test_without_gangs_the_replacement_of_a_preempted_pod_is_created_immediately() -> None:
    """The scheduler reserves the room for a pod that preempts."""
    s = await Simulation({"nodes": 1}, steps=10**6).begun()
    preempt(s, "job-0-0")
    await s.until(lambda: [p.name for p in bound(s)] == ["job-0-1"], limit=5)


async def test_a_preempted_spare_does_not_interrupt_training() -> None:
    s = WithGangs({"nodes": 2, "spares": 1, **FAST}, steps=10**6)
    await s.until(lambda: s.status.get("nodes", {}).get("display") == "2/2 +1")
    s.machines.capacity = 2
    preempt(s, next(p.name for p in s.nodes() if p.role is Role.SPARE))
    await s.passes(100)
    assert s.phase == "Running" and s.status["rendezvous"]["generation"] == 0 and len(bound(s)) == 2


async def test_an_unscheduled_spare_does_not_replace_a_pod() -> None:
    s = WithGangs({"nodes": 2, "spares": 1, **FAST}, steps=10**6)
    s.machines.capacity = 2
    await s.until_phase("Running")
    s.machines.capacity = 1
    preempt(s, "job-1-0")
    await s.until(lambda: not bound(s), limit=10)


async def test_a_resumed_job_waits_as_a_gang() -> None:
    s = await WithGangs({}, steps=60).begun()
    await s.suspended()
    await s.passes(2)
    assert not groups(s), "a scheduler's queue would show it as waiting"
    s.machines.capacity = 1
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.passes(60)
    assert not bound(s) and len(groups(s)) == 1
    s.machines.capacity = 2
    await s.until_phase("Complete")


# --- the operator's death, and random faults


async def loses_a_half(s: Simulation) -> None:
    await s.until_phase("Running")
    s.machines.capacity = 1
    s.force_delete("job-1-0")
    await s.until(lambda: s.status["rendezvous"]["generation"] == 1 and not bound(s))
    s.machines.capacity = 2
    await s.until_phase("Complete")


async def resized_while_it_waits(s: Simulation) -> None:
    s.machines.capacity = 1
    await s.passes(5)
    s.change_spec({"nodes": 3})
    await s.passes(5)
    s.machines.capacity = 3
    await s.until_phase("Complete")


Scenario = Callable[[Simulation], Awaitable[None]]
SCENARIOS: list[Scenario] = [
    crashes.start_and_complete, crashes.suspended_and_resumed, crashes.spare_takes_over, loses_a_half,
    crashes.elastic_shrinks_and_grows, crashes.scaled_down_and_up, resized_while_it_waits,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
async def test_the_outcome_is_the_same_if_the_operator_dies_before_or_after_any_call(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "Simulation", WithGangs)
    await crashes.die_everywhere(scenario, "Dedicated")


@pytest.mark.slow
async def test_a_preempted_job_completes_wherever_the_operator_dies() -> None:
    """A new operator process may not learn why the pod is gone. Then the job yields its nodes a
    while later.
    """

    async def preempted(s: Simulation) -> None:
        await s.until_phase("Running")
        s.machines.capacity = 1
        preempt(s, "job-1-0")
        await s.until(lambda: s.status["rendezvous"]["generation"] == 1 and not bound(s))
        s.machines.capacity = 2
        await s.until_phase("Complete")

    forks = crashes.Forks(WithGangs({}, steps=60), half=True)
    await forks.play(preempted)
    assert {end[:2] for end in forks.outcomes.values()} == {("Complete", 0)}


class RefusesGroups(MemoryCluster):
    """A cluster whose API server refuses every PodGroup."""

    refusal = Refused(422, 'PodGroup "job-gang-0" is invalid: spec.priorityClassName: no such class')

    async def create(self, job: DDPJob, manifest: Json) -> None:
        if manifest["kind"] == "PodGroup":
            raise self.refusal
        await super().create(job, manifest)


async def test_the_remedy_for_a_missing_priority_class_is_not_to_disable_the_gang() -> None:
    class Refusing(Simulation):
        cluster_class = RefusesGroups

    s = Refusing({}, steps=20)
    s.cluster.serves_gangs = True
    missing = 'podgroups.scheduling.k8s.io "job-gang-0" is forbidden: no PriorityClass with name high was found'
    RefusesGroups.refusal = Refused(403, missing)
    await s.passes(10)
    message = conditions(s)["Scheduled"]["message"]
    assert f"{missing}; the value comes from spec.scheduling.priorityClassName;" in message
    assert "scheduling.gang" not in message, "the API server refuses its pods as well"


@pytest.mark.parametrize("status", [400, 403, 404, 422])
async def test_a_refused_pod_group_is_reported_with_its_cause_and_the_remedy(status: int) -> None:
    class Refusing(Simulation):
        cluster_class = RefusesGroups

    s = Refusing({}, steps=20)
    s.cluster.serves_gangs = True
    RefusesGroups.refusal = Refused(status, "spec.priorityClassName: no such class")
    await s.passes(100)
    scheduled = conditions(s)["Scheduled"]
    assert (s.phase, scheduled["reason"]) == ("Pending", "CreationRefused") and not s.nodes()
    for part in ("PodGroup job-gang-0", "spec.priorityClassName: no such class", "set scheduling.gang to false"):
        assert part in scheduled["message"]
    assert sum(e.reason == "CreationRefused" for e in s.cluster.events) == 1
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.passes(5)
    s.change_spec({"runPolicy": {"suspend": False}, "scheduling": {"gang": False}})
    await s.until_phase("Complete")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_all_invariants_hold_under_random_faults_with_gangs(part: int) -> None:
    for seed in range(part, SEEDS, 5):
        asyncio.run(Story(seed, simulation=WithGangs).run())
