"""Checkpoints: the folder, two formats, a background writer, retention, and resuming."""

from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.index import prepare_folder
from ddpjob_trainer.checkpoints.snapshot import Snapshot

__all__ = ["CheckpointFolder", "Snapshot", "prepare_folder"]
