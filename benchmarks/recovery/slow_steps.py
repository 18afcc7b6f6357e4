"""Runs steps.py with ddpjob_report; the node named in FOLDER/slow takes twice as long.

    torchrun ... slow_steps.py FOLDER [the options of steps.py]

A step is mostly a sleep in the forward pass, so that a busy machine does not decide who is slow.
"""

import os
import sys
import time
from pathlib import Path

import ddpjob_report  # noqa: F401  (measures each rank's own work)
import steps

SECONDS = 0.05


def main():
    folder, plain = Path(sys.argv[1]), steps.network

    def network(width):
        model = plain(width)

        def sleep(*_):
            slow = folder / "slow"
            time.sleep(SECONDS * (1 + (slow.exists() and slow.read_text() == os.environ["DDPJOB_POD"])))

        model.register_forward_hook(sleep)
        return model

    steps.network = network
    sys.argv += ["--sleep", "0"]
    steps.main()


if __name__ == "__main__":
    main()
