"""`ddpjob run` as a user starts it, and access to everything that it leaves behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from ddpjob.local import processes
from machine import slowness

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "process_train.py")
Json = dict[str, Any]
FAST = {"mode": "Fast"}
"""The `recovery` of jobs whose mode does not matter. Two pods then import torch twice instead of
four times.
"""


ENDLESS = ["--steps=1000000"]
"""The `args` of a script that trains until `Run.finish`. A fixed number of steps would end too
early on a slow machine.
"""


def manifest(name: str = "job", **spec: Any) -> Json:
    """Return a DDPJob of two nodes on the CPU."""
    if not {"script", "module", "command"} & set(spec):
        spec["script"] = TRAIN
    return {
        "apiVersion": "ddpjob.io/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"image": "any/image:1", "nodes": 2, "gpusPerNode": 0, **spec},
    }


class Machine:
    """A folder of runs, and the commands that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self._runners: list[subprocess.Popen[str]] = []

    def environment(self) -> dict[str, str]:
        return {**os.environ, "DDPJOB_RUNS": str(self.runs), "DDPJOB_PLACE": "local"}

    def command(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run `ddpjob WORDS` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "ddpjob.cli", *words],
            env=self.environment(), cwd=self.folder, capture_output=True, text=True, check=False,
            timeout=seconds * slowness(),
        )  # fmt: skip

    def write(self, job: Json | str, name: str = "job.yaml") -> Path:
        path = self.folder / name
        path.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
        return path

    def start(self, job: Json, *options: str, stdout: int | None = None, wrapper: Sequence[str] = ()) -> Run:
        """Start `ddpjob run` in the background. `stdout` may be a pipe or a terminal, instead of
        the file of `Run.output`.
        """
        path = self.write(job, f"{job['metadata']['name']}.yaml")
        output = (self.folder / f"{job['metadata']['name']}.out").open("w+")
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "ddpjob.cli", "run", str(path), *options],
            env=self.environment(), cwd=self.folder, text=True,
            stdout=output if stdout is None else stdout, stderr=output,
        )  # fmt: skip
        self._runners.append(process)
        return Run(self, job["metadata"]["name"], process, Path(output.name))

    def run(self, job: Json, *options: str, seconds: float = 90) -> Run:
        """Run `ddpjob run` to its end."""
        run = self.start(job, *options)
        run.wait(seconds)
        return run

    def close(self) -> None:
        """Kill the processes that a failed test left running. The guard process then kills all
        others.
        """
        for process in self._runners:
            if process.poll() is None:
                process.kill()
            process.wait()


class Run:
    """One `ddpjob run`."""

    def __init__(self, machine: Machine, job: str, process: subprocess.Popen[str], output: Path) -> None:
        self.machine, self.job, self.process, self._output = machine, job, process, output
        self.folder = machine.runs / job

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def record(self) -> Json:
        body: Json = json.loads((self.folder / "status.json").read_text())
        return body

    @property
    def status(self) -> Json:
        status: Json = self.record.get("status", {})
        return status

    def condition(self, kind: str) -> Json:
        """Return a condition, or an empty one if there is none."""
        return next((c for c in self.status.get("conditions", ()) if c["type"] == kind), {})

    def until(self, what: Callable[[Run], object], seconds: float = 90) -> None:
        """Wait until the condition holds while the run continues."""
        began = time.monotonic()
        while time.monotonic() - began < seconds * slowness():
            assert self.process.poll() is None, f"the run has ended\n{self.everything()}"
            if (self.folder / "status.json").exists() and what(self):
                return
            time.sleep(0.05)
        raise AssertionError(f"the condition did not hold within {seconds} s\n{self.everything()}")

    def steps(self) -> int:
        """Return the number of saved steps."""
        try:
            return int((self.folder / "checkpoints" / "step").read_text())
        except FileNotFoundError:
            return 0

    def finish(self) -> None:
        """Let process_train.py complete, and check that the run, the job and its ledger show
        this.
        """
        (self.folder / "checkpoints" / "enough").touch()
        assert self.wait() == 0, self.everything()
        self.assert_ledger(self.steps())

    def wait(self, seconds: float = 180) -> int:
        """Wait for the end, and return the exit code."""
        try:
            return self.process.wait(seconds * slowness())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.everything()}") from None

    def pods(self) -> list[str]:
        """Return the names of the existing pods."""
        return [pod["name"] for pod in self.record["local"]["pods"]]

    def log(self, pod: str) -> str:
        return (Path(self.record["local"]["folder"]) / "pods" / f"{pod}.log").read_text()

    def processes(self) -> list[int]:
        """Return the processes that belong to the job."""
        return processes.find({"DDPJOB_UID": self.record["metadata"]["uid"]})

    def assert_nothing_left(self, seconds: float = 5) -> None:
        """Check that no process of the job is left, after the time that a guard may need."""
        began = time.monotonic()
        while left := self.processes():
            names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()]
            assert time.monotonic() - began < seconds * slowness(), f"processes were left behind: {names}"
            time.sleep(0.05)

    def assert_ledger(self, steps: int, ranks: int = 2) -> None:
        """Check that each rank has taken each step. A step is repeated only if a process was killed
        before it was saved.
        """
        for rank in range(ranks):
            made = [int(line) for line in (self.folder / "checkpoints" / f"ledger-{rank}").read_text().split()]
            assert sorted(set(made)) == list(range(steps)), f"rank {rank}: {made}"
            for before, after in itertools.pairwise(made):
                assert after in (before + 1, before), f"rank {rank} went from step {before} to {after}"

    def everything(self) -> str:
        """Return the output and the pods' logs, for the message of a failing test."""
        logs = [
            f"--- {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*/pods/*.log"))
        ]
        return "\n".join([self.output, *logs])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all processes of the job with SIGSTOP, so that the job cannot end before the test
        acts on it.
        """
        stopped = self.processes()
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in set(stopped) & set(self.processes()):
                os.kill(process, signal.SIGCONT)
