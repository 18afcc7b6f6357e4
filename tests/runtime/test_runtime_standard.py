"""Coordinator and launchers with real torchrun and gloo: two nodes are two launchers on
127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_harness import SCRIPTS, Job, until

pytest.importorskip("torch")

STEPS = str(SCRIPTS / "steps.py")
Report = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def job(folder: Path) -> Iterator[Job]:
    job = Job(folder)
    yield job
    job.close()
    assert job.workers() == [], "processes were left behind"


class Proxy:
    """A relay between launchers and the coordinator whose connections a test can cut."""

    def __init__(self, target: int) -> None:
        self.target, self.listener = target, socket.create_server(("127.0.0.1", 0))
        self.open: list[socket.socket] = []
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection(("127.0.0.1", self.target))
            self.open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.pump, args=(source, sink), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        while self.open:
            with contextlib.suppress(OSError):
                self.open.pop().shutdown(socket.SHUT_RDWR)


def running(report: Report, rounds: int = 1) -> bool:
    return report["state"] == "Running" and all(m["round"] == rounds for m in report["members"])


def stepping(job: Job, rank: int = 0, steps: int = 3) -> bool:
    path = job.folder / f"steps-{rank}"
    return path.exists() and len(path.read_text().splitlines()) >= steps


def finish(job: Job, *names: str, seconds: float = 90) -> Report:
    """Wait until all named launchers end with 0 and the coordinator reports success."""
    assert [job.wait_exit(name, seconds) for name in names] == [0] * len(names), job.all_logs()
    report = job.status()
    assert report["state"] == "Succeeded"
    return report


def test_a_killed_node_is_replaced_and_the_job_continues(job: Job) -> None:
    script = (STEPS, "--ddp", "--steps", "40", "--sleep", "0.05")
    job.start(*script)
    report = job.wait_until(
        lambda r: (
            (r["progress"].get("step") or 0) >= 3 and r["progress"].get("metrics", {}).get("stepsPerSecond", 0) > 0
        )
    )
    assert report["state"] == "Running"
    assert sorted((m["pod"], m["state"], m["round"]) for m in report["members"]) == [
        ("job-0-0", "Running", 1),
        ("job-1-0", "Running", 1),
    ]

    before = set(job.workers())
    killed = time.time()
    job.kill("job-1-0")
    job.start_node(1, *script, attempt=1)
    report = job.wait_until(lambda r: r["state"] == "Restarting", 2)
    assert report["recovery"]["downSince"] is not None
    job.wait_until(lambda r: not before & set(job.workers()), 5)  # the kernel ends workers whose launcher was killed
    report = job.wait_until(lambda r: running(r, 2) and r["recovery"]["downSince"] is None)
    print(
        f"recovered {time.time() - killed:.2f} s after kill -9 (coordinator: {report['recovery']['lastSeconds']:.2f} s)"
    )

    report = finish(job, "job-0-0", "job-1-1")
    assert [(i["kind"], i["pod"]) for i in report["incidents"]] == [("PeerLost", "job-1-0")]
    assert report["progress"]["step"] == 40


def test_exceptions_restart_workers_in_place_and_are_reported_with_rank_and_line(job: Job) -> None:
    script = (STEPS, "--steps", "8", "--raise-at", "3", "--fail-last")
    job.start(*script)
    report = finish(job, "job-0-0", "job-1-0")
    first, last = report["incidents"]  # each break has one incident, because the peer's connection errors do not count
    assert (first["kind"], first["rank"], first["localRank"], first["exitCode"]) == ("WorkerFailed", 1, 0, 1)
    # On a busy machine, the process may take longer than 10 s to exit, and the message says so.
    assert first["message"].startswith("ValueError: made to fail at step 3")
    assert (
        "in faults" in first["traceback"]
        and "worker.py" not in first["traceback"]
        and "runpy" not in first["traceback"]
    )
    # Rank 0 had finished when rank 1 failed, so both run again and no success is reported.
    assert (last["kind"], last["rank"], last["message"]) == (
        "WorkerFailed",
        1,
        "ArithmeticError: made to fail at the very end",
    )
    assert len((job.folder / "steps-0").read_text().splitlines()) >= 3 + 8 + 8


SKEWED = """
import os
if "RANK" not in os.environ:  # The launcher alone: workers do not rendezvous.
    import datetime
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic_rendezvous
    class Late(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=float(os.environ["SKEW"]))
    dynamic_rendezvous.datetime = Late
"""
NAMES_ITS_RANK = "import os\nprint('index', os.environ['DDPJOB_INDEX'], 'has rank', os.environ['RANK'])\n"


def test_clock_differences_of_a_minute_and_a_late_node_0_have_no_effect(folder: Path) -> None:
    """c10d compares the nodes' clocks and numbers the nodes by their addresses. The coordinator
    does neither.
    """
    (folder / "skewed").mkdir()
    (folder / "skewed" / "sitecustomize.py").write_text(SKEWED)
    (folder / "names_its_rank.py").write_text(NAMES_ITS_RANK + Path(STEPS).read_text())
    with contextlib.closing(Job(folder, nodes=3)) as job:
        job.start_coordinator()
        for index, skew in ((2, "-60"), (1, "60")):
            node = (index, "names_its_rank.py", "--steps", "20", "--sleep", "0.25")
            job.start_node(*node, SKEW=skew, PYTHONPATH=str(folder / "skewed"))
        job.wait_until(lambda r: len(r["members"]) == 2)
        job.start_node(0, "names_its_rank.py", "--steps", "20", "--sleep", "0.25")
        report = finish(job, *(f"job-{index}-0" for index in range(3)))
        assert report["incidents"] == []
        for index in range(3):
            assert f"index {index} has rank {index}" in job.log(f"job-{index}-0").read_text()


UNINTERRUPTIBLE = """
import ctypes, os, pathlib
if not pathlib.Path("stuck").exists():
    pathlib.Path("stuck").touch()
    libc = ctypes.CDLL(None)
    libc.vfork()  # The parent is in uninterruptible sleep while the child lives.
    libc.sleep(300)
    os._exit(0)
"""


def test_a_node_whose_torchrun_gives_up_has_not_succeeded(folder: Path) -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    if not hasattr(LocalElasticAgent, "_check_uninterruptible_state_timeout"):
        pytest.skip("this torch does not check for workers in uninterruptible sleep")
    (folder / "stuck.py").write_text(UNINTERRUPTIBLE)
    with contextlib.closing(Job(folder, nodes=1)) as job:
        job.start_coordinator()
        job.start_node(0, "stuck.py", TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1")
        report = finish(job, "job-0-0")
        assert report["round"] == 2, "its workers were started again"


def test_a_job_that_loses_a_node_after_its_peer_has_finished_has_not_succeeded(job: Job) -> None:
    script = (STEPS, "--steps", "3", "--late", "60")
    job.start(*script)
    job.wait_until(lambda r: sorted(m["state"] for m in r["members"]) == ["Finished", "Running"])
    late = next(m["pod"] for m in job.status()["members"] if m["state"] == "Running")
    index = int(late.split("-")[1])
    job.kill(late)
    job.start_node(index, *script, attempt=1)
    report = finish(job, f"job-{1 - index}-0", f"job-{index}-1")
    assert [(i["kind"], i["pod"]) for i in report["incidents"]] == [("PeerLost", late)]


def test_a_node_asked_to_stop_lets_its_workers_save_and_is_not_a_failure(job: Job) -> None:
    script = (STEPS, "--steps", "40", "--trap")
    job.start(*script)
    job.wait_until(lambda r: stepping(job))
    signalled = time.time()
    job.kill("job-1-0", signal.SIGTERM)
    assert job.wait_exit("job-1-0", 10) == 143
    print(f"left {time.time() - signalled:.2f} s after SIGTERM")
    assert (job.folder / "saved-0").exists() and (job.folder / "saved-1").exists()
    assert job.end("job-1-0")["kind"] == "Signal"
    job.start_node(1, *script, attempt=1)
    report = finish(job, "job-0-0", "job-1-1")
    assert [(i["kind"], i["pod"]) for i in report["incidents"]] == [("Left", "job-1-0")]


def test_a_coordinator_that_is_stopped_for_a_while_loses_no_pods(job: Job) -> None:
    """One node is still working, and the other has finished. Both nodes notice the silence and
    reconnect.
    """
    job.start(STEPS, "--steps", "3", "--late", "60")
    job.wait_until(lambda r: sorted(m["state"] for m in r["members"]) == ["Finished", "Running"])
    job.kill("coordinator", signal.SIGSTOP)
    time.sleep(15)
    job.kill("coordinator", signal.SIGCONT)
    until(lambda: job.log("coordinator").read_text().count("hello from") == 4)
    assert [job.processes[name].poll() for name in ("job-0-0", "job-1-0")] == [None, None]
    report = job.status()
    assert (report["round"], report["incidents"]) == (1, [])


def test_a_cut_connection_costs_only_a_restart(folder: Path) -> None:
    with contextlib.closing(Job(folder, nodes=1)) as job:
        job.start_coordinator()
        job.wait_until(lambda r: True)
        proxy = Proxy(job.port)
        job.start_node(
            0, STEPS, "--steps", "10", "--rank", "0", "--late", "60", DDPJOB_COORDINATOR=f"127.0.0.1:{proxy.port}"
        )
        job.wait_until(lambda r: stepping(job, steps=10) and (job.folder / "late").exists())
        proxy.cut()
        report = finish(job, "job-0-0")
        assert [(i["kind"], i["pod"]) for i in report["incidents"]] == [("PeerLost", "job-0-0")]


def test_a_command_without_python_runs_in_several_processes_per_node(folder: Path) -> None:
    with contextlib.closing(Job(folder, procs=2)) as job:
        command = (sys.executable, STEPS, "--steps", "6", "--exit-at", "3", "--rank", "3")
        job.start(*command, torchrun=("--no-python",))
        report = finish(job, "job-0-0", "job-1-0")
        incident = report["incidents"][0]
        assert len(report["incidents"]) == 1
        assert (incident["kind"], incident["rank"], incident["localRank"], incident["exitCode"]) == (
            "WorkerFailed",
            3,
            1,
            7,
        )
        assert incident["message"] == "ended with exit code 7" and incident["traceback"] == ""


def test_a_node_that_cannot_start_reports_the_reason(folder: Path) -> None:
    """The reasons are a missing script or module, a refused argument, a missing torch, and no space
    for temporary files.

    Each node ends with 78 and an incident, and the termination log has the reason if it can be
    written.
    """
    (folder / "broken" / "torch").mkdir(parents=True)
    (folder / "broken" / "torch" / "__init__.py").write_text("raise OSError('libtorch.so is missing')")
    # No file can be written, as with a read-only root file system.
    read_only = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh")
    with contextlib.closing(Job(folder, nodes=5, store=False)) as job:
        job.start_coordinator()
        job.start_node(0, "no/such/script.py")
        job.start_node(1, "no_such_package.train", torchrun=("-m",))
        job.start_node(2, STEPS, torchrun=("--no-such-flag",))
        job.start_node(3, STEPS, PYTHONPATH=str(folder / "broken"))
        job.start_node(4, STEPS, prefix=read_only)
        assert [job.wait_exit(f"job-{i}-0") for i in range(5)] == [78] * 5, job.all_logs()
        report = job.wait_until(lambda r: len(r["incidents"]) == 5, 5)
        text = {i["index"]: i["message"] for i in report["incidents"]}
        assert {i["kind"] for i in report["incidents"]} == {"InitFailure"}
        assert "no/such/script.py" in text[0] and str(folder) in text[0]
        assert "no module named 'no_such_package'" in text[1] and str(folder) in text[1]
        assert "--no-such-flag" in text[2]
        assert "libtorch.so is missing" in text[3] and sys.executable in text[3]
        assert "torchrun cannot start: " in text[4] and text[4].endswith("; give the container a writable /tmp")
        assert job.end("job-0-0") == {"kind": "InitFailure", "message": text[0], "traceback": ""}


def test_nodes_retry_a_wrong_token_yield_to_newer_attempts_and_exit_on_stop(folder: Path) -> None:
    with contextlib.closing(Job(folder, store=False)) as job:
        job.start_coordinator()
        job.start_node(1, STEPS, DDPJOB_TOKEN="another job's")
        job.start_node(0, STEPS)
        job.wait_until(lambda r: [m["pod"] for m in r["members"]] == ["job-0-0"])
        job.start_node(0, STEPS, attempt=1)
        assert job.wait_exit("job-0-0") == 79  # a newer attempt takes over the index
        assert "job-0-1" in job.end("job-0-0")["message"]
        job.wait_until(lambda r: [m["pod"] for m in r["members"]] == ["job-0-1"])
        assert job.post("/v1/stop", {"ok": False, "why": "the budget is spent"}) == (200, {})
        assert job.wait_exit("job-0-1") == 77
        assert job.end("job-0-1")["message"] == "the budget is spent"
        assert job.processes["job-1-0"].poll() is None, "it retries, because its job's coordinator may get this address"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a PID namespace")
def test_a_launcher_works_as_the_first_process_of_a_container(folder: Path) -> None:
    """The first process passes SIGTERM on and ends with the launcher's code. The namespace ends all
    other processes.
    """
    with contextlib.closing(Job(folder, nodes=1)) as job:
        job.start_coordinator()
        launcher = job.start_node(0, STEPS, "--steps", "1000", prefix=("unshare", "--pid", "--fork", "--mount-proc"))
        job.wait_until(lambda r: stepping(job))
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert job.wait_exit("job-0-0") == 143
        assert job.end("job-0-0")["kind"] == "Signal"
        assert job.workers() == []
