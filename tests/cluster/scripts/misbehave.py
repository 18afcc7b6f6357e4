"""A plain DDP script that trains until its folder has a file `go`, and then misbehaves once, as
selected by --do.

After a restart, it trains to its end.

Each rank that misbehaves first writes the current time to `fact-RANK`.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--do", choices=("exit", "raise", "allocate", "hang"), required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--rank", type=int, default=-1, help="who misbehaves; -1: every rank")
parser.add_argument("--steps", type=int, default=10, help="after the restart")
arguments = parser.parse_args()


def misbehave(rank: int) -> None:
    (arguments.folder / f"fact-{rank}").write_text(str(time.time()))
    if arguments.do == "exit":
        os._exit(7)
    if arguments.do == "raise":
        raise ValueError("the weights have gone to lunch")
    if arguments.do == "hang":
        wait_for_godot()
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1024) * (32 * 1024)))


def wait_for_godot() -> None:
    while True:
        time.sleep(0.1)


again = any(arguments.folder.glob("fact-*"))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print(f"rank {rank} of {world} begins", flush=True)
step = 0
while not again or step < arguments.steps:
    step += 1
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    # All ranks see the file in the same step, so that two of them can misbehave together.
    go = torch.tensor(int((arguments.folder / "go").exists()))
    dist.all_reduce(go, dist.ReduceOp.MAX)
    if go.item() and not again and arguments.rank in (-1, rank):
        misbehave(rank)
    time.sleep(0.2)
dist.destroy_process_group()
