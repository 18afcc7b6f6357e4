"""The trainer with a deliberate defect, with which the checks must fail.

python defective.py DEFECT ARGUMENTS_OF_THE_TRAINER
"""

import importlib
import sys

import torch
from ddpjob_trainer import __main__
from ddpjob_trainer.data import sampler


def lose_sample():
    """Drop one sample from every training step; evaluation is not changed."""
    importlib.import_module("ddpjob_trainer.evaluation.evaluate")
    share = sampler.share
    sampler.share = lambda samples, rank, world: (
        share(samples, rank, world)[1:] if rank == 1 else share(samples, rank, world)
    )


def forget_consumed():
    """Restart the epoch at a restart, although the model was already trained on a part of it."""

    def load(self, state):
        self.state = sampler.SamplerState(state["epoch"], 0, state["seed"])

    sampler.ElasticSampler.load_state_dict = load


def forget_momentum():
    """Do not restore the optimizer's state at a restart."""
    torch.optim.SGD.load_state_dict = lambda self, state: None


def no_resume():
    """Fail to read any checkpoint, so that the job can never continue after a kill."""
    from ddpjob_trainer.checkpoints import torch_file

    def broken(content):
        raise RuntimeError("this trainer cannot read its own checkpoints")

    torch_file.decode = broken


DEFECTS = {
    "lose-sample": lose_sample,
    "forget-consumed": forget_consumed,
    "forget-momentum": forget_momentum,
    "no-resume": no_resume,
}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    sys.exit(__main__.main())
