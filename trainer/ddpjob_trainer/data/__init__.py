"""Data sets with a common interface, the sampler, and randomness independent of ranks."""

from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import UNREADABLE, Batch, DataSet

__all__ = ["UNREADABLE", "Batch", "DataSet", "open_data"]
