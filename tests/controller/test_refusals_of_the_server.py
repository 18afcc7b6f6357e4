"""Refusals by quotas, policies and a busy API server, and how the operator handles them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType
from ddpjob.controller.caches import Caches
from ddpjob.core.decision import BLOCKED_POLL, Event
from ddpjob.core.world import Role
from ddpjob.engine.ports import Conflict, JobKey, NamespaceEnding, Refused, Unavailable
from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.workload import released
from simulation.store import Refusal

from .api_server import Fault
from .cluster_case import (
    KEY,
    MANIFEST,
    SPOT,
    Case,
    delete_token,
    in_case,
    judged,
    owned_by,
    put_into_queue,
    refused_by,
    seen,
    use_up_the_quota_of_secrets,
)
from .virtual_loop import virtual
from .world import api_server, connected, followed, loop_moment


async def a_job_with_room_for_four_pods(c: Case) -> JobKey:
    """Add a job that needs 64 pods, and a quota for four."""
    c.add("big", nodes=64)
    await seen()
    quota = Fault(403, reason="Forbidden", message="exceeded quota")
    c.server.faults = lambda m, path: quota if m == "POST" and path.endswith("/pods") and len(c.pods()) >= 4 else None
    return JobKey("space", "big")


async def the_room_of_a_pod_is_used(c: Case, key: JobKey) -> None:
    """Delete one of the four pods, and check that its quota is used immediately."""
    await c.cluster.delete_pod(await c.job(key), "big-0-0", c.uid("big-0-0"), None)
    await seen()
    await reconcile(c.cluster, key, loop_moment)
    await reconcile(c.cluster, key, loop_moment)
    assert len(c.pods()) == 4, "a new pod uses the quota of the deleted one"


@in_case()
async def test_a_quota_refusal_is_retried_with_back_off_or_as_soon_as_quota_is_free(c: Case) -> None:
    key = await a_job_with_room_for_four_pods(c)
    tries = []
    for second in range(300):
        c.server.requests.clear()
        await reconcile(c.cluster, key, loop_moment)
        tries += [second] * sum(r[0] == "POST" and r[1].endswith("/pods") for r in c.server.requests)
        await asyncio.sleep(1)
    assert len(c.pods()) == 4
    assert len([t for t in tries if t >= 1]) <= 8, tries
    await the_room_of_a_pod_is_used(c, key)


@in_case()
async def test_free_quota_is_used_immediately_even_after_the_first_refusal(c: Case) -> None:
    key = await a_job_with_room_for_four_pods(c)
    await reconcile(c.cluster, key, loop_moment)
    assert len(c.pods()) == 4
    await the_room_of_a_pod_is_used(c, key)


@in_case()
async def test_a_refusal_of_one_job_does_not_affect_a_later_job_with_its_name(c: Case) -> None:
    """The job is deleted and created again between two reconciles, as by `kubectl replace --force`
    while the watch is interrupted.
    """
    c.fault_once("POST", "/pods", Fault(422, reason="Invalid", message="spec.nodeSelector: Invalid value"))
    await c.reconcile()
    spec = c.server.store.delete("DDPJob", "job")["spec"]
    c.server.store.create("DDPJob", {"metadata": {"name": "job", "uid": "next"}, "spec": spec})
    await c.settle()
    assert (await c.job()).status.condition(ConditionType.FAILED) is None
    assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]


@in_case()
async def test_many_pods_that_are_refused_together_back_off_like_one(c: Case) -> None:
    c.add("big", nodes=64)
    await seen()
    down = True
    webhook = Fault(500, message="failed calling webhook")
    c.server.faults = lambda m, path: (
        webhook if down and m == "POST" and path.endswith("/pods") and len(c.pods()) >= 15 else None
    )
    key = JobKey("space", "big")
    await reconcile(c.cluster, key, loop_moment)
    assert len(c.pods()) == 15
    down = False
    await asyncio.sleep(BLOCKED_POLL + 1)
    await reconcile(c.cluster, key, loop_moment)
    assert len(c.pods()) == 65


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(403, reason="Forbidden", message="exceeded quota"), Refused),
        (Fault(422, reason="Invalid"), Refused),
        (Fault(500, message="Internal error occurred: failed calling webhook"), Refused),
        (Fault(500, message='admission webhook "mpod.kb.io" denied the request: not decided'), Refused),
        (Fault(500, message="Internal error occurred: etcdserver: no leader"), Unavailable),
        (
            Fault(403, reason="Forbidden", message="unable to create: namespace space is being terminated"),
            NamespaceEnding,
        ),
        (Fault(409, reason="Conflict", message="Operation cannot be fulfilled on resourcequotas"), Unavailable),
        (Fault(404, reason="NotFound", message='namespaces "space" not found'), Conflict),
        (Fault(404, reason="NotFound", message='admission webhook "q" denied the request: no team'), Refused),
        (Fault(409, reason="Conflict", message='admission webhook "q" denied the request: busy'), Refused),
        (Fault(429, {"Retry-After": "3"}), Unavailable),
        (Fault(503), Unavailable),
    ],
    ids=lambda v: str(getattr(v, "how", getattr(v, "__name__", v))),
)
@in_case()
async def test_a_failed_creation_is_classified_by_the_servers_response(
    c: Case, fault: Fault, raised: type[Exception]
) -> None:
    job = await c.job()
    c.fault_once("POST", "/pods", fault)
    with pytest.raises(raised):
        await c.cluster.create(job, MANIFEST)


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [("failed calling webhook", True), ("etcdserver: no leader", False)],
    ids=["webhook", "its own"],
)
@in_case()
async def test_a_500_from_a_webhook_counts_as_a_refusal_and_from_the_server_as_an_outage(
    c: Case, said: str, *, is_refused: bool
) -> None:
    """A webhook may be unreachable for a long time, which must not block other changes. An error of
    the server itself is usually short.
    """
    await c.reconcile()
    c.server.faults = lambda m, path: Fault(500, message=said) if m != "GET" else None
    job, uid = await c.job(), c.uid("job-0-0")
    for change in (
        c.cluster.label_pod(job, "job-0-0", uid, Role.SPARE),
        c.cluster.delete_pod(job, "job-0-0", uid, None),
        c.cluster.record(job, Event(False, "Resumed", "an event")),
    ):
        with contextlib.nullcontext() if is_refused else pytest.raises(Unavailable):
            await change
    for write in (c.cluster.create(job, owned_by(job)), c.cluster.write_status(job, {"phase": "Pending"})):
        with pytest.raises(Refused if is_refused else Unavailable, match=rf"^(500: |.*: 500: ){said}$"):
            await write


@in_case()
async def test_a_refused_event_is_only_logged(c: Case) -> None:
    job = await c.job()
    await c.cluster.record(job, Event(True, "Reason", "words " * 1000))
    assert len(c.server.events[0]["note"].encode()) <= 1000
    c.fault_once("POST", "/events", Fault(403, reason="Forbidden"))
    await c.cluster.record(job, Event(False, "Reason", "more"))
    assert len(c.server.events) == 1


@in_case()
async def test_the_operator_waits_as_long_as_a_throttling_server_requests(c: Case) -> None:
    c.fault_once("PUT", "/ddpjobs/job", Fault(429, {"Retry-After": "7"}))
    assert await c.reconcile() == 7
    c.fault_once("GET", "/ddpjobs/job", Fault(503, {"Retry-After": "3600"}))
    assert await c.reconcile() == 60, "a longer wait that a proxy's page requests is ignored"
    c.fault_once("GET", "/ddpjobs/job", Fault(503))
    assert await c.reconcile() == 2, "the outcome of the status write is read first"


@pytest.mark.parametrize("restarted", [False, True])
@in_case()
async def test_a_job_with_a_token_gets_pods_even_if_no_secret_can_be_created(c: Case, *, restarted: bool) -> None:
    """The quota is checked before the name, so creating an existing Secret is refused like a new
    one.
    """
    await c.reconcile()
    use_up_the_quota_of_secrets(c)
    c.server.store.remove("Pod", c.server.store.get("Pod", "job-0-0"))
    await seen()
    if restarted:
        c.cluster._tokens.clear()
    await c.reconcile()
    await c.reconcile()
    assert "job-0-1" in c.pods()


@pytest.mark.parametrize("restarted", [False, True])
@in_case()
async def test_an_exhausted_quota_of_secrets_is_shown_when_a_token_was_deleted(c: Case, *, restarted: bool) -> None:
    await c.reconcile()
    use_up_the_quota_of_secrets(c)
    await delete_token(c)
    if restarted:
        c.cluster._tokens.clear()
    await c.settle(3)
    scheduled = (await c.job()).status.condition(ConditionType.SCHEDULED)
    assert scheduled is not None and "exceeded quota" in scheduled.message


@in_case()
async def test_an_exhausted_quota_of_secrets_is_shown_to_a_job_without_a_token(c: Case) -> None:
    use_up_the_quota_of_secrets(c)
    await c.reconcile()
    await seen()
    assert c.pods() == []
    scheduled = (await c.job()).status.condition(ConditionType.SCHEDULED)
    assert scheduled is not None and "exceeded quota" in scheduled.message


@refused_by(Fault(422, reason="Invalid", message="policy 'nodel' denied request: pods are evidence"))
@in_case()
async def test_a_refused_pod_deletion_is_shown_and_retried_with_back_off(c: Case, policy: Fault) -> None:
    """An admission policy or an unreachable webhook refuses the deletion. The job's other changes
    are still made.
    """
    await c.reconcile()
    await c.reconcile()
    c.server.faults = lambda m, path: policy if m == "DELETE" and "/pods/" in path else None
    c.server.requests.clear()
    await c.change(runPolicy={"suspend": True})
    for _ in range(300):
        await c.reconcile()
        await asyncio.sleep(1)
    suspended = (await c.job()).status.condition(ConditionType.SUSPENDED)
    assert suspended is not None
    assert suspended.message == (
        f"3 pods not deleted yet: the API server refuses to delete pod job-0-0: {policy.message}; retried "
        "within a minute"
    )
    assert sum(method == "DELETE" for method, _, _ in c.server.requests) <= 3 * 9
    await c.change(runPolicy={"suspend": False})
    scheduled = (await c.job()).status.condition(ConditionType.SCHEDULED)
    assert scheduled is not None and scheduled.reason == "DeletionRefused"
    c.server.faults = lambda m, path: None
    for _ in range(70):
        await c.reconcile()
        await asyncio.sleep(1)
    assert (await c.cluster.observe(KEY)).world.deletion_refused == ""  # type: ignore[union-attr]


@in_case()
async def test_an_expired_job_that_may_not_be_deleted_is_stopped_and_gets_an_event(c: Case) -> None:
    policy = Fault(403, reason="Forbidden", message="policy 'nodel' denied request: jobs are evidence")
    await c.reconcile()
    await seen()
    await c.change(runPolicy={"ttlSecondsAfterFinished": 0})
    c.server.faults = lambda m, path: policy if m == "DELETE" and "/ddpjobs/" in path else None
    c.finish("job")
    c.server.requests.clear()
    for _ in range(300):
        await c.settle()
        await asyncio.sleep(1)
    assert "job-coordinator-0" not in c.pods()
    assert sum(method == "DELETE" and "/ddpjobs/" in path for method, path, _ in c.server.requests) <= 9
    [refused] = [e["note"] for e in c.server.events if e["reason"] == "DeletionRefused"]
    assert refused == (
        "the API server refuses to delete DDPJob job: policy 'nodel' denied request: jobs are evidence "
        "(retried within a minute)"
    )
    assert "ReconcileFailed" not in {e["reason"] for e in c.server.events}
    c.server.faults = lambda m, path: None
    await asyncio.sleep(60)
    await c.reconcile()
    assert c.server.store.find("DDPJob", "job") is None


@refused_by(Fault(403, reason="Forbidden", message="policy 'nodel' denied request: pods are evidence"))
@in_case()
async def test_deletion_of_a_finished_jobs_protected_pod_is_rarely_retried(
    c: Case,
    policy: Fault,
) -> None:
    await c.reconcile()
    await seen()
    c.server.faults = lambda m, path: policy if m == "DELETE" and "/pods/" in path else None
    c.finish("job")
    await c.settle()
    assert await c.reconcile() == BLOCKED_POLL
    c.server.faults = lambda m, path: None
    await asyncio.sleep(60)
    await c.reconcile()
    assert "job-coordinator-0" not in c.pods()
    await seen()
    assert await c.reconcile() is None


@in_case(serves_queues=True)
async def test_a_refused_workload_deletion_is_retried_and_reported_by_an_event(c: Case) -> None:
    policy = Fault(403, reason="Forbidden", message="policy 'nodel' denied request")
    put_into_queue(c)
    await c.settle()
    c.server.faults = lambda m, path: policy if m == "DELETE" and "/workloads/" in path else None
    await c.change(runPolicy={"suspend": True})
    assert await c.reconcile() == BLOCKED_POLL
    reasons = [e["reason"] for e in c.server.events]
    assert reasons.count("DeletionRefused") == 1 and "ReconcileFailed" not in reasons
    c.server.faults = lambda m, path: None
    await asyncio.sleep(60)
    await c.reconcile()
    assert not list(c.server.store.all("Workload"))


@refused_by(Fault(403, reason="Forbidden", message="policy 'frozen' denied request"))
@in_case()
async def test_a_status_that_a_policy_refuses_is_not_a_defect_of_the_operator(c: Case, policy: Fault) -> None:
    c.server.faults = lambda m, path: policy if m == "PUT" and path.endswith("/status") else None
    for _ in range(2):
        with pytest.raises(Refused):
            await c.reconcile()
    [event] = c.server.events
    how = 403 if policy.how == 404 else policy.how  # The denial of a webhook does not mean that the job is gone.
    assert event["note"].startswith(
        f"the API server refuses the job's status: {how}: {policy.message} (check the admission policies"
    )


@refused_by(Fault(422, reason="Invalid", message="policy 'nolabel' denied request: pods are immutable here"))
@in_case()
async def test_a_refused_label_is_not_an_error_and_is_retried_with_back_off(c: Case, policy: Fault) -> None:
    """A policy forbids changes to pods. The operator can do without the label on training pods."""
    await c.reconcile()
    c.server.faults = lambda m, path: policy if m == "PATCH" and "/pods/" in path else None
    job, uid = await c.job(), c.uid("job-0-0")
    for _ in range(120):
        await c.cluster.label_pod(job, "job-0-0", uid, Role.SPARE)
        await asyncio.sleep(1)
    assert sum(method == "PATCH" and "/pods/" in path for method, path, _ in c.server.requests) == 4
    await c.cluster.delete_pod(job, "job-0-0", uid, None)
    assert "job-0-0" not in c.pods(), "other changes to the pod are accepted"


@in_case()
async def test_a_namespace_that_forbids_root_gets_its_pods_immediately(c: Case) -> None:
    """The pause after a refused pod does not apply to its second version with runAsNonRoot."""
    act = c.server._act

    def restricted(method: str, kind: str, namespace: str, name: str | None, part: str | None, body: Json) -> Json:
        if method == "POST" and kind == "Pod" and not body["spec"]["securityContext"].get("runAsNonRoot"):
            raise Refusal(403, "Forbidden", 'violates PodSecurity "restricted:latest": runAsNonRoot != true')
        return act(method, kind, namespace, name, part, body)

    c.server._act = restricted  # type: ignore[method-assign]
    await c.reconcile()
    assert c.pods() == ["job-0-0", "job-1-0", "job-coordinator-0"]


@virtual
async def test_without_the_right_to_read_policies_everything_else_is_read() -> None:
    async with api_server() as server, connected(server) as rest:
        server.faults = lambda method, path: Fault(403, reason="Forbidden") if "networkpol" in path else None
        caches = Caches(rest, lambda key, urgent: None, lambda hosts, changed: None)
        async with asyncio.timeout(30), followed(server, caches):
            pass


@in_case(serves_gangs=True)
async def test_pod_groups_whose_api_is_no_longer_served_are_refused_once(c: Case) -> None:
    c.server.faults = lambda method, path: (
        Fault(404, reason="NotFound", message="404 page not found")
        if method == "POST" and "podgroups" in path
        else None
    )
    assert await c.reconcile() == BLOCKED_POLL
    conditions = {one.type: one for one in (await c.job()).status.conditions}
    assert "no longer serves PodGroups" in conditions["Scheduled"].message and not c.pods()


@in_case(serves_gangs=True, serves_queues=True)
async def test_a_refused_deletion_of_a_queued_jobs_group_is_retried(c: Case) -> None:
    """The deletion is retried before the next event, which may be hours away."""
    c.server.store.create("ResourceFlavor", {"metadata": {"name": "spot"}, "spec": SPOT}, "")
    put_into_queue(c)
    await c.settle()
    judged(c, admitted=True, QuotaReserved="True", Admitted="True")
    await c.settle(3)
    assert c.pods() and list(c.server.store.all("PodGroup"))
    c.server.faults = lambda method, path: (
        Fault(403, reason="Forbidden", message="no") if method == "DELETE" and "podgroups" in path else None
    )
    judged(c, Evicted="True", PodsReady="True")
    for _ in range(9):
        await seen()
        wake = await c.reconcile()
    assert not c.pods() and (await c.job()).status.phase == "Queued"
    assert len(list(c.server.store.all("PodGroup"))) == 1 and wake == BLOCKED_POLL
    c.server.faults = lambda method, path: None
    await asyncio.sleep(BLOCKED_POLL)
    await c.reconcile()
    assert not list(c.server.store.all("PodGroup"))


@in_case(serves_queues=True)
async def test_quota_is_not_released_if_kueue_has_admitted_the_job_again(c: Case) -> None:
    """The job was evicted when the decision was made, but has been readmitted by the time the
    decision is carried out.
    """
    put_into_queue(c)
    await c.settle()
    workload = judged(c, admitted=True, QuotaReserved="True", Admitted="True", Evicted="False")
    name = workload["metadata"]["name"]
    await c.cluster.change_workload(await c.job(), name, workload["metadata"]["uid"], released)
    assert "admission" in workload["status"]
    judged(c, Evicted="True")
    await c.cluster.change_workload(await c.job(), name, "another", released)
    assert "admission" in workload["status"], "a new Workload with the same name is a different one"
