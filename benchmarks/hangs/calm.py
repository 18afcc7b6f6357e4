"""Runs groups that are slow, suspended or cut off, but never hang. Any report of a hang is a false
alarm.

    python -m benchmarks.hangs --calm MINUTES [--kinds stops,links]

Each group trains in two nodes of one rank. Once in each PERIOD it is disturbed:

| group | disturbance |
| --- | --- |
| stops | a process of the group (worker, launcher, fork server or coordinator) is stopped for 2 to 12 s |
| evaluation | rank 1 computes for 60 s, while rank 0 waits in a collective |
| slow_disk | rank 0 writes a checkpoint that takes 50 s, in blocking writes |
| links | a node's network (a namespace; needs root) is cut off for 0.1 to 0.4 s |
| outages | as links, but for 2 to 10 s, so that a spare takes over; only a second restart is an alarm |

The script of the groups is disturbed.py.
"""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes import descendants
from benchmarks.recovery.cut import FastOnHosts, Hosts
from benchmarks.recovery.groups import Fast, NotRecovered, Shape

PERIOD = {"stops": 15.0, "evaluation": 80.0, "slow_disk": 70.0, "links": 10.0, "outages": 45.0}
"""Seconds from one disturbance to the next."""
STOP_SECONDS = (2.0, 12.0)
CUT_SECONDS = {"links": (0.1, 0.4), "outages": (2.0, 10.0)}


class Calm(Fast):
    """A group whose script is disturbed.py."""

    script = Path(__file__).with_name("disturbed.py")

    def alarms(self) -> list[str]:
        """Return the incidents, and the hang that is currently suspected."""
        report = self._report()
        found = [f"{incident['kind']}: {incident['message']}" for incident in report.get("incidents", [])]
        return found + [f"suspected: {report['overdue']}"] * bool(report.get("overdue"))

    def disturb(self, kind: str, dice: random.Random) -> None:
        """Stop one process for a few seconds, then continue it.

        In the other kinds, the script causes the disturbance.
        """
        if kind != "stops":
            return
        assert self.coordinator is not None
        roots = [self.coordinator.pid, *(node.pid for node in self.nodes.values())]
        victim = dice.choice(roots + [pid for root in roots for pid in descendants(root)])
        os.kill(victim, signal.SIGSTOP)
        time.sleep(dice.uniform(*STOP_SECONDS))
        os.kill(victim, signal.SIGCONT)


class CalmOnHosts(FastOnHosts):
    """Like `Calm`, but in network namespaces.

    The coordinator's report cannot be read there, so alarms come from its log.
    """

    script = Path(__file__).with_name("disturbed.py")

    def alarms(self) -> list[str]:
        """Return the coordinator's lines about ended rounds."""
        log = (self.folder / "coordinator-0-0.log").read_text(errors="replace")
        return [line for line in log.splitlines() if re.search(r"coordinator: round \d+ ends", line)]

    def disturb(self, kind: str, dice: random.Random) -> None:
        """Cut off one node's host, then heal its link."""
        host = self.host_of(dice.choice(list(self.nodes)))
        self.hosts.cut(host)
        time.sleep(dice.uniform(*CUT_SECONDS[kind]))
        self.hosts.heal(host)


@contextmanager
def calm_group(kind: str, folder: Path) -> Iterator[Calm | CalmOnHosts]:
    """Provide a group that has not started yet, and stop it on exit."""
    if kind not in CUT_SECONDS:
        group = Calm(folder, Shape(nodes=2, minimum=2), (kind, str(PERIOD[kind])))
        try:
            yield group
        finally:
            group.close()
        return
    shape = Shape(nodes=2, minimum=2, spares=1)
    hosts = Hosts(shape.nodes + shape.spares + 1, kind[0])
    on_hosts = CalmOnHosts(folder, shape, (kind, str(PERIOD[kind])))
    on_hosts.hosts = hosts
    try:
        hosts.make()
        yield on_hosts
    finally:
        on_hosts.close()
        hosts.remove()


def watch(kind: str, minutes: float) -> list[str]:
    """Run a group for `minutes` minutes, and return its false alarms without duplicates."""
    seen: dict[str, None] = {}
    disturbances, dice = 0, random.Random(kind)
    with tempfile.TemporaryDirectory(prefix=f"calm-{kind}-") as name, calm_group(kind, Path(name)) as group:
        step = Path(name) / "step"
        try:
            group.start()
            group.wait("the first step", lambda: step.exists() or None, 120)
            end, due = time.monotonic() + 60 * minutes, time.monotonic() + PERIOD[kind]
            while time.monotonic() < end:
                if time.monotonic() >= due:
                    group.disturb(kind, dice)
                    disturbances, due = disturbances + 1, time.monotonic() + PERIOD[kind]
                seen |= dict.fromkeys(group.alarms())
                time.sleep(1)
            before = step.read_text()
            group.wait("another step", lambda: step.read_text() != before or None, 120)
        except NotRecovered as error:
            seen[str(error)] = None
    if kind == "outages" and len(seen) <= disturbances:
        print(f"{kind:12} {len(seen)} restarts")
        seen.clear()
    figures = f"{minutes:g} min, disturbed {disturbances} times, {len(seen)} false alarms"
    print(f"{kind:12} {figures}", *seen, sep="\n  ", flush=True)
    return list(seen)
