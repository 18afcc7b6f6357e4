"""How long a coordinator needs for very many members: until a round of them begins, and the next one after a loss.

    python -m benchmarks.members [--members 1024] [--runs 3] [--table benchmarks/README.md]

The members are played by this program, over real sockets on 127.0.0.1: their lines, and no torch. Both share the
machine's processors. One more member than the round needs is a spare, so that a loss is made up for at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpjob_runtime import protocol

from benchmarks import CHECKOUT
from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm, free_port

TOKEN = "a benchmark"


class Member:
    """A member's end of a connection."""

    def __init__(self, port: int, index: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._lines = self._socket.makefile("rb")
        self.say("challenge", nonce="ours")
        proof = protocol.seal(TOKEN, "member", "ours", self.hear("proof")["nonce"])
        self.say("hello", proof=proof, pod=f"job-{index}-0", index=index, attempt=0, pid=1)

    def say(self, verb: str, **fields: Any) -> None:
        self._socket.sendall(json.dumps({"t": verb, **fields}).encode() + b"\n")

    def hear(self, verb: str) -> dict[str, Any]:
        """The next line of this verb. Raises ConnectionError at the connection's end."""
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
    """Of one run, in seconds; of the coordinator its processor time and its memory in MiB at the end."""

    connected: float
    formed: float
    formed_again: float
    processor: float
    memory: float


def measure(count: int) -> Figures:
    """A round of `count` members, the loss of one, the next round."""
    port = free_port()
    command = [sys.executable, str(CHECKOUT / "runtime" / "ddpjob_runtime"), "coordinator", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--nodes", str(count), "--mode", "Fast"]
    with subprocess.Popen(command, env={**os.environ, "DDPJOB_TOKEN": TOKEN}, stderr=subprocess.DEVNULL) as coordinator:
        try:
            _wait_for(port)
            began = time.monotonic()
            members = [Member(port, index) for index in range(count + 1)]
            for member in members:
                member.hear("welcome")
            connected = time.monotonic() - began
            began = time.monotonic()
            _say_ready(members, after=0)
            training, (spare,) = members[:count], members[count:]
            for member in training:
                member.hear("go")
            formed = time.monotonic() - began
            for member in training:
                member.say("joined", round=1)
            while _report(port)["state"] != "Running":
                time.sleep(0.05)
            for member in training:  # The end of a connection that has been silent may be that of a stall.
                member.say("hb")
                member.hear("hb")
            began = time.monotonic()
            training.pop(count // 2).close()
            for member in training:
                member.hear("restart")
            _say_ready(training, after=1)
            for member in [*training, spare]:
                member.hear("go")
            formed_again = time.monotonic() - began
            fields = Path(f"/proc/{coordinator.pid}/stat").read_text().rpartition(")")[2].split()
            ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
            memory = pages * resource.getpagesize() / 2**20
            return Figures(connected, formed, formed_again, ticks / os.sysconf("SC_CLK_TCK"), memory)
        finally:
            coordinator.kill()


def _say_ready(members: list[Member], after: int) -> None:
    for number, member in enumerate(members):
        member.say("ready", after=after, host="10.0.0.1", port=5000 + number)


def _report(port: int) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/status", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _wait_for(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


def table(count: int, runs: list[Figures], loads: list[float]) -> str:
    """Median and worst of each figure."""
    rows = {
        "all connected and welcomed, s": [run.connected for run in runs],
        "from the first `ready` to the last `go`, s": [run.formed for run in runs],
        "from a loss to the last `go` of the next round, s": [run.formed_again for run in runs],
        "the coordinator's processor time for all of it, s": [run.processor for run in runs],
        "the coordinator's memory, MiB": [run.memory for run in runs],
    }
    lines = [f"| {count} members | median | worst |", "| --- | ---: | ---: |"]
    lines += [f"| {what} | {median(values):.2f} | {max(values):.2f} |" for what, values in rows.items()]
    load = f"load average {min(loads):.1f} to {max(loads):.1f}"
    return "\n".join([*lines, "", f"{len(runs)} runs; {os.cpu_count()} cores; {load}."])


def main() -> int:
    """0; 2 where too few files may be open."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--members", type=int, default=1024, help="of a round (default 1024)")
    made.add_argument("--runs", type=int, default=3, help="(default 3)")
    add_table_option(made, "members")
    options = made.parse_args()
    wanted = options.members + 100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        print(f"only {hard} files may be open (ulimit -n): {wanted} are needed", file=sys.stderr)
        return 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    runs, loads = [], []
    for _ in range(options.runs):
        loads.append(os.getloadavg()[0])
        runs.append(measure(options.members))
        print(runs[-1], file=sys.stderr, flush=True)
    text = table(options.members, runs, loads)
    print(text)
    if options.table:
        write_between(options.table, "members", text)
    return 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
