"""When checkpoints are saved, where, in which format, and which are kept."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.fields import from_env


class Format(enum.StrEnum):
    """What a checkpoint is on disk; the value is the name's ending, too."""

    TORCH = "torch"
    DCP = "dcp"


class Metric(enum.StrEnum):
    """What makes one checkpoint better than another."""

    ACCURACY = "accuracy"
    LOSS = "loss"


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig:
    """When and where checkpoints are saved. One is always saved at the end of training and at SIGTERM.

    Training goes on while a checkpoint is written. One that cannot be written is told of and tried again when the next is due.
    """

    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_CHECKPOINT_DIR"))
    """Folder of checkpoints; without it RUN/checkpoints."""
    shared: bool = field(default=True, metadata=from_env("DDPJOB_CHECKPOINT_SHARED"))
    """true: every node sees the same folder, and rank 0 writes. false: each node has its own; one process of each node writes, and
    a start resumes from the newest checkpoint that any node still has."""
    format: Format = Format.TORCH
    """torch: one file that torch.load of any script reads. dcp: a folder of torch.distributed.checkpoint, each rank writes its part;
    for models that are too large for one rank, and checkpoint.shared=true. A start reads both."""
    every_steps: int = 0
    """Save each so many steps; 0: not by steps."""
    every_seconds: float = 60.0
    """Save each so many seconds; 0: not by time."""
    every_epochs: int = 1
    """Save at the end of each so many epochs; 0: not by epochs."""
    keep: int = 3
    """Newest whole checkpoints to keep."""
    keep_best: int = 0
    """Checkpoints with the best evaluation to keep beside the newest; 0: none. DIR/best.pt links to the best, DIR/best.json names it."""
    best_by: Metric = Metric.ACCURACY
    """What is best: accuracy (the highest) or loss (the lowest) on the test set."""
    keep_every_epochs: int = 0
    """Keep the checkpoint at the end of each so many epochs for good; 0: none."""
    failures: int = 3
    """So many checkpoints in a row that cannot be written end the training with an error. At its end and at SIGTERM one does."""
    resume: bool = True
    """Go on from the newest whole checkpoint. false: train anew, which is refused while the folder holds checkpoints."""
    load: Path | None = None
    """Start from the weights of this checkpoint (file or folder; of this trainer, or any state dict that torch.save wrote). Only for a
    first start: when checkpoint.dir holds a checkpoint, training goes on from that."""
    load_except: tuple[str, ...] = ()
    """checkpoint.load: names of tensors (with * and ?) that keep their initial values, such as fc.* for another number of classes."""

    def check(self) -> None:
        """Raises ConfigError for values out of range or that exclude each other."""
        for key, least in (("keep", 1), ("failures", 1), ("every_steps", 0), ("every_seconds", 0), ("every_epochs", 0)):
            self._at_least(key, least)
        for key in ("keep_best", "keep_every_epochs"):
            self._at_least(key, 0)
        if self.format is Format.DCP and not self.shared:
            raise ConfigError(
                "checkpoint.format=dcp: each rank writes a part, and a node's own folder would hold only its own;"
                " set checkpoint.shared=true and a folder that every node sees, or checkpoint.format=torch"
            )
        if self.keep_every_epochs and (self.every_epochs == 0 or self.keep_every_epochs % self.every_epochs):
            raise ConfigError(
                f"checkpoint.keep_every_epochs={self.keep_every_epochs}: must be a multiple of checkpoint.every_epochs={self.every_epochs},"
                f" which says after which epochs there is a checkpoint"
            )
        if self.keep_best and self.every_epochs == 0:
            raise ConfigError("checkpoint.keep_best: what is evaluated is the end of an epoch; set checkpoint.every_epochs to 1 or more")

    def _at_least(self, key: str, least: int) -> None:
        if getattr(self, key) < least:
            raise ConfigError(f"checkpoint.{key}: {getattr(self, key)} is less than {least}")
