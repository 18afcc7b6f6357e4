"""The shortest training loop on the trainer's data and model: no progress, ledger or checkpoints; logs the time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from ddpjob_trainer import config
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.sampler import permutation
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.model.models import build_model


def main() -> None:
    """Train until killed; argv: file for a line `STEP TIME` every train.log_every steps, KEY=VALUE ..."""
    out, settings = Path(sys.argv[1]), config.load(None, sys.argv[2:])
    devices.limit_threads(0, 1)
    data = open_data(settings.data)
    model = build_model(settings.model, data.shape, data.classes, settings.data.seed)
    optimizer = torch.optim.SGD(
        model.parameters(), settings.optim.lr, momentum=0.9, weight_decay=settings.optim.weight_decay
    )
    step = 0
    with out.open("w") as lines:
        for epoch in range(settings.train.epochs):
            order = permutation(settings.data.seed, epoch, data.train_size)
            parts = (
                order[start : start + settings.data.batch] for start in range(0, data.train_size, settings.data.batch)
            )
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
