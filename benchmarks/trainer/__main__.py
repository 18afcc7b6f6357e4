"""Measures how fast the trainer feeds a model, and the cost of its bookkeeping.

    python -m benchmarks.trainer [cifar|jpeg|ranks|bookkeeping|elasticity] [--rounds N] [--csv FILE] [--table FILE]
    python -m benchmarks.trainer --gpu [--minutes 5] [--json FILE] [--table FILE]

cifar, jpeg: images per second, compared with plain loops as in the official examples. ranks: images
per second and processor time on two ranks, compared with a plain DDP loop. bookkeeping: CPU time of
the parts of a step, compared with a bare loop's. elasticity: throughput after a change in the
number of ranks. The last three run only if selected. --gpu: see gpu.py.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm
from benchmarks.trainer import bookkeeping, elasticity, gpu, pipelines


def main() -> int:
    """Return 0 if everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="*",
        choices=["cifar", "jpeg", "ranks", "bookkeeping", "elasticity", []],
        help="default: the first two",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case (default 5)")
    names = [case.name for case in (*pipelines.CASES, *bookkeeping.CASES)]
    parser.add_argument("--cases", default="", help=f"comma-separated list of {', '.join(names)} (default: all)")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="worker processes of both loaders, on all ranks together (default: number of cores)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement to this file")
    add_table_option(parser, "speed")
    parser.add_argument(
        "--elasticity",
        type=Path,
        metavar="FILE",
        help="write the elasticity tables between their marks in a document",
    )
    parser.add_argument(
        "--bookkeeping",
        type=Path,
        metavar="FILE",
        help="write the bookkeeping table between its marks in a document",
    )
    gpu.add_options(parser)
    given = parser.parse_args()
    if given.gpu:
        return gpu.main(given)
    what = given.what or ["cifar", "jpeg"]
    wanted = given.cases.split(",") if given.cases else names
    marks: dict[str, list[pipelines.Case]] = {"speed": [], "speed of ranks": []}
    for case in pipelines.CASES:
        if ("ranks" if case.ranks > 1 else case.kind) in what and case.name in wanted:
            marks["speed of ranks" if case.ranks > 1 else "speed"].append(case)
    rows: list[tuple[str | int | float, ...]] = []
    tables: list[str] = []
    for mark, cases in marks.items():
        if not cases:
            continue
        found = pipelines.measure(cases, given.rounds, given.workers)
        for case_name, pairs in found.items():
            for number, (plain, trainer) in enumerate(pairs, 1):
                rows.append((case_name, number, plain.images, trainer.images, plain.processor, trainer.processor))
        tables.append(pipelines.table(cases, found, given.workers))
        if given.table:
            write_between(given.table, mark, tables[-1])
    if "elasticity" in what:
        found_costs = elasticity.measure(given.rounds)
        both = {"elasticity": elasticity.table(found_costs), "elasticity by arithmetic": elasticity.by_arithmetic()}
        rows += [(f"elasticity {cost.name}: {cost.kind}", 1, cost.at_start, cost.seconds) for cost in found_costs]
        tables += both.values()
        for mark, text in both.items() if given.elasticity else ():
            write_between(given.elasticity, mark, text)
    if "bookkeeping" in what:
        found_parts = [bookkeeping.measure(case, given.rounds) for case in bookkeeping.CASES if case.name in wanted]
        rows += [(f"bookkeeping: {each.case.name}", 1, each.bare, sum(each.kept.values())) for each in found_parts]
        tables.append(bookkeeping.table(found_parts))
        if given.bookkeeping:
            write_between(given.bookkeeping, "bookkeeping", tables[-1])
    if given.csv:
        with given.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("case", "round", "plain", "trainer", "plain ms", "trainer ms"), *rows])
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
