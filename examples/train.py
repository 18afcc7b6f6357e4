"""An ordinary DDP script that fits a line, saves its state after each epoch and resumes from it."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
epochs = parser.parse_args().epochs

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
snapshot = Path(os.environ.get("DDPJOB_CHECKPOINT_DIR", ".")) / "line.pt"

model = torch.nn.Linear(1, 1)
first = 0
# All ranks use rank 0's state, because without a shared folder another rank's state may be older
# or missing.
saved = [torch.load(snapshot, weights_only=True) if rank == 0 and snapshot.exists() else None]
dist.broadcast_object_list(saved, src=0)
if saved[0] is not None:
    model.load_state_dict(saved[0]["model"])
    first = saved[0]["epoch"]
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

x = torch.linspace(-1, 1, 512).unsqueeze(1)[rank::world]
for epoch in range(first, epochs):
    for batch in x.split(32):
        loss = (model(batch) - (3 * batch + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch + 1}/{epochs}: loss {loss.item():.6f}", flush=True)
        torch.save({"model": model.module.state_dict(), "epoch": epoch + 1}, f"{snapshot}.new")
        Path(f"{snapshot}.new").replace(snapshot)
    dist.barrier()
dist.destroy_process_group()
