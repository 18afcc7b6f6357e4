"""What every rank imports, for DDPJOB_PRELOAD.

A launcher that forks its workers imports this once, before the first fork. Only modules that start no thread and open
no file: torchvision, scikit-learn and matplotlib, which few runs need, are left to those runs.
"""

from ddpjob_pod import late_dynamo

from ddpjob_trainer import config, train
from ddpjob_trainer.data import cifar, digits, imagefolder
from ddpjob_trainer.evaluation import evaluate
from ddpjob_trainer.reporting import reporter
from ddpjob_trainer.strategies import ddp

__all__ = ["cifar", "config", "ddp", "digits", "evaluate", "imagefolder", "reporter", "train"]

late_dynamo.put_off()
