"""A custom training loop, exact on any number of ranks: pods may be lost or join at any step."""

import sys

import ddpjob_report
import torch
import torch.distributed as dist
from ddpjob_trainer import api
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else 10, 48

points = torch.randn(1500, 2, generator=torch.Generator().manual_seed(0))  # Your data: the same on every rank.
labels = (points[:, 0] * points[:, 1] > 0).long()
train, test = range(1200), range(1200, 1500)

dist.init_process_group("gloo")
group = api.Group.from_env()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
network = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
sampler = api.ElasticSampler(len(train), BATCH, api.Dealing(group.rank, group.world))
step, stopped = 0, False


def state():
    """Return everything that the next step depends on."""
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    return {"step": step, **{name: part.state_dict() for name, part in parts.items()}}


with api.CheckpointFolder.open(group, every_steps=20) as checkpoints:
    if (saved := checkpoints.newest()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        step = saved["step"]
    stop = api.StopRequest(group, checkpoints)
    stop.listen()  # From now on SIGTERM sets a flag.
    ledger = api.Ledger(checkpoints.path / "run", group, checkpoints.incarnation)
    ledger.start(step, len(train), EPOCHS)
    for taken in sampler.upcoming(EPOCHS):
        step += 1
        ledger.step(step, taken)
        agreement = stop.agreement(checkpoints.due(step))  # The ranks agree while they compute.
        for micro in taken.micros:  # One per rank; it does not count if there are fewer samples than ranks.
            scores = network(points[micro.samples])
            losses = nn.functional.cross_entropy(scores, labels[micro.samples], reduction="sum") * micro.counts
            # Average over the global batch; DistributedDataParallel divides by the number of ranks.
            (losses * group.world / len(taken.samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.done(taken)
        if sampler.epoch_is_done:
            sampler.next_epoch()
        stopped, save = agreement.wait()
        if stopped or save:
            checkpoints.save(state, step)
        for done in checkpoints.completed():
            ledger.checkpoint(done.step)
        if stopped:
            break
    stop.over()
    checkpoints.save(state, step)  # Does nothing if this step is already saved.
    checkpoints.finish()
    if not stopped:
        ledger.end(step)
        checkpoints.release()

accumulator = api.Accumulator(classes=2)
mine = api.share(test, group.rank, group.world)  # Test each point once, on any rank.
with torch.no_grad():
    accumulator.add(model(points[mine]), labels[mine])
result = accumulator.reduce(group, len(mine))
if group.rank == 0:
    print(f"{step} steps, test accuracy {result.accuracy:.1%}, test loss {result.loss:.4f}", flush=True)
dist.destroy_process_group()
if stopped:
    ddpjob_report.saved_and_leave()
