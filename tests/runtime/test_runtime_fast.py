"""Fast recovery with real torchrun and gloo. The scripts are unchanged, and the nodes are launchers
on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import slowness
from runtime_harness import PYTHON, RUNTIME, SCRIPTS, Job, until

pytest.importorskip("torch")

STEPS = str(SCRIPTS / "steps.py")
Report = dict[str, Any]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, mode="Fast")
    yield job
    job.close()
    assert job.workers() == [], "processes were left behind"


def states(report: Report) -> list[str]:
    return sorted(m["state"] for m in report["members"])


def made(job: Job, rank: int) -> list[tuple[float, int, int]]:
    """Return (time, pid, step) of every step that a rank has taken."""
    path = job.folder / f"steps-{rank}"
    if not path.exists():
        return []
    rows = (line.split() for line in path.read_text().splitlines())
    return [(float(row[0]), int(row[1]), int(row[2])) for row in rows if len(row) == 3]


def recovery_seconds(job: Job, since: float, ranks: int = 2) -> float:
    """Return the seconds from `since` until each rank has taken a step in a new process."""
    before = {pid for rank in range(ranks) for when, pid, _ in made(job, rank) if when < since}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        firsts = [next((when for when, pid, _ in made(job, rank) if pid not in before), None) for rank in range(ranks)]
        known = [first for first in firsts if first is not None]
        if len(known) == ranks:
            return max(known) - since
        time.sleep(0.02)
    raise AssertionError(job.all_logs())


def finish(job: Job, *names: str) -> Report:
    (job.folder / "enough").touch()
    assert [job.wait_exit(name) for name in names] == [0] * len(names), job.all_logs()
    report = job.status()
    assert report["state"] == "Succeeded"
    return report


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(i["kind"], i["pod"]) for i in report["incidents"]]


def with_a_spare(job: Job, steps: int) -> tuple[str, ...]:
    """Wait until two of three nodes have taken more than `steps` steps. Return their script with
    its arguments.
    """
    script = (STEPS, "--ddp", "--steps", "100000", "--sleep", "0.02")
    job.start_coordinator()
    for index in range(3):
        job.start_node(index, *script)
    job.wait_until(lambda r: states(r) == ["Ready", "Running", "Running"] and len(made(job, 0)) > steps)
    return script


def test_a_spare_takes_over_immediately(job: Job) -> None:
    script = with_a_spare(job, steps=5)
    victim = next(m["pod"] for m in job.status()["members"] if m["state"] == "Running" and m["rank"] == 0)
    killed = time.time()
    job.kill(victim)
    took = recovery_seconds(job, killed)
    print(f"a spare took over in {took:.3f} s")
    assert took < 10 * slowness(), "this only checks that nothing waits for a timeout; the benchmark measures the time"
    index = int(victim.split("-")[1])
    job.start_node(index, *script, attempt=1)
    left = [f"job-{i}-0" for i in range(3) if i != index]
    report = finish(job, *left, f"job-{index}-1")
    assert kinds(report) == [("PeerLost", victim)]
    assert report["notes"] == [], "no worker was started cold"


def test_a_node_with_several_workers_is_replaced(tmp_path: Path) -> None:
    with contextlib.closing(Job(tmp_path, procs=2, mode="Fast")) as job:
        script = (STEPS, "--ddp", "--steps", "100000", "--sleep", "0.02")
        job.start(*script)
        job.wait_until(lambda r: all(len(made(job, rank)) > 3 for rank in range(4)))
        killed = time.time()
        job.kill("job-1-0")
        job.start_node(1, *script, attempt=1)
        print(f"a node with two workers was replaced in {recovery_seconds(job, killed, ranks=4):.3f} s")
        report = finish(job, "job-0-0", "job-1-1")
        assert kinds(report) == [("PeerLost", "job-1-0")]
        assert job.workers() == []


def test_no_step_is_lost_with_the_coordinator(job: Job) -> None:
    script = (STEPS, "--ddp", "--steps", "100000", "--sleep", "0.03")
    job.start(*script)
    job.wait_until(lambda r: len(made(job, 0)) > 5 and r["state"] == "Running")
    job.kill("coordinator")
    job.wait_exit("coordinator")
    at_its_end = len(made(job, 0))
    until(lambda: len(made(job, 0)) > at_its_end + 5)
    before = len(made(job, 0))
    job.start_coordinator(attempt=1)
    report = job.wait_until(lambda r: r["state"] == "Running" and states(r) == ["Running", "Running"])
    assert before > 10 and report["round"] == 1
    job.kill("job-1-0")  # the new coordinator can do everything that the old one did
    job.start_node(1, *script, attempt=1)
    report = finish(job, "job-0-0", "job-1-1")
    assert [steps for _, _, steps in made(job, 0)][:before] == list(range(before)), (
        "no step was lost with the coordinator"
    )
    assert kinds(report) == [("PeerLost", "job-1-0")]
    assert report["incidents"][0]["id"] > 1_000_000


def test_a_group_shrinks_immediately_and_grows_back(tmp_path: Path) -> None:
    with contextlib.closing(Job(tmp_path, mode="Fast", min_nodes=1)) as job:
        script = (STEPS, "--ddp", "--steps", "100000", "--sleep", "0.02", "--trap")
        job.start(*script)
        job.wait_until(lambda r: len(made(job, 1)) > 3)
        killed = time.time()
        job.kill("job-1-0")
        job.wait_until(lambda r: r["world"] == 1 and r["state"] == "Running")
        print(f"continued alone after {recovery_seconds(job, killed, ranks=1):.3f} s")
        job.start_node(1, *script, attempt=1)
        report = job.wait_until(lambda r: r["world"] == 2 and r["state"] == "Running", 40)
        assert kinds(report) == [("PeerLost", "job-1-0"), ("Joined", "job-1-1")]
        assert (job.folder / "saved-0").exists(), (
            "the node that trained alone could save before it was stopped for the new member"
        )


def test_a_hang_is_detected_and_reported_with_its_stacks(job: Job) -> None:
    script = (STEPS, "--steps", "30", "--ddp", "--sleep", "0.02", "--hang-at", "10")
    job.start_coordinator("--hang-after", "3")
    job.start_node(0, *script)
    job.start_node(1, *script, DDPJOB_CHECKPOINT_DIR=str(job.folder))
    report = job.wait_until(lambda r: r["incidents"], 60)
    incident = report["incidents"][0]
    assert incident["kind"] == "Hang", incident
    assert "wait_for_ever" in incident["traceback"] and "rank 0" in incident["traceback"].lower()
    assert "wait_for_ever" in incident["message"], "the message shows where a rank is"
    pods = [m["pod"] for m in report["members"]]
    assert any("wait_for_ever" in job.log(pod).read_text() for pod in pods), "the pod's own log holds its stacks"
    assert list((job.folder / "stacks").glob("round-0.1-rank-*.txt"))
    finish(job, "job-0-0", "job-1-0")


def test_steps_without_an_optimizer_are_not_a_hang_unless_all_ranks_stand_still(job: Job) -> None:
    script = (STEPS, "--steps", "1000", "--sleep", "0.05", "--hang-at", "200")
    job.start_coordinator("--hang-after", "2")
    job.start_node(0, *script)
    job.start_node(1, *script)
    report = job.wait_until(lambda r: r["progress"].get("uncountable") or r["incidents"], 60)
    assert not report["incidents"], "the group is active, although its steps cannot be counted"
    report = job.wait_until(lambda r: r["incidents"], 60)
    [incident] = report["incidents"]
    assert incident["kind"] == "Hang" and "wait_for_ever" in incident["message"], incident
    assert max(step for _, _, step in made(job, 0)) >= 199
    (job.folder / "enough").touch()
    finish(job, "job-0-0", "job-1-0")


def test_a_frozen_node_is_fenced(job: Job) -> None:
    """The frozen node's peers continue with a different node. When the frozen node wakes up, it
    exits.
    """
    with_a_spare(job, steps=3)
    victim = next(m["pod"] for m in job.status()["members"] if m["state"] == "Running")
    frozen = [
        job.processes[victim].pid,
        *(pid for rank in (0, 1) for _, pid, _ in made(job, rank)[:1] if parent_of(pid, victim, job)),
    ]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        job.wait_until(lambda r: any(lost["pod"] == victim for lost in r["lost"]), 40)
        job.wait_until(
            lambda r: (
                r["state"] == "Running" and victim not in [m["pod"] for m in r["members"] if m["state"] == "Running"]
            ),
            20,
        )
        job.post("/v1/gone", {"pods": [victim], "why": "its node was abandoned"})
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert job.wait_exit(victim, 30) in (77, 79)


def parent_of(pid: int, victim: str, job: Job) -> bool:
    """Return whether a worker belongs to the launcher of `victim`."""
    return f"DDPJOB_POD={victim}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_a_job_that_crashes_repeatedly_backs_off(job: Job) -> None:
    script = (STEPS, "--steps", "8", "--raise-at", "0", "--always", "--ddp", "--sleep", "0")
    job.start_coordinator("--backoff", "1:60")
    job.start_node(0, *script)
    job.start_node(1, *script)
    report = job.wait_until(lambda r: len(r["incidents"]) == 4)
    assert {i["kind"] for i in report["incidents"]} == {"WorkerFailed"}
    assert [i["backoffSeconds"] for i in report["incidents"]] == [0, 1, 2, 4]


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
def test_a_script_finds_modules_as_if_python_had_started_it(tmp_path: Path, mode: str) -> None:
    (tmp_path / "look.py").write_text("import json, sys\nprint('path', json.dumps(sys.path))\n")
    plain = subprocess.run(
        [sys.executable, "look.py"], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60
    )
    with contextlib.closing(Job(tmp_path, nodes=1, mode=mode)) as job:
        job.start_coordinator()
        job.start_node(0, "look.py")
        finish(job, "job-0-0")
        assert plain.stdout in job.log("job-0-0").read_text()


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
def test_steps_of_a_script_that_reports_no_steps_are_counted(tmp_path: Path, mode: str) -> None:
    with contextlib.closing(Job(tmp_path, nodes=1, mode=mode)) as job:
        job.start_coordinator()
        job.start_node(0, STEPS, "--ddp", "--steps", "100000", "--sleep", "0.02")
        job.wait_until(lambda r: (r["progress"].get("step") or 0) >= 3)
        job.wait_until(lambda r: r["progress"].get("metrics", {}).get("stepsPerSecond", 0) > 0)
        report = finish(job, "job-0-0")
        assert report["progress"]["step"] == len(made(job, 0)), "the last count is posted at the end"


def test_programs_that_cannot_be_forked_run_cold_and_report_it_to_each_coordinator(job: Job) -> None:
    command = (sys.executable, STEPS, "--steps", "100000", "--sleep", "0.03")
    job.start(*command, torchrun=("--no-python",))
    job.wait_until(lambda r: r["state"] == "Running")
    job.kill("coordinator")
    job.wait_exit("coordinator")
    job.start_coordinator(attempt=1)
    report = job.wait_until(lambda r: r["state"] == "Running")
    assert {(n["kind"], n["pod"]) for n in report["notes"]} == {("ColdWorkers", "job-0-0"), ("ColdWorkers", "job-1-0")}
    assert "--no-python" in report["notes"][0]["why"] and report["attempt"] == 1
    finish(job, "job-0-0", "job-1-0")


UNREAD = """
import os, sys
reader, writer = os.pipe()
os.set_inheritable(reader, True)
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, b"x" * 512)
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 1)
os.dup2(writer, 2)
os.execvp(sys.argv[1], sys.argv[1:])
"""
NO_LOGS = {
    "a full disk": ["sh", "-c", 'exec "$@" > /dev/full 2>&1', "sh"],
    "a pipe that nobody reads": [sys.executable, "-c", UNREAD],
}
"""A command that starts programs that cannot write their logs."""


class Unlogged(Job):
    start: list[str]

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return super()._start(name, [*self.start, *command], env)


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
@pytest.mark.parametrize("why", NO_LOGS)
def test_a_log_that_cannot_be_written_costs_only_its_lines(tmp_path: Path, why: str, mode: str) -> None:
    """This happens if the disk is full of checkpoints, or while a host's container runtime
    hangs.
    """
    job = Unlogged(tmp_path, mode=mode)
    job.start = NO_LOGS[why]
    try:
        job.start_coordinator("--backoff", "0.1:0.1")
        job.start_node(0, STEPS, "--steps", "100000", "--sleep", "0.02", "--exit-at", "3")
        job.start_node(1, STEPS, "--steps", "100000", "--sleep", "0.02", "--exit-at", "3")
        job.wait_until(lambda r: r["state"] == "Running" and r["round"] == 2 and len(made(job, 0)) > 5)
        report = finish(job, "job-0-0", "job-1-0")
        assert [(i["kind"], i["exitCode"]) for i in report["incidents"]] == [("WorkerFailed", 7)]
    finally:
        job.close()


UNREADABLE = """
import os, pathlib, sys
contents = [b"", b'{"message": {"mess', bytes(range(256)), b'{"message": {"message": "own", "extraInfo": null}}']
tries = pathlib.Path(os.environ["OUT"], "tries")
tries.touch()
number = len(tries.read_text())
if number == len(contents):
    sys.exit(0)
tries.write_text("x" * (number + 1))
pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_bytes(contents[number])
os._exit(3)
"""


def test_an_unreadable_error_file_does_not_end_the_node(tmp_path: Path) -> None:
    """A full disk leaves an empty file, and a killed worker half a file."""
    (tmp_path / "unreadable.py").write_text(UNREADABLE)
    with contextlib.closing(Job(tmp_path, nodes=1, mode="Fast")) as job:
        job.start_coordinator("--backoff", "0.1:0.1")
        job.start_node(0, "unreadable.py")
        assert job.wait_exit("job-0-0") == 0, job.all_logs()
        found = [(i["kind"], i["exitCode"], i["message"]) for i in job.status()["incidents"]]
        assert [(kind, code) for kind, code, _ in found] == [("WorkerFailed", 3)] * 4
        assert all("is not readable" in message for *_, message in found[:3]) and found[3][2] == "own"


COUNTED = """
import os, pathlib, runpy, sys
sys.argv = sys.argv[2:]
import ddpjob_runtime.launcher.oom as oom
oom.FILES = (pathlib.Path(os.environ["OUT"], "memory.events"),)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A command that starts a launcher whose counter of processes killed for memory is a file of the
test.
"""


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_fork_server_killed_for_memory_makes_its_node_exit_with_the_reason(
    job: Job, number: signal.Signals | None
) -> None:
    """This holds even if the launcher is asked to stop before it has noticed the kill."""
    job.start_coordinator()
    prefix, options = (PYTHON, "-c", COUNTED), ("--nnodes=1", "--monitor-interval=1")
    path = os.pathsep.join((str(RUNTIME.parent), os.environ.get("PYTHONPATH", "")))
    node = job.start_node(0, STEPS, "--sleep", "0.02", torchrun=options, prefix=prefix, PYTHONPATH=path)
    job.start_node(1, STEPS, "--sleep", "0.02")
    job.wait_until(lambda r: r["state"] == "Running")
    (server,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    (job.folder / "memory.events").write_text("oom_kill 1\n")
    os.kill(int(server), signal.SIGKILL)
    if number is not None:
        node.send_signal(number)
    assert job.wait_exit("job-0-0", 20) == (1 if number is None else 143)
    if number is None:
        why = f"the process that starts workers (pid {server}) was killed by the kernel: the container reached its "
        assert why in job.end("job-0-0")["message"]
        (incident,) = job.wait_until(lambda r: r["incidents"])["incidents"]
        assert (incident["kind"], incident["pod"]) == ("OOMKilled", "job-0-0") and why in incident["message"]
    else:
        assert job.end("job-0-0")["message"] == "asked to stop by SIGTERM"
