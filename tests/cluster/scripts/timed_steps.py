"""Steps of a group without end; each process keeps a file: which round, of how many ranks, when each step was done.

By the machine's monotonic clock, which all pods of the test cluster share.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group()
name = f"{os.environ['DDPJOB_POD']}-{os.getpid()}-{os.environ['DDPJOB_FENCE']}"
step = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # its steps are the job's progress
with (Path(os.environ["DDPJOB_CHECKPOINT_DIR"]) / name).open("a", buffering=1) as file:
    while True:
        dist.all_reduce(torch.ones(1))
        step.step()
        file.write(f"{os.environ['DDPJOB_FENCE']} {dist.get_world_size()} {time.monotonic()} {time.time()}\n")
        time.sleep(0.1)
