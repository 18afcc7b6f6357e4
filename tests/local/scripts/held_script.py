"""Runs a script with delayed steps: held_script.py SCRIPT [ARGUMENT ...].

Steps in HELD ("30,60") wait for the file DDPJOB_CHECKPOINT_DIR/go-STEP. Until there is a file
go-pause, all steps wait for PAUSE seconds.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from ddpjob_trainer.data.sampler import Step
from ddpjob_trainer.reporting.ledger import Ledger

write = Ledger.step
HELD = [int(step) for step in os.environ.get("HELD", "").split(",") if step]
PAUSE = float(os.environ.get("PAUSE", "0"))


def held_step(self: Ledger, number: int, step: Step) -> None:
    """Record the step, then wait."""
    write(self, number, step)
    go = Path(os.environ["DDPJOB_CHECKPOINT_DIR"])
    if PAUSE and not (go / "go-pause").exists():
        time.sleep(PAUSE)
    if number in HELD:
        until = time.monotonic() + 300
        while not (go / f"go-{number}").exists():
            assert time.monotonic() < until
            time.sleep(0.02)


Ledger.step = held_step  # type: ignore[method-assign]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
