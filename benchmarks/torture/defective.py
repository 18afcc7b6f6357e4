"""The trainer with one deliberate defect, to show that the checks of the torture fail: defective.py DEFECT ARGUMENTS_OF_THE_TRAINER"""

import importlib
import sys

import torch
from ddpjob_trainer import __main__, sampler


def lose_sample():
    """A step takes one sample less than it should. The evaluation keeps the whole one."""
    importlib.import_module("ddpjob_trainer.evaluate")
    share = sampler.share
    sampler.share = lambda samples, rank, world: share(samples, rank, world)[1:] if rank == 1 else share(samples, rank, world)


def forget_consumed():
    """A restart begins its epoch anew, though the model has seen a part of it."""

    def load(self, state):
        self.state = sampler.SamplerState(state["epoch"], 0, state["seed"])

    sampler.ElasticSampler.load_state_dict = load


def forget_momentum():
    """A restart does not restore the optimizer's state."""
    torch.optim.SGD.load_state_dict = lambda self, state: None


def no_resume():
    """A start cannot read a checkpoint: the job can never go on after a kill."""
    from ddpjob_trainer.checkpoints import torch_file

    def broken(content):
        raise RuntimeError("this trainer cannot read its own checkpoints")

    torch_file.decode = broken


DEFECTS = {"lose-sample": lose_sample, "forget-consumed": forget_consumed, "forget-momentum": forget_momentum, "no-resume": no_resume}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    sys.exit(__main__.main())
