"""Moved to ddpjob_trainer.atomic."""

from ddpjob_trainer.atomic import write_atomically

__all__ = ["write_atomically"]
