"""The configuration: its sections (leaves that import no implementation), how they are read, and the command line."""

from ddpjob_trainer.config.config import Config, load, shipped

__all__ = ["Config", "load", "shipped"]
