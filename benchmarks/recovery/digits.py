"""Writes scikit-learn's digits as one file for steps.py."""

from __future__ import annotations

from pathlib import Path

import torch
from ddpjob_trainer.data.digits import read_digits


def write_digits(folder: Path) -> None:
    """Write `digits.pt`, (images, labels), atomically."""
    images, labels = read_digits()
    torch.save((images.float() / 16, labels), folder / "digits.tmp")
    (folder / "digits.tmp").rename(folder / "digits.pt")
