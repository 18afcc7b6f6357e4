"""A user's plain DDP script: a fixed number of optimizer steps, no checkpoint, no @record."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--sleep", type=float, default=0.1, help="seconds per step")
parser.add_argument("--raise-on-rank", type=int, default=-1)
parser.add_argument("--allocate-mebibytes", type=int, default=0)
arguments = parser.parse_args()

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print(f"rank {rank} of {world} begins", flush=True)
for step in range(1, arguments.steps + 1):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    print(f"rank {rank} step {step}", flush=True)
    if step == 5 and rank == arguments.raise_on_rank:
        raise ValueError("the weights have gone to lunch")
    time.sleep(arguments.sleep)
dist.destroy_process_group()
