"""Measure `decide` for a large job in its steady state: `measure_decide.py [NODES] [--profile]`.

It prints the median CPU time of 30 calls in milliseconds. It is not a test, because it would fail
on a busy machine.
"""

from __future__ import annotations

import cProfile
import statistics
import sys
import time
from dataclasses import replace

from ddpjob.api.job import DDPJob
from ddpjob.core.decide import decide
from ddpjob.core.world import HostView, World
from ddpjob_runtime.protocol import CoordinatorState, MemberState
from worlds import NOW, later, report, running


def large_job(nodes: int) -> tuple[DDPJob, World]:
    """Return a job that trains on this many nodes, in a state in which the operator has nothing to
    do.
    """
    job, pods = running(nodes, recovery={"mode": "Fast"})
    trains = report(CoordinatorState.RUNNING, *[MemberState.RUNNING] * nodes, progress={"step": 10, "steps": 100})
    hosts = {p.host: HostView(name=p.host, ready=True, since=NOW, out_of_service=False) for p in pods}
    world = World(
        pods=pods, runtime="r", runtime_offered="r", report=trains, has_service=True, has_budget=True, hosts=hosts
    )
    for second in range(3, 7):
        job = replace(job, status=decide(job, world, later(second)).status)
    return job, world


def main() -> None:
    """Run the measurement that the module describes."""
    nodes = next((int(a) for a in sys.argv[1:] if a.isdecimal()), 1024)
    (job, world), now = large_job(nodes), later(7)
    decision = decide(job, world, now)
    assert decision.actions == () and decision.status.phase == "Running"
    seconds = []
    for _ in range(30):
        fresh = replace(world)  # without derived values, because each reconcile observes a different world
        began = time.process_time()
        decide(job, fresh, now)
        seconds.append(time.process_time() - began)
    print(f"{nodes} nodes: {1000 * statistics.median(seconds):.1f} ms (best {1000 * min(seconds):.1f})")
    if "--profile" in sys.argv:
        with cProfile.Profile() as profile:
            decide(job, replace(world), now)
        profile.print_stats("tottime")


if __name__ == "__main__":
    main()
