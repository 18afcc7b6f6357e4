"""The official examples' loop with their meters, on a GPU if available. It prints its speed.

If torchrun starts several ranks, they use DDP and a DistributedSampler, as in PyTorch's tutorials,
on the CPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.trainer.step_timer import StepTimer

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() and RANKS == 1 else "cpu")

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def options() -> argparse.Namespace:
    """Parse the options of both programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, required=True, help="number of steps, including the warm-up")
    parser.add_argument("--recorded", type=int, default=0, help="additional steps that measure the device's busy share")
    parser.add_argument(
        "--compile", default="false", metavar="MODE", help="compile the model with this mode of torch.compile"
    )
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    return parser.parse_args()


def loader(data: torch.utils.data.Dataset[Any], given: argparse.Namespace) -> Iterable[Any]:
    """Return a loader for the training set, as in the official examples."""
    sampler = torch.utils.data.DistributedSampler(data) if RANKS > 1 else None
    return torch.utils.data.DataLoader(
        data,
        batch_size=given.batch // RANKS,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=given.workers,
        pin_memory=DEVICE.type == "cuda",
    )


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
    """Return the accuracy for each of `topk`, as in the ImageNet example."""
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
        return [correct[:k].reshape(-1).float().sum(0).mul_(100.0 / target.size(0)).item() for k in topk]


def train(model: nn.Module, loader: Batches, given: argparse.Namespace, meters: bool = True) -> None:
    """Train for one epoch, and print the figures of the steps after the warm-up.

    A GPU computes in the number format and layout that are the trainer's defaults.
    """
    on_gpu = DEVICE.type == "cuda"
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if on_gpu else torch.preserve_format
    model.to(DEVICE, memory_format=layout)
    criterion = nn.CrossEntropyLoss().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4, fused=not meters or None)
    losses = 0.0
    model.train()
    compute = torch.compile(model, mode=given.compile) if given.compile != "false" else model
    if RANKS > 1:
        compute = nn.parallel.DistributedDataParallel(model)
    timer = StepTimer(given.warm, given.steps - given.warm, given.recorded, given.batch)
    for step, (images, target) in enumerate(loader, 1):
        images = images.to(DEVICE, non_blocking=True, memory_format=layout)
        target = target.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=on_gpu):
            output = compute(images)
            loss = criterion(output, target)
        if meters:
            losses += loss.item() * images.size(0)
            accuracy(output, target, (1, 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        timer.on_step(step)
        if step == given.steps + given.recorded:
            return
    raise SystemExit(f"the data set ended before step {given.steps + given.recorded}")
