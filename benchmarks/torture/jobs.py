"""The tortured jobs: the project's trainer with its ledger, in every mode, size and elasticity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Json = dict[str, Any]
STEPS_PER_EPOCH = 23
"""Number of steps for 1438 digits in batches of 64."""


@dataclass(frozen=True)
class Kind:
    """One kind of job."""

    name: str
    mode: str
    minimum: int = 2
    spares: int = 0
    nodes: int = 2

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return self.minimum < self.nodes


KINDS = (
    Kind("fast-spare", "Fast", spares=1),
    Kind("fast-elastic", "Fast", minimum=1),
    Kind("standard", "Standard"),
    Kind("standard-elastic-spare", "Standard", minimum=1, spares=1),
)


def trainer_arguments(epochs: int) -> list[str]:
    """Return the arguments for a small training that is slow enough for some kills.

    The training saves a checkpoint every five steps.
    """
    return [
        "data.name=digits", "data.batch=64", "model.width=16", f"train.epochs={epochs}", "train.ledger=true",
        "train.eval_every=1000", "train.log_every=10", "optim.lr=0.05", "optim.warmup_epochs=1",
        "checkpoint.every_steps=5", "checkpoint.every_seconds=0", "train.timeout_seconds=120", "train.threads=1",
        "eval.pictures=false",
    ]  # fmt: skip


def spec(kind: Kind, epochs: int, defect: str) -> Json:
    """Return the DDPJob's spec. `defect` breaks the trainer on purpose."""
    recovery: Json = {"mode": kind.mode, "nodeLostAfterSeconds": 10}
    program: Json = {"module": "ddpjob_trainer", "args": trainer_arguments(epochs)}
    if defect:
        recovery["maxRestarts"] = 2
        program = {
            "script": str(Path(__file__).with_name("defective.py")),
            "args": [defect, *trainer_arguments(epochs)],
        }
    elastic = {"elastic": {"minNodes": kind.minimum}} if kind.elastic else {}
    return {
        **program, **elastic, "nodes": kind.nodes, "spares": kind.spares, "gpusPerNode": 0,
        "recovery": recovery,
    }  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the newest checkpoint."""
    newest = max(folder.glob("step-*.pt"))
    model: dict[str, torch.Tensor] = torch.load(newest, weights_only=True)["model"]
    return model


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between any two weights."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
