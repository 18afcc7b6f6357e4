"""The addresses on which the processes of job pods listen. Here each pod has its own loopback
address.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from listening import Where, listening
from machine import slowness
from runtime_harness import Job

pytest.importorskip("torch", reason="workers need torch")

SCRIPT = """
import os, pathlib, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    pathlib.Path("master").write_text(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
while not pathlib.Path("seen").exists():
    time.sleep(0.02)
"""
PREFLIGHT = {"group": True, "seconds": 600, "least": 0, "gpus": 0, "resource": "", "backend": "gloo", "folder": ""}
COORDINATOR, NODES = "127.0.0.2", ("127.0.0.3", "127.0.0.4")
EVERYWHERE = {"0.0.0.0", "::"}


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
def test_stores_listen_on_their_pods_address_and_the_coordinator_on_all_addresses(tmp_path: Path, mode: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = Job(tmp_path, mode=mode)
    job.store_host = COORDINATOR
    try:
        job.start_coordinator(host="", POD_IP=COORDINATOR)
        for index, address in enumerate(NODES):
            more = {"POD_IP": address, "DDPJOB_PREFLIGHT": json.dumps(PREFLIGHT), "GLOO_SOCKET_IFNAME": "lo"}
            job.start_node(index, "script.py", torchrun=(f"--local-addr={address}",), **more)
        seen = watch(job)
        assert [job.wait_exit(f"job-{index}-0") for index in range(2)] == [0, 0], job.all_logs()
    finally:
        job.close()
    assert {port for address, port in seen if address in EVERYWHERE} == {job.port}
    host, port = (tmp_path / "master").read_text().split()
    assert (host, int(port)) in seen and host in NODES
    if mode == "Standard":
        assert (COORDINATOR, job.store_port) in seen


def watch(job: Job) -> set[Where]:
    """Collect every socket until all nodes have ended. The script's ranks wait until their sockets
    have been seen.
    """
    seen, until = set[Where](), time.monotonic() + 240 * slowness()
    nodes = [process for name, process in job.processes.items() if name != "coordinator"]
    while any(process.poll() is None for process in nodes):
        assert time.monotonic() < until, job.all_logs()
        has_formed = (job.folder / "master").exists()
        seen |= listening(job.all_processes())
        if has_formed:
            (job.folder / "seen").touch()
        time.sleep(0.02)
    return seen
