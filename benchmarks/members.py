"""Measures a coordinator with a very large number of members.

It measures how long it takes until a round starts, and until the next round starts after a loss. It
also measures how long all members take to connect at once, at the job's start and after the loss of
an earlier coordinator.

    python -m benchmarks.members [--members 1024] [--runs 3] [--share 1 0.1] [--table benchmarks/README.md]

This program simulates the members over real sockets on 127.0.0.1, without torch. It shares the
machine's CPUs with the coordinator. One additional member is a spare, so that a lost member is
replaced immediately. `--members` and 100 spares connect at once, each from its own address, with a
launcher's timeouts and pauses. To give the coordinator only a share of a CPU, the benchmark
suspends it for the rest of each 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.client import CONNECT_SECONDS

from benchmarks import CHECKOUT
from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm, free_port, memory, processor_seconds

TOKEN = "a benchmark"
PERIOD = 0.05
"""Length of a period in seconds. In each period, the coordinator runs for its share of the time."""
REST = 10
"""How long the coordinator is observed while members train, in seconds."""
ARRIVAL_SECONDS = 60
"""Maximum number of seconds for all members to reach a coordinator. A slower launch has failed."""


class Member:
    """The member's end of a connection."""

    def __init__(self, port: int, index: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._lines = self._socket.makefile("rb")
        self._saying = threading.Lock()
        self.say("challenge", nonce="ours")
        proof = protocol.seal(TOKEN, "member", "ours", self.hear("proof")["nonce"])
        self.say("hello", proof=proof, pod=f"job-{index}-0", index=index, attempt=0, pid=1)

    def say(self, verb: str, **fields: Any) -> None:
        with self._saying:
            self._socket.sendall(protocol.encode(verb, **fields))

    def hear(self, verb: str) -> dict[str, Any]:
        """Return the next line with this verb. Raises ConnectionError if the connection ends."""
        while line := self._lines.readline():
            message: dict[str, Any] = json.loads(line)
            if message["t"] == verb:
                return message
        raise ConnectionError(f"the coordinator closed the connection before {verb!r}")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@dataclass
class Figures:
    """The figures of one run. Times are in seconds.

    Attributes:
        attempts: connections per member until all were welcomed at the start, and until all had rejoined at a second
            coordinator.
        at_rest: the coordinator's share of a CPU while all members train.
        report: the size of its report in kB.
        processor: its CPU time for everything except the time at rest.
        memory: its memory at the end in MiB.
    """

    connected: float
    formed: float
    formed_again: float
    arrived: float
    taken_over: float
    attempts: float
    at_rest: float
    report: float
    processor: float
    memory: float


@contextmanager
def beside(act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `act` in a thread during the context. `act` must return soon after the event is set."""
    ended = threading.Event()
    thread = threading.Thread(target=act, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def heard(members: list[Member]) -> AbstractContextManager[None]:
    """Send all members' heartbeats, as launchers do.

    Otherwise a slow coordinator would consider them silent.
    """

    def beat(ended: threading.Event) -> None:
        while not ended.wait(protocol.HEARTBEAT_SECONDS):
            for member in list(members):
                with suppress(OSError):  # The connection was closed, or the coordinator has ended.
                    member.say("hb")

    return beside(beat)


def sharing(pid: int, share: float) -> AbstractContextManager[None]:
    """Let the process run for this share of the time, and suspend it for the rest of the time."""

    def throttle(ended: threading.Event) -> None:
        while not ended.wait(PERIOD * share):
            os.kill(pid, signal.SIGSTOP)
            ended.wait(PERIOD * (1 - share))
            os.kill(pid, signal.SIGCONT)

    return beside(throttle) if share < 1 else nullcontext()


def measure(count: int, share: float) -> Figures:
    """Measure a round of `count` members, some training, a member's loss, and the next round."""
    port = free_port()
    with coordinating(port, count, share, attempt=0):
        arrived, attempts = asyncio.run(_arrive(port, count, resumes=False))
    with coordinating(port, count, share, attempt=1):
        taken_over, more = asyncio.run(_arrive(port, count, resumes=True))
    tried = (attempts + more) / 2 / (count + protocol.MAX_SPARES)
    with coordinating(port, count, share, attempt=0) as coordinator:
        return _play(count, port, coordinator, (arrived, taken_over, tried))


@contextmanager
def coordinating(port: int, count: int, share: float, attempt: int) -> Iterator[int]:
    """Run a coordinator with this share of a CPU, and yield its process id."""
    command = [sys.executable, str(CHECKOUT / "runtime" / "ddpjob_runtime"), "coordinator", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--nodes", str(count), "--mode", "Fast", "--attempt", str(attempt)]
    with subprocess.Popen(command, env={**os.environ, "DDPJOB_TOKEN": TOKEN}, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            with sharing(process.pid, share):
                yield process.pid
        finally:
            process.kill()


async def _arrive(port: int, count: int, resumes: bool) -> tuple[float, int]:
    """Connect all members and spares at once, and return (seconds until all are welcomed,
    connections).

    With `resumes`, they rejoin from round 1 of an earlier coordinator, and the call also waits
    until that round continues.
    """
    began, kept, attempts = time.monotonic(), [], 0

    async def arrive(index: int) -> None:
        nonlocal attempts
        pause = 0.05
        hello: dict[str, Any] = {"pod": f"job-{index}-0", "index": index, "attempt": 0, "pid": 1}
        if resumes and index < count:
            hello["resume"] = {"round": 1, "rank": index, "world": count, "state": "Running"}
        while True:
            attempts += 1
            try:
                kept.append(await _try_to_arrive(port, index, hello))
                return
            except (TimeoutError, OSError, ValueError):
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 1.5, 1.0)

    everybody = asyncio.gather(*[arrive(index) for index in range(count + protocol.MAX_SPARES)])
    await asyncio.wait_for(everybody, ARRIVAL_SECONDS)
    if resumes:
        await asyncio.to_thread(_wait_until_it_runs, port)
    return time.monotonic() - began, attempts


async def _try_to_arrive(port: int, index: int, hello: dict[str, Any]) -> asyncio.StreamWriter:
    """Connect to the coordinator as one member, and return the connection once it is welcomed.

    Raises OSError, ValueError or TimeoutError if the coordinator refuses it.
    """
    here = f"127.1.{index // 250}.{index % 250 + 1}"
    opening = asyncio.open_connection("127.0.0.1", port, local_addr=(here, 0))
    reader, writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
    try:
        writer.write(protocol.encode("challenge", nonce="ours"))
        proof = protocol.decode(await asyncio.wait_for(reader.readline(), protocol.SILENCE_SECONDS))
        sealed = protocol.seal(TOKEN, "member", "ours", str(proof["nonce"]))
        writer.write(protocol.encode("hello", proof=sealed, **hello))
        while protocol.decode(await asyncio.wait_for(reader.readline(), ARRIVAL_SECONDS))["t"] != "welcome":
            continue
    except BaseException:
        writer.transport.abort()
        raise
    return writer


def _play(count: int, port: int, coordinator: int, arrivals: tuple[float, float, float]) -> Figures:
    """Simulate the members of a run. `coordinator` is the coordinator's process id."""
    began = time.monotonic()
    members = [Member(port, index) for index in range(count + 1)]
    for member in members:
        member.hear("welcome")
    connected = time.monotonic() - began
    training, (spare,) = members[:count], members[count:]
    with heard(members):
        began = time.monotonic()
        _say_ready(members, after=0)
        for member in training:
            member.hear("go")
        formed = time.monotonic() - began
        for member in training:
            member.say("joined", round=1)
        _wait_until_it_runs(port)
    before, began = processor_seconds(coordinator), time.monotonic()
    for beat in range(1, REST + 1):
        for member in training:
            member.say("hb")
        for member in training:
            member.hear("hb")
        time.sleep(max(0.0, began + beat * protocol.HEARTBEAT_SECONDS - time.monotonic()))
    rest = processor_seconds(coordinator) - before
    at_rest, report = rest / (time.monotonic() - began), len(_report(port)) / 1000
    members.remove(lost := training.pop(count // 2))
    with heard(members):
        began = time.monotonic()
        lost.close()
        for member in training:
            member.hear("restart")
        _say_ready(training, after=1)
        for member in [*training, spare]:
            member.hear("go")
        formed_again = time.monotonic() - began
    processor = processor_seconds(coordinator) - rest
    return Figures(connected, formed, formed_again, *arrivals, at_rest, report, processor, memory(coordinator))


def _say_ready(members: list[Member], after: int) -> None:
    for number, member in enumerate(members):
        member.say("ready", after=after, host="10.0.0.1", port=5000 + number)


def _wait_until_it_runs(port: int) -> None:
    end = time.monotonic() + ARRIVAL_SECONDS
    while (state := json.loads(_report(port))["state"]) != "Running":
        if time.monotonic() > end:
            raise TimeoutError(f"the coordinator is {state} instead of Running after {ARRIVAL_SECONDS} s")
        time.sleep(0.05)


def _report(port: int) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/status", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def _wait_for(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


def table(count: int, share: float, runs: list[Figures], loads: list[float]) -> str:
    """Return a table with each figure's median and worst value."""
    percent = [100 * run.at_rest for run in runs]
    rows = {
        "time until all are connected and welcomed, s": [run.connected for run in runs],
        "time from the first `ready` to the last `go`, s": [run.formed for run in runs],
        "time from a loss to the last `go` of the next round, s": [run.formed_again for run in runs],
        "time until the last of these and 100 spares, connecting at once, is welcomed, s": [
            run.arrived for run in runs
        ],
        "time until the round of an earlier coordinator continues, s": [run.taken_over for run in runs],
        "connections per member": [run.attempts for run in runs],
        "the coordinator's share of a CPU while all train, %": percent,
        "size of its report, kB": [run.report for run in runs],
        "the coordinator's CPU time for everything else, s": [run.processor for run in runs],
        "the coordinator's memory, MiB": [run.memory for run in runs],
    }
    title = f"{count} members" + (f", the coordinator has {share:.0%} of a CPU" if share < 1 else "")
    lines = [f"| {title} | median | worst |", "| --- | ---: | ---: |"]
    lines += [f"| {what} | {median(values):.2f} | {max(values):.2f} |" for what, values in rows.items()]
    load = f"load average {min(loads):.1f} to {max(loads):.1f}"
    return "\n".join([*lines, "", f"{len(runs)} runs; {os.cpu_count()} cores; {load}."])


def main() -> int:
    """Return 0, or 2 if too few files may be open."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--members", type=int, default=1024, help="number of members in a round (default 1024)")
    made.add_argument("--runs", type=int, default=3, help="number of runs (default 3)")
    made.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=[1.0, 0.1],
        help="shares of a CPU that the coordinator gets (default 1 0.1)",
    )
    add_table_option(made, "members")
    options = made.parse_args()
    wanted = options.members + 2 * protocol.MAX_SPARES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        print(f"ulimit -n allows only {hard} open files, but {wanted} are needed", file=sys.stderr)
        return 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    tables = []
    for share in options.share:
        runs, loads = [], []
        for _ in range(options.runs):
            loads.append(os.getloadavg()[0])
            runs.append(measure(options.members, share))
            print(runs[-1], file=sys.stderr, flush=True)
        tables.append(table(options.members, share, runs, loads))
    text = "\n\n".join(tables)
    print(text)
    if options.table:
        write_between(options.table, "members", text)
    return 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
