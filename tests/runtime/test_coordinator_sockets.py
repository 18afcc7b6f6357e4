"""The coordinator's port: both protocols, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator import __main__ as coordinator_program
from ddpjob_runtime.coordinator import drain
from ddpjob_runtime.coordinator.hang import DUMP_SECONDS
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.server import (
    BLIND_SECONDS,
    MAX_STRANGERS,
    PROBE_SECONDS,
    RETURN_SECONDS,
    MemberSilent,
    Server,
    Strangers,
)
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.coordinator.states import IllegalTransition
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.protocol import Mode
from machine import slowness
from runtime_harness import RUNTIME, TOKEN, Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = started_job(tmp_path, 2)
    yield job
    job.close()


@pytest.fixture
def big_job(tmp_path: Path) -> Iterator[Job]:
    job = started_job(tmp_path, 256)
    yield job
    job.close()


def started_job(folder: Path, nodes: int, *arguments: str) -> Job:
    job = Job(folder, nodes=nodes, store=False, mode="Fast")
    started = time.monotonic()
    job.start_coordinator(*arguments)
    job.wait_until(lambda r: r["state"] == "Forming", 10)
    print(f"listening after {time.monotonic() - started:.2f} s")
    return job


class Wire:
    """A member's end of a connection."""

    def __init__(self, job: Job) -> None:
        self.socket = socket.create_connection(("127.0.0.1", job.port), timeout=60)
        self.lines = self.socket.makefile("rb")

    def say(self, verb: str, **fields: Any) -> None:
        self.raw(protocol.encode(verb, **fields))

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def prove(self, token: str = TOKEN) -> str:
        """Send the coordinator a challenge, and return the proof that a hello needs."""
        self.say("challenge", nonce="ours")
        answer = self.hear()
        place = str(answer["generation"]), str(answer["attempt"])
        assert protocol.is_sealed(answer["proof"], TOKEN, "coordinator", "ours", answer["nonce"], *place)
        return protocol.seal(token, "member", "ours", answer["nonce"])

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        assert line, "the coordinator closed the connection"
        message: dict[str, Any] = json.loads(line)
        return self.hear() if message["t"] == "record" else message

    def closed(self) -> bool:
        return self.lines.readline() == b""

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


def member(job: Job, index: int, attempt: int = 0, pid: int = 1, **more: Any) -> Wire:
    wire = Wire(job)
    hello = {"pod": f"job-{index}-{attempt}", "index": index, "attempt": attempt, "pid": pid, **more}
    wire.say("hello", proof=wire.prove(), **hello)
    return wire


def ready(*wires: Wire, after: int = 0) -> None:
    for i, w in enumerate(wires):
        w.say("ready", after=after, host="10.0.0.1", port=5000 + i)


def running(job: Job, count: int = 2, **more: Any) -> list[Wire]:
    """Return the members of a running round 1. Members beyond the job's nodes are spares."""
    wires = [member(job, i, **more) for i in range(count)]
    assert all(w.hear() == {"t": "welcome", "generation": 0} for w in wires)
    ready(*wires)
    for i, w in enumerate(wires[: job.nodes]):
        go = w.hear()
        assert (go["t"], go["round"], go["rank"], go["world"]) == ("go", 1, i, job.nodes)
        w.say("joined", round=1)
    job.wait_until(lambda r: r["state"] == "Running", 10)
    return wires


def raw_http(job: Job, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", job.port), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{not json\n", "not a line of JSON"),
        (b"{}\n", "verb"),
        (b'{"t":"hb"}\n', 'first line must be "challenge"'),
        (b'{"t":"challenge"}\n', "nonce"),
        (b'{"t":"challenge","nonce":7}\n', "nonce"),
    ],
)
def test_a_bad_first_line_is_refused_with_its_reason(job: Job, line: bytes, why: str) -> None:
    wire = Wire(job)
    wire.raw(line)
    answer = wire.hear()
    assert answer["t"] == "refused" and why in answer["why"]
    assert wire.closed()


HELLO = {"t": "hello", "pod": "p", "index": 1, "attempt": 0, "pid": 1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"t": "hb"}, 'second line must be "hello"'),
        ({"proof": "guessed"}, "proof"),
        ({"proof": None}, "proof"),
        ({"index": "0"}, "index"),
        ({"grace": "long"}, "grace"),
        ({"resume": {"round": "one"}}, "resume.round"),
        ({"pod": None}, "pod"),
        ({"pod": "x" * 254}, "pod"),
        ({"pod": "a\nb"}, "pod"),
        ({"index": protocol.MAX_PODS}, "index: must be a whole number from 0 to 1123"),
        ({"attempt": 2**63}, "attempt: must be a whole number from 0 to"),
        ({"pid": 10**400}, "pid: must be a whole number from 0 to"),
        ({"grace": 10**400}, "grace: must be a number of seconds from 0 to"),
        ({"resume": {"round": 2**63, "rank": 0, "world": 1, "state": "Running"}}, "resume.round"),
    ],
)
def test_a_bad_hello_is_refused_with_its_reason(job: Job, change: dict[str, Any], why: str) -> None:
    wire = Wire(job)
    wire.raw(json.dumps({**HELLO, "proof": wire.prove(), **change}).encode() + b"\n")
    answer = wire.hear()
    assert answer["t"] == "refused" and why in answer["why"]
    assert wire.closed()
    assert job.status()["members"] == []


def test_a_proof_is_valid_for_one_connection_only(job: Job) -> None:
    """An eavesdropper on the network cannot become a member."""
    old, new = Wire(job), Wire(job)
    proof = old.prove()
    new.prove()
    new.raw(json.dumps({**HELLO, "proof": proof}).encode() + b"\n")
    assert "proof" in new.hear()["why"]


def test_a_malformed_line_gets_an_error_reply_and_the_member_stays_connected(job: Job) -> None:
    wire = member(job, 0)
    assert wire.hear() == {"t": "welcome", "generation": 0}
    for line, why in (
        (b"nonsense\n", "JSON"),
        (b'{"t":"dance"}\n', "dance"),
        (b'{"t":"joined","round":-1}\n', "round"),
        (b'{"t":"ready","after":0,"host":3,"port":0}\n', "host"),
    ):
        wire.raw(line)
        answer = wire.hear()
        assert answer["t"] == "error" and why in answer["why"]
    wire.say("hb")
    assert wire.hear()["t"] == "hb"
    wire.raw(b'{"t":"' + b"x" * 400_000)  # exceeds the limit for a line, so this connection is dropped
    job.wait_until(lambda r: r["members"] == [], 5)


@pytest.mark.parametrize("where", ["hello", "line"])
def test_an_unexpected_exception_closes_the_connection_and_logs_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member must not remain in the group after its connection is closed."""
    logged: list[str] = []
    monkeypatch.setattr("ddpjob_runtime.coordinator.server.log", logged.append)

    def fail(*arguments: Any) -> None:
        raise IllegalTransition("CoordinatorState:\nStopped -> Forming")

    async def meet() -> list[Any]:
        server = Server(CoordinatorSettings(2, 2), TOKEN, store_ready=True)
        monkeypatch.setattr(server.coordinator, "_advance" if where == "hello" else "joined", fail)
        listener = await server.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(protocol.encode("challenge", nonce="ours"))
        nonce = protocol.decode(await reader.readline())["nonce"]
        proof = protocol.seal(TOKEN, "member", "ours", nonce)
        place = {"resume": {"round": 1, "rank": 0, "world": 2, "state": "Running"}} if where == "hello" else {}
        writer.write(protocol.encode("hello", proof=proof, pod="p", index=0, attempt=0, pid=1, **place))
        writer.write(protocol.encode("joined", round=1))
        await reader.read()
        writer.close()
        listener.close()
        return list(server.coordinator.members)

    left = asyncio.run(meet())
    said = [line for line in logged if "IllegalTransition" in line]
    assert len(said) == 1 and len(said[0].splitlines()) == 1, logged
    assert "Traceback" not in said[0] and "test_coordinator_sockets.py" in said[0]
    assert left == []


def test_the_response_to_a_bad_request_has_the_reason(job: Job) -> None:
    assert job.post("/v1/progress", {"step": 1}, token="wrong")[0] == 401
    assert job.post("/v1/progress", b"{")[0] == 400
    for path, body, why in (
        ("/v1/progress", {"lossy": 1}, "lossy: unknown field"),
        ("/v1/progress", {"loss": "low"}, "loss: must be a number"),
        ("/v1/progress", [1], "JSON object"),
        ("/v1/progress", {"metrics": {"a": "b"}}, "metrics.a"),
        ("/v1/gone", {"pods": "job-1-0", "why": ""}, "pods: must be a list"),
        ("/v1/gone", {"pods": ["job-1-0", 3], "why": ""}, "pods: must be a list of strings"),
        ("/v1/stop", {"ok": "yes", "why": ""}, "ok: must be a boolean"),
        ("/v1/stop", {"ok": True, "why": "", "extra": 1}, "extra: unknown field"),
        ("/v1/size", {"nodes": True, "minNodes": 1}, "nodes: must be a whole number"),
        ("/v1/size", {"nodes": 2}, "minNodes: must be a whole number"),
        ("/v1/patience", {"hangAfter": "long", "backoff": [1, 60]}, "hangAfter: must be a number of seconds or null"),
        ("/v1/patience", {"backoff": [1, 60]}, "hangAfter: must be a value"),
        (
            "/v1/patience",
            {"hangAfter": None, "backoff": [1, "long"]},
            "backoff: must be [INITIAL, MAXIMUM], two numbers",
        ),
        ("/v1/patience", {"hangAfter": None, "backoff": [9, 3]}, "INITIAL <= MAXIMUM"),
        ("/v1/size", {"nodes": 2, "minNodes": 3}, "minNodes: must be from 1 to nodes (2), not 3"),
        ("/v1/order", {"pods": "job-1-0"}, "pods: must be a list"),
        ("/v1/order", {"pods": ["job-1-0", None]}, "pods: must be a list of strings"),
        ("/v1/order", {"pods": ["job-1-0", "job-1-0"]}, "pods: 'job-1-0' is listed twice"),
        (
            "/v1/order",
            {"pods": [f"job-{index}-0" for index in range(2000)]},
            "pods: must have at most 1124 entries, not 2000",
        ),
        ("/v1/order", {"pods": [], "ranks": {}}, "ranks: unknown field"),
    ):
        status, answer = job.post(path, body)
        assert status == 400 and why in answer["error"], (path, answer)
    assert b"404" in raw_http(job, b"GET /nothing HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b"405" in raw_http(job, b"POST /status HTTP/1.1\r\n\r\n").splitlines()[0]
    known = b"Authorization: Bearer " + TOKEN.encode()
    for query in (b"news=x", b"news=-1"):
        answer = raw_http(job, b"GET /status?" + query + b"&wait=1 HTTP/1.1\r\n" + known + b"\r\n\r\n")
        assert b"400" in answer.splitlines()[0]
    assert b"400" in raw_http(job, b"what is this\r\n\r\n").splitlines()[0]
    assert b"413" in raw_http(job, b"POST /v1/progress HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n").splitlines()[0]
    assert raw_http(job, b"GET /healthz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert job.status()["progress"] == {"updatedAt": None}


def test_the_long_poll_returns_on_a_change(job: Job) -> None:
    news = job.status()["news"]
    timer = threading.Timer(
        0.3, lambda: job.post("/v1/progress", {"epoch": 1, "loss": 0.5, "metrics": {"accuracy": 0.9}})
    )
    timer.start()
    started = time.monotonic()
    report = job.status(news=news, wait=20)
    assert 0.2 < time.monotonic() - started < 5 * slowness() and report["news"] > news
    assert report["progress"]["loss"] == 0.5 and report["progress"]["metrics"] == {"accuracy": 0.9}
    timer.join()
    started = time.monotonic()
    assert job.status(news=report["news"], wait=0.5)["news"] == report["news"]
    assert 0.4 < time.monotonic() - started < 5 * slowness()


def test_progress_reported_by_the_script_replaces_the_step_counter(job: Job) -> None:
    job.post("/v1/progress", {"step": 3, "automatic": True, "metrics": {"stepsPerSecond": 2.0}})
    assert job.status()["progress"]["step"] == 3
    job.post("/v1/progress", {"step": 30, "steps": 100, "loss": 1.0})
    job.post("/v1/progress", {"step": 4, "automatic": True})
    job.post("/v1/progress", {"loss": 0.9})
    progress = job.status()["progress"]
    assert (progress["step"], progress["steps"], progress["loss"]) == (30, 100, 0.9) and "metrics" not in progress


def test_counted_steps_are_used_until_the_script_reports_its_own(job: Job) -> None:
    job.post("/v1/progress", {"step": 3, "automatic": True, "metrics": {"stepsPerSecond": 2.0}})
    job.post("/v1/progress", {"epoch": 2, "loss": 0.5, "metrics": {"accuracy": 0.9}})
    job.post("/v1/progress", {"step": 4, "automatic": True, "metrics": {"stepsPerSecond": 3.0}})
    progress = job.status()["progress"]
    assert (progress["epoch"], progress["step"], progress["loss"]) == (2, 4, 0.5)
    assert progress["metrics"] == {"accuracy": 0.9, "stepsPerSecond": 3.0}
    job.post("/v1/progress", {"step": 1000})
    job.post("/v1/progress", {"step": 5, "automatic": True, "metrics": {"stepsPerSecond": 3.0}})
    progress = job.status()["progress"]
    assert (progress["epoch"], progress["step"], progress["metrics"]) == (2, 1000, {"accuracy": 0.9})


def test_a_group_of_256_members_succeeds_or_breaks_together(big_job: Job) -> None:
    job, nodes = big_job, 256
    wires = [member(job, i) for i in range(nodes)]
    assert all(w.hear()["t"] == "welcome" for w in wires)
    started = time.monotonic()
    ready(*wires)
    goes = [w.hear() for w in wires]
    assert [go["rank"] for go in goes] == list(range(nodes)) and all(len(go["members"]) == 1 for go in goes)
    print(f"`go` reached {nodes} members in {time.monotonic() - started:.2f} s")
    for w in wires:
        w.say("joined", round=1)
    job.wait_until(lambda r: r["state"] == "Running" and r["world"] == nodes, 10)
    wires[7].close()
    started = time.monotonic()
    wanted = {"t": "restart", "round": 1, "why": "node job-7-0 was lost: its connection ended", "planned": False}
    assert all(w.hear() == wanted for w in wires if w is not wires[7])
    assert time.monotonic() - started < 2 * slowness()
    wires[7] = member(job, 7, attempt=1)
    assert wires[7].hear()["t"] == "welcome"
    ready(*wires, after=1)
    goes = [w.hear() for w in wires]
    assert [go["rank"] for go in goes] == list(range(nodes)) and {go["round"] for go in goes} == {2}
    for w in wires:
        w.say("joined", round=2)
        w.say("finished", round=2)
    assert all(w.hear() == {"t": "done"} for w in wires)
    report = job.status()
    assert report["state"] == "Succeeded" and [i["kind"] for i in report["incidents"]] == ["PeerLost"]
    text = urllib.request.urlopen(f"http://127.0.0.1:{job.port}/metrics", timeout=5).read().decode()
    assert 'ddpjob_incidents_total{job_name="job",namespace="default",kind="PeerLost"} 1' in text
    assert 'ddpjob_rendezvous_round{job_name="job",namespace="default"} 2' in text
    memory = Path(f"/proc/{job.processes['coordinator'].pid}/status").read_text()
    resident = int(memory.split("VmRSS:")[1].split()[0])
    print(f"resident: {resident} KiB")
    assert resident < 80 * 1024


def test_a_lone_surrogate_in_a_metric_name_does_not_break_the_metrics_page(job: Job) -> None:
    r"""The format escapes only backslashes, quotes and line ends. Prometheus rejects the whole page
    if it is not valid UTF-8.
    """
    job.post("/v1/progress", {"metrics": {"a\ud800": 1}})
    text = urllib.request.urlopen(f"http://127.0.0.1:{job.port}/metrics", timeout=5).read().decode()
    assert 'ddpjob_progress_metric{job_name="job",namespace="default",name="a?"} 1' in text


def test_a_failure_is_reported_with_all_its_details(job: Job) -> None:
    first, second = running(job)
    now = 123.0  # on the member's own clock, so only the age of the failure is used
    first.say(
        "failure", round=1, rank=0, localRank=0, pid=7, exitCode=-9, signal="SIGKILL", message="out of memory",
        traceback="T", time=now - 2, sent=now, oom=True,
    )  # fmt: skip
    assert second.hear()["t"] == "restart"
    ready(first, second, after=1)
    incident = job.wait_until(lambda r: r["incidents"])["incidents"][0]
    assert (incident["kind"], incident["exitCode"], incident["signal"], incident["traceback"]) == (
        "OOMKilled",
        -9,
        "SIGKILL",
        "T",
    )
    assert (incident["rank"], incident["localRank"], incident["pod"], incident["backoffSeconds"]) == (
        0,
        0,
        "job-0-0",
        0.0,
    )


def test_the_same_process_may_reconnect(job: Job) -> None:
    half_open, other = running(job)
    again = member(job, 0, resume={"round": 1, "rank": 0, "world": 2, "state": "Running"})
    assert again.hear()["t"] == "welcome"
    half_open.close()
    for w in (again, other):
        w.say("finished", round=1)
    assert again.hear()["t"] == "done" and job.status()["incidents"] == []


def test_a_pod_of_a_different_generation_is_rejected(job: Job) -> None:
    wire = member(job, 0, generation=3)
    assert wire.hear() == {"t": "welcome", "generation": 0} and wire.closed()
    assert job.status()["members"] == []


def test_strangers_cannot_exhaust_the_connections(job: Job) -> None:
    """Strangers hold connections open and send neither lines nor requests. Members and the operator
    can still connect.
    """
    kept = [socket.create_connection(("127.0.0.1", job.port), timeout=10) for _ in range(MAX_STRANGERS + 50)]
    for number, connection in enumerate(kept):
        with contextlib.suppress(OSError):
            connection.sendall((b"", b"{", b"GET /status?wait=60 HTTP/1.1\r\n", b"{" + b"x" * 300_000)[number % 4])
    wire = member(job, 0)
    assert wire.hear() == {"t": "welcome", "generation": 0}
    assert [m["pod"] for m in job.status()["members"]] == ["job-0-0"]
    for connection in kept:
        connection.close()
    for _ in range(50):
        raw_http(job, b"POST /v1/stop HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
        raw_http(job, b"GET http://[ HTTP/1.1\r\n\r\n")
    log = job.log("coordinator").read_text()
    assert "Traceback" not in log and len(log) < 20_000
    wire.say("hb")
    assert wire.hear()["t"] == "hb"


def test_pods_of_the_largest_job_connect_at_once_without_closing_others() -> None:
    strangers, closed = Strangers(), []

    def connect(address: str) -> None:
        writer = Mock(get_extra_info=lambda _: (address, 5000))
        writer.transport.abort = lambda: closed.append(address)
        strangers.meet(writer)

    for pod in range(protocol.MAX_PODS):
        connect(f"10.0.{pod // 256}.{pod % 256}")
    assert not closed
    for _ in range(MAX_STRANGERS):
        connect("10.9.9.9")
    assert set(closed) == {"10.9.9.9"}


def test_the_report_requires_the_token(job: Job) -> None:
    assert b" 401 " in raw_http(job, b"GET /status HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b" 401 " in raw_http(job, b"GET /status?news=0&wait=60 HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b" 200 " in raw_http(job, b"GET /metrics HTTP/1.1\r\n\r\n").splitlines()[0]


def test_a_note_reaches_the_operator(job: Job) -> None:
    wire = member(job, 0)
    assert wire.hear()["t"] == "welcome"
    wire.say("note", kind="ColdWorkers", why="--no-python")
    note = {"pod": "job-0-0", "kind": "ColdWorkers", "why": "--no-python"}
    job.wait_until(lambda r: r["notes"] == [note], 5)
    wire.say("note", kind="ColdWorkers", why="")
    job.wait_until(lambda r: r["notes"] == [], 5)


def test_the_notes_of_a_reconnecting_member_arrive_with_its_hello(job: Job) -> None:
    """If they came later, the operator could read a report in between."""
    wire = member(job, 0, notes={"ColdWorkers": "--no-python", "Data": ""})
    assert wire.hear()["t"] == "welcome"
    assert job.status()["notes"] == [{"pod": "job-0-0", "kind": "ColdWorkers", "why": "--no-python"}]
    refused = member(job, 1, notes=["ColdWorkers"])
    assert refused.hear() == {"t": "refused", "why": "notes: must be an object, not ['ColdWorkers']"}


def test_a_member_that_reads_nothing_does_not_stop_the_others(job: Job) -> None:
    deaf, other = member(job, 0), member(job, 1)
    assert other.hear()["t"] == "welcome"
    with pytest.raises(ConnectionError):  # responses accumulate until the connection is dropped
        # Error replies repeat the verb and are long, so a hundredth as many messages as heartbeats
        # is enough.
        for _ in range(20_000):
            deaf.raw(json.dumps({"t": "x" * 2000}).encode() + b"\n")
    other.say("hb")
    assert other.hear()["t"] == "hb"
    job.wait_until(lambda r: [m["index"] for m in r["members"]] == [1], 5)


def test_the_last_line_of_a_closing_connection_is_processed() -> None:
    """A launcher that is killed resets its connection right after its last line."""

    class Closing:
        def is_closing(self) -> bool:
            return True

    async def last_words() -> tuple[str, Any]:
        server = Server(CoordinatorSettings(2, 2), TOKEN, True)
        member = server.coordinator.hello("job-0-0", 0, 0, 1, lambda verb, fields: None)
        assert member is not None
        reader = asyncio.StreamReader()
        reader.feed_data(protocol.encode("note", kind="ColdWorkers", why="last"))
        reader.feed_eof()
        closing: Any = Closing()
        why = await server._listen(member, reader, closing, member.send)
        return why, server.coordinator.report().notes

    assert asyncio.run(last_words()) == (
        "it did not read the coordinator's messages",
        (protocol.Note("job-0-0", "ColdWorkers", "last"),),
    )


def test_a_host_that_stays_silent_is_declared_lost(job: Job) -> None:
    wire = member(job, 0)
    assert wire.hear()["t"] == "welcome"
    ready(wire)
    drop_all_packets(wire.socket)
    started = time.monotonic()
    report = job.wait_until(lambda r: r["members"] == [], 30)
    assert time.monotonic() - started > 5
    [lost] = report["lost"]
    assert lost["pod"] == "job-0-0" and lost["why"].startswith("silent for ")


def test_sigterm_after_the_group_has_finished_is_not_an_error(tmp_path: Path) -> None:
    """Regression: kubectl showed the coordinator's pod of a succeeded job with an error."""
    job = Job(tmp_path, nodes=1, store=False, mode="Fast")
    job.start_coordinator()
    job.wait_until(lambda r: r["state"] == "Forming", 10)
    wire = member(job, 0)
    assert wire.hear()["t"] == "welcome"
    ready(wire)
    assert wire.hear()["t"] == "go"
    wire.say("joined", round=1)
    wire.say("finished", round=1)
    assert wire.hear() == {"t": "done"}
    job.kill("coordinator", signal.SIGTERM)
    assert job.wait_exit("coordinator", 2 * slowness()) == 0


def test_the_coordinator_exits_immediately_on_sigterm_or_if_its_store_dies(tmp_path: Path) -> None:
    job = Job(tmp_path, store=False)
    job.start_coordinator()
    job.wait_until(lambda r: True)
    job.kill("coordinator", signal.SIGTERM)
    assert job.wait_exit("coordinator", 2 * slowness()) == 143

    pytest.importorskip("torch", reason="the store needs torch")
    with contextlib.closing(Job(tmp_path)) as job:
        process = job.start_coordinator()
        job.wait_until(lambda r: True)
        assert b"503" in raw_http(job, b"GET /healthz HTTP/1.1\r\n\r\n").splitlines()[0]
        deadline = time.monotonic() + 20
        while not raw_http(job, b"GET /healthz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < deadline, job.all_logs()
            time.sleep(0.1)
        store = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        os.kill(store, signal.SIGKILL)
        assert job.wait_exit("coordinator", 5) == 1


@pytest.mark.parametrize(
    ("nodes", "arguments", "why"),
    [
        (0, (), "--nodes: must be at least 1"),
        (2, ("--min-nodes", "3"), "--min-nodes: must be from 1 to --nodes (2), not 3"),
        (2, ("--attempt", "-1"), "--attempt: must not be negative"),
        (2, ("--backoff", "9:1"), "INITIAL must be above 0 and at most MAXIMUM"),
        (2, ("--backoff", "soon"), "must be INITIAL:MAXIMUM in seconds"),
        (2, ("--hang-after", "0"), "must be above 0"),
        (2, ("--store-port", "1"), "--store-port has no effect with --mode Fast"),
    ],
)
def test_a_coordinator_that_cannot_start_reports_the_reason(
    tmp_path: Path, nodes: int, arguments: tuple[str, ...], why: str
) -> None:
    job = Job(tmp_path, nodes=nodes, store=False, mode="Fast")
    job.start_coordinator(*arguments)
    assert job.wait_exit("coordinator", 10) == 2
    assert why in job.log("coordinator").read_text()


@pytest.mark.parametrize("address", ["203.0.113.1", ""])
def test_a_store_whose_address_is_not_its_pods_ends_the_coordinator_with_the_reason(
    tmp_path: Path, address: str
) -> None:
    pytest.importorskip("torch", reason="the store needs torch")
    job = Job(tmp_path)
    job.start_coordinator(host="", POD_IP=address)
    assert job.wait_exit("coordinator", 60) == 1
    log = job.log("coordinator").read_text()
    assert f"store: cannot host a store on {address!r}, port {job.store_port}: " in log and "check POD_IP" in log


@pytest.mark.parametrize(
    "prints",
    [
        "print('== the image of the team ==')",
        "print('== no newline ==', end='')",
        "print(200_000 * '=')",
    ],
)
def test_output_of_the_image_does_not_hide_that_the_store_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str
) -> None:
    pytest.importorskip("torch", reason="the store needs torch")
    (tmp_path / "sitecustomize.py").write_text(f"{prints}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(Job(tmp_path, nodes=1, mode="Standard")) as job:
        job.start_coordinator()
        deadline = time.monotonic() + 60
        while "store: ready" not in (text := job.log("coordinator").read_text()):
            assert time.monotonic() < deadline, text[-2000:]
            time.sleep(0.05)


def test_an_image_without_a_usable_torch_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "print('loading', end='')\nraise ImportError('libtorch.so:\\nno such library\\n\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = Job(tmp_path, nodes=1, mode="Standard")
    job.start_coordinator()
    assert job.wait_exit("coordinator", 60) == protocol.EXIT_INIT_FAILURE
    last = job.log("coordinator").read_text().splitlines()[-1]
    assert last.endswith(
        "cannot import the image's torch, which the rendezvous store needs: libtorch.so: no such library"
    )


def test_the_output_of_the_stores_process_is_read_until_it_exits() -> None:
    """Otherwise the image's output after the start would fill the pipe and stop the store."""

    async def read() -> bytes:
        ready, output, said = list[bool](), asyncio.StreamReader(), bytearray()
        server: Any = SimpleNamespace(store_is_ready=lambda: ready.append(True))
        output.feed_data(b"hello\nrea")
        reading = asyncio.ensure_future(coordinator_program._read(output, said, server))
        await asyncio.sleep(0)
        output.feed_data(b"dy 29400\n" + 10**6 * b"." + b"\nready 1\nthe last line\n")
        output.feed_eof()
        await reading
        assert ready == [True]
        return bytes(said)

    said = asyncio.run(read())
    assert said.endswith(b"\nthe last line\n") and len(said) == coordinator_program.KEPT_OUTPUT


@pytest.mark.parametrize("how", ["asked", "store"])
def test_the_coordinator_exits_even_if_connections_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Regression: from Python 3.12 on, closing a server waits for its connections, so a coordinator
    whose store had died did not exit.
    """
    if how == "store":
        pytest.importorskip("torch", reason="the store needs torch")
    (tmp_path / "sitecustomize.py").write_text(
        "import asyncio, asyncio.base_events\n"
        "async def wait_closed(self): await asyncio.sleep(600)\n"
        "asyncio.base_events.Server.wait_closed = wait_closed\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.closing(Job(tmp_path, nodes=1, mode="Standard", store=how == "store")) as job:
        job.start_coordinator()
        job.wait_until(lambda report: report["state"] == "Forming", 60)
        wire = member(job, 0)
        if how == "asked":
            assert job.post("/v1/exit", {"why": "the job has ended"}) == (200, {})
        else:
            pid = job.processes["coordinator"].pid
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        assert job.wait_exit("coordinator", 20) == (1 if how == "store" else 0)
        assert "Traceback" not in job.log("coordinator").read_text()
        wire.close()


# ---- slow is not dead


def clients(job: Job, count: int) -> list[MemberClient]:
    """Return the connections of launchers in a running round."""
    found = []
    for index in range(count):
        identity = {"pod": f"job-{index}-0", "index": index, "attempt": 0, "pid": 100 + index, "generation": 0}
        client = MemberClient(f"127.0.0.1:{job.port}", TOKEN, identity, Mode.FAST, 60, lambda *end: None)
        client.start()
        found.append(client)

    def take_part(client: MemberClient) -> None:
        client.wait_welcome()
        go = client.wait_go("127.0.0.1", 1)
        assert go is not None
        client.joined(go["round"])

    threads = [threading.Thread(target=take_part, args=(client,)) for client in found]
    for thread in threads:
        thread.start()
    job.wait_until(lambda r: r["state"] == "Running", 20)
    return found


def stand_still(job: Job, seconds: float) -> None:
    """Stop the coordinator's process for `seconds` with a signal."""
    job.kill("coordinator", signal.SIGSTOP)
    time.sleep(seconds)
    job.kill("coordinator", signal.SIGCONT)


def test_a_coordinator_that_was_stopped_does_not_restart_workers(tmp_path: Path) -> None:
    with contextlib.closing(started_job(tmp_path, 4)) as job:
        members = clients(job, 4)
        stand_still(job, 8)
        time.sleep(RETURN_SECONDS + 2)
        report = job.status()
        assert (report["state"], report["round"], report["incidents"]) == ("Running", 1, [])
        assert not any(client.must_restart(1) for client in members)
        assert "was stalled for" in job.log("coordinator").read_text()


def test_a_coordinator_that_was_stopped_does_not_report_a_hang(tmp_path: Path) -> None:
    """The coordinator's timer for the next step fires as soon as it continues."""
    with contextlib.closing(started_job(tmp_path, 2, "--hang-after", "6")) as job:
        members = clients(job, 2)
        stand_still(job, 7)
        time.sleep(DUMP_SECONDS + 1)
        assert job.status()["incidents"] == []
        assert not any(client.must_restart(1) for client in members)


def test_a_stalled_coordinator_first_reads_what_members_sent_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members' workers end while the coordinator stands still, past the deadline for that."""
    monkeypatch.setattr(drain, "DRAIN_SECONDS", 1.0)

    def members(port: int, loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
        job: Any = SimpleNamespace(port=port, nodes=2, wait_until=lambda *_: None)
        wires = running(job)
        wires[0].say("failure", round=1, message="ValueError: bug", exitCode=1)
        assert [wire.hear()["t"] for wire in wires] == ["restart", "restart"]
        loop.call_soon_threadsafe(time.sleep, 2.0)
        time.sleep(0.2)  # The coordinator must stand still before anything arrives.
        ready(*wires, after=1)
        return [wire.hear() for wire in wires]

    async def serve() -> list[dict[str, Any]]:
        server = Server(CoordinatorSettings(2, 2), TOKEN, True)
        async with await server.listen("127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await asyncio.to_thread(members, port, asyncio.get_running_loop())

    assert [(line["t"], line.get("round")) for line in asyncio.run(serve())] == [("go", 2)] * 2


LAUNCHER = """
import sys, time
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.protocol import Mode
address, token = sys.argv[1:]
identity = {"pod": "job-1-0", "index": 1, "attempt": 0, "pid": 1, "generation": 0}
client = MemberClient(address, token, identity, Mode.FAST, 60, lambda *end: print(end, flush=True))
client.start()
client.wait_welcome()
client.joined(client.wait_go("127.0.0.1", 1)["round"])
time.sleep(1000)
"""


def test_a_launcher_that_was_stopped_does_not_restart_workers(job: Job) -> None:
    command = [sys.executable, "-c", LAUNCHER, f"127.0.0.1:{job.port}", TOKEN]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(RUNTIME.parent)}) as launcher:
        try:
            [client] = clients(job, 1)  # This launcher is the job's other node.
            launcher.send_signal(signal.SIGSTOP)
            time.sleep(10)
            assert job.status()["state"] == "Running"
            launcher.send_signal(signal.SIGCONT)
            time.sleep(RETURN_SECONDS + 2)
            report = job.status()
            assert (report["state"], report["round"], report["incidents"]) == ("Running", 1, [])
            assert not client.must_restart(1)
        finally:
            launcher.kill()
    job.wait_until(lambda r: r["state"] == "Restarting", 30)


def drop_all_packets(receiver: socket.socket) -> None:
    """Make the socket look as if its host were unreachable, because its kernel acknowledges
    nothing.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes
    fprog = struct.pack("HL", 1, ctypes.addressof(program))
    receiver.setsockopt(socket.SOL_SOCKET, 26, fprog)  # SO_ATTACH_FILTER


def test_a_member_whose_host_is_gone_is_lost_within_seconds(tmp_path: Path) -> None:
    with contextlib.closing(started_job(tmp_path, 3)) as job:
        wires = running(job, 3)

        def beat() -> None:
            with contextlib.suppress(OSError):
                while True:
                    for wire in wires[:2]:
                        wire.say("hb")
                    time.sleep(protocol.HEARTBEAT_SECONDS)

        threading.Thread(target=beat, daemon=True).start()
        drop_all_packets(wires[2].socket)
        began = time.monotonic()
        report = job.wait_until(lambda r: r["state"] == "Restarting", 30)
        assert [lost["pod"] for lost in report["lost"]] == ["job-2-0"]
        assert "job-0-0 is silent" not in job.log("coordinator").read_text(), "its heartbeats are received"
        limit = protocol.SILENCE_SECONDS + PROBE_SECONDS + RETURN_SECONDS - 1
        assert protocol.SILENCE_SECONDS - 1 < time.monotonic() - began < limit * slowness(), (
            "the group does not wait until the member returns"
        )


def test_the_coordinator_waits_if_all_members_fall_silent_together(tmp_path: Path) -> None:
    """A coordinator that hears from no member judges none, because its own host may be partitioned.
    In the end it declares all members lost at the same moment. Otherwise, the operator would
    replace only the first pod that is reported lost.
    """
    with contextlib.closing(started_job(tmp_path, 3)) as job:
        wires = running(job, 3)
        for number, wire in enumerate(wires):
            time.sleep(2.0 * min(number, 1))
            wire.say("hb")
            drop_all_packets(wire.socket)
        time.sleep(2 * protocol.SILENCE_SECONDS)
        assert job.status()["state"] == "Running"
        report = job.wait_until(lambda r: r["lost"], BLIND_SECONDS + 10)
        assert (report["state"], len(report["lost"])) == ("Restarting", 3)
        reasons = [*(lost["why"] for lost in report["lost"]), *(i["message"] for i in report["incidents"])]
        assert [why for why in reasons if "like most members" not in why] == [], "no single member is to blame"


def test_a_silent_member_that_was_lost_with_others_and_speaks_again_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the member's connection was still open and answered, so it never learned that it
    had to send hello again.
    """
    monkeypatch.setattr(protocol, "SILENCE_SECONDS", 30.0)
    hear, cut_off = Server._hear, threading.Event()

    async def silenced(self: Server, member: Member, *rest: Any) -> bytes:
        if cut_off.is_set() and member.index == 0:
            for each in self.coordinator.members:
                each.heard -= 2 * BLIND_SECONDS
            raise MemberSilent("silent for 60 s")
        return await hear(self, member, *rest)

    monkeypatch.setattr(Server, "_hear", silenced)

    def members(port: int) -> tuple[list[str], str]:
        job: Any = SimpleNamespace(port=port, nodes=2, wait_until=lambda *_: None)
        first, second = running(job)
        for wire in (first, second):
            wire.say("hb")
            assert wire.hear()["t"] == "hb", "all its earlier lines are read"
        cut_off.set()
        first.say("note", kind="ColdWorkers", why="")
        first.lines.read()  # until both members are declared lost
        second.say("hb")
        answers = [json.loads(line)["t"] for line in second.lines]
        return answers, member(job, 1).hear()["t"]

    async def serve() -> tuple[list[str], str]:
        server = Server(CoordinatorSettings(2, 2), TOKEN, True)
        listening = await server.listen("127.0.0.1", 0)
        async with listening:
            return await asyncio.to_thread(members, listening.sockets[0].getsockname()[1])

    answers, again = asyncio.run(serve())
    assert answers.count("hb") == 1 and again == "welcome", answers
