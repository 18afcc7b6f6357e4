"""Each rank's record of its steps. In some steps, rank 1 waits until the test has acted."""

import os
import time

import ddpjob_report

HOLDS = (30, 45)


def made(step: int) -> None:
    """Record the step, counted from 0. If the step is in HOLDS, wait in it."""
    folder, rank = ddpjob_report.checkpoint_dir(), os.environ["RANK"]
    with (folder / f"ledger-{rank}").open("a") as ledger:
        ledger.write(f"{step}\n")
    if rank == "1" and step in HOLDS:
        while not (folder / f"go-{step}").exists():
            time.sleep(0.02)
