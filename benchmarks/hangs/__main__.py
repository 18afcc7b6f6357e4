"""Plants each kind of hang in its own group, to see whether it ends without any setting.

    python -m benchmarks.hangs [--kinds loader,gil] [--together 3] [--patience 240] [--csv FILE]
    python -m benchmarks.hangs --calm MINUTES     groups that never hang (calm.py)

A group is one node with two ranks, of which rank 1 hangs after 15 s of training (plants.py). Each
row shows the seconds from then until the coordinator ended the round, the seconds until the next
step, and the incident's message. `ok` requires the cause Hang, the hanging rank first in the
message (unless both wait in a collective, or all ranks hang), and a step in the next round.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.hangs import calm
from benchmarks.hangs.plants import KINDS
from benchmarks.processes import exit_on_sigterm
from benchmarks.recovery.groups import Fast, NotRecovered, Shape

NAMELESS = {"skips_collective", "barrier", "everywhere"}
"""Kinds in which there is no single rank that the others wait for."""


class Planted(Fast):
    """A group whose script is plants.py."""

    script = Path(__file__).with_name("plants.py")

    def incident(self) -> dict[str, Any] | None:
        """Return the first incident; None if there is none yet."""
        found: list[dict[str, Any]] = self._report().get("incidents", [])
        return found[0] if found else None

    def planted(self) -> float | None:
        """Return when the first rank began to hang, in Unix seconds."""
        return min((path.stat().st_mtime for path in self.folder.glob("planted-*")), default=None)

    def trains_after(self, moment: float) -> float | None:
        """Return the time of the last step if it is after `moment`."""
        step, _, when = (self.folder / "step").read_text().partition(" ")
        return float(when) if step and when and float(when) > moment else None


@dataclass(frozen=True)
class Outcome:
    """The outcome of one planted hang."""

    kind: str
    ok: bool
    ended: float | None
    trains: float | None
    load: float
    message: str


def plant(kind: str, patience: float) -> Outcome:
    """Run a group until its hang has ended."""
    with tempfile.TemporaryDirectory(prefix=f"hang-{kind}-") as folder:
        group = Planted(Path(folder), Shape(nodes=1, minimum=1, procs=2), (kind,))
        ended = trains = None
        message = ""
        try:
            group.start()
            began = group.wait("the hang is planted", group.planted, patience)
            incident = group.wait("the hang has ended", group.incident, patience)
            moment = time.time()
            ended, message = moment - began, f"{incident['kind']}: {incident['message']}"
            trains = group.wait("the next step", partial(group.trains_after, moment), patience) - began
        except NotRecovered as error:
            message = message or str(error)
        finally:
            group.close()
    named = kind in NAMELESS or ": rank 1 " in message.partition("no step for ")[2][:40]
    ok = message.startswith("Hang: ") and named and trains is not None
    return Outcome(kind, ok, ended, trains, os.getloadavg()[0], message)


def main() -> int:
    """Plant the kinds, print a row for each, and return 1 if one of them is not ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", help=f"comma-separated list of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--together", type=int, default=3, help="number of groups that run at the same time")
    parser.add_argument("--patience", type=float, default=240.0, help="count a hang as missed after this many seconds")
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--calm", type=float, metavar="MINUTES", help="look for false alarms for this many minutes instead"
    )
    options = parser.parse_args()
    if options.calm is not None:
        kinds = options.kinds.split(",") if options.kinds else list(calm.PERIOD)
        with ThreadPoolExecutor(len(kinds)) as pool:
            return 1 if any(list(pool.map(partial(calm.watch, minutes=options.calm), kinds))) else 0
    kinds = options.kinds.split(",") if options.kinds else KINDS
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    outcomes = []
    with ThreadPoolExecutor(options.together) as pool:
        for outcome in pool.map(partial(plant, patience=options.patience), kinds):
            outcomes.append(outcome)
            times = [f"{value:7.1f}" if value is not None else "      -" for value in (outcome.ended, outcome.trains)]
            print(f"{outcome.kind:20} {'ok' if outcome.ok else 'NO':3}", *times, outcome.message[:200], flush=True)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Outcome))
            writer.writerows(map(astuple, outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
