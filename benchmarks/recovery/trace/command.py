"""python -m benchmarks.recovery trace [--runs 3] [--states 80e3,100e6,500e6] [--steps 0.05,0.5] [--record FILE]

Plays one trace of failures on DDPJob (`ddpjob run`), torchft and stock torchrun, in turns, with the
same script, state size and step time. A trace has clean kills of a node, crashes of a worker, hosts
that fall silent (SIGSTOP), and a node that joins. Prints useful steps per ideal step, pauses and
repeated steps (median / worst), and the resulting effective training time with 1,000 to 16,000
nodes. `--from FILE` prints and draws the results of an earlier `--record`.

torchft is installed into ~/.cache/ddpjob/torchft on the first run. If that is impossible, it is
skipped with the reason. A run takes `--count` times `--every` seconds, plus half a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.marks import add_table_option, write_between
from benchmarks.recovery.trace import effective_time, report, torchft_packages
from benchmarks.recovery.trace.events import Kind, make_trace
from benchmarks.recovery.trace.play import Run, Setting, play
from benchmarks.recovery.trace.systems import SYSTEMS


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="number of rounds (default 3)")
    parser.add_argument(
        "--systems", type=_names(SYSTEMS), default=list(SYSTEMS), help=f"comma-separated list of {', '.join(SYSTEMS)}"
    )
    parser.add_argument(
        "--kinds", type=_names(Kind), default=list(Kind), help=f"comma-separated list of {', '.join(Kind)}"
    )
    parser.add_argument("--states", type=report.read_numbers, default=[80e3, 100e6, 500e6], metavar="BYTES,...")
    parser.add_argument("--steps", type=report.read_numbers, default=[0.05], metavar="SECONDS,...")
    parser.add_argument("--count", type=int, default=8, help="number of failures in a run (default 8)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two failures (default 60)")
    parser.add_argument("--save-seconds", type=float, default=60.0, help="seconds between two checkpoints (default 60)")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="restart everything after this many seconds without a step (default 60)",
    )
    parser.add_argument("--seed", type=int, default=1, help="round N uses the trace for seed + N - 1 (default 1)")
    parser.add_argument(
        "--node-days", type=float, default=effective_time.NODE_DAYS, help="days between two failures of one node"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="add each run to this file")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="read this file instead of measuring")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.png", help="draw the figures to this file")
    add_table_option(parser, "trace", " (and effective-time)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Play, print and draw. Return 0, or 1 if a DDPJob did not train or did not recover."""
    options = parse(arguments)
    runs = report.read(options.source) if options.source else _play_all(options)
    text, model = report.table(runs), effective_time.table(runs, options.node_days)
    print(f"{text}\n\n{model}")
    if options.table:
        write_between(options.table, "trace", text)
        write_between(options.table, "effective-time", model)
    if options.output:
        report.draw(runs, options.output)
    return int(any(run.system.startswith("ddpjob") and not _is_well(run) for run in runs))


def _is_well(run: Run) -> bool:
    return run.account is not None and all(seen.recovered for seen in run.account.seen) and not run.whole_restarts


def _play_all(options: argparse.Namespace) -> list[Run]:
    systems, runs = _installed(options.systems), list[Run]()
    for round_ in range(1, options.runs + 1):
        trace = make_trace(options.count, options.every, options.kinds, options.seed + round_ - 1)
        for state in options.states:
            for step in options.steps:
                for system in systems:
                    setting = Setting(int(state), step, options.save_seconds, options.patience)
                    run = play(system, setting, trace, round_)
                    runs.append(run)
                    if options.record:
                        report.append(options.record, run)
                    _show(run)
    return runs


def _installed(systems: Sequence[str]) -> list[str]:
    """Return the systems that can run here, and print why other systems cannot."""
    if not any(name.startswith("torchft") for name in systems):
        return list(systems)
    try:
        version = torchft_packages.read_version(torchft_packages.find_python())
        print(f"torchft {version} in {torchft_packages.FOLDER}", file=sys.stderr)
        return list(systems)
    except torchft_packages.NotInstalled as error:
        print(f"skipped: {error}", file=sys.stderr)
        return [name for name in systems if not name.startswith("torchft")]


def _show(run: Run) -> None:
    head = f"{run.round:>3} {run.system:<20}{report.size(run.state):>7} {run.step:g} s "
    if run.account is None:
        print(f"{head} {run.note}", file=sys.stderr, flush=True)
        return
    seen = [
        f"{one.kind} {one.pause:.2f} s" + f" +{one.repeated}" * bool(one.repeated) + "!" * (not one.recovered)
        for one in run.account.seen
    ]
    print(f"{head} {run.account.useful} steps; {', '.join(seen)}", file=sys.stderr, flush=True)


class _names:
    """Parses a comma-separated list of known words."""

    def __init__(self, known: object) -> None:
        self._known = {str(name): name for name in known}  # type: ignore[attr-defined]

    def __call__(self, text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in self._known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(self._known)}")
        return [self._known[word] for word in words]
