"""A response of a coordinator is either refused as a report, or can be decided on."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import SlotState
from ddpjob.core.decide import decide
from ddpjob.core.world import ContainerView, PodView, Role, World
from ddpjob.engine.coordinator_client import read_report
from ddpjob_runtime import protocol
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORDS = [*protocol.CoordinatorState, *protocol.MemberState, *protocol.IncidentKind, *protocol.Mode]
NAMES = ["job-0-0", "job-1-0", "job-coordinator-0", "", ": : ", "\ud800", "x" * 9000]
TIMES = [protocol.iso(NOW + timedelta(seconds=s)) for s in (-1e8, -40, -1, 0, 5, 1e8)]
TIMES += ["0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "2026-01-01T00:00:00"]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, -1, 2**53, 2**63, -(2**63), 10**400, 1e308, -1e308, 0.5]),
    st.sampled_from([*map(str, WORDS), *NAMES, *TIMES]),
    st.text(max_size=5),
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


def record(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Draw content for the record's fields, sometimes of a wrong type."""
    types = typing.get_type_hints(kind)
    fields = {
        key: value(types[name]) if key != "generation" else st.just(0) for name, key, *_ in protocol._layout(kind)
    }
    whole = st.fixed_dictionaries(fields)
    return st.builds(lambda good, key, bad, wrong: good | ({key: bad} if wrong == 7 else {}),
                     whole, st.sampled_from(list(fields)), ANYTHING, st.integers(0, 40))  # fmt: skip


def value(kind: Any) -> st.SearchStrategy[Any]:
    """Draw a value of this type, including unlikely but valid values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return st.none() | value(arguments[0])
    if origin is tuple:
        return st.lists(value(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.sampled_from(["step", "steps", "epoch", "loss", "eta", "metrics"]), ANYTHING)
    if issubclass(kind, protocol.Record):
        return record(kind)
    if issubclass(kind, protocol.Word):
        return st.sampled_from([str(word) for word in kind])
    known: dict[Any, list[Any]] = {
        int: [0, 1, 2, 3, -1, 1000, 2**62],
        float: [0, 0.5, 1, -3, 1e18],
        str: NAMES,
        datetime: TIMES[:6],
    }
    return st.sampled_from(known[kind])


def a_job() -> DDPJob:
    spec = {"image": "image", "script": "train.py", "nodes": 2, "recovery": {"mode": "Fast"}}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": spec})
    status = decide(job, world(None), NOW).status
    status = replace(status, rendezvous=replace(status.rendezvous, endpoint="10.0.0.1:29401", state=SlotState.RUNNING))
    return replace(job, status=status)


def world(report: protocol.Report | None) -> World:
    started = NOW - timedelta(seconds=60)
    pods = [
        PodView(
            name=f"job-{i}-0", uid=f"{i}", role=Role.NODE, index=i, host=f"n{i}", phase="Running", created=started,
            containers={"trainer": ContainerView(started=started)},
        )
        for i in range(2)
    ]  # fmt: skip
    return World(pods=tuple(pods), runtime="r", runtime_offered="r", report=report)


JOB = a_job()


def check(body: bytes) -> protocol.Report | None:
    """Read the response. If it is a report, decide twice. The second decision starts from the
    status that the first one wrote.
    """
    try:
        report = read_report(body, NOW, JOB.spec.pods)
    except ValueError:
        return None
    first = decide(JOB, world(report), NOW)
    written = json.dumps(first.status.write(JOB.spec), allow_nan=False)
    assert len(written) < 500_000, "the API server does not accept a larger status"
    assert all(len(event.message.encode(errors="replace")) <= 1000 for event in first.events)
    decide(replace(JOB, status=first.status), world(report), NOW + timedelta(seconds=1))
    return report


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(record(protocol.Report))
def test_a_report_with_any_content_can_be_decided_on(body: dict[str, Any]) -> None:
    check(json.dumps(body).encode())


@pytest.mark.parametrize("message", ["", ": : ", "\n", " "])
@pytest.mark.parametrize("kind", ["Hang", "WorkerFailed", "PeerLost"])
def test_an_incident_without_a_message_can_be_decided_on(kind: str, message: str) -> None:
    incident = {"id": 1, "time": "2022-10-31T14:13:20.000Z", "kind": kind, "message": message}
    body = {"generation": 0, "state": "Forming", "nodes": 2, "minNodes": 2, "backoff": [], "incidents": [incident]}
    assert check(json.dumps(body).encode()) is not None


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANYTHING)
def test_any_json_is_a_report_or_refused(body: Any) -> None:
    check(json.dumps(body).encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_report_or_refused(body: bytes) -> None:
    assert check(body) is None
