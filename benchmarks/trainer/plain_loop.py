"""The official examples' loop with their meters, on a GPU if available. It prints its speed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def options() -> argparse.Namespace:
    """Parse the options of both programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, required=True, help="total number of steps")
    return parser.parse_args()


def loader(data: torch.utils.data.Dataset[Any], given: argparse.Namespace) -> Iterable[Any]:
    """Return a loader for the training set, as in the official examples."""
    return torch.utils.data.DataLoader(
        data,
        batch_size=given.batch,
        shuffle=True,
        num_workers=given.workers,
        pin_memory=DEVICE.type == "cuda",
    )


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[float]:
    """Return the accuracy for each of `topk`, as in the ImageNet example."""
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
        return [correct[:k].reshape(-1).float().sum(0).mul_(100.0 / target.size(0)).item() for k in topk]


def train(model: nn.Module, loader: Iterable[tuple[torch.Tensor, torch.Tensor]], given: argparse.Namespace) -> None:
    """Train for one epoch, and print images and seconds after the warm-up."""
    model.to(DEVICE)
    criterion = nn.CrossEntropyLoss().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    losses = began = 0.0
    model.train()
    for step, (images, target) in enumerate(loader, 1):
        images, target = images.to(DEVICE, non_blocking=True), target.to(DEVICE, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses += loss.item() * images.size(0)
        accuracy(output, target, (1, 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == given.warm:
            began = time.time()
        if step == given.steps:
            print(
                json.dumps({"images": (given.steps - given.warm) * given.batch, "seconds": time.time() - began}),
                flush=True,
            )
            return
    raise SystemExit(f"the data set ended before step {given.steps}")
