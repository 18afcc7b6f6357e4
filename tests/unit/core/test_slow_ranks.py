"""Which slow ranks are replaced by a spare, and why the others stay."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from ddpjob.api.job_status import AvoidedNode, JobStatus, Restart, SlotState
from ddpjob.core.failures.slow_ranks import APART, LASTS, find_next_move, is_named, judge_slow_ranks
from ddpjob.core.view import View
from ddpjob.core.world import World
from ddpjob_runtime.protocol import CoordinatorState, Member, MemberState, Report
from worlds import NOW, later, running

LONG = LASTS.total_seconds()
SLOW = {"slowdown": 2.0, "cost": 0.5}


def seen(
    slow: dict[int, dict[str, Any]],
    *,
    at: float = LONG,
    since: float = 0.0,
    nodes: int = 4,
    spares: int = 1,
    state: CoordinatorState = CoordinatorState.RUNNING,
    spec: dict[str, Any] | None = None,
    **status: Any,
) -> View:
    """Return the view at time `at` of a group whose ranks `slow` have been reported since time
    `since`. Spares have the last indices.
    """
    job, pods = running(nodes + spares, **(spec or {}))
    job = replace(job, spec=replace(job.spec, nodes=nodes, spares=spares))
    procs = job.spec.procs_per_node
    members = [Member(pods[rank].name, MemberState.RUNNING, rank=rank, index=rank) for rank in range(nodes)]
    members += [Member(pod.name, MemberState.READY, index=nodes) for pod in pods[nodes : nodes + spares]]
    reported = [{"rank": rank, **figures} for rank, figures in slow.items()]
    figures = {"stragglers": reported}
    report = Report(0, state, nodes, nodes, (1.0, 60.0), progress=figures, members=tuple(members), world=nodes)
    began = f"{later(since):%Y-%m-%dT%H:%M:%SZ}"
    shown = [{"rank": rank, "pod": pods[rank // procs].name, "slowdown": 2.0, "since": began} for rank in slow]
    full = replace(job.status, progress={"stragglers": shown}, **status)
    return View(replace(job, status=full), full, World(pods=pods, report=report), later(at))


def moved(view: View) -> list[int]:
    return [verdict.index for verdict in judge_slow_ranks(view) if not verdict.why]


def why(view: View) -> str:
    (verdict,) = judge_slow_ranks(view)
    return verdict.why


def restarts(*moves: tuple[int, str, float], reason: str = "SlowRank") -> dict[str, Any]:
    recent = tuple(
        Restart(time=later(at), pod="p", reason=reason, message="", counted=False, node=node, rank=rank, round=number)
        for number, (rank, node, at) in enumerate(moves)
    )
    return {"restarts": replace(JobStatus().restarts, recent=recent)}


def test_a_spare_takes_over_from_a_rank_that_stays_slow() -> None:
    early = seen({2: SLOW}, at=LONG - 1)
    assert judge_slow_ranks(early) == [] and find_next_move(early) == NOW + LASTS and is_named(early)
    (verdict,) = judge_slow_ranks(seen({2: SLOW}))
    assert (verdict.index, verdict.why, verdict.end.cause, verdict.end.rank) == (2, "", "SlowRank", 2)
    assert verdict.end.message.startswith("rank 2's own work in a step takes 2.0 times as long as the median rank's")


@pytest.mark.parametrize(
    "figures", [{"slowdown": 1.2, "cost": 0.5}, {"slowdown": 9.0, "cost": 0.05}], ids=["hardly slow", "hardly costs"]
)
def test_a_rank_that_hardly_slows_down_the_steps_is_left_alone(figures: dict[str, float]) -> None:
    view = seen({2: figures})
    assert judge_slow_ranks(view) == [] and find_next_move(view) is None and not is_named(view)


def test_slow_ranks_are_only_reported_if_the_script_reports_no_costs() -> None:
    assert "reported but not moved" in why(seen({2: {"slowdown": 2.0}}))
    assert "reported but not moved" in why(seen({2: SLOW}, spec={"script": None, "command": ["torchrun", "train.py"]}))


def test_pods_move_one_at_a_time_and_not_if_many_are_slow() -> None:
    two = seen({2: SLOW, 3: {"slowdown": 3.0, "cost": 0.6}}, nodes=8)
    assert moved(two) == [3], "the slowest pod moves first"
    assert [verdict.why for verdict in judge_slow_ranks(two)][1:] == ["one pod is moved at a time"]
    few = seen({2: SLOW, 3: SLOW}, nodes=4)
    assert moved(few) == [] and "more than a quarter" in judge_slow_ranks(few)[0].why


def test_slow_ranks_of_one_pod_count_as_one_pod() -> None:
    assert moved(seen({4: SLOW, 5: SLOW}, spec={"procsPerNode": 2})) == [2]


def test_without_a_spare_on_another_node_the_rank_stays() -> None:
    assert "no spare is ready" in why(seen({2: SLOW}, spares=0))
    view = seen({2: SLOW})
    near = tuple(replace(pod, host=view.pods[2].host) if pod.index == 4 else pod for pod in view.world.pods)  # type: ignore[union-attr]
    assert "no spare is ready" in why(replace(view, world=replace(view.world, pods=near)))
    assert moved(replace(view, world=replace(view.world, pods=near, one_host=True))) == [2]


def test_no_rank_moves_and_no_node_is_left_twice_within_an_hour() -> None:
    ago = -APART.total_seconds()
    assert "the same rank" in why(seen({2: SLOW}, **restarts((2, "n9", ago))))
    assert "the job left this Kubernetes node" in why(seen({2: SLOW}, **restarts((1, "n2", ago))))
    left = AvoidedNode(node="n2", until=later(999), reason="SlowRank occurred there within an hour")
    assert "the job left this Kubernetes node" in why(seen({2: SLOW}, avoided_nodes=(left,)))
    assert moved(seen({2: SLOW}, **restarts((2, "n2", -3600)))) == [2]
    three = restarts(*((0, f"n{number}", ago) for number in (7, 8, 9)))
    assert "moved 3 times" in why(seen({2: SLOW}, **three))
    again = restarts(*((0, f"n{n}", -1) for n in (7, 8, 9)), reason="NodeUnhealthy")
    assert "moved 3 times" in why(seen({2: SLOW}, **again))


def test_there_are_minutes_between_two_moves() -> None:
    view = seen({2: SLOW}, **restarts((1, "n9", 0.0)))
    assert judge_slow_ranks(view) == [] and find_next_move(view) == NOW + APART
    assert moved(replace(view, now=NOW + APART)) == [2]


def test_no_rank_moves_while_the_group_does_not_train_or_is_finishing() -> None:
    assert judge_slow_ranks(seen({2: SLOW}, state=CoordinatorState.RESTARTING)) == []
    view = seen({2: SLOW})
    slots = (replace(view.status.slots[0], state=SlotState.SUCCEEDED), *view.status.slots[1:])
    assert judge_slow_ranks(view.with_status(replace(view.status, slots=slots))) == []


def test_the_coordinators_pod_is_not_moved() -> None:
    master = {"rendezvous": {"placement": "Master"}}
    assert "runs the coordinator" in why(seen({0: SLOW}, spec=master))
    assert moved(seen({1: SLOW}, spec=master)) == [1]


def test_a_slow_rank_without_a_start_time_is_not_moved() -> None:
    view = seen({2: SLOW}, at=3600)
    unknown = {"stragglers": [{"rank": 2, "pod": "job-1-0", "since": "2026-01-01T00:00:00Z"}, {"rank": 2}]}
    assert judge_slow_ranks(view.with_status(replace(view.status, progress=unknown))) == []
    assert timedelta(0) < LASTS
