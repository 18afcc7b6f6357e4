"""How long a pod has been silent, and which Kubernetes nodes are avoided."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job_status import AvoidedNode, JobStatus, Restart, Restarts
from ddpjob.core.failures.avoided_nodes import find_avoided_nodes
from ddpjob.core.failures.liveness import is_out_of_service, lost_since
from ddpjob.core.world import ContainerView, HostView, PodView, Role, World, remembered
from ddpjob_runtime.protocol import CoordinatorState, LostMember, Member, MemberState, Report

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEFORE = NOW - timedelta(seconds=20)
POD = PodView(name="job-0-0", uid="u", role=Role.NODE, host="n1", containers={"trainer": ContainerView(started=BEFORE)})


def host(*, ready: bool, out: bool = False, since: datetime | None = BEFORE) -> dict[str, HostView]:
    """Return the pod's node, n1, and a healthy one, n2."""
    return {
        "n1": HostView(name="n1", ready=ready, since=since, out_of_service=out),
        "n2": HostView(name="n2", ready=True, since=None, out_of_service=False),
    }


@pytest.mark.parametrize(
    ("hosts", "since"),
    [
        (None, None),
        (host(ready=True), None),
        (host(ready=False), BEFORE),
        (host(ready=False, since=None), NOW),
        (host(ready=False, since=NOW + timedelta(hours=1)), NOW),
        (host(ready=True, out=True), None),
        ({}, None),
        ({"n1": HostView(name="n1", ready=False, since=BEFORE, out_of_service=False, deleted=True)}, BEFORE),
    ],
)
def test_a_pod_is_silent_since_its_node_became_unready(hosts: Any, since: datetime | None) -> None:
    assert lost_since(POD, World(hosts=hosts), NOW) == since
    assert lost_since(replace(POD, host=""), World(hosts=hosts), NOW) is None, "the pod is not placed yet"


def test_no_node_is_considered_lost_if_none_is_ready() -> None:
    hosts = {name: HostView(name=name, ready=False, since=BEFORE, out_of_service=False) for name in ("n1", "n2")}
    assert lost_since(POD, World(hosts=hosts), NOW) is None
    assert lost_since(POD, World(hosts=hosts | {"n1": replace(hosts["n1"], out_of_service=True)}), NOW) == BEFORE


def test_changes_of_hosts_are_dated_by_the_operators_own_clock() -> None:
    """A stale list lacks new hosts, and the API server's clock may be wrong."""
    found = {name: HostView(name=name, ready=name != "n3", since=None, out_of_service=False) for name in ("n1", "n3")}
    first = remembered(None, found, BEFORE)
    assert (first["n1"].since, first["n3"].since) == (BEFORE, BEFORE)
    assert remembered(first, found, NOW) == first
    down = remembered(first, {**found, "n1": replace(found["n1"], ready=False)}, NOW)
    assert (down["n1"].since, down["n3"].since) == (NOW, BEFORE)
    gone = remembered(first, {"n3": found["n3"]}, NOW)
    assert gone["n1"] == replace(found["n1"], ready=False, since=NOW, deleted=True)
    later = remembered(gone, {"n3": found["n3"]}, NOW + timedelta(minutes=1))
    assert later["n1"] == gone["n1"]
    assert remembered(gone, {"n3": found["n3"]}, NOW + timedelta(hours=1)).keys() == {"n3"}
    back = remembered(later, found, NOW + timedelta(minutes=2))
    assert (back["n1"].deleted, back["n1"].since) == (False, NOW + timedelta(minutes=2))


def test_a_coordinator_that_hears_from_hardly_any_member_is_itself_partitioned() -> None:
    pods = tuple(replace(POD, name=f"job-{i}-0", index=i) for i in range(4))
    lost = tuple(LostMember(pod.name, BEFORE + timedelta(seconds=n)) for n, pod in enumerate(pods))
    connected = tuple(Member(pod.name, MemberState.RUNNING) for pod in pods)

    def world(silent: int, hosts: Any = None) -> World:
        report = Report(0, CoordinatorState.RUNNING, 4, 4, (1.0, 60.0), lost=lost[:silent], members=connected[silent:])
        return World(pods=pods, report=report, hosts=hosts if hosts is not None else host(ready=True))

    for silent in (3, 4):
        assert world(silent).deaf_since == BEFORE + timedelta(seconds=2), (
            "the silence began when most members fell silent"
        )
        assert lost_since(pods[0], world(silent), NOW) is None
    assert world(2).deaf_since is None
    assert lost_since(pods[0], world(2), NOW) == BEFORE
    down = world(4, host(ready=False))
    assert down.deaf_since is None and lost_since(pods[0], down, NOW) == BEFORE


def test_a_pod_is_silent_since_the_coordinator_lost_it() -> None:
    report = Report(
        0,
        CoordinatorState.RESTARTING,
        nodes=2,
        min_nodes=2,
        backoff=(1.0, 60.0),
        lost=(LostMember("job-0-0", BEFORE),),
    )
    assert lost_since(POD, World(pods=(POD,), report=report), NOW) == BEFORE
    assert lost_since(POD, World(pods=(POD,), report=report, hosts=host(ready=True)), NOW) == BEFORE
    assert lost_since(replace(POD, name="job-1-0"), World(pods=(POD,), report=report), NOW) is None
    back = replace(report, members=(Member("job-0-0", MemberState.READY),))
    assert lost_since(POD, World(pods=(POD,), report=back), NOW) is None
    assert lost_since(replace(POD, containers={}), World(report=report), NOW) is None, (
        "the pod does not run, as its own state shows"
    )
    ended = replace(POD, containers={"trainer": ContainerView(exit_code=1)})
    assert lost_since(ended, World(report=report, hosts={}), NOW) is None


def test_out_of_service_counts_immediately_if_the_node_is_not_ready() -> None:
    assert is_out_of_service(POD, World(hosts=host(ready=False, out=True)))
    assert not is_out_of_service(POD, World(hosts=host(ready=True, out=True)))
    assert not is_out_of_service(POD, World(hosts=host(ready=False)))
    assert not is_out_of_service(POD, World())


# --- avoided nodes ----------------------------------------------------------------------------------------------


def restarts(*what: tuple[str, str], counted: bool = True, age: float = 60) -> JobStatus:
    recent = tuple(
        Restart(
            time=NOW - timedelta(seconds=age),
            pod="p",
            node=node,
            reason=reason,
            message="",
            counted=counted and reason != "NodeLost",
        )
        for reason, node in what
    )
    return JobStatus(restarts=Restarts(recent=recent))


def nodes(status: JobStatus, *, trained: bool = True) -> list[str]:
    return [entry.node for entry in find_avoided_nodes(status, NOW, trained=trained)]


def test_a_node_that_fails_three_times_while_others_work_is_avoided() -> None:
    failed = ("ExitCode", "n1")
    assert nodes(restarts(failed, failed)) == []
    assert nodes(restarts(failed, failed, ("WorkerFailed", "n1"))) == ["n1"]
    assert nodes(restarts(failed, failed, failed, ("ExitCode", "n2"))) == [], (
        "if the job fails everywhere, the job is at fault"
    )
    assert nodes(restarts(failed, failed, failed, counted=False)) == []
    for limit in ("OOMKilled", "StorageExceeded"):
        assert nodes(restarts(failed, failed, (limit, "n1"))) == [], "the memory limit is set by the job"
    assert nodes(restarts(failed, failed, failed, age=3601)) == []


def test_a_job_that_never_completed_a_step_does_not_blame_a_node() -> None:
    failed = ("ExitCode", "n1")
    assert nodes(restarts(failed, failed, failed), trained=False) == []
    assert nodes(restarts(("NodeLost", "n1"), ("NodeLost", "n1")), trained=False) == ["n1"], (
        "a lost node is not the job's fault"
    )


@pytest.mark.parametrize("reason", ["NodeFault", "StartError"])
def test_a_single_fault_that_is_certainly_the_nodes_is_enough_to_avoid_it(reason: str) -> None:
    for trained in (True, False):
        assert nodes(restarts((reason, "n1"), ("ExitCode", "n2"), counted=False), trained=trained) == ["n1"]


def test_a_node_that_is_lost_twice_is_avoided() -> None:
    lost = ("NodeLost", "n1")
    assert nodes(restarts(lost)) == []
    assert nodes(restarts(lost, lost, ("ExitCode", "n2"))) == ["n1"]
    [entry] = find_avoided_nodes(restarts(lost, lost), NOW, trained=True)
    assert entry.until == NOW + timedelta(minutes=59)


def test_an_avoided_node_is_remembered_for_a_limited_time() -> None:
    known = AvoidedNode(node="n3", until=NOW + timedelta(seconds=1), reason="2 times lost")
    status = JobStatus(avoided_nodes=(known,))
    assert find_avoided_nodes(status, NOW, trained=True) == (known,)
    assert find_avoided_nodes(status, NOW + timedelta(seconds=1), trained=True) == ()
