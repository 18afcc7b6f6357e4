"""Measures how long training is interrupted when a process, pod or host dies.

    python -m benchmarks.recovery [--runs 20] [--cases fast-spare,stock-replaced] [--csv FILE]    on loopback
    python -m benchmarks.recovery --cuda ...                                                      on its GPUs
    python -m benchmarks.recovery trace | overhead | chart | phases | cluster | gpu ...           see --help of each

The time is measured from the kill to the next step of all ranks, from the ranks' own step logs and
with one clock. Rounds are interleaved: every case runs once per round. Stock torchrun needs most of
a minute if it recovers at all, so its cases, and the cases with ten consecutive kills, run in fewer
rounds (`--slow-every`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from benchmarks.processes import exit_on_sigterm
from benchmarks.recovery import chart, cluster, gpu, interleaved, overhead, phases
from benchmarks.recovery.cases import CASES, Loopback
from benchmarks.recovery.cut import CUTS
from benchmarks.recovery.trace import command as trace

OTHERS = {
    "trace": trace.main, "overhead": overhead.main, "chart": chart.main, "cluster": cluster.main, "phases": phases.main,
    "gpu": gpu.main,
}  # fmt: skip


def main() -> int:
    """Run the benchmark, and return its exit code.

    The code is 0 if everything was measured, 1 if a case other than stock torchrun's did not
    recover, and 2 on bad input.
    """
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        return OTHERS[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    interleaved.add_options(parser, (*CASES, *CUTS))
    parser.set_defaults(cases=",".join(case.name for case in CASES))
    parser.add_argument("--cuda", action="store_true", help="train on the machine's GPUs, which the nodes share")
    options = parser.parse_args()
    # The targets are for CPUs.
    cases = [replace(case, target=None) for case in CASES] if options.cuda else (*CASES, *CUTS)
    return interleaved.run(Loopback(options.patience, cuda=options.cuda), cases, options)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
