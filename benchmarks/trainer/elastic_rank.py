"""One rank of `elasticity`: trains, and writes each step's CPU seconds, except the first two.

Only the computing thread's time is measured. Because ranks share cores here, gloo's thread polls
continuously while it waits for a lock whose owner is waiting for a core. That takes up to 0.2 s of
a 0.9 s step, which a rank with its own device would not spend.

With the argument `whole`, ranks use whole micro-batches, even if these cannot be distributed
evenly. A rank that joins a run may then have no micro-batch.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpjob_trainer import config, train
from ddpjob_trainer.run_plan import Division
from ddpjob_trainer.strategies.ddp import Ddp


def main() -> int:
    """Run the trainer, and return its exit code."""
    path, *arguments = sys.argv[1:]
    if "whole" in arguments:
        Ddp.divides = False
        Division.check_work = lambda self: None  # type: ignore[method-assign]
    ends: list[float] = []
    update = Ddp.update

    def noted(self: Ddp, *given: Any) -> Any:
        result = update(self, *given)
        ends.append(time.thread_time())
        return result

    Ddp.update = noted  # type: ignore[method-assign]
    code = train.run(config.load(None, [argument for argument in arguments if argument != "whole"]))
    steps = [after - before for before, after in pairwise(ends)]
    Path(path).write_text(json.dumps(steps[1:]))
    return code


if __name__ == "__main__":
    sys.exit(main())
