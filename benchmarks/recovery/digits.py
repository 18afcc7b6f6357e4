"""The digits that ship in scikit-learn, as one file that steps.py reads."""

from __future__ import annotations

from pathlib import Path

import torch
from ddpjob_trainer.data.digits import read_digits


def write_digits(folder: Path) -> None:
    """`digits.pt`: (images, labels). It is there whole or not at all."""
    images, labels = read_digits()
    torch.save((images.float() / 16, labels), folder / "digits.tmp")
    (folder / "digits.tmp").rename(folder / "digits.pt")
