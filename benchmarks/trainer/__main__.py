"""How fast the trainer feeds a model, and what its bookkeeping costs.

    python benchmarks/trainer [cifar|jpeg|overhead] [--rounds N] [--csv FILE] [--table FILE]

cifar, jpeg: images per second beside plain loops as the official examples write them. overhead: against the bare loop on the same data.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import bookkeeping
import pipelines
from marks import write_between


def main() -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["cifar", "jpeg", "overhead", []], help="default: all three")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case; overhead: four turns a round (default 5)")
    parser.add_argument("--cases", default="", help=f"some of {', '.join(case.name for case in pipelines.CASES)} (default: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes of either loader (default: the cores)")
    parser.add_argument("--seconds", type=float, default=4.0, help="overhead: length of a turn (default 4)")
    parser.add_argument("--width", type=int, default=32, help="overhead: the network's width (default 32)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="where the single measurements go")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="put the tables between the marks <!-- speed: begin/end --> of a document"
    )
    given = parser.parse_args()
    what = given.what or ["cifar", "jpeg", "overhead"]
    wanted = given.cases.split(",") if given.cases else [case.name for case in pipelines.CASES]
    cases = [case for case in pipelines.CASES if case.kind in what and case.name in wanted]
    rows: list[tuple[str, int, float, float]] = []
    tables: list[str] = []
    if cases:
        found = pipelines.measure(cases, given.rounds, given.workers)
        rows += [(case, number, *pair) for case, pairs in found.items() for number, pair in enumerate(pairs, 1)]
        tables.append(pipelines.table(cases, found, given.workers))
    failure: SystemExit | None = None
    if "overhead" in what:
        try:
            turns = bookkeeping.measure(4 * given.rounds, given.seconds, given.width)
        except SystemExit as error:
            failure = error  # What was measured before it is written all the same.
        else:
            rows += [("overhead", number, *pair) for number, pair in enumerate(turns, 1)]
            tables.append(bookkeeping.table(turns, given.width))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("case", "round", "plain", "trainer"), *rows])
    print("\n\n".join(tables))
    if given.table:
        write_between(given.table, "speed", "\n\n".join(tables))
    if failure is not None:
        raise failure
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended on the way out
    sys.exit(main())
