"""The built-in trainer with a separate checkpoint folder for each pod, as in a cluster. With
`ddpjob run`, pods normally share one folder.

The pod job-1-0 waits after its twelfth step, so that the test can kill it before the training has
ended.
"""

from __future__ import annotations

import os
import runpy
import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


def stop_at_the_twelfth(*_: Any) -> None:
    steps.append(1)
    while len(steps) >= 12:
        time.sleep(1)


steps: list[int] = []


os.environ["DDPJOB_CHECKPOINT_DIR"] += f"/{os.environ['DDPJOB_POD']}"
if os.environ["DDPJOB_POD"] == "job-1-0":
    register_optimizer_step_post_hook(stop_at_the_twelfth)
runpy.run_module("ddpjob_trainer", run_name="__main__", alter_sys=True)
