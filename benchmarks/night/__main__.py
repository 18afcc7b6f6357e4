"""Runs a night of 50 jobs on eight simulated Kubernetes nodes of eight GPUs, with priorities,
preemption and losses.

    python -m benchmarks.night [--seed 1] [--chart docs/images/night.png] [--table benchmarks/README.md]

Needs root and Go. In a slot where no cluster is up (DDPJOB_CLUSTER_SLOT), it starts the test
cluster's etcd, API server, kube-controller-manager and kube-scheduler, with gangs and
WorkloadAwarePreemption. It also starts an operator as a separate process, and ends everything
afterwards. Nodes and containers are simulated, because 50 real training runs on eight nodes would
need more than two CPUs. The question is whether the deciding programs (scheduler,
controllers, operator, coordinators) leave GPUs idle or lose samples, which does not require workers
to compute. These programs therefore run production code, and only kubelets, launchers and the
arithmetic of a step are simulated (see `machines.py`, `training.py`).

A job has 1 to 8 nodes with 1 to 8 GPUs each, and one of three priorities. Some jobs are elastic,
and some have a spare. Jobs save a checkpoint every ten steps, and when asked to stop. Pods and
coordinators are killed, and nodes lose power or network and return.

Every second, watches show which jobs would fit into the free GPUs, and for how long they have
fitted (see `waits.py`). At the end, every job must be Complete without a counted restart. Its
ledger must show each sample once per epoch, which the check for the trainer's own ledger verifies.
The exit code is 1 if a job fails these checks, or has waited longer than the aim.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ddpjob.controller.kube.rest import Rest
from kubernetes.aio import client, config

from benchmarks.marks import add_table_option, write_between
from benchmarks.night.chart import draw
from benchmarks.night.night import Night, Record
from benchmarks.night.report import AIM, longest, table
from benchmarks.night.schedule import draw_faults, draw_jobs
from benchmarks.processes import exit_on_sigterm, processor_seconds
from benchmarks.testbed import (
    Cluster,
    OperatorProcess,
    Testbed,
    controlplane,
    install_crd,
    prerequisites,
    recorded,
)

DEFECTS = ("forgets", "asleep")
LIMIT = 4.0
"""Maximum duration of a night, as a multiple of the time in which its jobs arrive."""


@contextmanager
def control_plane() -> Iterator[Cluster]:
    """Start everything except nodes and DNS, in a slot where no cluster is running."""
    first = Cluster()
    slots = (Cluster(replace(first.settings, slot=slot)) for slot in range(first.settings.slot, 16))
    cluster = next((free for free in slots if free.state() is None), first)
    if cluster.state() is not None:
        raise SystemExit("a cluster is running in every slot; stop one with `python -m testcluster down`")
    prerequisites.require(cluster.settings)
    cluster.up(nodes=0, keep=False)
    try:
        install_crd(cluster)
        controlplane.start_controllers(cluster.settings, cluster.programs)
        yield cluster
    finally:
        cluster.down()


async def play(given: argparse.Namespace, cluster: Cluster, namespace: str, folder: Path) -> Record:
    settings = client.Configuration()
    await config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=settings)
    rest = Rest.open(settings, 64)
    jobs = draw_jobs(given.seed, given.jobs, given.minutes)
    faults = draw_faults(given.seed, given.minutes * LIMIT)
    scheduler = scheduler_of(cluster)
    before = processor_seconds(scheduler)
    try:
        night = Night(rest, namespace, jobs, faults, folder, forgets=given.defect == "forgets")
        record = await night.run(given.minutes * LIMIT * 60)
    finally:
        await rest.close()
    record.scheduler_seconds = processor_seconds(scheduler) - before
    return record


def scheduler_of(cluster: Cluster) -> int:
    [scheduler] = [process.pid for process in recorded(cluster.settings) if process.name == "kube-scheduler"]
    return scheduler


def put_to_sleep(cluster: Cluster, seconds: float) -> None:
    """Suspend kube-scheduler while jobs are arriving, as a deliberate defect."""
    scheduler = scheduler_of(cluster)
    for _ in range(3):
        time.sleep(seconds)
        os.kill(scheduler, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(scheduler, signal.SIGCONT)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=1, help="seed of jobs and faults (default 1)")
    made.add_argument("--jobs", type=int, default=50, help="number of jobs (default 50)")
    made.add_argument("--minutes", type=float, default=6.0, help="minutes within which the jobs arrive (default 6)")
    made.add_argument("--defect", choices=DEFECTS, help="plant this defect, which the checks must find")
    made.add_argument("--chart", type=Path, metavar="FILE", help="draw the night to this file")
    made.add_argument("--log", type=Path, metavar="FILE", help="write the operator's log to this file (default: none)")
    add_table_option(made, "night")
    return made


def main() -> int:
    """Run a night. Return 0, or 1 if a check has failed."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="night-") as name, control_plane() as cluster:
        folder, namespace = Path(name), f"night-{secrets.token_hex(2)}"
        cluster.kubectl("create", "namespace", namespace)
        operator = OperatorProcess(cluster, given.log or folder / "operator.log")
        try:
            Testbed(cluster, namespace, operator).start_operator()
            if given.defect == "asleep":
                threading.Thread(target=put_to_sleep, args=(cluster, 20.0), daemon=True).start()
            record = asyncio.run(play(given, cluster, namespace, folder))
        finally:
            operator.kill()
    text = table(record, {job.name: job for job in draw_jobs(given.seed, given.jobs, given.minutes)}, given.seed)
    print(text)
    for problem in record.problems:
        print(problem, file=sys.stderr)
    if given.chart is not None:
        draw(record, given.chart, given.seed)
    if given.table is not None:
        write_between(given.table, "night", text)
    return int(bool(record.problems) or longest(record) > AIM)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
