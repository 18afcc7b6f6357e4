"""How fast the trainer feeds a model, and what its bookkeeping costs.

    python -m benchmarks.trainer [cifar|jpeg|overhead|elasticity] [--rounds N] [--csv FILE] [--table FILE]

cifar, jpeg: images per second, compared with plain loops as in the official examples. overhead: time per step, compared
with a bare loop on the same data. elasticity: throughput on other numbers of ranks than at the start; only when named.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm
from benchmarks.trainer import bookkeeping, elasticity, pipelines


def main() -> int:
    """0 when everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="*",
        choices=["cifar", "jpeg", "overhead", "elasticity", []],
        help="default: the first three",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of each case; overhead: four turns per round (default 5)"
    )
    parser.add_argument(
        "--cases", default="", help=f"some of {', '.join(case.name for case in pipelines.CASES)} (default: all)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="worker processes of both loaders (default: number of cores)",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="overhead: length of a turn in seconds (default 4)")
    parser.add_argument("--width", type=int, default=32, help="overhead: the network's width (default 32)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement here")
    add_table_option(parser, "speed")
    parser.add_argument(
        "--elasticity",
        type=Path,
        metavar="FILE",
        help="write elasticity's tables between its marks in a document",
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
    if "elasticity" in what:
        found_costs = elasticity.measure(given.rounds)
        both = {"elasticity": elasticity.table(found_costs), "elasticity by arithmetic": elasticity.by_arithmetic()}
        rows += [
            (f"elasticity {cost.began} -> {cost.now}: {cost.kind}", 1, cost.at_start, cost.seconds)
            for cost in found_costs
        ]
        tables += both.values()
        for mark, text in both.items() if given.elasticity else ():
            write_between(given.elasticity, mark, text)
    failure: SystemExit | None = None
    if "overhead" in what:
        try:
            turns = bookkeeping.measure(4 * given.rounds, given.seconds, given.width)
        except SystemExit as error:
            failure = error  # The measurements so far are still written.
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
    exit_on_sigterm()
    sys.exit(main())
