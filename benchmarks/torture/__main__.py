"""Kills whatever can be killed, again and again, and checks that nobody could tell.

    python benchmarks/torture [--kills 40] [--seed 1]                under `ddpjob run`, on this machine
    python benchmarks/torture --cluster [--kills 200] [--seed 1]     on the test cluster (make cluster-up); the operator is killed too

Jobs of all kinds (modes Fast and Standard, fixed and elastic, with and without spares) train side by side. Each must become Complete with
no restart counted against it; its ledger must deal out every sample of every epoch exactly once; its weights must be, to the bit, those of
undisturbed training with as many ranks at each step (replay.py says why). Exit code 1 when one is not so.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arena import Arena, Processes
from defective import DEFECTS
from jobs import KINDS
from marks import write_between
from on_cluster import on_test_cluster
from torture import Plan, Torture
from verdict import table


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kills", type=int, default=40, help="in all (default 40)")
    made.add_argument("--seed", type=int, default=1, help="of the choice of victims and moments (default 1)")
    made.add_argument("--epochs", type=int, default=40, help="length of a job, 23 steps each (default 40)")
    made.add_argument("--interval", type=float, default=8.0, help="seconds between two kills at most (default 8)")
    made.add_argument("--jobs", default="", help=f"some of: {', '.join(kind.name for kind in KINDS)} (default all)")
    made.add_argument("--cluster", action="store_true", help="on the test cluster")
    made.add_argument("--defect", choices=list(DEFECTS), default="", help="break the trainer on purpose: the checks must fail")
    made.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="put the table between the marks <!-- torture: begin/end --> of a document (torture-local without --cluster)",
    )
    return made


def main() -> int:
    """0 when every job is as it must be, 1 when one is not, 2 on bad input."""
    options = parser().parse_args()
    wanted = tuple(kind for kind in KINDS if not options.jobs or kind.name in options.jobs.split(","))
    if unknown := set(filter(None, options.jobs.split(","))) - {kind.name for kind in KINDS}:
        print(f"--jobs: {', '.join(sorted(unknown))} is not known; write some of {', '.join(kind.name for kind in KINDS)}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True)))
        arena: Arena = stack.enter_context(on_test_cluster(folder)) if options.cluster else Processes(folder)
        plan = Plan(options.kills, options.seed, options.epochs, options.interval, wanted, options.defect)
        torture = Torture(arena, plan, folder)
        verdicts = torture.run()
    text = table(verdicts, torture.for_all, options.seed)
    print(text)
    if options.table:
        write_between(options.table, "torture" if options.cluster else "torture-local", text)
    return int(any(verdict.problems for verdict in verdicts))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended on the way out
    sys.exit(main())
