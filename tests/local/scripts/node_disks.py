"""The built-in trainer with a checkpoint folder of each pod's own, as in a cluster: `ddpjob run` has one for all."""

from __future__ import annotations

import os
import runpy

os.environ["DDPJOB_CHECKPOINT_DIR"] += f"/{os.environ['DDPJOB_POD']}"
runpy.run_module("ddpjob_trainer", run_name="__main__", alter_sys=True)
