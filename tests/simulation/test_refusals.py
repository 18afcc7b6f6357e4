"""What the API server refuses: told once and truthfully, tried again without a storm, gone when the reason is."""

from __future__ import annotations

from ddpjob.api.types import DDPJob, Json
from ddpjob.engine.ports import NameTaken, Refused
from simulated import EPOCH, Simulation, conditions


class Refusing(Simulation):
    """Refuses pods over a quota, or a service whose name another has; every pass is made as often as its own writes wake it."""

    def __init__(self, spec: Json, pods_allowed: int = 99, *, taken: bool = False) -> None:
        super().__init__(spec)
        self.pods_allowed, self.taken, self.writes = pods_allowed, taken, 0

    async def create(self, job: DDPJob, manifest: Json) -> None:
        if manifest["kind"] == "Service" and self.taken:
            raise NameTaken("an object of this name is there and does not belong to this job")
        if manifest["kind"] == "Pod" and len(self.pods) >= self.pods_allowed:
            raise Refused(403, "exceeded quota: one")
        await super().create(job, manifest)

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        self.writes += 1
        return await super().write_status(job, status)

    async def settle(self) -> None:
        """Passes until one writes nothing, as the watch brings them about."""
        for _ in range(10):
            before = self.writes
            await self.one_pass()
            if self.writes == before:
                return
        raise AssertionError("every pass writes, and so wakes the next: a hot loop")


async def test_a_quota_is_told_once_and_the_job_starts_when_it_is_raised() -> None:
    s = Refusing({"nodes": 3}, pods_allowed=2)
    for _ in range(30):
        await s.settle()
        s.advance(1)
    scheduled = conditions(s)["Scheduled"]
    assert (scheduled["status"], scheduled["reason"]) == ("False", "CreationRefused")
    assert "exceeded quota: one" in scheduled["message"]
    assert s.wake is not None
    assert s.wake >= 10
    assert [e.reason for e in s.events].count("CreationRefused") == 1
    s.pods_allowed = 99
    await s.until_phase("Complete")
    assert conditions(s)["Scheduled"]["status"] == "True"


async def test_a_name_that_another_has_is_told() -> None:
    s = Refusing({}, taken=True)
    for _ in range(5):
        await s.settle()
        s.advance(1)
    scheduled = conditions(s)["Scheduled"]
    assert (scheduled["status"], scheduled["reason"]) == ("False", "NameTaken")
    assert scheduled["message"].startswith("Service job: an object of this name is there")
    assert [e.reason for e in s.events].count("NameTaken") == 1
    s.taken = False
    await s.until_phase("Complete")


async def test_a_budget_that_is_lowered_below_what_is_spent_fails_the_job() -> None:
    s = Simulation({}, steps=1000)
    for _ in range(2):
        await s.until_phase("Running")
        await s.until(lambda: any(p.running and s.worker_fails(p.name) for p in s._nodes()))
        await s.until_phase("Restarting")
    s.change_spec({"recovery": {"maxRestarts": 1}})
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "RestartBudgetSpent"
    assert failed["message"].startswith("2 failures, recovery.maxRestarts is 1; the last one: WorkerFailed: rank")


async def test_a_job_that_finished_before_its_deadline_is_complete_although_nobody_looked() -> None:
    s = Simulation({"runPolicy": {"activeDeadlineSeconds": 60}}, steps=10)
    await s.until_phase("Running")
    for _ in range(100):
        s.advance(1)
    assert (EPOCH.timestamp() + s.now) > EPOCH.timestamp() + 60
    await s.until_phase("Complete")


async def test_a_job_whose_time_is_over_before_it_began_says_what_was_missing() -> None:
    s = Refusing({"runPolicy": {"activeDeadlineSeconds": 5}}, pods_allowed=0)
    await s.until_phase("Failed")
    failed = conditions(s)["Failed"]
    assert failed["reason"] == "DeadlineExceeded"
    assert "when it was over: CreationRefused" in failed["message"]
    assert "exceeded quota: one" in failed["message"]


async def test_after_a_resume_no_condition_speaks_of_the_suspension() -> None:
    s = Simulation({}, steps=1000)
    await s.until_phase("Running")
    s.force_delete(next(p.name for p in s._nodes() if p.running))
    await s.until_phase("Restarting")
    await s.until_phase("Running")
    s.change_spec({"runPolicy": {"suspend": True}})
    await s.until(lambda: s.phase == "Suspended" and not s.pods)
    assert {c["reason"] for c in conditions(s).values()} == {"Suspended"}
    s.change_spec({"runPolicy": {"suspend": False}})
    await s.until_phase("Running")
    assert not [c for c in conditions(s).values() if "suspended" in c["message"] or c["reason"] == "Suspended"]
