"""Which reports of health agents make a Kubernetes node count as unhealthy, and which pods leave
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import PodChanges, QueueStatus, Restart, SlotState
from ddpjob.controller.operator_settings import Settings, SettingsError
from ddpjob.core.failures.classify import Cause
from ddpjob.core.failures.node_health import LASTS, find_next_judgement, judge_failing, judge_nodes
from ddpjob.core.view import View
from ddpjob.core.world import HealthSignals, HostView, PodView, World, remembered
from ddpjob_runtime.protocol import CoordinatorState, MemberState
from worlds import NOW, later, report, running

SIGNALS = HealthSignals((("AcceleratedHardwareReady", "False"), ("Gpu*", "True")), ("example.com/gpu-", "agent.io/*"))


def node(*conditions: tuple[str, str], taints: tuple[str, ...] = (), **spec: Any) -> dict[str, Any]:
    listed = [{"type": "Ready", "status": "True"}, *({"type": t, "status": s, "reason": "R"} for t, s in conditions)]
    return {
        "metadata": {"name": "n0"},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints], **spec},
        "status": {"conditions": listed, "allocatable": {"cpu": "8", "nvidia.com/gpu": "8", "hugepages-2Mi": "0"}},
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (node(), ""),
        (node(("AcceleratedHardwareReady", "True")), ""),
        (node(("AcceleratedHardwareReady", "False")), "condition AcceleratedHardwareReady is False (R)"),
        (node(("AcceleratedHardwareReady", "Unknown")), ""),
        (node(("GpuMemWatch", "True")), "condition GpuMemWatch is True (R)"),
        (node(("MyGpu", "True")), ""),
        (node(taints=("example.com/gpu-error",)), ""),
        (node(taints=("example.com/gpu-",)), "taint example.com/gpu-"),
        (node(taints=("agent.io/xid",)), "taint agent.io/xid"),
        (node(taints=("node.kubernetes.io/unschedulable",), unschedulable=True), ""),
        (node(("Gpu" + "x" * 1000, "True")), ("condition Gpu" + "x" * 1000)[:300]),
    ],
)
def test_the_signals_of_an_unhealthy_node_are_recognized(body: dict[str, Any], said: str) -> None:
    host = HostView.read(body, SIGNALS)
    assert host.unhealthy == said and host.ready and host.devices == {"nvidia.com/gpu": 8}
    assert host.schedulable is ("unschedulable" not in body["spec"])
    assert HostView.read(body).unhealthy == "", "without signals no node is unhealthy"


def test_a_signal_is_dated_by_the_operators_own_clock() -> None:
    ill, well = HostView.read(node(("GpuMemWatch", "True")), SIGNALS), HostView.read(node(), SIGNALS)
    clear = remembered(None, {"n0": well}, NOW)
    first = remembered(clear, {"n0": ill}, later(10))
    again = remembered(first, {"n0": ill}, later(50))
    assert first["n0"].unhealthy_since == again["n0"].unhealthy_since == later(10)
    healed = remembered(again, {"n0": well}, later(60))
    assert healed["n0"].unhealthy_since is None
    assert remembered(healed, {"n0": ill}, later(70))["n0"].unhealthy_since == later(70), (
        "the signal's time starts over"
    )


def test_a_signal_older_than_the_operator_is_not_trusted() -> None:
    ill, well = HostView.read(node(("GpuMemWatch", "True")), SIGNALS), HostView.read(node(), SIGNALS)
    found = remembered(None, {"n0": ill}, NOW)
    again = remembered(found, {"n0": ill}, later(1000))
    assert found["n0"].unhealthy and found["n0"].unhealthy_since is again["n0"].unhealthy_since is None
    job, pods = running(1)
    assert judged(job, pods, {**hosts(known=5), "n0": again["n0"]}, at=2000) == []
    clear = remembered(again, {"n0": well}, later(1010))
    assert remembered(clear, {"n0": ill}, later(1020))["n0"].unhealthy_since == later(1020)


def test_a_deleted_node_is_not_unhealthy() -> None:
    ill, well = HostView.read(node(("GpuMemWatch", "True")), SIGNALS), HostView.read(node(), SIGNALS)
    before = remembered(remembered(None, {"n0": well}, NOW), {"n0": ill}, later(10))
    deleted = remembered(before, {}, later(20))
    assert deleted["n0"].deleted and not deleted["n0"].unhealthy and deleted["n0"].unhealthy_since is None
    back = remembered(deleted, {"n0": ill}, later(30))["n0"]
    assert back.unhealthy and back.unhealthy_since is None, "a new node with that name is seen for the first time"


def hosts(*ill: int, known: int = 12, **fields: Any) -> dict[str, HostView]:
    found = {}
    for number in range(known):
        word = "condition GpuUnhealthy is True (XidError)" if number in ill else ""
        since = NOW if word else None
        values = {"ready": True, "since": NOW, "out_of_service": False, "devices": {"nvidia.com/gpu": 8}, **fields}
        found[f"n{number}"] = HostView(name=f"n{number}", unhealthy=word, unhealthy_since=since, **values)
    return found


def judged(
    job: DDPJob, pods: tuple[PodView, ...], nodes: Mapping[str, HostView], at: float = LASTS.total_seconds()
) -> list[tuple[int, str]]:
    view = View(job, job.status, World(pods=pods, hosts=nodes), later(at))
    return [(verdict.index, verdict.reason) for verdict in judge_nodes(view)]


def test_a_signal_counts_only_after_it_has_persisted() -> None:
    job, pods = running(2, gpusPerNode=8)
    assert judged(job, pods, hosts(1), at=59) == []
    assert judged(job, pods, hosts(1)) == [(1, "")]
    assert judged(job, pods, hosts()) == []
    assert judged(job, pods, hosts(1, ready=False)) == [], "a silent node is judged by its silence"


def test_a_lost_connection_is_blamed_on_a_pod_only_if_a_third_node_is_connected() -> None:
    job, pods = running(3, gpusPerNode=8)
    values: dict[str, Any] = {"pod": "job-1-0", "reason": Cause.PEER_LOST, "message": "", "index": 1, "node": "n1"}
    lost = [Restart(time=later(n), round=n, counted=False, **values) for n in (1, 2, 3)]
    job = replace(job, status=replace(job.status, restarts=replace(job.status.restarts, recent=tuple(lost[:2]))))

    def failing(members: int) -> list[int]:
        last = report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * members)
        view = View(job, job.status, World(pods=pods, hosts=hosts(), report=last), later(4))
        return [found.index for found in judge_failing(view, lost[2:])]

    assert failing(3) == [1]
    assert failing(2) == [], "the coordinator runs on n0, and job-2-0 is not connected"


def test_signals_on_many_nodes_at_once_are_blamed_on_the_agent() -> None:
    job, pods = running(2, gpusPerNode=8)
    assert judged(job, pods, hosts(0, 1, 5)) == [(0, ""), (1, "")], "up to a quarter of the nodes may be unhealthy"
    assert judged(job, pods, hosts(0, 5, 6, 7)) == [(0, "TooManyUnhealthy")]
    assert judged(job, pods, hosts(1, known=3)) == [(1, "")], "in a small cluster, one node may be unhealthy"


def test_only_nodes_of_the_same_kind_show_whether_an_agent_is_broken() -> None:
    job, pods = running(2, gpusPerNode=8)
    broken = {
        name: replace(host, devices={"nvidia.com/gpu": 0}) for name, host in hosts(2, 3, 4).items() if host.unhealthy
    }
    nodes = {**hosts(1, known=10), **broken}
    others = {f"cpu{number}": replace(nodes["n9"], name=f"cpu{number}", devices={}) for number in range(40)}
    assert judged(job, pods, {**nodes, **others}) == [(1, "TooManyUnhealthy")], (
        "four of ten GPU nodes are too many, although there are 40 nodes without GPUs"
    )
    sick = {name: replace(host, unhealthy="x") for name, host in others.items()}
    assert judged(job, pods, {**hosts(1, known=10), **sick}) == [(1, "")], "this agent runs on nodes without GPUs"
    job, pods = running(2, podTemplate={"spec": {"nodeSelector": {"pool": "a"}}})
    nodes = {name: replace(host, labels={"pool": "a"}) for name, host in nodes.items()}
    assert judged(job, pods, {**nodes, **others}) == [(1, "TooManyUnhealthy")], (
        "a node without devices is compared by its labels"
    )


def test_the_number_of_unhealthy_nodes_is_not_in_the_status() -> None:
    job, pods = running(2)

    def why(*ill: int) -> list[str]:
        return [v.why for v in judge_nodes(View(job, job.status, World(pods=pods, hosts=hosts(*ill)), later(60)))]

    assert why(1, 5, 6, 7) == why(1, 5, 6, 7, 8) != []


def test_a_pod_moves_only_if_another_node_has_room_for_it() -> None:
    job, pods = running(2, gpusPerNode=8)
    assert judged(job, pods, hosts(1, known=2)) == [(1, "NoOtherNode")], "each pod needs a separate node"
    cordoned = {name: replace(host, schedulable=name in ("n0", "n1")) for name, host in hosts(1).items()}
    assert judged(job, pods, cordoned) == [(1, "NoOtherNode")]
    assert judged(job, pods, hosts(1, devices={"nvidia.com/gpu": 4})) == [(1, "NoOtherNode")], (
        "the other nodes are too small"
    )
    nodes = hosts(0, 1)
    for number in range(3, 12):
        nodes[f"n{number}"] = replace(nodes[f"n{number}"], schedulable=False)
    assert judged(job, pods, nodes) == [(0, ""), (1, "NoOtherNode")], "there is room for only one of the two pods"
    together, pods = running(2, gpusPerNode=0, scheduling={"onePodPerNode": False})
    assert judged(together, pods, hosts(1, known=2)) == [(1, "")]


def test_pods_that_may_share_a_node_each_need_enough_devices() -> None:
    job, pods = running(3, gpusPerNode=4, scheduling={"onePodPerNode": False})
    pods = tuple(replace(pod, host="n0") if pod.name in ("job-0-0", "job-1-0") else pod for pod in pods)
    assert judged(job, pods, hosts(0, known=4)) == [(0, ""), (1, "")], "n3 has room for two"
    nodes = {name: host for name, host in hosts(0, known=4).items() if name in ("n0", "n2")}
    assert judged(job, pods, nodes) == [(0, ""), (1, "NoOtherNode")], "n2 has four devices left"
    pods = tuple(replace(pod, host="n0") if pod.name == "job-2-0" else pod for pod in pods)
    assert judged(job, pods, hosts(0, known=2)) == [(0, ""), (1, ""), (2, "NoOtherNode")], "n1 has eight devices"


def test_a_pod_moves_only_if_it_could_still_be_scheduled_to_its_own_node() -> None:
    job, pods = running(2, gpusPerNode=8)
    nodes = hosts(1)
    for change in ({"schedulable": False}, {"taints": (("gpu", "bad", "NoSchedule"),)}):
        assert judged(job, pods, {**nodes, "n1": replace(nodes["n1"], **change)}) == [(1, "NoOtherNode")]


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"key": "dedicated", "value": "gpu"}, True),
        ({"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "dedicated", "value": "cpu"}, False),
        ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_node_counts_only_if_the_pod_tolerates_its_taints(toleration: dict[str, str] | None, fits: bool) -> None:
    tolerations = [] if toleration is None else [toleration]
    job, pods = running(2, gpusPerNode=8, podTemplate={"spec": {"tolerations": tolerations}})
    body = node()
    body["spec"]["taints"] = [
        {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"},
        {"key": "soft", "effect": "PreferNoSchedule"},
    ]
    taints = HostView.read(body).taints
    assert taints == (("dedicated", "gpu", "NoSchedule"),)
    nodes = {name: host if name in ("n0", "n1") else replace(host, taints=taints) for name, host in hosts(1).items()}
    assert judged(job, pods, nodes) == [(1, "" if fits else "NoOtherNode")]


def test_node_selectors_from_the_queues_flavor_count_like_the_templates_own() -> None:
    job, pods = running(2, gpusPerNode=8)
    taints = (("pool", "h100", "NoSchedule"),)
    nodes = {name: replace(host, labels={"pool": "h100"}, taints=taints) for name, host in hosts(1).items()}
    assert judged(job, pods, nodes) == [(1, "NoOtherNode")]
    added = PodChanges(node_selector={"pool": "h100"}, tolerations=({"key": "pool", "operator": "Exists"},))
    queued = replace(job, status=replace(job.status, queue=QueueStatus(workload="w", uid="w", pods=2, node=added)))
    assert judged(queued, pods, nodes) == [(1, "")]
    others = {name: host if name in ("n0", "n1") else replace(host, labels={}) for name, host in nodes.items()}
    assert judged(queued, pods, others) == [(1, "NoOtherNode")], "the job's quota is for machines of a different flavor"


def test_a_pod_whose_domain_the_queue_assigns_moves_only_to_a_spare() -> None:
    job, pods = running(2, gpusPerNode=8)
    added = PodChanges(annotations={"kueue.x-k8s.io/workload": "w"})
    queued = replace(job, status=replace(job.status, queue=QueueStatus(workload="w", uid="w", pods=2, node=added)))
    assert judged(job, pods, hosts(1)) == [(1, "")] and judged(queued, pods, hosts(1)) == [(1, "NoOtherNode")]


def test_a_node_with_too_many_taints_to_check_is_not_schedulable() -> None:
    host = HostView.read(node(taints=tuple(f"t{number}" for number in range(1000))))
    assert len(host.taints) == 50 and not host.schedulable


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    "spec",
    [
        {"podTemplate": {"spec": {"affinity": {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": [{}]}}}}}},
        {"podTemplate": {"spec": {"affinity": {"podAntiAffinity": {_REQUIRED: [{"topologyKey": "zone"}]}}}}},
        {"podTemplate": {"spec": {"resourceClaims": [{"name": "gpus"}]}}},
        {"podTemplate": {"spec": {"topologySpreadConstraints": [{"maxSkew": 1}]}}},
        {"podTemplate": {"spec": {"nodeName": "n1"}}},
        {"resources": {"limits": {"rdma/hca": 1}}},
        {"resources": {"limits": {"rdma/hca": "1k"}}},
        {"podTemplate": {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"rdma/hca": 1}}}]}}},
        {"podTemplate": {"spec": {"containers": [{"name": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}},
    ],
)
def test_a_pod_with_constraints_that_only_the_scheduler_can_judge_stays(spec: dict[str, Any]) -> None:
    job, pods = running(2, gpusPerNode=8, **spec)
    assert judged(job, pods, hosts(1)) == [(1, "NoOtherNode")]


def test_extended_resources_must_be_allocatable_on_the_other_node() -> None:
    job, pods = running(2, gpusPerNode=8, resources={"requests": {"cpu": "4", "rdma/hca": 1}})
    assert judged(job, pods, hosts(1, devices={"nvidia.com/gpu": 8, "rdma/hca": 1})) == [(1, "")]


def test_a_single_pod_may_move_to_a_different_topology_domain() -> None:
    job, pods = running(1, scheduling={"sameTopology": "rack"})
    nodes = {name: replace(host, labels={"rack": name}) for name, host in hosts(0).items()}
    assert judged(job, pods, nodes) == [(0, "")]


def test_pods_that_must_be_in_separate_zones_need_another_zone() -> None:
    job, pods = running(2, scheduling={"topologyKey": "zone"})
    zones = {"n0": "a", "n1": "b", "n2": "a", "n3": "b"}
    nodes = {name: replace(host, labels={"zone": zones[name]}) for name, host in hosts(1, known=4).items()}
    assert judged(job, pods, nodes) == [(1, "")], "n3 is in the zone that the pod leaves"
    nodes["n3"] = replace(nodes["n3"], labels={"zone": "a"})
    assert judged(job, pods, nodes) == [(1, "NoOtherNode")]


def test_the_operator_checks_again_when_a_signal_has_lasted_long_enough() -> None:
    job, pods = running(2)
    world = World(pods=pods, hosts=hosts(1))
    assert find_next_judgement(View(job, job.status, world, later(20))) == NOW + LASTS
    assert find_next_judgement(View(job, job.status, world, later(61))) is None
    assert find_next_judgement(View(job, job.status, replace(world, hosts=hosts()), later(20))) is None


def test_the_other_node_must_have_the_labels_that_the_pod_selects() -> None:
    job, pods = running(2, scheduling={"sameTopology": "rack"}, podTemplate={"spec": {"nodeSelector": {"gpu": "a100"}}})
    nodes = {name: replace(host, labels={"rack": "1", "gpu": "a100"}) for name, host in hosts(1, known=4).items()}
    assert judged(job, pods, nodes) == [(1, "")]
    for labels in ({"rack": "2", "gpu": "a100"}, {"rack": "1", "gpu": "t4"}, {"gpu": "a100"}):
        others = {name: replace(host, labels=labels) if name in ("n2", "n3") else host for name, host in nodes.items()}
        assert judged(job, pods, others) == [(1, "NoOtherNode")]


def test_pods_of_a_job_that_is_finishing_are_not_moved() -> None:
    job, pods = running(2)
    slots = (replace(job.status.slots[0], state=SlotState.SUCCEEDED), job.status.slots[1])
    assert judged(replace(job, status=replace(job.status, slots=slots)), pods, hosts(1)) == []


def test_pods_leave_a_node_at_most_once_an_hour_and_a_job_moves_three_times() -> None:
    job, pods = running(2, gpusPerNode=8)

    def after(*moves: tuple[str, int]) -> DDPJob:
        recent = tuple(
            Restart(time=NOW, pod="p", reason="NodeUnhealthy", message="", counted=False, node=name, round=number)
            for name, number in moves
        )
        return replace(job, status=replace(job.status, restarts=replace(job.status.restarts, recent=recent)))

    assert judged(after(("n1", 1)), pods, hosts(1)) == [(1, "MovedBefore")]
    assert judged(after(("n1", 1)), pods, hosts(1), at=timedelta(hours=1).total_seconds() + 1) == [(1, "")]
    assert judged(after(("n5", 1), ("n6", 1), ("n7", 1)), pods, hosts(1)) == [(1, "")], (
        "pods that leave together are one move"
    )
    assert judged(after(("n5", 1), ("n6", 2), ("n7", 3)), pods, hosts(1)) == [(1, "MovedTooOften")]


def test_restarts_of_other_kinds_do_not_hide_moves() -> None:
    job, pods = running(2, gpusPerNode=8)
    one = Restart(time=NOW, pod="p", reason="WorkerFailed", message="", counted=True, node="n5", round=1)

    def after(*recent: Restart) -> DDPJob:
        return replace(job, status=replace(job.status, restarts=replace(job.status.restarts, recent=recent)))

    assert judged(after(*[one] * 9), pods, hosts(1)) == [(1, "")]
    assert judged(after(*[one] * 10), pods, hosts(1)) == [(1, "MovedTooOften")], (
        "restarts that are no longer listed may have been moves"
    )
    assert judged(after(replace(one, time=later(-3600)), *[one] * 9), pods, hosts(1)) == [(1, "")]


def test_a_pod_scheduled_to_a_node_that_was_already_unhealthy_stays() -> None:
    job, pods = running(2, gpusPerNode=8)
    younger = tuple(replace(pod, created=later(5)) if pod.name == "job-1-0" else pod for pod in pods)
    assert judged(job, younger, hosts(1)) == [(1, "PlacedThere")]


def test_a_pod_that_does_not_run_yet_is_left_to_the_kubelet() -> None:
    job, pods = running(2, gpusPerNode=8)
    starting = tuple(replace(pod, containers={}) if pod.name == "job-1-0" else pod for pod in pods)
    assert judged(job, starting, hosts(1)) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NODE_CONDITIONS", '["GpuUnhealthy"]', "write TYPE=True"),
        ("NODE_CONDITIONS", '["Ready=False"]', "Ready is always watched"),
        ("NODE_CONDITIONS", '["*=True"]', "write TYPE=True"),
        ("NODE_CONDITIONS", '["Gpu*Down=True"]', "write TYPE=True"),
        ("NODE_CONDITIONS", '["Re*=True"]', "matches Ready=True, the condition of a healthy node; write the full TYPE"),
        ("NODE_CONDITIONS", '["MemoryPressure=False"]', "matches MemoryPressure=False, the"),
        ("NODE_CONDITIONS", '["GpuUnhealthy=True", "Net*=False"]', "matches NetworkUnavailable=False, the"),
        ("NODE_TAINTS", '["a*b"]', "only at the end of a key"),
        ("NODE_CONDITIONS", '{"a": 1}', "must be a JSON list"),
        ("NODE_CONDITIONS", "[1]", "at most 100 names"),
        ("NODE_TAINTS", '["*"]', "at most 100 names"),
        ("NODE_TAINTS", '["node.kubernetes.io/unschedulable"]', "a cordon, do not describe"),
        ("NODE_TAINTS", '["node.kube*"]', "a cordon, do not describe"),
        ("NODE_TAINTS", json.dumps(["a"] * 101), "at most 100 names"),
    ],
)
def test_invalid_settings_of_signals_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"DDPJOB_OPERATOR_{name}.*{message}"):
        Settings.from_environment({"DDPJOB_OPERATOR_KEY": "k" * 16, f"DDPJOB_OPERATOR_{name}": value})
