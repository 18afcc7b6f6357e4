"""How long training stands still when something dies.

    python benchmarks/recovery [--runs 20] [--cases fast-spare,stock-replaced] [--csv FILE]     on loopback
    python benchmarks/recovery overhead | chart | cluster ...                                   see --help of each

From the kill to the first step of all ranks after it, by the ranks' own step logs and one clock. Rounds are interleaved: each case is run
once in every round. Stock torchrun takes most of a minute where it recovers at all: its cases, and ten kills in a row, run in fewer rounds
(`--slow-every`).
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import chart
import cluster
import interleaved
import overhead
from cases import CASES, Loopback

OTHERS = {"overhead": overhead.main, "chart": chart.main, "cluster": cluster.main}


def main() -> int:
    """0 when everything was measured, 1 when a case of ours did not recover, 2 on bad input."""
    if sys.argv[1:2] and sys.argv[1] in OTHERS:
        return OTHERS[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    interleaved.add_options(parser, CASES)
    options = parser.parse_args()
    return interleaved.run(Loopback(options.patience), CASES, options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended on the way out
    sys.exit(main())
