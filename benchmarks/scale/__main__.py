"""Measures one operator with a large number of jobs: creation, rest, a storm of losses, a restart,
hostile coordinators.

    python -m benchmarks.scale [--sizes 100 300] [--csv FILE] [--chart FILE.png] [--table benchmarks/README.md]
    python -m benchmarks.scale hostile [--large 100] [--reports 500] [--csv FILE] [--table benchmarks/README.md]

`hostile` measures how one team's very large jobs and reports slow down other teams. For comparison,
it also measures the operator without them.

Starts only the test cluster's API server (needs root and Go; the slot is DDPJOB_CLUSTER_SLOT) and
ends it afterwards, or uses a running test cluster. The operator is a separate process, started as
in the chart. The benchmark simulates kubelets and coordinators, and pods do not run anything. The
pods name a scheduler that does not exist.

Each figure is shown with the number of CPUs that were busy during the measurement. All programs
share one machine. If all CPUs are busy, the machine limits the rate, and the operator's share shows
how much of that is due to the operator.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path

from ddpjob.controller.kube.rest import Rest
from kubernetes.aio import client, config

from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm
from benchmarks.scale.chart import draw
from benchmarks.scale.floor import BARE, BareClient
from benchmarks.scale.hollow import Hollow
from benchmarks.scale.hostile import HostileParts
from benchmarks.scale.measure import Figure, Meter, Operator
from benchmarks.scale.onlooker import Onlooker
from benchmarks.scale.parts import BenchmarkError, Options, Parts, prepare
from benchmarks.scale.timeline import write_timelines
from benchmarks.testbed import KEY, Cluster, OperatorProcess, install_crd, prerequisites

TEAMS = 10
CONNECTIONS = 128


@contextmanager
def api_server() -> Iterator[tuple[Cluster, bool]]:
    """Provide the test cluster, and whether it was already running."""
    cluster = Cluster()
    before = cluster.state() is not None
    if not before:
        prerequisites.require(cluster.settings)
        cluster.up(nodes=0, keep=False)
    try:
        install_crd(cluster)
        yield cluster, before
    finally:
        if not before:
            cluster.down()


async def measure(kind: type[Parts], options: Options, cluster: Cluster, shared: bool, log: Path) -> Parts:
    """Measure the parts of a `kind`.

    If the cluster is `shared` with other programs, the operator watches only the benchmark's
    namespaces.
    """
    settings = client.Configuration()
    await config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=settings)
    rest = Rest.open(settings, CONNECTIONS)
    token = secrets.token_hex(2)
    namespaces = [f"scale-{token}-{name}" for name in (*range(TEAMS), "other")]
    hollow, others = Hollow(rest, KEY, namespaces), Hollow(rest, KEY, namespaces, BARE)
    operator = Operator(OperatorProcess(cluster, log), tuple(namespaces) if shared else (), namespaces[-1])
    onlooker = Onlooker(cluster.kubeconfig, namespaces[-1])
    following = [asyncio.create_task(it.run()) for it in (hollow, others, onlooker)]
    try:
        await prepare(rest, namespaces)
        for it in (hollow, others):
            await it.ready()
        bare = BareClient(rest, others)
        parts = kind(options, rest, hollow, bare, onlooker, operator, Meter(cluster, operator), namespaces)
        try:
            await parts.run()
        except BenchmarkError as error:
            parts.error = str(error)
        return parts
    finally:
        operator.kill()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for namespace in namespaces if shared else ():
            await rest.request("DELETE", f"/api/v1/namespaces/{namespace}")
        await rest.close()


def table(figures: list[Figure]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| part | figure | value | aim | reached | notes |", "| --- | --- | ---: | --- | --- | --- |"]
    for f in figures:
        value = f"{f.value:.3g} {f.unit}".strip()
        lines.append(f"| {f.part} | {f.what} | {value} | {f.aim} | {f.reached} | {f.beside} |")
    load = os.getloadavg()[2]
    return "\n".join([*lines, "", f"{os.cpu_count()} cores; the 15-minute load average was {load:.1f}."])


def write_csv(path: Path, figures: list[Figure]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Figure)])
        writer.writerows(astuple(figure) for figure in figures)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", nargs="?", choices=["all", "hostile"], default="all")
    made.add_argument("--large", type=int, default=100, help="hostile: number of jobs of 1.4 MB (default 100)")
    made.add_argument(
        "--reports",
        type=int,
        default=500,
        help="hostile: number of coordinators with the largest reports (default 500)",
    )
    made.add_argument("--sizes", type=int, nargs="+", default=[100, 300], help="numbers of jobs (default 100 300)")
    made.add_argument("--nodes", type=int, default=8, help="nodes of each job (default 8)")
    made.add_argument("--burst", type=int, default=50, help="number of jobs created at once (default 50)")
    made.add_argument(
        "--rounds", type=int, default=3, help="rounds of bursts, alternating with the bare client (default 3)"
    )
    made.add_argument(
        "--rest", type=float, default=60.0, help="measure jobs at rest for this many seconds (default 60)"
    )
    made.add_argument("--settle", type=float, default=15.0, help="seconds to wait before --rest begins (default 15)")
    made.add_argument("--ended", type=int, default=300, help="number of finished jobs to add (default 300)")
    made.add_argument("--storm", type=int, default=1000, help="number of pods that die at once (default 1000)")
    made.add_argument("--hostile", type=int, default=150, help="number of hostile coordinators (default 150)")
    made.add_argument("--csv", type=Path, metavar="FILE", help="write the figures to this file")
    made.add_argument("--chart", type=Path, metavar="FILE", help="draw the figures to this file")
    made.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write a CSV file of when each pod of the storm was lost and replaced",
    )
    add_table_option(made, "scale")
    return made


def main() -> int:
    """Run the benchmark, and return 0, or 1 if a part did not finish.

    If a part did not finish, there are figures for the other parts, but no chart.
    """
    given = parser().parse_args()
    options = Options(**{field.name: getattr(given, field.name) for field in fields(Options)})
    options.sizes.sort()
    is_hostile = given.what == "hostile"
    with tempfile.TemporaryDirectory() as folder, api_server() as (cluster, shared):
        log = Path(folder) / "operator.log"
        parts = asyncio.run(measure(HostileParts if is_hostile else Parts, options, cluster, shared, log))
        if parts.error:
            print(f"{parts.error}. The end of the operator's log:", *log.read_text().splitlines()[-20:], sep="\n")
    if given.csv is not None:
        write_csv(given.csv, parts.figures)
    if given.timeline is not None and parts.timelines:
        write_timelines(given.timeline, parts.timelines)
    if parts.error:
        return 1
    if given.chart is not None and not is_hostile:
        draw(parts.series, given.chart)
    if given.table is not None:
        write_between(given.table, "hostile" if is_hostile else "scale", table(parts.figures))
    return 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
