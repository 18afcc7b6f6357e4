"""A spare takes over from a slow rank, which does not count as a restart. Without a spare, the rank
is only reported.
"""

from __future__ import annotations

from typing import Any

import pytest

from .simulated import Simulation, conditions
from .test_recovery_in_simulation import FAST, passes, reasons, running

SLOW = {"slowdown": 2.0, "cost": 0.5}


async def training(spares: int, **spec: Any) -> Simulation:
    s = Simulation({**FAST, "nodes": 4, "spares": spares, **spec}, steps=10**6)
    shown = "4/4" + (f" +{spares}" if spares else "")
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == shown)
    await passes(s, 5)
    return s


@pytest.mark.parametrize("mode", ["Fast", "Standard"])
async def test_a_spare_takes_over_from_a_slow_rank_without_counting(mode: str) -> None:
    s = await training(1, recovery={"mode": mode})
    node, round_ = s.pods["job-2-0"].node, s.status["round"]
    s.training.slow_pods = {"job-2-0": SLOW}
    await passes(s, 25)
    assert reasons(s) == [] and s.status["progress"]["stragglers"][0]["rank"] == 2, (
        "a report counts only if it persists"
    )
    await passes(s, 15)
    await s.until_phase("Running")
    await passes(s, 5)
    assert reasons(s) == [("SlowRank", False)] and s.status["restarts"]["counted"] == 0
    (moved,) = s.status["restarts"]["recent"]
    assert moved["rank"] == 2 and moved["node"] == node and "2.0 times as long as the median rank" in moved["message"]
    assert "job-2-0" not in s.pods and s.status["round"] == round_ + 1
    assert [entry["node"] for entry in s.status["avoidedNodes"]] == [node]
    assert "RanksKeepPace" not in conditions(s)
    training_pods = {member.pod.name for member in s.training.rounds[max(s.training.rounds)].working.values()}
    assert training_pods == {"job-0-0", "job-1-0", "job-3-0", "job-4-0"}, "the spare, not a new pod"


async def test_without_a_spare_a_slow_rank_is_reported_until_it_recovers() -> None:
    s = await training(0)
    s.training.slow_pods = {"job-1-0": SLOW}
    await passes(s, 40)
    shown = conditions(s)["RanksKeepPace"]
    assert (shown["status"], shown["reason"]) == ("False", "SlowRank")
    place = f"rank 1 (pod job-1-0 on Kubernetes node {s.pods['job-1-0'].node}) has been clearly slower"
    assert place in shown["message"] and "no spare is ready" in shown["message"]
    s.training.slow_pods = {"job-1-0": {**SLOW, "cost": 0.01}}
    await passes(s, 70)
    assert conditions(s)["RanksKeepPace"]["status"] == "True" and reasons(s) == []
    assert len(running(s)) == 4


async def test_slow_ranks_are_only_reported_if_the_job_requests_it() -> None:
    s = await training(1, recovery={"mode": "Fast", "slowRanks": "Report"})
    s.training.slow_pods = {"job-1-0": SLOW}
    await passes(s, 40)
    assert "recovery.slowRanks is Report" in conditions(s)["RanksKeepPace"]["message"] and reasons(s) == []
    s.change_spec({"recovery": {"mode": "Fast", "slowRanks": "Move"}})
    await passes(s, 10)
    assert reasons(s) == [("SlowRank", False)], "it can be changed while the job runs"


async def test_a_rank_that_is_slow_on_every_host_moves_once() -> None:
    s = await training(1)
    s.training.slow_pods = {f"job-{index}-{attempt}": SLOW for index in (3, 4) for attempt in range(9)}
    await passes(s, 60)
    assert reasons(s) == [("SlowRank", False)]
    await passes(s, 320, step=10)
    assert reasons(s) == [("SlowRank", False)]
    assert "the same rank was slow in a different pod" in conditions(s)["RanksKeepPace"]["message"]
