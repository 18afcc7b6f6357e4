"""Jobs begun by a different release of the operator: running pods stay, and new pods use this
release's runtime.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import SlotState
from ddpjob.core.decide import decide
from ddpjob.core.decision import CreateCoordinator, CreateNode, Creation, Decision, DeletePod, Preparation
from ddpjob.core.world import ContainerView, PodView, Role, World
from ddpjob_runtime import protocol

NOW = datetime(2026, 11, 22, 14, 40, tzinfo=UTC)
OFFERED = "ddpjob-runtime-new"
KEY = "1fdbc9"
STATUS = {
    "conditions": [
        {
            "lastTransitionTime": "2026-11-22T14:34:53Z",
            "message": "2 of 2 pods have a node",
            "observedGeneration": 1,
            "reason": "AllPlaced",
            "status": "True",
            "type": "Scheduled",
        },
        {
            "lastTransitionTime": "2026-11-22T14:35:07Z",
            "message": "2 nodes train as one group",
            "observedGeneration": 1,
            "reason": "GroupRuns",
            "status": "True",
            "type": "Running",
        },
    ],
    "highestAttempt": 0,
    "nodes": {"active": 2, "display": "2/2", "ready": 2, "spare": 0, "wanted": 2},
    "observedGeneration": 1,
    "phase": "Running",
    "progress": {"display": "step 61", "metrics": {"stepsPerSecond": 9.961}, "step": 61},
    "rendezvous": {"endpoint": "198.19.49.3:29401", "generation": 0, "nodes": 2, "state": "Running"},
    "restarts": {
        "counted": 0,
        "display": "0/10",
        "max": 10,
        "recent": [],
        "seen": {"generation": 0, "incident": 0, "round": 0},
        "total": 0,
        "uncounted": 0,
    },
    "round": 0,
    "slots": [{"attempt": 0, "node": "n2", "state": "Running"}, {"attempt": 0, "node": "n1", "state": "Running"}],
    "startTime": "2026-11-22T14:34:53Z",
}
"""The status of a running job, without the fields that `begun` adds."""


def begun(release: str, **fields: Any) -> DDPJob:
    """Return a running job of two nodes whose pods a different release created, with this version
    of the protocol.
    """
    spec = {"image": "image", "nodes": 2, **({} if "command" in fields else {"script": "train.py"}), **fields}
    body: Json = {"metadata": {"name": "job", "namespace": "space", "uid": "uid", "generation": 1}, "spec": spec}
    job = DDPJob.read({**body, "status": STATUS})
    mark = f"{job.spec.template_hash}-{KEY}-{release}"
    return replace(job, status=replace(job.status, template_hash=mark, runtime="ddpjob-runtime-other"))


def pods(*indices: int) -> tuple[PodView, ...]:
    ran = {"created": NOW - timedelta(minutes=5), "phase": "Running", "address": "198.19.49.3"}
    made = [
        PodView(
            name=f"job-{i}-0",
            uid=f"n{i}",
            role=Role.NODE,
            index=i,
            host=f"n{i}",
            containers={"trainer": ContainerView(started=NOW)},
            **ran,
        )
        for i in indices
    ]
    containers = {"coordinator": ContainerView(started=NOW)}
    made.append(PodView(name="job-coordinator-0", uid="c", role=Role.COORDINATOR, containers=containers, **ran))
    return tuple(made)


def after(job: DDPJob, *seen: PodView, **world: Any) -> Decision:
    objects = {"has_service": True, "has_budget": True, "has_policy": True, "key_mark": KEY}
    return decide(job, World(pods=seen, runtime_offered=OFFERED, **(objects | world)), NOW)


RELEASES = [str(protocol.VERSION), str(protocol.VERSION + 1)]
"""A release of our own protocol whose runtime is gone, and an invented next release, as in a
rollback.
"""


@pytest.mark.parametrize("kind", [{}, {"recovery": {"mode": "Fast"}}, {"command": ["train"]}], ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_pods_of_a_different_release_are_kept(release: str, kind: Json) -> None:
    job = begun(release, **kind)
    decision = after(job, *pods(0, 1))
    assert not [a for a in decision.actions if isinstance(a, Creation | DeletePod)], "not even a ConfigMap is created"
    assert decision.status.rendezvous.generation == 0 and not decision.status.restarts.total
    assert decision.status.template_hash == job.status.template_hash, "the other release may return"
    assert decision.status.runtime == job.status.runtime
    again = after(replace(job, status=decision.status), *pods(0, 1))
    assert again.status == decision.status and not again.actions


@pytest.mark.parametrize("kind", [{}, {"recovery": {"mode": "Fast"}}, {"command": ["train"]}], ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_if_a_pod_of_another_release_is_lost_a_generation_with_our_runtime_begins(release: str, kind: Json) -> None:
    """A single pod of this release could not communicate with its peers."""
    decision = after(begun(release, **kind), *pods(0))
    status = decision.status
    assert [(r.pod, r.reason, r.counted) for r in status.restarts.recent] == [("job-1-0", "Deleted", False)]
    assert (status.rendezvous.generation, status.runtime) == (1, OFFERED)
    assert status.template_hash.endswith(f"-{KEY}-{protocol.VERSION}")
    assert [slot.attempt for slot in status.slots] == [1, 1] and Preparation.RUNTIME in decision.actions
    assert {a.name for a in decision.actions if isinstance(a, DeletePod)} == {"job-0-0"}
    later = after(replace(begun(release, **kind), status=status), runtime=OFFERED)
    assert {CreateCoordinator(), CreateNode(0, 1), CreateNode(1, 1)} <= set(later.actions)


@pytest.mark.parametrize("release", RELEASES)
def test_in_fast_mode_a_lost_coordinator_begins_a_generation_with_our_runtime(release: str) -> None:
    decision = after(begun(release, recovery={"mode": "Fast"}), *pods(0, 1)[:2])
    assert [(r.reason, r.round) for r in decision.status.restarts.recent] == [("CoordinatorLost", 1)]
    assert decision.status.rendezvous.generation == 1
    (event,) = [e for e in decision.events if e.reason == "CoordinatorLost"]
    assert "training continues" not in event.message, "the group starts again"


@pytest.mark.parametrize("release", RELEASES)
def test_scaling_up_begins_a_generation_with_our_runtime_but_scaling_down_does_not(release: str) -> None:
    more, fewer = begun(release, nodes=3), begun(release, nodes=1)
    assert after(more, *pods(0, 1)).status.rendezvous.generation == 1
    decision = after(fewer, *pods(0, 1))
    assert decision.status.rendezvous.generation == 0
    assert {a.name for a in decision.actions if isinstance(a, DeletePod)} == {"job-1-0"}


def test_additional_spares_are_not_reported_as_additional_nodes() -> None:
    decision = after(begun(RELEASES[1], spares=1), *pods(0, 1))
    assert decision.status.rendezvous.generation == 1
    assert decision.status.restarts.recent[-1].message == "spec.spares changed from 0 to 1"


def test_pods_that_another_release_had_only_planned_begin_a_generation_too() -> None:
    job = begun(RELEASES[1])
    planned = replace(job.status.slots[1], state=SlotState.PLANNED, attempt=1)
    job = replace(job, status=replace(job.status, slots=(job.status.slots[0], planned)))
    decision = after(job, *pods(0))
    assert decision.status.restarts.recent[-1].reason == "RuntimeChanged"
    assert decision.status.rendezvous.generation == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_suspended_job_of_another_release_resumes_with_our_runtime(release: str) -> None:
    job = begun(release)
    suspend = replace(job.spec, run_policy=replace(job.spec.run_policy, suspend=True))
    suspended = after(replace(job, spec=suspend), *pods(0, 1)).status
    assert suspended.template_hash == job.status.template_hash
    resumed = after(replace(job, status=suspended))
    assert (resumed.status.runtime, resumed.status.restarts.total) == (OFFERED, 0)
    assert resumed.status.template_hash.endswith(f"-{protocol.VERSION}")
    later = after(replace(job, status=resumed.status), runtime=OFFERED)
    assert later.status.rendezvous.generation == resumed.status.rendezvous.generation


@pytest.mark.parametrize("release", RELEASES)
def test_a_different_spec_or_key_replaces_pods_of_any_release(release: str) -> None:
    assert after(begun(release), *pods(0, 1), key_mark="other").status.restarts.recent[-1].reason == "KeyChanged"
    job = begun(release)
    changed = replace(job, spec=begun(release, image="another").spec)
    assert after(changed, *pods(0, 1)).status.restarts.recent[-1].reason == "SpecChanged"
