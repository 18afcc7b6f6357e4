"""Kills everything at random, suspends processes and cuts connections, none of which may affect the
result.

    python -m benchmarks.torture [--kills 40] [--seed 1]                under `ddpjob run`, on this machine; processes
                                                                        are also stopped for 2 to 12 s (SIGSTOP), clocks
                                                                        of pods set to up to 2 min behind, as root
                                                                        connections cut for 2 to 12 s
    python -m benchmarks.torture --cluster [--kills 200] [--seed 1]     on the test cluster (make cluster-up); the
                                                                        operator is killed, too
    python -m benchmarks.torture --snapshots [...]                      states in memory, checkpoints each hour; workers
                                                                        are also killed in the middle of a copy

Jobs of all kinds (modes Fast and Standard, fixed and elastic, with and without spares) train side
by side. Each must become Complete without a counted restart. According to its ledger, every sample
of every epoch must be consumed exactly once. Its weights must equal, bit for bit, those of an
undisturbed training with the same number of ranks at each step (replay.py explains why). With
--snapshots, a kill may cost at most one complete step, in addition to the step in progress. The
exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm
from benchmarks.torture.arena import COPY_KILL, Arena, Processes
from benchmarks.torture.defective import DEFECTS
from benchmarks.torture.jobs import KINDS, KINDS_OF_SNAPSHOTS
from benchmarks.torture.on_cluster import on_test_cluster
from benchmarks.torture.torture import Plan, Torture
from benchmarks.torture.verdict import table

OWN_NETWORK = "TORTURE_OWN_NETWORK"
"""The variable that is set in the program inside its own network namespace."""

MANY_MISSED = 5
"""Number of missed kills in a copy after which at least one must have happened."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kills", type=int, default=40, help="number of kills, pauses and cuts (default 40)")
    made.add_argument("--seed", type=int, default=1, help="seed for the choice of victims and times (default 1)")
    made.add_argument(
        "--epochs", type=int, default=40, help="number of epochs of a job, with 23 steps each (default 40)"
    )
    made.add_argument(
        "--interval", type=float, default=8.0, help="maximum number of seconds between two kills (default 8)"
    )
    made.add_argument(
        "--jobs",
        default="",
        help=f"comma-separated list of {', '.join(kind.name for kind in KINDS)}; with --snapshots of "
        f"{', '.join(kind.name for kind in KINDS_OF_SNAPSHOTS)} (default all)",
    )
    made.add_argument(
        "--snapshots", action="store_true",
        help="jobs that keep the state in memory after every step, with an hour between checkpoints",
    )  # fmt: skip
    made.add_argument("--cluster", action="store_true", help="run on the test cluster")
    made.add_argument(
        "--defect", choices=list(DEFECTS), default="", help="break the trainer on purpose, so that a check must fail"
    )
    add_table_option(made, "torture", " (torture-local without --cluster; each with -snapshots)")
    return made


def main() -> int:
    """Return 0 if every job passes all checks, 1 if a job fails a check, 2 on bad input."""
    options = parser().parse_args()
    kinds = KINDS_OF_SNAPSHOTS if options.snapshots else KINDS
    wanted = tuple(kind for kind in kinds if not options.jobs or kind.name in options.jobs.split(","))
    if unknown := set(filter(None, options.jobs.split(","))) - {kind.name for kind in kinds}:
        known = ", ".join(kind.name for kind in kinds)
        print(f"--jobs: unknown: {', '.join(sorted(unknown))}; choose from {known}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True)))
        arena: Arena = (
            stack.enter_context(on_test_cluster(folder))
            if options.cluster
            else Processes(folder, cuts=OWN_NETWORK in os.environ, copies=options.snapshots)
        )
        plan = Plan(options.kills, options.seed, options.epochs, options.interval, wanted, options.defect)
        torture = Torture(arena, plan, folder)
        verdicts = torture.run()
    text = table(verdicts, torture.for_all, options.seed)
    print(text)
    if options.table:
        place = ("torture" if options.cluster else "torture-local") + ("-snapshots" if options.snapshots else "")
        write_between(options.table, place, text)
    if torture.missed >= MANY_MISSED and not any(verdict.kills[COPY_KILL] for verdict in verdicts):
        print(f"none of {torture.missed} workers died in a copy; see clocks/copy_kills.py", file=sys.stderr)
        return 1
    return int(any(verdict.problems for verdict in verdicts))


def in_own_network() -> None:
    """Run this program again in a loopback-only network namespace, so that connections can be
    cut.
    """
    enter = f'ip link set lo up && iptables --wait --list >/dev/null && {OWN_NETWORK}=1 exec "$@"'
    words = [sys.executable, "-m", "benchmarks.torture", *sys.argv[1:]]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    trial = ["unshare", "--net", "sh", "-c", enter, "sh"]
    if subprocess.run([*trial, "true"], capture_output=True, check=False).returncode:
        print("connections are not cut, because that needs root, unshare, ip and iptables", file=sys.stderr)
        return
    os.execvp("unshare", [*trial, *words])


if __name__ == "__main__":
    if not {"--cluster", "--help", "-h", OWN_NETWORK} & {*sys.argv, *os.environ}:
        in_own_network()
    exit_on_sigterm()
    sys.exit(main())
