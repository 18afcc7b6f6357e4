"""The configuration: its sections, how they are read, and the command line.

The sections do not import the code that they configure.
"""

from ddpjob_trainer.config.config import Config, load, shipped

__all__ = ["Config", "load", "shipped"]
