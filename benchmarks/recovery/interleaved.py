"""Runs interleaved rounds of cases on one backend, and shows each result immediately."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.marks import add_table_option, write_between
from benchmarks.recovery.cases import Backend, Case
from benchmarks.recovery.groups import NotRecovered
from benchmarks.recovery.tables import CsvFile, Sample, markdown


def add_options(parser: argparse.ArgumentParser, cases: Sequence[Case]) -> None:
    """Add the options common to all backends."""
    parser.add_argument("--runs", type=int, default=20, help="number of rounds (default 20)")
    parser.add_argument(
        "--slow-every",
        type=int,
        default=4,
        metavar="N",
        help="run slow cases in only two of every N rounds (default 4)",
    )
    parser.add_argument(
        "--cases", default="", help=f"comma-separated list of {', '.join(case.name for case in cases)} (default all)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="count a group as not recovered after this many seconds (default 60)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement to this file")
    add_table_option(parser, "MARK")
    parser.add_argument("--mark", help="name of the marks for --table (default loopback, gpu or cluster)")


def chosen(names: str, cases: Sequence[Case]) -> list[Case]:
    """Return the cases named on the command line. Raises ValueError."""
    known = {case.name: case for case in cases}
    wanted = [name for name in names.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--cases: unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def measure(case: Case, backend: Backend, round_: int) -> list[Sample]:
    """Run one round of a case. A group that never trains counts as not recovered."""
    samples: list[Sample] = []
    try:
        samples.extend(case.run(case, backend, round_))
    except NotRecovered as error:
        samples.append(case.sample(backend, "", round_, None, outcome=str(error)))
    return samples


def run(backend: Backend, cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Run the rounds and print the table.

    Return 0; 1 if a case other than stock torchrun's did not recover; 2 on bad input.
    """
    try:
        wanted = chosen(options.cases, cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    file, samples = CsvFile(options.csv), list[Sample]()
    for round_ in range(1, options.runs + 1):
        for case in wanted:
            if case.slow and (round_ - 1) % options.slow_every > 1:  # Two of N rounds cover both victims.
                continue
            for sample in measure(case, backend, round_):
                samples.append(sample)
                file.add(sample)
                took = sample.outcome if sample.seconds is None else f"{sample.seconds:.3f} s"
                print(
                    f"{sample.round:>3} {sample.case:<22}{sample.victim:<12}{sample.kill:>3}  {took}",
                    file=sys.stderr,
                    flush=True,
                )
    text = markdown(samples, {case.name: case.target for case in cases})
    print(text)
    if options.table:
        write_between(options.table, options.mark or backend.name, text)
    return int(any(sample.seconds is None and not sample.case.startswith("stock") for sample in samples))
