"""Imports the modules that every rank needs, before a launcher forks its workers (DDPJOB_PRELOAD).

A launcher that forks its workers imports this module once, before the first fork. This module
imports only modules that do not start threads or open files. The few runs that need torchvision,
scikit-learn or matplotlib import them later.
"""

from ddpjob_pod import late_dynamo

from ddpjob_trainer import config, train
from ddpjob_trainer.data import cifar, digits, imagefolder
from ddpjob_trainer.evaluation import evaluate
from ddpjob_trainer.reporting import reporter
from ddpjob_trainer.strategies import ddp

__all__ = ["cifar", "config", "ddp", "digits", "evaluate", "imagefolder", "reporter", "train"]

late_dynamo.put_off()
