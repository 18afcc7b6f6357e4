"""Requests that the API server refuses are reported once and correctly, retried without a storm,
and no longer reported once the reason is gone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.engine.ports import NameTaken, Refused
from ddpjob.objects.claim import build_claim
from ddpjob.objects.platform import Platform

from .clock import EPOCH
from .operator_port import MemoryCluster
from .simulated import Simulation, conditions


class RefusingCluster(MemoryCluster):
    """A cluster that refuses pods by a quota or a policy, or a service whose name is taken."""

    pods_allowed = 99
    taken = False
    denial: Refused | None = None
    claim_denial: Refused | None = None
    budget_denial: Refused | None = None

    async def create(self, job: DDPJob, manifest: Json) -> None:
        if manifest["kind"] == "PersistentVolumeClaim" and self.claim_denial is not None:
            raise self.claim_denial
        if manifest["kind"] == "PodDisruptionBudget" and self.budget_denial is not None:
            raise self.budget_denial
        if manifest["kind"] == "Service" and self.taken:
            raise NameTaken("an object with this name is there and does not belong to this job")
        if manifest["kind"] == "Pod" and len(list(self.store.all("Pod"))) >= self.pods_allowed:
            raise Refused(403, "exceeded quota: one")
        if manifest["kind"] == "Pod" and self.denial is not None:
            raise self.denial
        await super().create(job, manifest)


class Refusing(Simulation):
    """A simulation that reconciles as often as its own writes wake it."""

    cluster_class = RefusingCluster
    cluster: RefusingCluster

    def __init__(self, spec: Json, pods_allowed: int = 99, *, taken: bool = False, steps: int = 20) -> None:
        super().__init__(spec, steps=steps)
        self.cluster.pods_allowed, self.cluster.taken = pods_allowed, taken

    async def settle(self) -> None:
        """Reconcile until a pass writes nothing, because each write would wake the operator through
        the watch.
        """
        for _ in range(10):
            before = self.cluster.writes
            await self.one_pass()
            if self.cluster.writes == before:
                return
        raise AssertionError("hot loop: every pass writes, and so wakes the next")

    async def settles(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.settle()
            self.advance(1)


async def test_a_quota_is_reported_once_and_the_job_starts_when_it_is_raised() -> None:
    s = Refusing({"nodes": 3}, pods_allowed=2)
    await s.settles(30)
    scheduled = conditions(s)["Scheduled"]
    assert (scheduled["status"], scheduled["reason"]) == ("False", "CreationRefused")
    assert "exceeded quota: one" in scheduled["message"]
    assert s.wake is not None
    assert s.wake >= 10
    assert [e.reason for e in s.cluster.events].count("CreationRefused") == 1
    s.cluster.pods_allowed = 99
    await s.until_phase("Complete")
    assert conditions(s)["Scheduled"]["status"] == "True"


async def test_pods_that_wait_for_refused_pods_are_reported_and_can_be_released() -> None:
    """The pods are kept, because two jobs that each released and retried could block each other
    forever.
    """
    s = Refusing({"nodes": 4, "gpusPerNode": 8}, pods_allowed=3)
    messages = []
    for _ in range(60):
        await s.settle()
        s.advance(10)
        messages.append(conditions(s)["Scheduled"]["message"])
    assert len(set(messages[2:])) == 1, "the condition does not flap"
    waiting = "; 2 of 4 pods are already waiting with 16 GPUs: to release them, set runPolicy.suspend to true"
    assert waiting in messages[-1]
    assert len(s.nodes()) == 2 and s.status["restarts"]["total"] == 0
    await s.suspended()
    s.change_spec({"runPolicy": {"suspend": False}, "nodes": 2})
    await s.until_phase("Complete")


async def test_a_refused_disruption_budget_is_reported_and_does_not_delay_replacements() -> None:
    s = Refusing({"nodes": 2}, steps=10**6)
    s.cluster.budget_denial = Refused(403, "exceeded quota: budgets")
    await s.until_phase("Running")
    messages = []
    for _ in range(30):
        await s.settle()
        s.advance(10)
        scheduled = conditions(s)["Scheduled"]
        assert (scheduled["status"], scheduled["reason"]) == ("True", "AllPlaced")
        messages.append(scheduled["message"])
    [message] = set(messages[1:])
    assert message.startswith("2 of 2 pods are scheduled; PodDisruptionBudget job is refused, so a drain can end")
    assert message.endswith("exceeded quota: budgets")
    s.force_delete("job-0-0")
    await s.until(lambda: s.status["restarts"]["total"] == 1 and s.phase == "Running")
    s.cluster.budget_denial = None
    await s.until(lambda: conditions(s)["Scheduled"]["message"] == "2 of 2 pods are scheduled", limit=120)


async def test_a_refused_disruption_budget_does_not_preserve_an_old_quota_message() -> None:
    s = Refusing({"nodes": 3, "elastic": {"minNodes": 2}}, pods_allowed=3, steps=10**6)
    s.cluster.budget_denial = Refused(403, "exceeded quota: budgets")
    await s.until_phase("Running")
    await s.settle()
    assert "Pod job-2-0: exceeded quota: one" in conditions(s)["Scheduled"]["message"]
    s.cluster.pods_allowed = 99
    await s.until(lambda: conditions(s)["Scheduled"]["status"] == "True", limit=120)
    assert "PodDisruptionBudget job is refused" in conditions(s)["Scheduled"]["message"]


async def test_training_pods_are_not_reported_as_waiting_for_refused_pods() -> None:
    s = await Refusing({"nodes": 3, "elastic": {"minNodes": 2}}, pods_allowed=3, steps=1000).begun()
    await s.settle()
    scheduled = conditions(s)["Scheduled"]
    assert scheduled["reason"] == "CreationRefused" and "already waiting" not in scheduled["message"]
    await s.one_pass()
    said = conditions(s)["Running"]["message"]
    assert said.startswith("2 of 3 nodes run together; the missing pods cannot be created (CreationRefused): Pod job-2")


async def test_a_name_that_another_object_has_taken_is_reported() -> None:
    s = Refusing({}, taken=True)
    await s.settles(5)
    scheduled = conditions(s)["Scheduled"]
    assert (scheduled["status"], scheduled["reason"]) == ("False", "NameTaken")
    assert scheduled["message"].startswith("Service job: an object with this name is there")
    assert [e.reason for e in s.cluster.events].count("NameTaken") == 1
    s.cluster.taken = False
    await s.until_phase("Complete")


async def test_a_budget_lowered_below_the_used_restarts_fails_the_job() -> None:
    s = Simulation({}, steps=1000)
    for number in (1, 2):
        await s.until_phase("Running")
        # The failures are in different pods, because a pod that fails twice is replaced.
        assert s.worker_fails(s.nodes()[number - 1].name)
        await s.until(lambda number=number: s.status["restarts"]["counted"] == number)  # type: ignore[misc]
    s.change_spec({"recovery": {"maxRestarts": 1}})
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "RestartBudgetSpent"
    assert failed["message"].startswith("WorkerFailed: ValueError: lunch (rank")
    assert "; 2 failures, but recovery.maxRestarts is 1)" in failed["message"]


async def test_a_job_that_finished_unseen_before_its_deadline_completes() -> None:
    s = await Simulation({"runPolicy": {"activeDeadlineSeconds": 60}}, steps=10).begun()
    for _ in range(100):
        s.advance(1)
    assert (EPOCH.timestamp() + s.now) > EPOCH.timestamp() + 60
    await s.until_phase("Complete")


async def finished(*, seen: bool) -> Simulation:
    """Start a job that has taken its last step. The operator has not reconciled since (`seen` is
    false), or its last pod ends slowly.
    """
    s = await Simulation({"runPolicy": {"activeDeadlineSeconds": 600}}, steps=5).begun()
    last = s.pods["job-1-0"].launcher
    assert last is not None
    leave = last.leave
    last.leave = lambda *how: s.clock.later(20 if seen else 0, lambda: leave(*how))  # type: ignore[method-assign]
    while not s.pods["job-0-0"].ended:
        s.advance(0.1)
    s.advance(0 if seen else 60)
    if seen:
        await s.one_pass()
        assert s.phase == "Running"
    return s


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("change", ["env", "nodes", "spares", "suspend", "deadline", "key"])
async def test_a_job_that_has_taken_its_last_step_does_not_restart(change: str, seen: bool) -> None:
    s = await finished(seen=seen)
    changes: dict[str, Json] = {
        "env": {"env": [{"name": "LR", "value": "1"}]},
        "nodes": {"nodes": 3},
        "spares": {"spares": 1},
        "suspend": {"runPolicy": {"suspend": True}},
        "deadline": {"runPolicy": {"activeDeadlineSeconds": 2}},
        "key": {},
    }
    s.change_spec(changes[change])
    if change == "key":
        s.cluster.platform = Platform(operator_key=b"another")
    await s.until(lambda: s.phase in ("Complete", "Failed", "Suspended"))
    assert s.phase == "Complete"
    assert conditions(s)["Complete"]["message"] == "all 2 nodes have finished"
    assert s.invariants.names == {"job-coordinator-0", "job-0-0", "job-1-0"}
    assert s.status["restarts"]["display"] == "0/10"


@pytest.mark.parametrize("seen", [True, False])
async def test_a_finished_pod_that_is_removed_unseen_is_counted(seen: bool) -> None:
    s = await finished(seen=seen)
    s.cluster.restart()
    s.store.delete("Pod", "job-0-0", grace=0)
    await s.until_phase("Complete", limit=30)
    assert conditions(s)["Complete"]["message"] == "all 2 nodes have finished"
    assert s.status["nodes"]["display"] == "2/2"


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_job_that_takes_its_last_step_during_its_suspension_completes(mode: str, elastic: bool) -> None:
    size = {"nodes": 3, "elastic": {"minNodes": 2}} if elastic else {}
    s = Simulation({"recovery": {"mode": mode}, **size}, steps=8)
    s.machines.capacity = 2
    await s.until_phase("Running")
    await s.until(lambda: s.training.made == 7)
    for pod in s.running():
        assert pod.launcher is not None
        pod.launcher.terminate = lambda saves: None  # type: ignore[method-assign]
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.until_phase("Complete", limit=30)
    assert conditions(s)["Complete"]["message"] == f"all {'' if elastic else '2 '}nodes have finished"
    assert conditions(s)["Suspended"]["status"] == "False"
    await s.until(lambda: s.wake is None, limit=30)


async def test_a_job_that_times_out_before_its_start_reports_the_refusal() -> None:
    s = Refusing({"runPolicy": {"activeDeadlineSeconds": 5}}, pods_allowed=0)
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "DeadlineExceeded"
    assert "at the deadline, the condition Scheduled was False (CreationRefused): " in failed["message"]
    assert "exceeded quota: one" in failed["message"]


async def test_after_a_resume_no_condition_mentions_the_suspension() -> None:
    s = await Simulation({}, steps=1000).begun()
    s.force_delete(next(p.name for p in s.nodes() if p.running))
    await s.until_phase("Restarting")
    await s.until_phase("Running")
    await s.suspended()
    assert {c["reason"] for c in conditions(s).values()} == {"Suspended"}
    await s.resumed()
    assert not [c for c in conditions(s).values() if "suspended" in c["message"] or c["reason"] == "Suspended"]


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_job_resumed_in_another_mode_reports_nothing_about_the_earlier_mode(mode: str) -> None:
    s = Simulation({"recovery": {"mode": "Fast"}}, steps=10**6)
    await s.until(lambda: "FastRecovery" in conditions(s))
    await s.suspended()
    assert "FastRecovery" not in conditions(s), "the condition about the pods is removed with them"
    s.change_spec({"runPolicy": {"suspend": False}, "recovery": {"mode": mode}})
    await s.one_pass()
    assert "FastRecovery" not in conditions(s)
    await s.until_phase("Running")
    await s.one_pass()
    assert ("FastRecovery" in conditions(s)) == (mode == "Fast")


async def test_a_job_that_disables_isolation_has_no_condition_about_it() -> None:
    """The message of the condition advises this change."""
    s = await Simulation({"podTemplate": {"spec": {"hostNetwork": True}}}, steps=10**6).begun()
    assert "set spec.network.isolate to false" in conditions(s)["Isolated"]["message"]
    s.change_spec({"runPolicy": {"suspend": True}, "network": {"isolate": False}})
    await s.until(lambda: s.phase == "Suspended" and not s.pods)
    await s.resumed()
    assert "Isolated" not in conditions(s)


async def test_an_admission_policy_that_denies_a_replacement_does_not_fail_the_job() -> None:
    s = await Refusing({}, steps=200).begun()
    s.cluster.denial = Refused(400, 'admission webhook "images" denied the request: the registry does not answer')
    s.force_delete("job-1-0")
    await s.settles(60)
    scheduled = conditions(s)["Scheduled"]
    assert (scheduled["reason"], s.phase) == ("CreationRefused", "Restarting")
    assert 'admission webhook "images" denied the request' in scheduled["message"]
    s.cluster.denial = None
    await s.until_phase("Complete")


async def test_a_faulty_pod_template_does_not_fail_a_job_that_has_run() -> None:
    s = await Simulation({}, steps=200).begun()
    pods = {p.name for p in s.nodes()}
    s.change_spec({"podTemplate": {"spec": {"hostname": "mine"}}})
    await s.passes(10)
    assert (s.phase, {p.name for p in s.nodes()}) == ("Running", pods)
    assert conditions(s)["Scheduled"]["reason"] == "InvalidPodTemplate"
    assert "spec.podTemplate.spec.hostname" in conditions(s)["Scheduled"]["message"]
    s.force_delete("job-1-0")
    await s.until_phase("Restarting")
    s.advance(20)
    await s.one_pass()
    assert s.phase == "Restarting", "no pod can be built"
    s.change_spec({"podTemplate": {}})
    await s.until_phase("Complete")


async def test_a_pod_template_that_became_faulty_while_suspended_waits_for_repair() -> None:
    s = await Simulation({}, steps=200).begun()
    s.change_spec({"runPolicy": {"suspend": True}, "podTemplate": {"spec": {"hostname": "mine"}}})
    await s.until(lambda: s.phase == "Suspended" and not s.pods)
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.passes(10)
    assert (s.phase, s.pods) == ("Pending", {})
    assert conditions(s)["Scheduled"]["reason"] == "InvalidPodTemplate"
    s.change_spec({"podTemplate": {}})
    await s.until_phase("Complete")


async def test_a_faulty_pod_template_fails_a_new_job() -> None:
    s = Simulation({"podTemplate": {"spec": {"hostname": "mine"}}})
    await s.until_phase("Failed")
    assert conditions(s)["Failed"]["reason"] == "InvalidPodTemplate"


class WithoutPolicies(MemoryCluster):
    """A cluster that refuses NetworkPolicies, as the API server does if the operator may not create
    them.
    """

    status: int = 403
    policies_asked = 0

    async def create(self, job: DDPJob, manifest: Json) -> None:
        if manifest["kind"] == "NetworkPolicy":
            self.policies_asked += 1
            if self.status:
                raise Refused(self.status, "networkpolicies is forbidden")
        await super().create(job, manifest)


class Unisolated(Simulation):
    cluster_class = WithoutPolicies
    cluster: WithoutPolicies


@pytest.mark.parametrize("status", [403, 422, 500])
async def test_a_refused_network_policy_is_reported_and_the_job_runs(status: int) -> None:
    s = Unisolated({})
    s.cluster.platform = replace(s.cluster.platform, operator_peer={"podSelector": {}})
    s.cluster.status = status
    await s.until_phase("Running")
    await s.passes(5)
    isolated = conditions(s)["Isolated"]
    assert (isolated["status"], isolated["reason"]) == ("False", "PolicyRefused")
    assert "networkpolicies is forbidden" in isolated["message"]
    assert [e.reason for e in s.cluster.events].count("PolicyRefused") == 1
    assert s.cluster.policies_asked <= 2, "retried with new pods, not at every reconcile"
    s.cluster.status = 0
    s.store.delete("Pod", "job-0-0", grace=0)
    s.cluster.changed()
    await s.until_phase("Complete")
    assert conditions(s)["Isolated"]["status"] == "True" and len(list(s.store.all("NetworkPolicy"))) == 1


async def test_pods_on_the_hosts_network_are_reported_as_not_isolated() -> None:
    s = Simulation({"podTemplate": {"spec": {"hostNetwork": True}}})
    await s.until(lambda: s.phase == "Running")
    isolated = conditions(s)["Isolated"]
    assert (isolated["status"], isolated["reason"]) == ("False", "HostNetwork")


async def test_an_isolated_job_has_its_policy_before_its_pods() -> None:
    s = Unisolated({})
    s.cluster.platform = replace(s.cluster.platform, operator_peer={"podSelector": {}})
    s.cluster.status = 0
    made: list[str] = []
    s.store.watchers.append(lambda kind, what, body: made.append(kind) if what == "ADDED" else None)
    await s.until_phase("Complete")
    assert made.index("NetworkPolicy") < made.index("Pod") and made.index("Secret") < made.index("Pod")
    assert "Isolated" not in conditions(s) and s.cluster.policies_asked == 1


async def test_a_running_job_adds_metrics_peers_and_keeps_the_earlier_ones() -> None:
    s = Unisolated({})
    s.cluster.platform = replace(s.cluster.platform, operator_peer={"podSelector": {}})
    s.cluster.status = 0
    await s.until_phase("Running")
    pods = set(s.pods)
    s.cluster.platform = replace(s.cluster.platform, metrics_peers=({"podSelector": {"matchLabels": {"a": "b"}}},))
    await s.passes(5)
    assert len(list(s.store.all("NetworkPolicy"))) == 2 and set(s.pods) == pods


class Restricted(MemoryCluster):
    """A namespace that forbids root, and the fields of `forbids`."""

    forbids = ""

    async def create(self, job: DDPJob, manifest: Json) -> None:
        if manifest["kind"] == "Pod":
            root = not manifest["spec"].get("securityContext", {}).get("runAsNonRoot")
            faults = [self.forbids] * bool(self.forbids) + ["runAsNonRoot != true"] * root
            if faults:
                raise Refused(403, f'violates PodSecurity "restricted:latest": {", ".join(faults)}')
        await super().create(job, manifest)


class InRestrictedNamespace(Simulation):
    cluster_class = Restricted
    cluster: Restricted


async def test_in_a_namespace_that_forbids_root_pods_run_as_non_root() -> None:
    s = InRestrictedNamespace({})
    await s.until_phase("Complete")
    assert all(pod["spec"]["securityContext"]["runAsNonRoot"] for pod in s.store.all("Pod"))


async def test_other_fields_that_a_namespace_forbids_are_reported_by_name() -> None:
    s = InRestrictedNamespace({})
    s.cluster.forbids = "hostPort"
    await s.passes(3)
    message = conditions(s)["Scheduled"]["message"]
    assert "the securityContext of spec.podTemplate.spec" in message and "remove hostNetwork and hostPort" in message
    assert not list(s.store.all("Pod"))


# --- the claim that a job creates
# ------------------------------------------------------------------------------

CLAIM = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
FIELD = "spec.storage.checkpoints.claimTemplate"


def storing(when_deleted: str = "Retain") -> Json:
    return {"storage": {"checkpoints": {"claimTemplate": {**CLAIM, "whenDeleted": when_deleted}}}}


async def test_a_storage_quota_is_reported_with_the_field_and_does_not_count() -> None:
    s = Refusing(storing())
    s.cluster.claim_denial = Refused(403, "exceeded quota: storage, requested: requests.storage=1Gi")
    await s.settles(30)
    scheduled = conditions(s)["Scheduled"]
    assert (scheduled["status"], scheduled["reason"]) == ("False", "CreationRefused")
    assert f"PersistentVolumeClaim job-checkpoints ({FIELD}): exceeded quota" in scheduled["message"]
    assert not s.pods and [e.reason for e in s.cluster.events].count("CreationRefused") == 1
    s.cluster.claim_denial = None
    await s.until_phase("Complete")
    assert s.status["restarts"]["total"] == 0


async def test_a_claim_that_is_refused_for_good_fails_the_job_with_the_field() -> None:
    s = Refusing(storing())
    s.cluster.claim_denial = Refused(422, "spec.dataSource.name: Invalid value")
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "InvalidClaim" and FIELD in failed["message"] and not s.pods
    assert s.status["restarts"]["total"] == 0


@pytest.mark.parametrize("when_deleted", ["Retain", "Delete"])
async def test_the_spec_determines_whether_a_claim_is_kept_when_its_job_is_deleted(when_deleted: str) -> None:
    s = Refusing(storing(when_deleted))
    await s.until_phase("Complete")
    [claim] = s.store.all("PersistentVolumeClaim")
    assert claim["metadata"]["labels"]["ddpjob.io/job-uid"] == s.job_body["metadata"]["uid"]
    s.store.remove("DDPJob", s.job_body)
    assert (s.store.find("PersistentVolumeClaim", "job-checkpoints") is not None) == (when_deleted == "Retain")


async def test_a_job_scaled_to_more_nodes_than_its_claim_can_serve_keeps_training() -> None:
    s = Simulation({"nodes": 1, "storage": {"checkpoints": {"claimName": "disk"}}}, steps=10**6)
    s.store.create("PersistentVolumeClaim", {"metadata": {"name": "disk"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    await s.until_phase("Running")
    s.change_spec({"nodes": 2})
    await s.passes(30)
    scheduled = conditions(s)["Scheduled"]
    assert scheduled["reason"] == "VolumeSingleNode" and "but spec.nodes is 2" in scheduled["message"]
    assert [p.name for p in s.nodes()] == ["job-0-0"] and s.status["restarts"]["total"] == 0
    assert "the missing pods cannot be created (VolumeSingleNode)" in conditions(s)["Running"]["message"]
    s.change_spec({"nodes": 1})
    await s.until(lambda: conditions(s)["Running"]["message"] == "1 node trains")


async def test_a_claim_kept_from_an_earlier_job_is_reused() -> None:
    s, mark = Refusing(storing()), "ddpjob.io/claim-template"
    kept = build_claim(DDPJob.read(s.job_body))
    kept["metadata"]["labels"]["ddpjob.io/job-uid"] = "earlier"
    other = {**kept, "metadata": {**kept["metadata"], "annotations": {mark: "another"}}}
    s.store.create("PersistentVolumeClaim", other)
    await s.settle()
    assert "created from a different claimTemplate" in conditions(s)["Scheduled"]["message"] and not s.pods
    s.store.remove("PersistentVolumeClaim", s.store.get("PersistentVolumeClaim", "job-checkpoints"))
    s.store.create("PersistentVolumeClaim", kept)
    await s.until_phase("Complete")
    [claim] = s.store.all("PersistentVolumeClaim")
    assert claim["metadata"]["labels"]["ddpjob.io/job-uid"] == "earlier", "the claim is not changed"


async def test_a_claim_owned_by_another_object_is_never_used() -> None:
    s = Refusing(storing())
    theirs = {"metadata": {"name": "job-checkpoints"}, "spec": CLAIM["spec"]}
    s.store.create("PersistentVolumeClaim", theirs)
    await s.settles(20)
    scheduled = conditions(s)["Scheduled"]
    assert scheduled["reason"] == "ClaimTaken" and FIELD in scheduled["message"]
    assert not s.pods and s.store.find("Service", "job") is None, "nothing is created"
    s.store.remove("PersistentVolumeClaim", s.store.get("PersistentVolumeClaim", "job-checkpoints"))
    await s.until_phase("Complete")


# --- storage that changes while the job is suspended ------------------------------------------------------------


async def resumed_with(s: Simulation, storage: Json) -> None:
    await s.suspended()
    s.spec["storage"] = {}
    s.change_spec({**storage, "runPolicy": {"suspend": False}})
    await s.settles(20)


async def until_trained(s: Simulation) -> None:
    await s.until_phase("Running")
    while not s.status.get("trained"):
        await s.one_pass()
        s.advance(10)


@pytest.mark.parametrize("made_again", [False, True])
async def test_a_claim_is_kept_if_the_spec_is_changed_to_keep_it(made_again: bool) -> None:
    s = await Refusing(storing("Delete"), steps=10**6).begun()
    named = {"storage": {"checkpoints": {"claimName": "job-checkpoints"}}}
    await resumed_with(s, named)
    if made_again:
        await resumed_with(s, storing("Retain"))
    scheduled = conditions(s)["Scheduled"]
    assert scheduled["reason"] == "ClaimTaken" and "kubectl patch pvc job-checkpoints" in scheduled["message"]
    assert not s.pods
    claim = s.store.get("PersistentVolumeClaim", "job-checkpoints")
    claim["metadata"]["ownerReferences"] = []
    if made_again:
        await s.until(lambda: "created by this job from a different" in conditions(s)["Scheduled"]["message"])
        await resumed_with(s, named)
    await s.until_phase("Running")
    s.store.remove("DDPJob", s.job_body)
    assert s.store.find("PersistentVolumeClaim", "job-checkpoints") is not None


async def test_a_job_that_has_trained_without_a_claim_may_get_one() -> None:
    s = Refusing({}, steps=10**6)
    await until_trained(s)
    await resumed_with(s, storing())
    await s.until_phase("Running")
    assert s.store.find("PersistentVolumeClaim", "job-checkpoints") is not None and s.status["claimMade"]


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
async def test_a_lost_claim_of_a_job_that_trained_is_not_recreated(mode: str) -> None:
    s = Refusing({**storing(), "recovery": {"mode": mode}}, steps=10**6)
    await until_trained(s)
    claim = s.store.get("PersistentVolumeClaim", "job-checkpoints")
    s.store.remove("PersistentVolumeClaim", claim)
    s.force_delete("job-0-0")
    await s.until(lambda: conditions(s)["Scheduled"]["reason"] == "ClaimNotFound")
    await s.passes(60)
    assert s.store.find("PersistentVolumeClaim", "job-checkpoints") is None
    assert not {p.name for p in s.nodes()} - {"job-1-0"}, "no pod is created, because it would train from the start"
    s.store.create("PersistentVolumeClaim", claim)  # restored from a backup
    await s.until_phase("Running")
