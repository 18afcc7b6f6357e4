"""How long training stands still when something dies.

    python benchmarks/recovery [--runs 20] [--cases fast-spare,stock-replaced] [--csv FILE]     on loopback
    python benchmarks/recovery overhead | chart | cluster ...                                   see --help of each

From the kill to the first step of all ranks after it, by the ranks' own step logs and one clock. Rounds are interleaved: each case is run
once in every round. Stock torchrun takes most of a minute where it recovers at all: its cases run in each `--slow-every`th round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import chart
import overhead
from cases import CASES, Case, Loopback, Place, Sample
from groups import NotRecovered
from tables import CsvFile, markdown

OTHERS = {"overhead": overhead.main, "chart": chart.main}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--runs", type=int, default=20, help="rounds (default 20)")
    made.add_argument("--slow-every", type=int, default=4, metavar="N", help="slow cases run in each Nth round (default 4)")
    made.add_argument("--cases", default="", help=f"some of: {', '.join(case.name for case in CASES)} (default all)")
    made.add_argument("--patience", type=float, default=60.0, help="seconds after which a group counts as not recovered (default 60)")
    made.add_argument("--csv", type=Path, metavar="FILE", help="where the single measurements go")
    return made


def chosen(names: str) -> list[Case]:
    """The cases of the command line. Raises ValueError."""
    known = {case.name: case for case in CASES}
    wanted = [name for name in names.split(",") if name] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--cases: {', '.join(unknown)} is not known; write some of {', '.join(known)}")
    return [known[name] for name in wanted]


def measure(case: Case, place: Place, round_: int) -> list[Sample]:
    """One round of a case. A group that never trains counts as a run that did not recover."""
    samples: list[Sample] = []
    try:
        samples.extend(case.run(case, place, round_))
    except NotRecovered as error:
        samples.append(case.sample(place, "", round_, None, outcome=str(error)))
    return samples


def main() -> int:
    """0 when everything was measured, 1 when a case of ours did not recover, 2 on bad input."""
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        return OTHERS[sys.argv[1]](sys.argv[2:])
    arguments = parser().parse_args()
    try:
        cases = chosen(arguments.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    file, samples, place = CsvFile(arguments.csv), list[Sample](), Loopback(arguments.patience)
    for round_ in range(1, arguments.runs + 1):
        for case in cases:
            if case.slow and (round_ - 1) % arguments.slow_every > 1:  # Two of each N: both kinds of victims.
                continue
            for sample in measure(case, place, round_):
                samples.append(sample)
                file.add(sample)
                took = sample.outcome if sample.seconds is None else f"{sample.seconds:.3f} s"
                print(f"{sample.round:>3} {sample.case:<22}{sample.victim:<12}{sample.kill:>3}  {took}", file=sys.stderr, flush=True)
    print(markdown(samples, {case.name: case.aim for case in CASES}))
    return int(any(sample.seconds is None and not sample.case.startswith("stock") for sample in samples))


if __name__ == "__main__":
    sys.exit(main())
