"""The order of ranks by spec.rankOrder: what the operator sends to the coordinator and shows in the
status.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType
from ddpjob.core.decide import decide
from ddpjob.core.decision import Decision, NotifyCoordinator
from ddpjob.core.rank_order import Place, in_order, place_of
from ddpjob.core.world import HostView, PodView, World
from ddpjob_runtime.coordinator.formation import RankOrder
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.protocol import MAX_PODS, CoordinatorState, MemberState, Report, order_mark
from worlds import later, report, running

BLOCK, RACK = "example.com/block", "example.com/rack"


def host(name: str, **labels: str) -> HostView:
    named = {f"example.com/{label}": value for label, value in labels.items()}
    return HostView(name=name, ready=True, since=None, out_of_service=False, labels=named)


# --- the order itself


@pytest.mark.parametrize(
    ("racks", "order"),
    [
        ("abab", [0, 2, 1, 3]),
        ("aabb", [0, 1, 2, 3]),
        ("baba", [0, 2, 1, 3]),
        ("abcabc", [0, 3, 1, 4, 2, 5]),
        ("aaaa", [0, 1, 2, 3]),
        ("a-a-b", [0, 2, 1, 3, 4]),
    ],
)
def test_nodes_of_a_rack_are_adjacent_and_the_lowest_index_comes_first(racks: str, order: list[int]) -> None:
    places = {}
    for index, rack in enumerate(racks):
        known = host(f"n{index}", rack=rack) if rack != "-" else host(f"n{index}")
        places[index] = place_of(known.name, known, [RACK])
    assert in_order(places) == order


def test_a_node_that_lacks_a_label_is_in_a_separate_domain_from_that_level_on() -> None:
    labels = [BLOCK, RACK]
    assert place_of("n", host("n", block="b", rack="r"), labels) == ("b", "r", "/n")
    assert place_of("n", host("n", block="b"), labels) == ("b", "/n", "/n")
    assert place_of("n", host("n", rack="r"), labels) == ("/n", "/n", "/n"), "racks are compared only within a block"
    assert place_of("n", host("n", block="", rack="r"), labels) == ("/n", "/n", "/n"), (
        "an empty value counts as missing"
    )
    assert place_of("n", None, labels) == ("/n", "/n", "/n")


def test_racks_with_the_same_name_in_different_blocks_are_different_racks() -> None:
    places: dict[int, Place] = {0: ("a", "1"), 1: ("b", "1"), 2: ("a", "2"), 3: ("b", "1"), 4: ("a", "1")}
    assert in_order(places) == [0, 4, 2, 1, 3]


def some_places(chance: random.Random) -> dict[int, Place]:
    labels = [f"example.com/{level}" for level in range(chance.randint(1, 4))]
    places = {}
    for index in chance.sample(range(40), chance.randint(1, 30)):
        name = f"n{chance.randrange(25)}"
        known = random.Random(name)  # The labels of a Kubernetes node are the same for all of its pods.
        values = {label: known.choice("abc") for label in labels if known.random() < 0.9}
        view = HostView(name=name, ready=True, since=None, out_of_service=False, labels=values)
        places[index] = place_of(name, view, labels)
    return places


def check(order: list[int], places: Mapping[int, Place]) -> None:
    """Check that the ranks of each topology domain are consecutive at each level, so that as few
    neighbours as possible are in different domains.
    """
    assert sorted(order) == sorted(places)
    for level in range(len(next(iter(places.values())))):
        row = [places[index][: level + 1] for index in order]
        borders = sum(a != b for a, b in itertools.pairwise(row))
        assert borders == len(set(row)) - 1, (level, row)


def test_the_ranks_of_a_domain_are_consecutive_and_the_lowest_index_comes_first() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        places = some_places(chance)
        order = in_order(places)
        check(order, places)
        assert order[0] == min(order)
        # This holds for any subset that trains, because the coordinator leaves the others out.
        told = RankOrder(places={f"job-{index}-0": at for at, index in enumerate(order)})
        some = chance.sample(sorted(places), chance.randint(1, len(places)))
        members = [Member(f"job-{i}-0", i, 0, 1, lambda verb, fields: None, 30.0, 0.0) for i in some]
        ranked = [member.index for member in told.ranked(members)]
        check(ranked, {index: places[index] for index in some})
        assert 0 not in some or ranked[0] == 0


# --- messages to the coordinator


def looked_at(
    job: DDPJob,
    pods: tuple[PodView, ...],
    hosts: Mapping[str, HostView] | None,
    last: Report | None,
    at: float = 10,
) -> Decision:
    world = World(
        pods=pods, runtime="r", runtime_offered="r", report=last, has_service=True, has_budget=True, hosts=hosts
    )
    return decide(job, world, later(at))


def told(decision: Decision) -> list[Any]:
    return [a.body["pods"] for a in decision.actions if isinstance(a, NotifyCoordinator) and a.verb == "order"]


RACKS = {f"n{index}": host(f"n{index}", rack="ab"[index % 2]) for index in range(4)}
IN_ORDER = ["job-0-0", "job-2-0", "job-1-0", "job-3-0"]


def running_report(order: str, ranks: list[int] | None = None) -> Report:
    found = report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * 4, order=order)
    ranked = ranks or [0, 1, 2, 3]
    return replace(found, members=tuple(replace(m, rank=ranked.index(m.index)) for m in found.members))


def test_the_order_is_sent_until_the_report_shows_it() -> None:
    job, pods = running(4, rankOrder=[RACK])
    assert told(looked_at(job, pods, RACKS, running_report(""))) == [IN_ORDER]
    assert told(looked_at(job, pods, RACKS, running_report("another"))) == [IN_ORDER]
    assert told(looked_at(job, pods, RACKS, running_report(order_mark(IN_ORDER)))) == []
    assert told(looked_at(job, pods, RACKS, None)) == [], "there is no coordinator to notify"


def test_without_rank_order_an_earlier_order_is_withdrawn_and_nothing_else_sent() -> None:
    job, pods = running(4)
    assert told(looked_at(job, pods, RACKS, running_report(""))) == []
    assert told(looked_at(job, pods, RACKS, running_report("some"))) == [[]]


def test_a_node_without_labels_gets_a_place_in_the_order_and_an_unknown_node_none() -> None:
    job, pods = running(4, rankOrder=[RACK])
    unseen = {name: view for name, view in RACKS.items() if name != "n1"}
    assert told(looked_at(job, pods, unseen, running_report(""))) == [["job-0-0", "job-2-0", "job-3-0"]]
    bare = {**RACKS, "n2": host("n2")}
    assert told(looked_at(job, pods, bare, running_report(""))) == [["job-0-0", "job-1-0", "job-3-0", "job-2-0"]]


def test_an_operator_that_may_not_read_nodes_still_sends_an_order() -> None:
    """Otherwise, the first round would wait until its timeout. The operator still knows which pods
    share a Kubernetes node.
    """
    job, pods = running(4, rankOrder=[RACK])
    assert told(looked_at(job, pods, None, running_report(""))) == [[f"job-{index}-0" for index in range(4)]]
    shared = tuple(replace(p, host=f"n{p.index % 2}") for p in pods)
    assert told(looked_at(job, shared, None, running_report(""))) == [IN_ORDER]


def test_the_order_of_the_largest_job_fits_into_a_message() -> None:
    names = [f"{'j' * 40}-{index}-123456" for index in range(MAX_PODS)]
    assert len(str({"pods": names})) < 256 * 1024 / 2


# --- the status


def condition(job: DDPJob, pods: tuple[PodView, ...], hosts: Any, last: Report) -> tuple[bool, str, str]:
    found = looked_at(job, pods, hosts, last).status.condition(ConditionType.RANKS_ORDERED)
    assert found is not None
    return found.status, found.reason, found.message


def test_the_condition_shows_whether_the_running_group_follows_the_order() -> None:
    job, pods = running(4, rankOrder=[RACK])
    right, early = running_report(order_mark(IN_ORDER), [0, 2, 1, 3]), running_report(order_mark(IN_ORDER))
    assert condition(job, pods, RACKS, right) == (
        True, "InOrder", "Kubernetes nodes with the same labels have neighbouring ranks (2 x example.com/rack)",
    )  # fmt: skip
    assert condition(job, pods, RACKS, early)[:2] == (False, "NextRound")
    moved = {**RACKS, "n3": host("n3", rack="a")}
    assert condition(job, pods, moved, right)[:2] == (False, "NextRound")
    bare = {**RACKS, "n1": host("n1"), "n3": host("n3")}
    holds, reason, message = condition(job, pods, bare, right)
    assert (holds, reason) == (False, "LabelsMissing")
    assert "lack label example.com/rack: n1 and 1 more" in message
    assert condition(job, pods, None, right)[:2] == (False, "NodesUnknown")


def test_without_rank_order_there_is_no_condition() -> None:
    job, pods = running(4, rankOrder=[RACK])
    right = running_report(order_mark(IN_ORDER), [0, 2, 1, 3])
    shown = looked_at(job, pods, RACKS, right).status
    assert shown.condition(ConditionType.RANKS_ORDERED) is not None
    plain, _ = running(4)
    after = looked_at(replace(plain, status=shown), pods, RACKS, right).status
    assert after.condition(ConditionType.RANKS_ORDERED) is None
    assert after.rank_order == (0, 2, 1, 3), "the condition stays while that group trains"


def test_the_status_shows_an_order_that_differs_from_the_indices() -> None:
    job, pods = running(4, rankOrder=[RACK])
    status = looked_at(job, pods, RACKS, running_report(order_mark(IN_ORDER), [0, 2, 1, 3])).status
    assert status.rank_order == (0, 2, 1, 3)
    forming = looked_at(replace(job, status=status), pods, RACKS, report(CoordinatorState.FORMING)).status
    assert forming.rank_order == (0, 2, 1, 3)
    assert looked_at(replace(job, status=status), pods, RACKS, running_report("")).status.rank_order == ()


def test_a_report_with_impossible_indices_shows_no_order() -> None:
    job, pods = running(4, rankOrder=[RACK])
    last = running_report("", [3, 2, 1, 0])
    for index in (0, -1, 7):
        members = (*last.members[:3], replace(last.members[3], index=index))
        assert looked_at(job, pods, RACKS, replace(last, members=members)).status.rank_order == ()
