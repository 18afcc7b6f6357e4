"""Since when a pod is silent, and which nodes are avoided for it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.types import AvoidedNode, JobStatus, Restart, Restarts
from ddpjob.core.avoid import avoided
from ddpjob.core.hosts import HostView
from ddpjob.core.losses import lost_since, out_of_service
from ddpjob.core.world import ContainerView, LostMember, Member, PodView, Report, Role, World

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEFORE = NOW - timedelta(seconds=20)
POD = PodView(name="job-0-0", uid="u", role=Role.NODE, node="n1", containers={"trainer": ContainerView(started=BEFORE)})


def host(*, ready: bool, out: bool = False, since: datetime | None = BEFORE) -> dict[str, HostView]:
    """The pod's, and another one that is well."""
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
        (host(ready=True, out=True), NOW),
        ({}, NOW),
    ],
)
def test_by_its_node(hosts: Any, since: datetime | None) -> None:
    assert lost_since(POD, World(hosts=hosts), NOW) == since
    assert lost_since(replace(POD, node=""), World(hosts=hosts), NOW) is None, "not placed yet"


def test_where_no_node_is_ready_none_is_lost() -> None:
    hosts = {name: HostView(name=name, ready=False, since=BEFORE, out_of_service=False) for name in ("n1", "n2")}
    assert lost_since(POD, World(hosts=hosts), NOW) is None
    assert lost_since(POD, World(hosts=hosts | {"n1": replace(hosts["n1"], out_of_service=True)}), NOW) == BEFORE


def test_by_the_coordinator() -> None:
    report = Report(generation=0, state="Restarting", lost=(LostMember(pod="job-0-0", since=BEFORE),))
    assert lost_since(POD, World(report=report), NOW) == BEFORE
    assert lost_since(POD, World(report=report, hosts=host(ready=True)), NOW) == BEFORE
    assert lost_since(replace(POD, name="job-1-0"), World(report=report), NOW) is None
    back = replace(report, members=(Member(pod="job-0-0", state="Ready"),))
    assert lost_since(POD, World(report=back), NOW) is None
    assert lost_since(replace(POD, containers={}), World(report=report), NOW) is None, "it does not run: its own state tells"
    ended = replace(POD, containers={"trainer": ContainerView(exit_code=1)})
    assert lost_since(ended, World(report=report, hosts={}), NOW) is None


def test_out_of_service_is_at_once_where_the_node_is_not_ready() -> None:
    assert out_of_service(POD, World(hosts=host(ready=False, out=True)))
    assert not out_of_service(POD, World(hosts=host(ready=True, out=True)))
    assert not out_of_service(POD, World(hosts=host(ready=False)))
    assert not out_of_service(POD, World())


# --- avoided nodes ----------------------------------------------------------------------------------------------


def restarts(*what: tuple[str, str], counted: bool = True, age: float = 60) -> JobStatus:
    recent = tuple(
        Restart(time=NOW - timedelta(seconds=age), pod="p", node=node, reason=reason, message="", counted=counted and reason != "NodeLost")
        for reason, node in what
    )
    return JobStatus(restarts=Restarts(recent=recent))


def nodes(status: JobStatus) -> list[str]:
    return [entry.node for entry in avoided(status, NOW)]


def test_a_node_that_fails_three_times_while_others_do_not() -> None:
    failed = ("ExitCode", "n1")
    assert nodes(restarts(failed, failed)) == []
    assert nodes(restarts(failed, failed, ("WorkerFailed", "n1"))) == ["n1"]
    assert nodes(restarts(failed, failed, failed, ("ExitCode", "n2"))) == [], "then it is the job"
    assert nodes(restarts(failed, failed, failed, counted=False)) == []
    assert nodes(restarts(failed, failed, ("OOMKilled", "n1"))) == [], "memory is the job's matter"
    assert nodes(restarts(failed, failed, failed, age=3601)) == []


def test_a_node_that_is_lost_twice() -> None:
    lost = ("NodeLost", "n1")
    assert nodes(restarts(lost)) == []
    assert nodes(restarts(lost, lost, ("ExitCode", "n2"))) == ["n1"]
    [entry] = avoided(restarts(lost, lost), NOW)
    assert entry.until == NOW + timedelta(minutes=59)


def test_it_is_remembered_for_its_time() -> None:
    known = AvoidedNode(node="n3", until=NOW + timedelta(seconds=1), reason="2 times lost")
    status = JobStatus(avoided_nodes=(known,))
    assert avoided(status, NOW) == (known,)
    assert avoided(status, NOW + timedelta(seconds=1)) == ()
