"""Runs the trainer with a deliberate defect, which the checks must find.

python defective.py DEFECT ARGUMENTS_OF_THE_TRAINER
"""

import copy
import importlib
import sys
from dataclasses import replace

import torch
from ddpjob_pod import rank_snapshots
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
    """Start the epoch from the beginning after a restart, although the model was already trained on
    a part of it.
    """

    def load(self, state):
        self.state = sampler.SamplerState(state["epoch"], 0, state["seed"])

    sampler.ElasticSampler.load_state_dict = load


def forget_momentum():
    """Do not restore the optimizer's state after a restart."""
    torch.optim.SGD.load_state_dict = lambda self, state: None


def no_resume():
    """Fail to read every checkpoint, so that the job can never continue after a kill."""
    from ddpjob_trainer.checkpoints import torch_file

    def broken(content):
        raise RuntimeError("this trainer cannot read its own checkpoints")

    torch_file.decode = broken


def mark_first():
    """Mark a state in memory as complete before its data is there."""
    write, writing = rank_snapshots.RankSnapshots._copy, rank_snapshots.RankSnapshots._writing

    def marking(self, tree, copy):
        self.marked = copy.moment
        write(self, tree, copy)

    def marked(self, part, size):
        found = writing(self, part, size)
        if found is not None and part == self._part:
            found.complete(self.marked)
        return found

    rank_snapshots.RankSnapshots._copy, rank_snapshots.RankSnapshots._writing = marking, marked


def prefer_older():
    """Continue from the highest step in memory instead of the newest incarnation's."""

    choose = rank_snapshots.choose

    def highest(held, world):
        whole = []
        for moment in {state.moment for states in held.values() for state in states}:
            alone = {holder: [state for state in states if state.moment == moment] for holder, states in held.items()}
            whole += [found] if (found := choose(alone, world)) else []
        return max(whole, key=lambda found: (found[0].step, [-n for n in found[0].order]), default=None)

    rank_snapshots.choose = highest


def leave_out_momentum():
    """Make every later copy in memory carry the first copy's optimizer state."""
    take = rank_snapshots.RankSnapshots.take

    def without(self, step, make, own=None):
        def stale():
            tree = make()
            if not hasattr(self, "stale"):
                self.stale = copy.deepcopy(tree["optimizer"])
            return {**tree, "optimizer": self.stale}

        take(self, step, stale, own)

    rank_snapshots.RankSnapshots.take = without


def send_older():
    """Send the next node a part of the previous copy as if it belonged to the new one."""
    give = rank_snapshots.RankSnapshots._copy_to_neighbour

    def older(self, moment):
        held = self._store.held

        def relabelled():
            states = held()
            first = next((state for state in states if state.part == self._part), None)
            others = [state for state in states if state.part != self._part]
            return others if first is None else [*others, replace(first, moment=moment)]

        self._store.held = relabelled
        try:
            give(self, moment)
        finally:
            del self._store.held

    rank_snapshots.RankSnapshots._copy_to_neighbour = older


OF_SNAPSHOTS = {
    "mark-first": mark_first,
    "prefer-older": prefer_older,
    "leave-out-momentum": leave_out_momentum,
    "send-older": send_older,
}
"""Defects of the states in memory, which `--snapshots` must find."""
DEFECTS = {
    **OF_SNAPSHOTS,
    "lose-sample": lose_sample,
    "forget-consumed": forget_consumed,
    "forget-momentum": forget_momentum,
    "no-resume": no_resume,
}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    sys.exit(__main__.main())
