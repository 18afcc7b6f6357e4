"""A job's coordinator and launchers as processes on 127.0.0.1, as pods would run them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpjob_runtime.launcher import stacks
from machine import free_port, slowness

RUNTIME = Path(__file__).resolve().parents[2] / "runtime" / "ddpjob_runtime"
SCRIPTS = Path(__file__).parent / "scripts"
TOKEN = f"a-token-for-tests-{os.getpid()}"
PYTHON = os.environ.get("DDPJOB_TEST_PYTHON", sys.executable)
"""Programs that start the job's pods. Set it to a Python with a different torch, to see whether
that torch is supported.
"""


def until(reached: Callable[[], object], seconds: float = 20) -> None:
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < seconds * slowness(), "timed out"
        time.sleep(0.02)


class Job:
    """A generation of a job."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        procs: int = 1,
        store: bool = True,
        mode: str = "Standard",
        min_nodes: int | None = None,
    ) -> None:
        self.folder, self.nodes, self.procs, self.store, self.mode = (
            folder,
            nodes,
            procs,
            store and mode == "Standard",
            mode,
        )
        self.min_nodes = nodes if min_nodes is None else min_nodes
        self.port, self.store_port, self.store_host = free_port(), free_port(), "127.0.0.1"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment that the operator gives every pod."""
        fixed = {
            "DDPJOB_TOKEN": TOKEN, "DDPJOB_GENERATION": "0", "DDPJOB_NAME": "job", "DDPJOB_NAMESPACE": "default",
            "DDPJOB_COORDINATOR": f"127.0.0.1:{self.port}", "DDPJOB_RECOVERY": self.mode, "OMP_NUM_THREADS": "1",
            "OUT": str(self.folder),
        }  # fmt: skip
        return {**os.environ, **fixed, **more}

    def start_coordinator(
        self, *more: str, attempt: int = 0, host: str = "127.0.0.1", **env: str
    ) -> subprocess.Popen[bytes]:
        """Start the coordinator, in Standard with a store unless asked otherwise."""
        command = [PYTHON, str(RUNTIME), "coordinator", "--port", str(self.port), "--nodes", str(self.nodes)]
        command += [
            "--host",
            host,
            "--mode",
            self.mode,
            "--min-nodes",
            str(self.min_nodes),
            "--attempt",
            str(attempt),
            *more,
        ]
        if self.store:
            command += ["--store-port", str(self.store_port)]
        return self._start("coordinator", command, env)

    def start_node(
        self,
        index: int,
        *what: str,
        attempt: int = 0,
        torchrun: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        **env: str,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher of one node. `what` is the script with its arguments, `prefix` a
        program that starts the launcher.
        """
        pod = f"job-{index}-{attempt}"
        command = [
            *prefix, PYTHON, str(RUNTIME), "launcher",
            f"--nnodes={self.nodes}:{self.nodes}", f"--nproc-per-node={self.procs}",
            "--rdzv-id=uid-0", "--max-restarts=1000000", "--local-addr=127.0.0.1", *self.rendezvous(), *torchrun,
            "--", *what,
        ]  # fmt: skip
        place = {"DDPJOB_POD": pod, "DDPJOB_INDEX": str(index), "DDPJOB_ATTEMPT": str(attempt)}
        place["DDPJOB_TERMINATION_LOG"] = str(self.folder / f"{pod}.end")
        return self._start(pod, command, {**place, **env})

    def start(self, *what: str, **more: Any) -> None:
        """Start the coordinator, and all nodes with the same script and arguments."""
        self.start_coordinator()
        for index in range(self.nodes):
            self.start_node(index, *what, **more)

    def rendezvous(self) -> list[str]:
        """Return the arguments of torchrun in this mode."""
        if self.mode == "Fast":
            return ["--rdzv-backend=ddpjob", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--monitor-interval=0.02"]
        conf = "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=10800,last_call_timeout=1"
        conf += ",join_timeout=600,read_timeout=60"
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.store_host}:{self.store_port}",
            "--monitor-interval=0.1",
            f"--rdzv-conf={conf}",
        ]

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log(name).open("wb") as log:
            environment = self.environment(**env)
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        """Return the log file of one process."""
        return self.folder / f"{name}.log"

    def end(self, name: str) -> dict[str, Any]:
        """Return the text that a launcher wrote to its termination log."""
        content: dict[str, Any] = json.loads((self.folder / f"{name}.end").read_text())
        return content

    def status(self, news: int | None = None, wait: float = 0) -> dict[str, Any]:
        """Return the coordinator's report."""
        query = "" if news is None else f"?news={news}&wait={wait}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/status{query}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=wait + 10) as answer:
            report: dict[str, Any] = json.load(answer)
        return report

    def post(self, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any]:
        """Send a POST and return (status, JSON)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_until(self, condition: Callable[[dict[str, Any]], object], seconds: float = 90) -> dict[str, Any]:
        """Return the first report for which the condition holds."""
        began, report = time.monotonic(), {}
        while time.monotonic() - began < seconds * slowness():
            try:
                report = self.status()
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
                continue
            if condition(report):
                return report
            time.sleep(0.02)
        raise AssertionError(
            f"condition not met within {seconds} s; last report: {json.dumps(report, indent=1)}\n{self.all_logs()}"
        )

    def wait_exit(self, name: str, seconds: float = 90) -> int:
        """Return the exit code of one process."""
        try:
            return self.processes[name].wait(seconds * slowness())
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{name} is still running after {seconds} s\n{self.all_logs()}\n{self.stacks()}"
            ) from None

    def stacks(self) -> str:
        """Return the workers' stacks, for the message of a failing test. On the signal, each worker
        writes its stacks or exits.
        """
        began = time.time()
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stacks.SIGNAL)
        time.sleep(2 * stacks.WRITING_SECONDS)
        written = [p for p in Path(tempfile.gettempdir()).glob(stacks.PREFIX + "*/*.txt") if p.stat().st_mtime >= began]
        return "\n".join(f"--- stacks of rank {path.stem}\n{path.read_text(errors='replace')}" for path in written)

    def all_logs(self) -> str:
        """Return the last lines of all logs, for a failing test."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a single process."""
        self.processes[name].send_signal(number)

    def workers(self) -> list[int]:
        """Return the process ids with this job's environment, except the coordinator, the store and
        the launchers.
        """
        own, found = {p.pid for p in self.processes.values()}, []
        for pid in self.all_processes():
            with contextlib.suppress(OSError):  # the process has just ended
                command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty while a process ends
                if command and pid not in own and b"\0store\0--port\0" not in command:
                    found.append(pid)
        return found

    def all_processes(self) -> list[int]:
        """Return the process ids with this job's environment."""
        mark, found = f"OUT={self.folder}".encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # the process has just ended
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Kill all processes, generation by generation. The kernel kills workers together with
        their launchers.
        """
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        deadline = time.monotonic() + 60  # A busy machine needs more time.
        while self.workers() and time.monotonic() < deadline:
            time.sleep(0.02)
