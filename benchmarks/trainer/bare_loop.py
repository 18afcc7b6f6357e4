"""Measures a model's maximum speed, by training on the same batch repeatedly, without data loading
or meters.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.trainer.models_of_cases import model_of
from benchmarks.trainer.plain_loop import DEVICE, options, train


def main() -> None:
    """Train on one batch."""
    given, shape = options(), (3, 224, 224)
    images = torch.randn(given.batch, *shape, device=DEVICE).contiguous(memory_format=torch.channels_last)
    batch = images, torch.randint(10, (given.batch,), device=DEVICE)
    train(model_of(given.model, shape, 10), itertools.repeat(batch), given, meters=False)


if __name__ == "__main__":
    main()
