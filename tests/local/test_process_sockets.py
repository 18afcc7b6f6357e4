"""The TCP sockets on which the processes of `ddpjob run` listen, and whether they can be reached
from a network.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from listening import Where, beyond_loopback, listening
from machine import slowness
from process_harness import Machine, Run, manifest

SCRIPT = """
import os, pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
pathlib.Path("formed-" + os.environ["RANK"]).write_text(os.environ["MASTER_PORT"])
while not pathlib.Path("seen").exists():
    time.sleep(0.02)
"""
LIMIT_SECONDS = 240


def watch(machine: Machine, run: Run) -> set[Where]:
    """Return all sockets that existed at any time during the job. The script's ranks wait until
    their sockets have been seen.
    """
    seen = set[Where]()
    formed = [machine.folder / f"formed-{rank}" for rank in range(2)]
    until = time.monotonic() + LIMIT_SECONDS * slowness()
    while run.process.poll() is None and time.monotonic() < until:
        has_formed = all(path.exists() for path in formed)
        if (run.folder / "status.json").exists():
            seen |= listening([run.process.pid, *run.processes()])
        if has_formed:
            (machine.folder / "seen").touch()
        time.sleep(0.02)
    assert run.wait(1) == 0, run.everything()
    return seen


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
def test_all_processes_of_a_job_listen_only_on_the_loopback(machine: Machine, mode: str) -> None:
    (machine.folder / "script.py").write_text(SCRIPT)
    what = {"script": "script.py"} if mode == "Standard" else {"module": "script"}
    job = manifest(**what, recovery={"mode": mode}, preflight={"timeoutSeconds": 1800})
    seen = watch(machine, machine.start(job))
    own = int((machine.folder / "formed-0").read_text())
    assert not beyond_loopback(seen)
    # The coordinator, the workers' store and two sockets of gloo exist throughout the training.
    # Those of the preflight exist only briefly, so a busy machine may miss them.
    assert ("127.0.0.1", own) in seen
    assert len(seen) > 3, seen


def test_only_the_store_of_a_commands_torchrun_is_reachable_from_the_network(machine: Machine) -> None:
    (machine.folder / "script.py").write_text(SCRIPT)
    job = manifest(command=["torchrun", "script.py"])
    seen = watch(machine, machine.start(job))
    reached: dict[int, Any] = {port: address for address, port in beyond_loopback(seen)}
    assert list(reached) == [int((machine.folder / "formed-0").read_text())], "SECURITY.md states that these are all"
    assert len(seen) > 3, seen
