"""The parts that make your own training loop exact on any number of ranks (docs/own-scripts.md).

Only the trainer provides these parts. For reports and exit codes, every script uses
`ddpjob_report`.
"""

from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.data.randomness import derive, seed_torch
from ddpjob_trainer.data.sampler import Dealing, ElasticSampler, Micro, SamplerState, Step, share
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError, FencedError, TrainerError
from ddpjob_trainer.evaluation.accumulate import Accumulator, Evaluation
from ddpjob_trainer.lifecycle.signals import Agreement, Due, StopRequest
from ddpjob_trainer.reporting.ledger import Ledger

__all__ = [
    "Accumulator",
    "Agreement",
    "CheckpointError",
    "CheckpointFolder",
    "ConfigError",
    "Dealing",
    "Due",
    "ElasticSampler",
    "Evaluation",
    "FencedError",
    "Group",
    "Ledger",
    "Micro",
    "SamplerState",
    "Step",
    "StopRequest",
    "TrainerError",
    "derive",
    "seed_torch",
    "share",
]
