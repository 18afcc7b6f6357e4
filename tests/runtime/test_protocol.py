"""The operator's strict parser accepts every report that the coordinator can write."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone
from typing import Any

import pytest
from coordinator_world import World, formed
from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator import http_api
from ddpjob_runtime.coordinator.member_lines import HANDLERS
from ddpjob_runtime.protocol import Command, CoordinatorState, IncidentKind, Mode, Report


def a_report() -> Report:
    world, *members = formed(3, 2, mode=Mode.STANDARD)
    world.coordinator.note(members[1], protocol.COLD_WORKERS, "torch is too old")
    world.coordinator.report_progress({"step": 3, "loss": 0.5})
    world.fail(members[0], "ValueError: \udcff")
    world.pass_time(1)
    world.lose(members[2])
    world.pass_time(2)
    return world.coordinator.report()


def test_the_operator_reads_a_report_that_the_coordinator_writes() -> None:
    report = a_report()
    read = Report.read(json.loads(json.dumps(report.write())))
    assert read.state is CoordinatorState.RESTARTING and read.incidents[0].kind is IncidentKind.WORKER_FAILED
    assert read.incidents[0].message == "ValueError: \\udcff", "no API accepts lone surrogates"
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
        ({"members": [{"pod": "a"}]}, "report.members[0].state: missing"),
        ({"members": {}}, "report.members: must be a list, not {}"),
        ({"now": "yesterday"}, "report.now: must be a time like 2026-01-31T23:59:59.000Z, not 'yesterday'"),
        ({"backoff": [1, "x"]}, "report.backoff[1]: must be a number, not 'x'"),
        ({"backoff": [1, 2**63]}, f"report.backoff[1]: must be a finite number of at most 64 bits, not {2**63}"),
        ({"recovery": []}, "report.recovery: must be an object, not []"),
        ({"hangAfter": float("nan")}, "report.hangAfter: must be a finite number of at most 64 bits, not nan"),
        ({"backoff": [-float("inf")]}, "report.backoff[0]: must be a finite number of at most 64 bits, not -inf"),
        ({"world": 2**63}, f"report.world: must be a finite number of at most 64 bits, not {2**63}"),
    ],
)
def test_the_error_about_an_invalid_report_names_the_field(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError) as caught:
        Report.read({**a_report().write(), **change})
    assert str(caught.value) == error


def test_a_required_key_must_exist_and_an_unknown_key_is_ignored() -> None:
    body = a_report().write()
    assert Report.read({**body, "colour": "red"}) == Report.read(body)
    del body["nodes"]
    with pytest.raises(ValueError, match=r"^report\.nodes: missing$"):
        Report.read(body)
    assert Report.read({k: v for k, v in a_report().write().items() if k != "notes"}).notes == ()


LINES = (
    {"t": "ready", "after": 0, "host": "10.0.0.1", "port": 5000, "check": 3},
    {"t": "joined", "round": 1},
    {"t": "failure", "round": 1, "rank": 0, "localRank": 0, "exitCode": 1, "message": "m", "time": 1.0, "sent": 2.0},
    {"t": "finished", "round": 1},
    {"t": "stacks", "round": 1, "rank": 0, "text": "x"},
    {"t": "looked", "round": 1, "ranks": [{"rank": 0, "text": "x", "digest": "x", "seconds": 5, "cpu": 0, "bytes": 0}]},
    {"t": "note", "kind": "Data", "why": "x"},
    {"t": "leaving", "why": "x"},
    {"t": "init_failure", "message": "x"},
    {"t": "replaced", "generation": 0, "attempt": 1},
)
EXTREMES: tuple[Any, ...] = (
    *(-1, 2**62, 2**62 + 1, 2**63, 2**64, 10**400, -(10**400), True, 1.5, 1e308, float("nan"), float("inf")),
    *(None, "", "x" * 250_000, "\0" * 40_000, "\udcff", [], {}, [{}]),
)


def as_read(world: World) -> Report:
    """Return the report as the operator reads it. Raises the reader's errors."""
    text = http_api._report(world.coordinator.report()).encode(errors="backslashreplace")
    assert len(text) <= protocol.largest_report(world.coordinator.settings.nodes)
    return Report.read(json.loads(text))


@pytest.mark.parametrize("line", LINES, ids=lambda line: str(line["t"]))
def test_no_line_of_a_member_makes_the_report_unreadable(line: dict[str, Any]) -> None:
    """The line raises at most a ValueError, to which the server responds."""
    for name in [name for name in line if name != "t"]:
        for value in EXTREMES:
            world, *members = formed(2)
            with contextlib.suppress(ValueError):
                HANDLERS[line["t"]](world.coordinator, members[0], {**line, name: value})
            world.pass_time(40)
            for member in members:
                with contextlib.suppress(ValueError):
                    world.ready(member)
            as_read(world)


def test_no_request_to_the_operators_port_makes_the_report_unreadable() -> None:
    bodies: tuple[tuple[Command, dict[str, Any]], ...] = (
        (Command.SIZE, {"nodes": 2, "minNodes": 2}),
        (Command.PATIENCE, {"backoff": [1, 60], "hangAfter": 60}),
        (Command.PATIENCE, {"backoff": [1, 60], "hangAfter": None, "hangs": "End"}),
        (Command.ORDER, {"pods": ["job-0-0"]}),
        (Command.PROGRESS, {"step": 1, "loss": 0.5, "metrics": {"a": 1}, "activity": "x", "eta": 3}),
        (Command.STOP, {"ok": False, "why": "x"}),
    )
    for command, body in bodies:
        for name in body:
            for value in (*EXTREMES, [1, 1e308], [float("inf")] * 2, [2**63, 2**64], {"x" * 100: 10**400}):
                world = World(2)
                world.form(2)
                with contextlib.suppress(ValueError):
                    http_api.ROUTES[command.path][1](world.coordinator, {**body, name: value})
                as_read(world)


@pytest.mark.parametrize("nodes", [1, 8, 1024])
@pytest.mark.parametrize("character", ["x", "\0", "\N{GRINNING FACE}"])
def test_the_operator_reads_the_largest_possible_report(nodes: int, character: str) -> None:
    """The report has all spares, names of the maximum length, 60 incidents, notes and metrics.

    Tracebacks and strings are realistic: ASCII, messages of one paragraph, and pod names of 63
    characters.
    """
    world, text = World(nodes), character * protocol.MAX_TRACEBACK
    coordinator, pods = world.coordinator, nodes + protocol.MAX_SPARES
    for index in range(pods):
        pod = f"{'a' * (52 if character == 'x' else 240)}-{index}-0"
        member = coordinator.hello(pod, index, 0, 1, lambda verb, fields: None)
        assert member is not None
        for kind in (protocol.DATA, protocol.COLD_WORKERS, protocol.PREFLIGHT):
            coordinator.note(member, kind, text[: 100 if character == "x" else protocol.MAX_NOTE])
        if index % 2:
            world.lose(member, "x" * 1000)
    message = text[: 500 if character == "x" else protocol.MAX_TEXT]
    details = {"pod": pod, "message": message, "traceback": text, "signal": "SIGKILL"}
    for _ in range(60):
        coordinator.rounds.incidents.add(IncidentKind.WORKER_FAILED, world.now, details, 7)
    figures = {f"{n}{character * 90}": 1 / 3 for n in range(100)}
    coordinator.report_progress({"step": 2**40, "metrics": figures, "activity": text[: protocol.MAX_FIGURES]})
    report = as_read(world)
    assert len(report.members) + len(report.lost) == pods and report.progress["step"] == 2**40
    assert report.incidents[-1].id == 60
    if character == "x":
        assert len(report.incidents[-1].traceback) >= 3000 and len(report.progress["metrics"]) == 100


def test_string_enums_format_like_their_values_in_every_python() -> None:
    assert (f"{Mode.FAST}", str(Mode.FAST), f"{Mode.FAST:>5}", Command.SIZE.path) == (
        "Fast", "Fast", " Fast", "/v1/size",
    )  # fmt: skip
    assert json.dumps({"mode": Mode.FAST}) == '{"mode": "Fast"}' and {Mode.FAST: 1}["Fast"] == 1  # type: ignore[index]


def test_reports_of_lagging_ranks_are_validated_and_merged() -> None:
    from ddpjob_runtime.coordinator import progress

    two = [{"rank": 3, "slowdown": 1.8}, {"rank": 0, "slowdown": 2}]
    merged = progress.MergedProgress()
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
        assert merged.report()["stragglers"] == two, "an invalid entry is dropped alone"
    for cost, kept in ((0.4, {"cost": 0.4}), (0, {"cost": 0}), *((bad, {}) for bad in (1.1, -0.1, True, "x", None))):
        merged.merge(progress.check({"stragglers": [{"rank": 1, "slowdown": 2, "cost": cost}]}), 4.0)
        assert merged.report()["stragglers"] == [{"rank": 1, "slowdown": 2, **kept}], "an invalid cost is dropped alone"
    merged.merge(progress.check({"stragglers": [{"rank": rank, "slowdown": 2} for rank in range(99)]}), 5.0)
    assert len(merged.report()["stragglers"]) == 8
    for wrong in (None, "x", {}, 3):
        with pytest.raises(ValueError, match="stragglers: must be a list, not"):
            progress.check({"stragglers": wrong})
    for round_ in (None, 3, "3", "1.2.3", "1.-2", "1." + "9" * 99, ["1.2"]):
        with pytest.raises(ValueError, match=r"round: must be GENERATION\.ROUND, as in DDPJOB_FENCE, not"):
            progress.check({"stragglers": two, "round": round_})
