"""Each rank's record of the steps it makes. Rank 1 waits in some of them until the test has done what it does then."""

import os
import time

import ddpjob_report

HOLDS = (30, 45)


def made(step: int) -> None:
    """Write the step down, from 0, and wait in it if it is one of HOLDS."""
    folder, rank = ddpjob_report.checkpoint_dir(), os.environ["RANK"]
    with (folder / f"ledger-{rank}").open("a") as ledger:
        ledger.write(f"{step}\n")
    if rank == "1" and step in HOLDS:
        while not (folder / f"go-{step}").exists():
            time.sleep(0.02)
