"""`python exchange.py write|read FOLDER` writes or reads checkpoints of both formats. The test runs
it in two Python versions.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
from ddpjob_trainer.checkpoints import dcp, torch_file
from ddpjob_trainer.checkpoints.metadata import Metadata

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(3)}
SNAPSHOT = {"step": 7, "sampler": {"epoch": 0, "consumed": 1}, "lr": 0.1, "betas": (0.9, 0.99), "tensors": TENSORS}


def write(folder: Path) -> None:
    folder.mkdir()
    dcp.write(folder / "step-000000007.dcp", 1, SNAPSHOT, Metadata(7), None, lambda: None)
    torch_file.write(folder / "step-000000007.pt", SNAPSHOT, Metadata(7))


def read(folder: Path) -> None:
    parts, file = folder / "step-000000007.dcp", folder / "step-000000007.pt"
    assert dcp.check(parts).step == torch_file.check_file(file).step == 7
    for found in (dcp.read(parts), torch_file.read(file)):
        assert {**found, "tensors": 0} == {**SNAPSHOT, "tensors": 0}, found
        assert all(torch.equal(found["tensors"][name], tensor) for name, tensor in TENSORS.items()), found


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
    print(platform.python_version(), torch.__version__)
