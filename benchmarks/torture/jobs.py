"""The tortured jobs: the project's trainer with its ledger, in every mode, size and elasticity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ddpjob_trainer.checkpoints import dcp

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
    strategy: str = "ddp"
    snapshots: int | str = 0
    """`recovery.snapshots`, with checkpoints only every hour; 0 means checkpoints only."""

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


KINDS_OF_SNAPSHOTS = (
    Kind("memory-spare", "Fast", spares=1, snapshots=1),
    Kind("memory-auto", "Fast", spares=1, snapshots="auto"),
    Kind("memory-standard", "Standard", snapshots=1),
    Kind("memory-fsdp-2", "Fast", strategy="fsdp", snapshots=1),
    Kind("memory-fsdp-3", "Fast", nodes=3, strategy="fsdp", snapshots=1),
)
"""The kinds with --snapshots. They have at least two nodes, so that after one loss another node
still has the state. memory-fsdp-3 continues with two nodes, among which the sharded state is
redistributed.
"""


def trainer_arguments(epochs: int, kind: Kind | None = None) -> list[str]:
    """Return the arguments for a small training, slow enough for several kills.

    It saves a checkpoint every five steps, unless its states are kept in memory.
    """
    if kind is not None and kind.snapshots:
        return [*trainer_arguments(epochs), f"strategy={kind.strategy}", *_RARE_CHECKPOINTS,
                *(["ddp.ordered=true"] if kind.strategy == "ddp" else [])]  # fmt: skip
    return [
        "data.name=digits", "data.batch=64", "model.width=16", f"train.epochs={epochs}", "train.ledger=true",
        "train.eval_every=1000", "train.log_every=10", "optim.lr=0.05", "optim.warmup_epochs=1",
        "checkpoint.every_steps=5", "checkpoint.every_seconds=0", "train.timeout_seconds=120", "train.threads=1",
        "eval.pictures=false",
    ]  # fmt: skip


_RARE_CHECKPOINTS = ("checkpoint.every_steps=0", "checkpoint.every_seconds=3600", "checkpoint.every_epochs=0")


def spec(kind: Kind, epochs: int, defect: str) -> Json:
    """Return the DDPJob's spec. `defect` names a deliberate defect of the trainer; empty means
    none.
    """
    recovery: Json = {"mode": kind.mode, "nodeLostAfterSeconds": 10}
    if kind.snapshots:
        # A worker that exits on its own counts as a failure.
        recovery |= {"snapshots": kind.snapshots, "maxRestarts": 1000}
    program: Json = {"module": "ddpjob_trainer", "args": trainer_arguments(epochs, kind)}
    if defect:
        recovery.setdefault("maxRestarts", 2)
        program = {
            "script": str(Path(__file__).with_name("defective.py")),
            "args": [defect, *trainer_arguments(epochs, kind)],
        }
    elastic = {"elastic": {"minNodes": kind.minimum}} if kind.elastic else {}
    return {
        **program, **elastic, "nodes": kind.nodes, "spares": kind.spares, "gpusPerNode": 0,
        "recovery": recovery,
    }  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the newest checkpoint."""
    newest = max(folder.glob("step-*"))
    state = dcp.read(newest) if newest.suffix == dcp.SUFFIX else torch.load(newest, weights_only=True)
    model: dict[str, torch.Tensor] = state["model"]
    return model


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between any two weights."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
