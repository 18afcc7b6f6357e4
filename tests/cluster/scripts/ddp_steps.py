"""A user's plain DDP script without @record. It takes a fixed number of steps, and with --saved it
saves a checkpoint at each step.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--sleep", type=float, default=0.1, help="seconds per step")
parser.add_argument("--raise-on-rank", type=int, default=-1)
parser.add_argument("--lose-device-in", help="the name of a pod")
parser.add_argument("--allocate-mebibytes", type=int, default=0)
parser.add_argument("--saved", type=Path, help="a file with the last step and the weights, from which it continues")
arguments = parser.parse_args()

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 1
if arguments.saved is not None and arguments.saved.exists():
    saved = torch.load(arguments.saved)
    model.load_state_dict(saved["model"])
    first = saved["step"] + 1
print(f"rank {rank} of {world} begins{f' at step {first}' if first > 1 else ''}", flush=True)
for step in range(first, arguments.steps + 1):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(f"rank {rank} step {step}", flush=True)
    if step == 5 and rank == arguments.raise_on_rank:
        raise ValueError("the weights have gone to lunch")
    if step == 5 and os.environ.get("DDPJOB_POD") == arguments.lose_device_in:
        raise RuntimeError("CUDA error: no CUDA-capable device is detected")
    if arguments.saved is not None and rank == 0:
        temporary = arguments.saved.with_suffix(".part")
        torch.save({"step": step, "model": model.state_dict()}, temporary)
        temporary.replace(arguments.saved)
    time.sleep(arguments.sleep)
dist.destroy_process_group()
