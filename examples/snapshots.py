"""A plain DDP script with three lines that keep its state in memory across restarts."""

import argparse
import time

import ddpjob_report
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--seconds", type=float, default=0.05)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
x = torch.linspace(-1, 1, 512).unsqueeze(1)[rank::world]

snapshots = ddpjob_report.Snapshots(model=model, optimizer=optimizer, scheduler=scheduler)  # 1
for step in range(snapshots.step, args.steps):  # 2
    batch = x.roll(step, 0)[:32]
    loss = (model(batch) - (3 * batch + 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    snapshots.take(step + 1)  # 3
    ddpjob_report.report(step=step + 1, steps=args.steps, loss=loss)
    time.sleep(args.seconds)  # Take as long as a step of a larger model.

total = sum(weight.double().sum() for weight in model.parameters()).item()
print(f"rank {rank} ends with weights of sum {total!r}", flush=True)
dist.destroy_process_group()
