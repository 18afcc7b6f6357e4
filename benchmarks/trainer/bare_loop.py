"""The trainer's data and model in the shortest loop that trains: no progress, accounting or checkpoints. Tells the time each ten steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from ddpjob_trainer import config, devices
from ddpjob_trainer.data import open_data
from ddpjob_trainer.models import build_model
from ddpjob_trainer.sampler import permutation


def main() -> None:
    """Trains until it is ended; argv: file of times, key=value ..."""
    out, settings = Path(sys.argv[1]), config.load(None, sys.argv[2:])
    devices.limit_threads(0, 1)
    data = open_data(settings.data)
    model = build_model(settings.model, data.shape, data.classes, settings.data.seed)
    optimizer = torch.optim.SGD(model.parameters(), settings.optim.lr, momentum=0.9, weight_decay=settings.optim.weight_decay)
    step = 0
    with out.open("w") as lines:
        for epoch in range(settings.train.epochs):
            order = permutation(settings.data.seed, epoch, data.train_size)
            parts = (order[start : start + settings.data.batch] for start in range(0, data.train_size, settings.data.batch))
            for batch in data.train_batches(parts, epoch):
                loss = torch.nn.functional.cross_entropy(model(batch.images), batch.labels)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                step += 1
                if step % settings.train.log_every == 0:
                    lines.write(f"{step} {time.time()}\n")
                    lines.flush()


if __name__ == "__main__":
    main()
