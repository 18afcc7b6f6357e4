"""Real ranks that hang in different ways are found, reported and ended (`benchmarks.hangs`
covers all kinds).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from ddpjob_runtime.launcher.worker_vitals import read_vitals
from ddpjob_runtime.protocol import WaitKind
from machine import slowness
from runtime_harness import Job, until

pytest.importorskip("torch")
CHECKOUT = Path(__file__).resolve().parents[2]
PLANTS = str(CHECKOUT / "benchmarks" / "hangs" / "plants.py")
PLANTED = {
    "loader": "rank 1 in ",
    "lock": "rank 1 in hang_lock (",
    "server": "rank 1 in hang_server (",
}
"""Kinds that differ in the kernel's state and in the message."""


def hangs(folder: Path, kind: str, found: dict[str, str]) -> None:
    """Run a job until its hang was ended and it trains again."""
    folder.mkdir()
    job = Job(folder, nodes=1, procs=2, mode="Fast")
    try:
        job.start_coordinator()
        job.start_node(0, PLANTS, str(folder), kind, "--after", "12")
        report = job.wait_until(lambda r: r["incidents"], 120)
        found[kind] = f"{report['incidents'][0]['kind']}: {report['incidents'][0]['message']}"
        job.wait_until(lambda r: r["state"] == "Running" and r["progress"].get("step") and r["round"] == 2, 60)
    except AssertionError as error:
        found[kind] = str(error)
    finally:
        job.close()


def test_deliberate_hangs_are_resolved_automatically(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    jobs = [threading.Thread(target=hangs, args=(tmp_path / kind, kind, found)) for kind in PLANTED]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for kind, named in PLANTED.items():
        assert found[kind].startswith("Hang: no step for ") and f": {named}" in found[kind], found[kind]
        assert "the other ranks are waiting for it" in found[kind] and "rank 0 in all_reduce" in found[kind], found[
            kind
        ]


def worker(act: str) -> int:
    """Start a process in its own session, like a worker, and return its pid."""
    return os.posix_spawn(
        "/usr/bin/env",
        ["env", "python3", "-c", f"import os, signal, socket, sys, threading, time\n{act}"],
        os.environ,
        setsid=True,
    )


@pytest.mark.parametrize(
    ("act", "wait", "call"),
    [
        ("time.sleep(1000)", WaitKind.ASLEEP, ""),
        ("os.kill(os.getpid(), signal.SIGSTOP)", WaitKind.STOPPED, ""),
        ("if os.fork(): signal.pause()\nos.kill(os.getpid(), signal.SIGSTOP)", WaitKind.STOPPED, ""),
        ("open('pipe').read()", WaitKind.STORAGE, "openat"),
        ("threading.Thread(target=open, args=['pipe']).start()\nsignal.pause()", WaitKind.STORAGE, "openat"),
        ("signal.pause()", None, ""),
    ],
)
def test_the_reason_why_a_worker_waits_is_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, wait: WaitKind | None, call: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    pid = worker(act)

    def rests() -> bool:
        before = read_vitals([pid])[pid]
        time.sleep(0.2)
        now = read_vitals([pid])[pid]
        since = now.since(before)
        idle = (since["cpu"], since["bytes"], since["forks"], since["gpu"]) == (0.0, 0, 0, False)
        return idle and now.cpu > 0 and (now.wait, now.call) == (wait, call)

    try:
        until(rests)
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_a_request_without_an_answer_is_a_wait_for_a_server(low: bool, answers: bool) -> None:
    """Native clients wait without a frame on the stack. A rank's port is ephemeral, a server's is not."""
    with listen(range(20_000, 30_000) if low else [0]) as server:
        port = server.getsockname()[1]
        pid = worker(f"c = socket.create_connection(('127.0.0.1', {port}))\nc.send(b'GET')\nc.recv(9)\nsignal.pause()")
        try:
            accepted, _ = server.accept()
            assert accepted.recv(9) == b"GET"
            if answers:
                time.sleep(0.2)
                accepted.send(b"OK")
            expected = (WaitKind.SERVER, f"127.0.0.1 port {port}") if low and not answers else (None, "")

            def waits() -> bool:
                now = read_vitals([pid])[pid]
                return (now.wait, now.call) == expected

            until(waits)
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def listen(ports: Iterable[int]) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no free port")


def test_bytes_received_from_a_socket_are_a_sign_of_life() -> None:
    """/proc/PID/io does not count what `recv` reads."""
    pid = worker("a, b = [socket.create_server(('127.0.0.1', 0))] * 2\nc = socket.create_connection(a.getsockname())\n"
                 "d, _ = a.accept()\nwhile True: c.send(bytes(1000)); d.recv(1000); time.sleep(0.01)")  # fmt: skip
    try:
        until(lambda: read_vitals([pid])[pid].bytes > 10_000_000 / 1000)
        before = read_vitals([pid])[pid]
        time.sleep(0.3 * slowness())
        grown = read_vitals([pid])[pid].since(before)["bytes"]
        assert isinstance(grown, int) and grown > 1000
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
