"""Measures a model's maximum speed on a GPU, by training on the same batch repeatedly, without data
loading or meters.

It uses the trainer's precision, layout and optimizer.
"""

from __future__ import annotations

import json
import time

import torch
from torch import nn

from benchmarks.trainer.models_of_cases import model_of
from benchmarks.trainer.plain_loop import DEVICE, options


def main() -> None:
    """Train on one batch."""
    given = options()
    torch.backends.cudnn.benchmark = True
    shape = (3, 224, 224)
    model = model_of(given.model, shape, 10).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    criterion = nn.CrossEntropyLoss()
    images = torch.randn(given.batch, *shape, device=DEVICE).contiguous(memory_format=torch.channels_last)
    target = torch.randint(10, (given.batch,), device=DEVICE)
    marks = []
    for step in range(1, given.steps + 1):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
        if step in (given.warm, given.steps):
            loss.item()
            marks.append(time.time())
    began, ended = marks
    print(json.dumps({"images": (given.steps - given.warm) * given.batch, "seconds": ended - began}), flush=True)


if __name__ == "__main__":
    main()
