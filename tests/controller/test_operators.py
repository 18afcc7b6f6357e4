"""Complete operators against the fake API server: the simulation's stories, with faults of HTTP.

They check for KubernetesCluster, Rest, the caches, ReportWatch, the Lease and the queue what the
simulation checks in memory.
"""

from __future__ import annotations

import asyncio

import pytest
from ddpjob.api.job_status import ConditionType, JobStatus
from prometheus_client import REGISTRY

from .operators import HttpStory, played
from .virtual_loop import run, virtual


@virtual
async def test_a_job_completes_and_only_one_of_two_replicas_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(1, monkeypatch) as story:
        story.server.faults = lambda method, path: None
        story.s.training.steps = 10
        async with asyncio.timeout(300):
            while story.s.phase != "Complete":
                await asyncio.sleep(1)
                story.replicas.check()
        [acting] = story.replicas.acting.values()
        renewing = [r for r in story.replicas.rests[acting] if any("leases/ddpjob-operator" in p for p in r.paths)]
        assert [all("leases" in path for path in rest.paths) for rest in renewing] == [True], (
            "renewals use their own connections"
        )
        writes = [what for what in story.server.acted if what[0] == "POST" and what[1].endswith("/pods")]
        assert len(writes) == len(set(story.s.invariants.names)), "every pod was created once"


@pytest.mark.parametrize("seed", range(6))
@virtual
async def test_all_invariants_hold_under_random_http_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played(seed, monkeypatch) as story:
        await story.run()


@pytest.mark.parametrize("seed", range(2))
def test_metrics_count_each_event_once_under_any_failure(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of an operator that runs throughout equal the counts in the final status."""

    def counted() -> dict[str, float]:
        names = ("ddpjob_jobs_created_total", "ddpjob_jobs_completed_total", "ddpjob_jobs_failed_total")
        totals = dict.fromkeys((*names, "ddpjob_restarts_total"), 0.0)
        for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
            if sample.name in totals:
                totals[sample.name] += sample.value
        return totals

    async def break_watches(story: HttpStory) -> None:
        if story.random.random() < 0.1:
            story.server.break_watches()

    async def main() -> None:
        before = counted()
        monkeypatch.setattr(HttpStory, "_harass", break_watches)
        async with played(seed, monkeypatch, replicas=1) as story:
            await story.run()
            status = JobStatus.read(story.s.status)
            changes = {name: value - before[name] for name, value in counted().items()}
        assert changes == {
            "ddpjob_jobs_created_total": 1,
            "ddpjob_jobs_completed_total": status.holds(ConditionType.COMPLETE),
            "ddpjob_jobs_failed_total": status.holds(ConditionType.FAILED),
            "ddpjob_restarts_total": status.restarts.total,
        }

    run(main())
