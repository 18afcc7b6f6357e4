"""What every rank imports, for DDPJOB_PRELOAD: a launcher that forks its workers imports it once, before the first fork.

Only modules that start no thread and open nothing: torchvision, scikit-learn and matplotlib, which few runs need, are left to those runs.
"""

from ddpjob_trainer import config, evaluate, fast_start, progress, train
from ddpjob_trainer.data import cifar, digits, imagefolder

__all__ = ["cifar", "config", "digits", "evaluate", "imagefolder", "progress", "train"]

fast_start.install()
