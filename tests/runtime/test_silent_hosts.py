"""A host loses its network. The real coordinator, clients and neighbours run in network namespaces,
without torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from machine import slowness
from networks import need_namespaces, network
from runtime_harness import RUNTIME, until

MEMBER = """
import os, sys
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.launcher.neighbours import watch_neighbours
from ddpjob_runtime.protocol import Mode
coordinator, host, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
identity = {"pod": f"job-{index}-0", "pid": os.getpid(), "grace": 5.0, "index": index, "attempt": 0, "generation": 0}
client = MemberClient(coordinator, "a-token", identity, Mode.FAST, 60.0, lambda *end: os._exit(1))
client.neighbours = watch_neighbours(host, "a-token", client.report_neighbour)
client.start()
client.wait_welcome()
while True:
    go = client.wait_go(host, 1)
    client.joined(go["round"])
    with client.changed:
        client.changed.wait_for(lambda: client.must_restart(go["round"]))
"""
NODES, SPARE = 3, 3
PORT = 29401


def test_a_spare_takes_over_from_a_partitioned_host_which_returns_as_the_spare(tmp_path: Path) -> None:
    need_namespaces()
    log = tmp_path / "coordinator.log"
    environment = {
        **os.environ, "PYTHONPATH": str(RUNTIME.parent), "DDPJOB_TOKEN": "a-token", "DDPJOB_GENERATION": "0",
    }  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []

    def said(pattern: str) -> list[float]:
        """Return the Unix times of the lines in the coordinator's log that match."""
        lines = (line.partition(" ") for line in log.read_text().splitlines() if re.search(pattern, line))
        return [datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp() for when, _, _ in lines]

    with network(NODES + 2) as made, log.open("wb") as output:
        try:
            last = made.address(NODES + 1)
            for host in range(NODES + 2):
                prefix = ["ip", "netns", "exec", f"{made.prefix}{host}", sys.executable]
                member = ["-c", MEMBER, f"{last}:{PORT}", made.address(host), str(host)]
                coordinator = [str(RUNTIME), "coordinator", "--port", str(PORT), "--nodes", str(NODES), "--mode=Fast"]
                command = coordinator if host > NODES else member
                out = output if host > NODES else subprocess.DEVNULL
                processes.append(subprocess.Popen([*prefix, *command], env=environment, stdout=out, stderr=out))
            until(lambda: said("round 1 runs") and len(said("'t': 'ready'")) == NODES + 1)
            [first] = re.findall(r"round 1 begins with 3 nodes: (.*)", log.read_text())
            victim = int(first.split(", ")[1].split("-")[1])
            time.sleep(2)  # Its neighbours are connected.
            cut = time.time()
            made.run(victim, "ip link set eth0 down")
            until(lambda: said("round 2 runs"))
            assert said("round 2 runs")[0] - cut < 1.5 * slowness()
            assert said(f"node job-{victim}-0 .*: its host does not acknowledge bytes from job-")
            made.run(victim, "ip link set eth0 up")
            until(lambda: len(said(f"job-{victim}-0: .*'t': 'ready'")) == 2)
            assert said(f"hello from job-{victim}-0 .*'round': 1.*'Running'"), "it was still in its old round"
            assert not said("round 3") and not said("fences")
        finally:
            for process in processes:
                process.kill()
                process.wait()
