"""Data-parallel training in 100 lines of PyTorch, to be read from top to bottom.

    python examples/ddp_in_100_lines.py 3                         one GPU, or the CPU
    torchrun --nproc-per-node=2 examples/ddp_in_100_lines.py 3    two ranks
    ddpjob run examples/ddp-in-100-lines.yaml                     two nodes

All three commands print the same losses, up to rounding, as does the built-in trainer:

    python -m ddpjob_trainer --config digits data.augment=false amp.level=O0 train.epochs=3
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEED, BATCH, PEAK_RATE, WARMUP_EPOCHS = 0, 64, 0.05, 2
EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 30

# 1. The group. torchrun starts one process per device, each with its RANK and LOCAL_RANK.
cuda = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(device)
alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("nccl" if cuda else "gloo", **alone)
rank, world = dist.get_rank(), dist.get_world_size()


def mix(z):
    """Scramble 64 bits (splitmix64). The trainer's split and order come from this function."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


# 2. The data: 1797 digits. A fifth of each class is for testing. Every rank has all digits.
digits = load_digits()
by_class = [(digits.target == label).nonzero()[0].tolist() for label in range(10)]
test = [n for own in by_class for n in sorted(own, key=mix)[: round(len(own) * 0.2)]]
train = torch.tensor(sorted(set(range(len(digits.target))) - set(test)))
images = ((torch.tensor(digits.images).float() / 16 - 0.3053) / 0.3761).unsqueeze(1).to(device)
labels = torch.tensor(digits.target).to(device)


# 3. The model. It normalizes each image separately, so the division among ranks changes nothing.
def convolution(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()


torch.manual_seed(SEED)
body = *convolution(1, 64), *convolution(64, 128), nn.MaxPool2d(2), *convolution(128, 128)
model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 10)).to(device)
network = DistributedDataParallel(model)  # It averages gradients over ranks as they are computed.
optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)

step, size = 0, len(train)
for epoch in range(EPOCHS):
    # 4. The order depends on seed and epoch only, so it is the same on every rank.
    key = 0
    for part in (SEED, epoch):
        key = mix(key ^ (part + 1) * 0x9E3779B97F4A7C15 % 2**64)
    order = train[torch.randperm(size, generator=torch.Generator().manual_seed(key >> 1))]
    window = torch.zeros(2, device=device)  # The loss and the samples since the last report.
    for begin in range(0, size, BATCH):
        # 5. The learning rate: a linear warm-up, then a cosine to zero.
        done, warmup = epoch * size + begin, WARMUP_EPOCHS * size
        rate = PEAK_RATE * min(1, (done + BATCH) / warmup)
        if done >= warmup:
            rate *= 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / (EPOCHS * size - warmup))
        optimizer.param_groups[0]["lr"] = rate
        # 6. The step. Each rank takes its part of the global batch. DDP divides by the number of
        # ranks, so `world / len(batch)` turns the sum of losses into the mean over the batch.
        batch = order[begin : begin + BATCH]
        mine = batch.tensor_split(world)[rank]
        loss = nn.functional.cross_entropy(network(images[mine]), labels[mine], reduction="sum")
        optimizer.zero_grad()
        (loss * world / len(batch)).backward()
        optimizer.step()
        # 7. The report. A rank knows only its own losses, so the ranks add them up.
        step, window = step + 1, window + torch.stack([loss.detach(), loss.new_tensor(len(mine))])
        if step % 10 == 0 or begin + BATCH >= size:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step}  loss {window[0] / window[1]:.4f}", flush=True)
            window.zero_()
# 8. The test. Each sample is tested by one rank.
mine = torch.tensor(test).tensor_split(world)[rank]
with torch.no_grad():
    correct = (model(images[mine]).argmax(1) == labels[mine]).sum()
dist.all_reduce(correct)
if rank == 0:
    print(f"test accuracy {int(correct) / len(test):.2%}")
dist.destroy_process_group()
