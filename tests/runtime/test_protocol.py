"""The report is read as strictly as it is written."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest
from coordinator_world import World
from ddpjob_runtime import protocol
from ddpjob_runtime.protocol import Command, CoordinatorState, IncidentKind, Mode, Report


def a_report() -> Report:
    world = World(3, 2, mode=Mode.STANDARD)
    members = world.form(3)
    world.coordinator.note(members[1], protocol.COLD_WORKERS, "torch is too old")
    world.coordinator.report_progress({"step": 3, "loss": 0.5})
    world.fail(members[0], "ValueError: \udcff")
    world.pass_time(1)
    world.lose(members[2])
    world.pass_time(2)
    return world.coordinator.report()


def test_what_the_coordinator_writes_is_what_the_operator_reads() -> None:
    report = a_report()
    read = Report.read(json.loads(json.dumps(report.write())))
    assert read.state is CoordinatorState.RESTARTING and read.incidents[0].kind is IncidentKind.WORKER_FAILED
    assert read.incidents[0].message == "ValueError: \\udcff", "no API takes halves of surrogate pairs"
    assert (read.nodes, read.min_nodes, read.mode, read.progress["step"]) == (3, 2, Mode.STANDARD, 3)
    assert Report.read(read.write()) == read
    assert read.lost[0].since == datetime(1970, 1, 1, 0, 16, 41, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"minNodes": None}, "report.minNodes: must be a whole number, not None"),
        ({"nodes": True}, "report.nodes: must be a whole number, not True"),
        (
            {"state": "Dancing"},
            "report.state: must be one of Forming, Running, Restarting, Succeeded, Stopped, not 'Dancing'",
        ),
        ({"members": [{"pod": "a"}]}, "report.members[0].state: is missing"),
        ({"members": {}}, "report.members: must be a list, not {}"),
        ({"startedAt": "yesterday"}, "report.startedAt: must be a time like 2026-01-31T23:59:59.000Z, not 'yesterday'"),
        ({"backoff": [1, "x"]}, "report.backoff[1]: must be a number, not 'x'"),
        ({"backoff": [1, 2**63]}, f"report.backoff[1]: must be a finite number of at most 64 bits, not {2**63}"),
        ({"recovery": []}, "report.recovery: must be an object, not []"),
        ({"hangAfter": float("nan")}, "report.hangAfter: must be a finite number of at most 64 bits, not nan"),
        ({"backoff": [-float("inf")]}, "report.backoff[0]: must be a finite number of at most 64 bits, not -inf"),
        ({"world": 2**63}, f"report.world: must be a finite number of at most 64 bits, not {2**63}"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError) as caught:
        Report.read({**a_report().write(), **change})
    assert str(caught.value) == error


def test_a_required_key_must_be_there_and_an_unknown_one_may() -> None:
    body = a_report().write()
    assert Report.read({**body, "colour": "red"}) == Report.read(body)
    del body["nodes"]
    with pytest.raises(ValueError, match=r"^report\.nodes: is missing$"):
        Report.read(body)
    assert Report.read({k: v for k, v in a_report().write().items() if k != "notes"}).notes == ()


def test_words_format_as_their_values_in_every_python() -> None:
    assert (f"{Mode.FAST}", str(Mode.FAST), f"{Mode.FAST:>5}", Command.SIZE.path) == (
        "Fast", "Fast", " Fast", "/v1/size",
    )  # fmt: skip
    assert json.dumps({"mode": Mode.FAST}) == '{"mode": "Fast"}' and {Mode.FAST: 1}["Fast"] == 1  # type: ignore[index]


def test_ranks_that_lag_are_checked_and_merged() -> None:
    from ddpjob_runtime.coordinator import progress

    two = [{"rank": 3, "slowdown": 1.8}, {"rank": 0, "slowdown": 2}]
    merged = progress.Progress()
    assert merged.merge(progress.check({"step": 4}), 1.0) and merged.merge(progress.check({"stragglers": two}), 2.0)
    assert merged.report()["stragglers"] == two and merged.report()["step"] == 4
    merged.merge(progress.check({"stragglers": []}), 3.0)
    assert merged.report()["stragglers"] == []
    for entry in (
        [],
        {"rank": 5},
        {"rank": -1, "slowdown": 2},
        {"rank": True, "slowdown": 2},
        {"rank": 5, "slowdown": float("inf")},
        {"rank": 5, "slowdown": 10**400},
        {"rank": 5, "slowdown": 0.9},
        {"rank": 3, "slowdown": 7},
    ):
        merged.merge(progress.check({"stragglers": [two[0], entry, two[1]]}), 4.0)
        assert merged.report()["stragglers"] == two, "one bad entry costs only itself"
    merged.merge(progress.check({"stragglers": [{"rank": rank, "slowdown": 2} for rank in range(99)]}), 5.0)
    assert len(merged.report()["stragglers"]) == 8
    for wrong in (None, "x", {}, 3):
        with pytest.raises(ValueError, match="stragglers: must be a list, not"):
            progress.check({"stragglers": wrong})
    for round_ in (None, 3, "3", "1.2.3", "1.-2", "1." + "9" * 99, ["1.2"]):
        with pytest.raises(ValueError, match=r"round: must be GENERATION\.ROUND, as in DDPJOB_FENCE, not"):
            progress.check({"stragglers": two, "round": round_})
