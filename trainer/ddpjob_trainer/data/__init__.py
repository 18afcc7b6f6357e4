"""Data sets: real on-disk formats behind one small interface."""

from ddpjob_trainer.data.source import UNREADABLE, Batch, DataConfig, DataName, DataSet, open_data

__all__ = ["UNREADABLE", "Batch", "DataConfig", "DataName", "DataSet", "open_data"]
