"""Interleaved rounds of cases at one place, shown as they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cases import Case, Place, Sample
from groups import NotRecovered
from marks import write_between
from tables import CsvFile, markdown


def add_options(parser: argparse.ArgumentParser, cases: Sequence[Case]) -> None:
    """What every place offers."""
    parser.add_argument("--runs", type=int, default=20, help="rounds (default 20)")
    parser.add_argument("--slow-every", type=int, default=4, metavar="N", help="slow cases run in two of each N rounds (default 4)")
    parser.add_argument("--cases", default="", help=f"some of: {', '.join(case.name for case in cases)} (default all)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a group counts as not recovered (default 60)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="where the single measurements go")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="put the table between the marks <!-- PLACE: begin/end --> of a document"
    )


def chosen(names: str, cases: Sequence[Case]) -> list[Case]:
    """The cases of the command line. Raises ValueError."""
    known = {case.name: case for case in cases}
    wanted = [name for name in names.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--cases: {', '.join(unknown)} is not known here; write some of {', '.join(known)}")
    return [known[name] for name in wanted]


def measure(case: Case, place: Place, round_: int) -> list[Sample]:
    """One round of a case. A group that never trains counts as a run that did not recover."""
    samples: list[Sample] = []
    try:
        samples.extend(case.run(case, place, round_))
    except NotRecovered as error:
        samples.append(case.sample(place, "", round_, None, outcome=str(error)))
    return samples


def run(place: Place, cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Prints the table. 0 when everything was measured, 1 when a case of ours did not recover, 2 on bad input."""
    try:
        wanted = chosen(options.cases, cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    file, samples = CsvFile(options.csv), list[Sample]()
    for round_ in range(1, options.runs + 1):
        for case in wanted:
            if case.slow and (round_ - 1) % options.slow_every > 1:  # Two of each N: both kinds of victims.
                continue
            for sample in measure(case, place, round_):
                samples.append(sample)
                file.add(sample)
                took = sample.outcome if sample.seconds is None else f"{sample.seconds:.3f} s"
                print(f"{sample.round:>3} {sample.case:<22}{sample.victim:<12}{sample.kill:>3}  {took}", file=sys.stderr, flush=True)
    text = markdown(samples, {case.name: case.aim for case in cases})
    print(text)
    if options.table:
        write_between(options.table, place.name, text)
    return int(any(sample.seconds is None and not sample.case.startswith("stock") for sample in samples))
