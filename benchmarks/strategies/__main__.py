"""Compares every strategy on this machine with the same model, data, global batch and number of
epochs.

    python -m benchmarks.strategies [--rounds 3] [--ranks 2] [--strategies ddp,horovod] [--epochs 3]
        [--csv FILE] [--chart FILE.png] [KEY=VALUE ...]

Rounds are interleaved: each runs every case once. The first epoch of a run is a warm-up and does
not count. KEY=VALUE are trainer settings, such as model.name=torchvision:resnet50
data.shape=3,224,224; the defaults are ResNet-18 on GPUs, the small network on the CPU, and
synthetic images. Cases that this machine cannot run are listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.marks import add_table_option, write_between
from benchmarks.strategies import report
from benchmarks.strategies.cases import CASES, accelerators
from benchmarks.strategies.runs import Measured, NotMeasured, arguments, run, samples


def main() -> int:
    """Return 0 if something was measured and nothing failed.

    A case that cannot run here does not count as failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the trainer's configuration")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default 3)")
    parser.add_argument(
        "--ranks", type=int, default=accelerators() or 2, help="number of ranks (default: one per GPU, or 2)"
    )
    parser.add_argument(
        "--strategies", default=",".join(names), help=f"comma-separated list of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--epochs", type=int, default=3, help="epochs per run; the first is not measured (default 3)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, help="count a run as failed after this many seconds (default 1800)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement to this file")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="write the chart to this file")
    add_table_option(parser, "strategies")
    given = parser.parse_args()
    wanted = [name.strip() for name in given.strategies.split(",")]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--strategies: unknown: {', '.join(unknown)}; choose from {', '.join(names)}")
    if given.epochs < 2 or given.rounds < 1 or given.ranks < 1:
        parser.error("--epochs must be at least 2, and --rounds and --ranks must be at least 1")
    if wrong := [setting for setting in given.settings if "=" not in setting]:
        parser.error(f"{wrong[0]}: trainer settings must have the form KEY=VALUE")

    cases = [case for case in CASES if case.name in wanted]
    missing = {case.name: reason for case in cases if (reason := case.lacks(given.ranks))}
    failed: set[str] = set()
    found: dict[str, list[Measured]] = {}
    for number in range(1, given.rounds + 1):
        for case in cases:
            if case.name in missing:
                continue
            try:
                measured = run(case, given.ranks, given.settings, given.epochs, given.timeout)
            except NotMeasured as error:
                missing[case.name] = str(error)
                failed.add(case.name)
                found.pop(case.name, None)
                print(f"round {number}: {case.name}: {error}", file=sys.stderr, flush=True)
                continue
            found.setdefault(case.name, []).append(measured)
            speed = max(measured.speeds)
            print(
                f"round {number}: {case.name}: {speed:,.0f} samples/s, loss {measured.loss:.4f}",
                file=sys.stderr,
                flush=True,
            )
    if not found:
        print("\n".join(f"not measured: {name}: {reason}" for name, reason in missing.items()), file=sys.stderr)
        return 1

    size = samples(given.settings)
    settings = dict(argument.split("=", 1) for argument in arguments(given.settings, given.epochs))
    what = (
        f"{settings['model.name']} on {size:,} images of {settings['data.shape']},"
        f" global batch {settings['data.batch']}, {given.ranks} ranks, {report.device()};"
        f" {given.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
    )
    table = f"{what}\n\n{report.table(cases, found, missing, size)}"
    print(table)
    if given.csv:
        report.write_csv(given.csv, found, missing, size)
    if given.chart:
        report.draw(given.chart, cases, found, missing, size, what)
    if given.table:
        write_between(given.table, "strategies", table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
