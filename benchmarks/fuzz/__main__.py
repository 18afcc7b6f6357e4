"""`python -m benchmarks.fuzz`; see the package."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import benchmarks.fuzz
from benchmarks import CHECKOUT
from benchmarks.fuzz.parsers import PARSERS
from benchmarks.fuzz.soak import Result, soak, write_findings
from benchmarks.fuzz.watch import SECONDS, Parser, attempt, warm, watching
from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm

FOUND = CHECKOUT / "build" / "fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=benchmarks.fuzz.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--minutes", type=float, help="stop after this many minutes (default: 10)")
    end.add_argument("--inputs", type=int, help="stop after this many inputs for all parsers together")
    parser.add_argument("--seed", type=int, default=1, help="seed of the mutations (default: 1)")
    parser.add_argument("--parser", action="append", choices=list(PARSERS), metavar="NAME", help=", ".join(PARSERS))
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="run only this input; its folder must be named after the parser"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds allowed per input (default: 5)")
    add_table_option(parser, "fuzz")
    options = parser.parse_args()
    exit_on_sigterm()
    chosen = [PARSERS[name] for name in options.parser or PARSERS]
    if options.replay is not None:
        faulthandler.enable()
        return replay(options.replay, chosen[0] if options.parser else None, options.seconds)
    return run(chosen, options)


def replay(file: Path, parser: Parser | None, seconds: float) -> int:
    """Run one input in this process, so that a debugger can be used. Return the exit code."""
    if parser is None:
        parser = PARSERS.get(file.resolve().parent.name)
    if parser is None:
        raise SystemExit(f"{file}: the folder is not named after a parser; add --parser NAME")
    data = file.read_bytes()
    with watching():
        target = parser.make()
        warm(target)
        outcome = attempt(target, data, seconds)
    print(outcome.finding or ("refused" if outcome.refused else "accepted"), f"({outcome.seconds:.3f} s)")
    return outcome.finding is not None


def run(parsers: list[Parser], options: argparse.Namespace) -> int:
    """Soak the parsers and print the results. Return the exit code."""
    began, used = time.monotonic(), os.times()
    seconds = 60 * (options.minutes or 10.0)

    def is_over(results: list[Result]) -> bool:
        if options.inputs is not None:
            return bool(sum(result.inputs for result in results) >= options.inputs)
        return time.monotonic() - began >= seconds

    def progress(results: list[Result]) -> None:
        minutes, findings = (time.monotonic() - began) / 60, sum(len(result.findings) for result in results)
        print(f"{minutes:5.1f} min: {sum(r.inputs for r in results):,} inputs, {findings} findings", flush=True)

    results = soak(parsers, options.seed, is_over, limit=options.seconds, progress=progress)
    now = os.times()
    processor = sum(now[:4]) - sum(used[:4])
    minutes, load = (time.monotonic() - began) / 60, os.getloadavg()[2]
    what = (
        f"{datetime.now(UTC):%Y-%m-%d}, seed {options.seed}; {minutes:.0f} minutes, {processor / 60:.0f} minutes of"
        " CPU time"
    )
    table = f"{table_of(results)}\n\n{what}; {os.cpu_count()} cores, the 15-minute load average was {load:.1f}."
    print(f"\n{table}\n")
    if options.table is not None:
        write_between(options.table, "fuzz", table)
    for result in results:
        for count, finding, path in write_findings(result, FOUND):
            print(f"{result.parser.name}: {finding} ({count} times)", file=sys.stderr)
            if path is not None:
                print(f"    python -m benchmarks.fuzz --replay {path.relative_to(CHECKOUT)}", file=sys.stderr)
    return int(any(result.findings for result in results))


def table_of(results: list[Result]) -> str:
    """Return a Markdown table whose last row has the totals."""
    rows = ["| parser | what it reads | inputs | refused | findings | slowest, ms | growth, MiB |"]
    rows += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for r in results:
        share, slowest = r.refused / max(1, r.inputs), 1000 * r.slowest
        rows.append(
            f"| {r.parser.name} | {r.parser.what} | {r.inputs:,} | {share:.0%} | {len(r.findings)} | {slowest:.0f} |"
            f" {r.growth:.0f} |"
        )
    inputs, findings = sum(r.inputs for r in results), sum(len(r.findings) for r in results)
    return "\n".join([*rows, f"| all | | {inputs:,} | | {findings} | | |"])


if __name__ == "__main__":
    sys.exit(main())
