"""Control-plane faults on the test cluster (make cluster-up) while jobs train.

    python -m benchmarks.faults [--runs 3] [--only "quota,DNS"] [--table docs/recovery.md]

After each fault, the operator must be the same process (unless it was killed). Each job must
continue without a counted restart, and only pods lost to the fault may be replaced. Nothing may
have been created twice, and a new job must get its pod. The exit code is 1 if a check fails.

A full disk is not among the faults, because all nodes of the test cluster share this machine's
disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.faults.faults import FAULTS, Fault
from benchmarks.faults.scene import Scene, scene
from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm
from benchmarks.testbed import Cluster


@dataclass
class Result:
    """The result of all runs of a fault."""

    fault: Fault
    seconds: list[float] = field(default_factory=list)
    """Seconds until the operator acted again, for each run."""
    problems: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        runs = len(self.seconds) + len(self.problems)
        result = "passed" if not self.problems else f"{len(self.problems)} of {runs} runs: {self.problems[0][:200]}"
        took = f"{median(self.seconds):.1f}" if self.seconds else ""
        took += f" (at most {max(self.seconds):.1f})" if len(self.seconds) > 1 else ""
        return f"| {self.fault.name} | {runs} | {result} | {took} |"


def once(stage: Scene, fault: Fault, seconds: float | None = None) -> float:
    """Cause a fault, and check its effects. Return the seconds until the operator acted again."""
    took = fault.bring(stage, fault.seconds if seconds is None else seconds)
    if took is None:
        took = stage.probe()
    stage.check()
    return took


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--runs", type=int, default=3, help="runs of each fault (default 3)")
    made.add_argument(
        "--only", default="", help="run only faults whose names contain one of these comma-separated words"
    )
    add_table_option(made, "faults")
    return made


def main() -> int:
    """Return 0 if nothing was damaged, 1 if there was damage, 2 if there is no cluster."""
    options = parser().parse_args()
    words = [word for word in options.only.split(",") if word]
    chosen = [f for f in FAULTS if not words or any(word.lower() in f.name.lower() for word in words)]
    cluster = Cluster()
    if cluster.state() is None:
        print("the test cluster is not running; start it with make cluster-up", file=sys.stderr)
        return 2
    results = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, scene(cluster, Path(folder)) as stage:
        for fault in chosen:
            result = Result(fault)
            results.append(result)
            for _ in range(options.runs):
                began = time.monotonic()
                try:
                    result.seconds.append(once(stage, fault))
                except Exception as problem:  # Continue with the other faults.
                    result.problems.append((str(problem) or repr(problem)).splitlines()[0])
                    print(problem, file=sys.stderr)
                print(f"{time.monotonic() - began:.0f} s: {result.row}", file=sys.stderr, flush=True)
    head = "| fault | runs | result | seconds until it acts again |\n| --- | --- | --- | --- |"
    text = "\n".join([head, *(result.row for result in results)])
    print(text)
    if options.table:
        write_between(options.table, "faults", text)
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
