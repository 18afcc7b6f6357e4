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
    print(f"listens after {time.monotonic() - started:.2f} s")
    return job


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


def ready(*wires: Wire, after: int = 0) -> None:
    for i, w in enumerate(wires):
        w.say("ready", after=after, host="10.0.0.1", port=5000 + i)


def running(job: Job, count: int = 2, **more: Any) -> list[Wire]:
    """Members of a running round 1; those beyond the job's nodes are spares."""
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
        (b'{"t":"hb"}\n', 'first line must be "hello"'),
        (b'{"t":"hello","token":"x","pod":"p","index":0,"attempt":0,"pid":1}\n', "token"),
        (json.dumps({"t": "hello", "token": TOKEN, "pod": "p", "index": "0", "attempt": 0, "pid": 1}).encode() + b"\n", "index"),
        (
            json.dumps({"t": "hello", "token": TOKEN, "pod": "p", "index": 1, "attempt": 0, "pid": 1, "grace": "long"}).encode() + b"\n",
            "grace",
        ),
        (
            json.dumps({"t": "hello", "token": TOKEN, "pod": "p", "index": 1, "attempt": 0, "pid": 1, "resume": {"round": "one"}}).encode()
            + b"\n",
            "resume.round",
        ),
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
        ("/v1/size", {"nodes": True, "minNodes": 1}, "nodes: must be a whole number"),
        ("/v1/size", {"nodes": 2}, "minNodes: must be a whole number"),
        ("/v1/patience", {"hangAfter": "long", "backoff": [1, 60]}, "hangAfter: a number of seconds or null"),
        ("/v1/patience", {"hangAfter": None, "backoff": [9, 3]}, "INITIAL <= MAXIMUM"),
        ("/v1/size", {"nodes": 2, "minNodes": 3}, "minNodes: must be from 1 to nodes (2), not 3"),
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


def test_256_members_succeed_or_break_together(big_job: Job) -> None:
    job, nodes = big_job, 256
    wires = [member(job, i) for i in range(nodes)]
    assert all(w.hear()["t"] == "welcome" for w in wires)
    started = time.monotonic()
    ready(*wires)
    goes = [w.hear() for w in wires]
    assert sorted(go["rank"] for go in goes) == list(range(nodes)) and all(len(go["members"]) == nodes for go in goes)
    print(f"go reaches {nodes} members in {time.monotonic() - started:.2f} s")
    for w in wires:
        w.say("joined", round=1)
    job.wait_until(lambda r: r["state"] == "Running" and r["world"] == nodes, 10)
    wires[7].close()
    started = time.monotonic()
    told = {"t": "restart", "round": 1, "why": "node job-7-0 was lost: its connection ended", "planned": False}
    assert all(w.hear() == told for w in wires if w is not wires[7])
    assert time.monotonic() - started < 2
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


def test_a_spare_takes_over_at_once(job: Job) -> None:
    first, second, spare = running(job, 3)
    started = time.monotonic()
    second.close()
    assert first.hear()["t"] == "restart"
    first.say("ready", after=1, host="10.0.0.9", port=77)
    go, same = first.hear(), spare.hear()
    print(f"the next round begins {1000 * (time.monotonic() - started):.1f} ms after the loss")
    assert time.monotonic() - started < 0.5
    assert (go["t"], go["round"], go["rank"], same["rank"]) == ("go", 2, 0, 1) and go["members"] == same["members"]
    assert go["members"] == [
        {"rank": 0, "host": "10.0.0.9", "port": 77, "pod": "job-0-0"},
        {"rank": 1, "host": "10.0.0.1", "port": 5002, "pod": "job-2-0"},
    ]


def test_a_failure_is_told_with_all_that_is_known_of_it(job: Job) -> None:
    first, second = running(job)
    now = 123.0  # of the member's own clock: only the age counts
    first.say(
        "failure", round=1, rank=0, localRank=0, pid=7, exitCode=-9, signal="SIGKILL", message="out of memory", traceback="T",
        time=now - 2, sent=now, oom=True,
    )  # fmt: skip
    assert second.hear()["t"] == "restart"
    ready(first, second, after=1)
    incident = job.wait_until(lambda r: r["incidents"])["incidents"][0]
    assert (incident["kind"], incident["exitCode"], incident["signal"], incident["traceback"]) == ("OOMKilled", -9, "SIGKILL", "T")
    assert (incident["rank"], incident["localRank"], incident["pod"], incident["backoffSeconds"]) == (0, 0, "job-0-0", 0.0)


def test_a_hang_is_seen_and_its_stacks_are_kept(tmp_path: Path) -> None:
    job = started_job(tmp_path, 2, "--hang-after", "1")
    try:
        first, second = running(job)
        assert first.hear() == {"t": "dump", "round": 1} and second.hear()["t"] == "dump"
        stack = 'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in all_reduce\n'
        for rank, w in enumerate((first, second)):
            w.say("stacks", round=1, rank=rank, localRank=0, text=stack)
        assert first.hear()["t"] == "restart" and second.hear()["t"] == "restart"
        incident = job.wait_until(lambda r: r["incidents"])["incidents"][0]
        assert incident["kind"] == "Hang" and "rank 1 in all_reduce (train.py:3)" in incident["message"]
        assert incident["traceback"].count("most recent call first") == 2
    finally:
        job.close()


def test_another_coordinator_adopts_the_round_of_one_that_was_killed(job: Job) -> None:
    wires = running(job, 3)
    job.kill("coordinator")
    job.wait_exit("coordinator", 5)
    assert all(w.closed() for w in wires)
    job.start_coordinator(attempt=1)
    job.wait_until(lambda r: r["attempt"] == 1, 10)
    spare = member(job, 2)
    assert spare.hear()["t"] == "welcome"
    ready(spare)
    first, second = (member(job, i, resume={"round": 1, "rank": i, "world": 2, "state": "Running"}) for i in range(2))
    assert first.hear() == second.hear() == {"t": "welcome", "generation": 0}
    report = job.wait_until(lambda r: r["state"] == "Running", 5)
    assert (report["round"], report["world"], report["incidents"]) == (1, 2, [])
    second.close()
    assert first.hear()["t"] == "restart"
    first.say("ready", after=1, host="10.0.0.1", port=1)
    assert (first.hear()["round"], spare.hear()["rank"]) == (1_000_001, 1)
    assert job.wait_until(lambda r: r["incidents"])["incidents"][0]["id"] == 1_000_001


def test_another_size_restarts_the_group_and_leaves_time_to_save(job: Job) -> None:
    first, second = running(job, grace=7)
    assert job.post("/v1/size", {"nodes": 1, "minNodes": 1}) == (200, {})
    told = first.hear()
    assert (told["t"], told["planned"]) == ("restart", True) and second.hear() == told
    ready(first, second, after=1)
    assert first.hear()["world"] == 1
    report = job.status()
    assert (report["wanted"], report["minimum"], report["world"]) == (1, 1, 1)
    assert [m["state"] for m in report["members"]] == ["Running", "Ready"]


def test_the_operator_knows_of_a_lost_pod_before_its_connection_ends(job: Job) -> None:
    first, second = running(job)
    assert job.post("/v1/gone", {"pod": "job-1-0", "why": "node n2 is lost"}) == (200, {})
    assert first.hear() == {"t": "restart", "round": 1, "why": "node job-1-0 was lost: node n2 is lost", "planned": False}
    told = second.hear()
    assert told["t"] == "stop" and told["fenced"] is True
    zombie = member(job, 1)  # it comes back: its place is not its own any more
    assert zombie.hear()["fenced"] is True
    ready(first, after=1)
    report = job.wait_until(lambda r: r["incidents"])
    assert (report["incidents"][0]["kind"], report["incidents"][0]["message"]) == ("PeerLost", "node n2 is lost")
    assert report["lost"] == []


def test_the_same_process_may_come_back_over_a_new_connection(job: Job) -> None:
    half_open, other = running(job)
    again = member(job, 0, resume={"round": 1, "rank": 0, "world": 2, "state": "Running"})
    assert again.hear()["t"] == "welcome"
    half_open.close()
    for w in (again, other):
        w.say("finished", round=1)
    assert again.hear()["t"] == "done" and job.status()["incidents"] == []


def test_a_pod_of_another_generation_is_not_let_in(job: Job) -> None:
    wire = member(job, 0, generation=3)
    assert wire.hear() == {"t": "welcome", "generation": 0} and wire.closed()
    assert job.status()["members"] == []


def test_a_note_reaches_the_operator(job: Job) -> None:
    wire = member(job, 0)
    assert wire.hear()["t"] == "welcome"
    wire.say("note", kind="ColdWorkers", why="--no-python")
    note = {"pod": "job-0-0", "kind": "ColdWorkers", "why": "--no-python"}
    job.wait_until(lambda r: r["notes"] == [note], 5)


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
    ready(wire)
    started = time.monotonic()
    report = job.wait_until(lambda r: r["members"] == [], 15)
    assert 5 < time.monotonic() - started < 10
    assert [(entry["pod"], entry["why"]) for entry in report["lost"]] == [("job-0-0", "silent for 6 s")]


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


@pytest.mark.parametrize(
    ("nodes", "arguments", "why"),
    [
        (0, (), "--nodes: must be at least 1"),
        (2, ("--min-nodes", "3"), "--min-nodes: must be from 1 to --nodes (2), not 3"),
        (2, ("--attempt", "-1"), "--attempt: must not be negative"),
        (2, ("--backoff", "9:1"), "INITIAL must be above 0 and not above MAXIMUM"),
        (2, ("--backoff", "soon"), "must be INITIAL:MAXIMUM in seconds"),
        (2, ("--hang-after", "0"), "must be above 0"),
        (2, ("--store-port", "1"), "mode fast has no store of its own"),
    ],
)
def test_what_is_wrong_at_the_start_is_named(tmp_path: Path, nodes: int, arguments: tuple[str, ...], why: str) -> None:
    job = Job(tmp_path, nodes=nodes, store=False, mode="Fast")
    job.start_coordinator(*arguments)
    assert job.wait_exit("coordinator", 10) == 2
    assert why in job.log("coordinator").read_text()
