"""Takes steps forever. Each process writes the round, its number of ranks and the time of each step
to a file.

Times are from the machine's monotonic clock, which all pods of the test cluster share.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group()
name = f"{os.environ['DDPJOB_POD']}-{os.getpid()}-{os.environ['DDPJOB_FENCE']}"
step = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # steps of an optimizer are the job's progress
with (Path(os.environ["DDPJOB_CHECKPOINT_DIR"]) / name).open("a", buffering=1) as file:
    while True:
        dist.all_reduce(torch.ones(1))
        step.step()
        file.write(f"{os.environ['DDPJOB_FENCE']} {dist.get_world_size()} {time.monotonic()} {time.time()}\n")
        time.sleep(0.1)
