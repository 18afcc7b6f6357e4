"""The coordinator's port: both protocols, by real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from podfiles_harness import TOKEN, Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, nodes=200, store=False)
    started = time.monotonic()
    job.start_coordinator()
    job.wait_until(lambda r: r["state"] == "Forming", 10)
    print(f"listens after {time.monotonic() - started:.2f} s")
    yield job
    job.close()


class Wire:
    """A member's end of a connection."""

    def __init__(self, job: Job) -> None:
        self.socket = socket.create_connection(("127.0.0.1", job.port), timeout=10)
        self.lines = self.socket.makefile("rb")

    def say(self, verb: str, **fields: Any) -> None:
        self.raw(json.dumps({"t": verb, **fields}).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        assert line, "the coordinator closed the connection"
        message: dict[str, Any] = json.loads(line)
        return message

    def closed(self) -> bool:
        return self.lines.readline() == b""

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


def member(job: Job, index: int, attempt: int = 0, pid: int = 1, **more: Any) -> Wire:
    wire = Wire(job)
    wire.say("hello", token=TOKEN, pod=f"job-{index}-{attempt}", index=index, attempt=attempt, pid=pid, **more)
    return wire


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
        (b'{"t":"hb"}\n', 'first line must be "hello"'),
        (b'{"t":"hello","token":"x","pod":"p","index":0,"attempt":0,"pid":1}\n', "token"),
        (json.dumps({"t": "hello", "token": TOKEN, "pod": "p", "index": "0", "attempt": 0, "pid": 1}).encode() + b"\n", "index"),
        (json.dumps({"t": "hello", "token": TOKEN, "pod": "p", "index": 200, "attempt": 0, "pid": 1}).encode() + b"\n", "200"),
        (json.dumps({"t": "hello", "token": TOKEN, "index": 1, "attempt": 0, "pid": 1}).encode() + b"\n", "pod"),
    ],
)
def test_a_bad_hello_is_refused_with_its_reason(job: Job, line: bytes, why: str) -> None:
    wire = Wire(job)
    wire.raw(line)
    answer = wire.hear()
    assert answer["t"] == "refused" and why in answer["why"]
    assert wire.closed()
    assert job.status()["members"] == []


def test_a_members_bad_lines_are_answered_and_change_nothing(job: Job) -> None:
    wire = member(job, 0)
    assert wire.hear() == {"t": "welcome", "generation": 0}
    for line, why in ((b"nonsense\n", "JSON"), (b'{"t":"dance"}\n', "dance"), (b'{"t":"joined","round":-1}\n', "round")):
        wire.raw(line)
        answer = wire.hear()
        assert answer["t"] == "error" and why in answer["why"]
    wire.say("hb")
    assert wire.hear()["t"] == "hb"
    wire.raw(b'{"t":"' + b"x" * 400_000)  # longer than any line may be: this connection is given up
    job.wait_until(lambda r: r["members"] == [], 5)


def test_bad_requests_say_what_is_wrong(job: Job) -> None:
    assert job.post("/v1/progress", {"step": 1}, token="wrong")[0] == 401
    assert job.post("/v1/progress", b"{")[0] == 400
    for path, body, why in (
        ("/v1/progress", {"lossy": 1}, "lossy: unknown field"),
        ("/v1/progress", {"loss": "low"}, "loss: must be a number"),
        ("/v1/progress", [1], "JSON object"),
        ("/v1/progress", {"metrics": {"a": "b"}}, "metrics.a"),
        ("/v1/gone", {"pod": 3, "why": ""}, "pod: must be a string"),
        ("/v1/stop", {"ok": "yes", "why": ""}, "ok: must be a boolean"),
        ("/v1/stop", {"ok": True, "why": "", "extra": 1}, "extra: unknown field"),
    ):
        status, answer = job.post(path, body)
        assert status == 400 and why in answer["error"], (path, answer)
    assert b"404" in raw_http(job, b"GET /nothing HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b"405" in raw_http(job, b"POST /status HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b"400" in raw_http(job, b"GET /status?after=x&wait=1 HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b"400" in raw_http(job, b"what is this\r\n\r\n").splitlines()[0]
    assert b"413" in raw_http(job, b"POST /v1/progress HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n").splitlines()[0]
    assert raw_http(job, b"GET /healthz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert job.status()["progress"] == {"updatedAt": None}


def test_the_long_poll_answers_at_a_change(job: Job) -> None:
    version = job.status()["version"]
    timer = threading.Timer(0.3, lambda: job.post("/v1/progress", {"epoch": 1, "loss": 0.5, "metrics": {"accuracy": 0.9}}))
    timer.start()
    started = time.monotonic()
    report = job.status(after=version, wait=20)
    assert 0.2 < time.monotonic() - started < 5 and report["version"] > version
    assert report["progress"]["loss"] == 0.5 and report["progress"]["metrics"] == {"accuracy": 0.9}
    timer.join()
    started = time.monotonic()
    assert job.status(after=report["version"], wait=0.5)["version"] == report["version"]
    assert 0.4 < time.monotonic() - started < 5


def test_progress_of_the_script_beats_the_step_counter(job: Job) -> None:
    job.post("/v1/progress", {"step": 3, "automatic": True, "metrics": {"stepsPerSecond": 2.0}})
    assert job.status()["progress"]["step"] == 3
    job.post("/v1/progress", {"step": 30, "steps": 100, "loss": 1.0})
    job.post("/v1/progress", {"step": 4, "automatic": True})
    job.post("/v1/progress", {"loss": 0.9})
    progress = job.status()["progress"]
    assert (progress["step"], progress["steps"], progress["loss"]) == (30, 100, 0.9) and "metrics" not in progress


def test_two_hundred_members_succeed_or_break_together(job: Job) -> None:
    wires = [member(job, i) for i in range(200)]
    assert all(w.hear()["t"] == "welcome" for w in wires)
    for i, w in enumerate(wires):
        w.say("joining")
        w.say("joined", round=0, rank=i, world=200)
    job.wait_until(lambda r: r["state"] == "Running" and len(r["members"]) == 200, 10)
    wires[7].close()
    started = time.monotonic()
    told = {"t": "restart", "round": 0, "why": "node job-7-0 was lost: its connection ended"}
    assert all(w.hear() == told for w in wires if w is not wires[7])
    assert time.monotonic() - started < 2
    job.wait_until(lambda r: [i["kind"] for i in r["incidents"]] == ["PeerLost"], 5)
    wires[7] = member(job, 7, attempt=1)
    assert wires[7].hear()["t"] == "welcome"
    for w in wires:
        w.say("joining")
    job.wait_until(lambda r: [m["state"] for m in r["members"]] == ["Joining"] * 200, 10)
    for i, w in enumerate(wires):
        w.say("joined", round=1, rank=i, world=200)
        w.say("finished", round=1)
    assert all(w.hear() == {"t": "done"} for w in wires)
    assert job.status()["state"] == "Succeeded"
    text = urllib.request.urlopen(f"http://127.0.0.1:{job.port}/metrics", timeout=5).read().decode()
    assert 'ddpjob_incidents_total{job_name="job",namespace="default",kind="PeerLost"} 1' in text
    assert 'ddpjob_rendezvous_round{job_name="job",namespace="default"} 1' in text


def test_the_operator_knows_of_a_lost_pod_before_its_connection_ends(job: Job) -> None:
    first, second = member(job, 0), member(job, 1)
    for i, w in enumerate((first, second)):
        assert w.hear()["t"] == "welcome"
        w.say("joined", round=4, rank=i, world=2)
    job.wait_until(lambda r: r["state"] == "Running")
    assert job.post("/v1/gone", {"pod": "job-1-0", "why": "node n2 is lost"}) == (200, {})
    assert first.hear() == {"t": "restart", "round": 4, "why": "node job-1-0 was lost: node n2 is lost"}
    assert second.hear()["t"] == "stop"
    zombie = member(job, 1)  # it comes back: its place is not its own any more
    assert zombie.hear()["t"] == "stop"
    report = job.wait_until(lambda r: r["incidents"])
    assert (report["incidents"][0]["kind"], report["incidents"][0]["message"]) == ("PeerLost", "node n2 is lost")


def test_the_same_process_may_come_back_over_a_new_connection(job: Job) -> None:
    half_open = member(job, 0, pid=5)
    assert half_open.hear()["t"] == "welcome"
    half_open.say("joined", round=0, rank=0, world=1)
    job.wait_until(lambda r: r["state"] == "Running")
    again = member(job, 0, pid=5, resume={"round": 0, "rank": 0, "world": 1})
    assert again.hear()["t"] == "welcome"
    half_open.close()
    again.say("finished", round=0)
    assert again.hear()["t"] == "done"
    assert job.status()["incidents"] == []


def test_who_comes_back_after_its_round_was_broken_is_told(job: Job) -> None:
    first, second = member(job, 0), member(job, 1, pid=5)
    for i, w in enumerate((first, second)):
        assert w.hear()["t"] == "welcome"
        w.say("joined", round=0, rank=i, world=2)
    job.wait_until(lambda r: r["state"] == "Running")
    second.close()
    assert first.hear()["t"] == "restart"
    again = member(job, 1, pid=5, resume={"round": 0, "rank": 1, "world": 2})
    assert again.hear()["t"] == "welcome"
    assert again.hear()["t"] == "restart"


def test_a_place_that_has_finished_is_not_run_again_by_its_replacement(job: Job) -> None:
    first, second = member(job, 0), member(job, 1)
    for i, w in enumerate((first, second)):
        assert w.hear()["t"] == "welcome"
        w.say("joined", round=0, rank=i, world=2)
    second.say("finished", round=0)
    job.wait_until(lambda r: [m["state"] for m in r["members"]] == ["Running", "Finished"])
    second.close()
    job.wait_until(lambda r: len(r["members"]) == 1)
    replacement = member(job, 1, attempt=1)
    replacement.say("hb")
    assert replacement.hear()["t"] == "hb"  # no welcome: it would make torchrun restart the node that still works
    first.say("finished", round=0)
    assert first.hear()["t"] == "done" and replacement.hear()["t"] == "done"
    assert job.status()["incidents"] == []


def test_a_member_that_reads_nothing_does_not_stop_the_others(job: Job) -> None:
    deaf, other = member(job, 0), member(job, 1)
    assert other.hear()["t"] == "welcome"
    with pytest.raises(ConnectionError):  # answers pile up until it is given up
        for _ in range(200_000):
            deaf.raw(b'{"t":"hb"}\n' * 500)
    other.say("hb")
    assert other.hear()["t"] == "hb"
    job.wait_until(lambda r: [m["index"] for m in r["members"]] == [1], 5)


def test_silence_is_death(job: Job) -> None:
    wire = member(job, 0)
    assert wire.hear()["t"] == "welcome"
    wire.say("joining")
    started = time.monotonic()
    job.wait_until(lambda r: r["members"] == [], 15)
    assert 8 < time.monotonic() - started < 13


def test_sigterm_ends_it_at_once_and_a_dead_store_takes_it_along(tmp_path: Path) -> None:
    job = Job(tmp_path, store=False)
    job.start_coordinator()
    job.wait_until(lambda r: True)
    job.kill("coordinator", signal.SIGTERM)
    assert job.wait_exit("coordinator", 2) == 143

    job = Job(tmp_path)
    try:
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
    finally:
        job.close()


def test_what_is_missing_at_the_start_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=0, store=False)
    job.start_coordinator()
    assert job.wait_exit("coordinator", 5) == 2
    assert "--nodes: must be at least 1" in job.log("coordinator").read_text()
