"""Checkpoints: a folder of them, two formats, a writer beside training, and what is kept."""

from ddpjob_trainer.checkpoints.config import CheckpointConfig
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.shelf import prepare_folder
from ddpjob_trainer.checkpoints.snapshot import Snapshot

__all__ = ["CheckpointConfig", "CheckpointFolder", "Snapshot", "prepare_folder"]
