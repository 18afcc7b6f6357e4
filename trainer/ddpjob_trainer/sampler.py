"""Which samples a step takes, and which rank takes them: exact on any world size, which may change at any step.

State is `{epoch, consumed, seed}`: one permutation per epoch, one global count of samples consumed, no counter of any rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.randomness import derive


@dataclass(frozen=True)
class SamplerState:
    """Where training stands: `consumed` samples of epoch `epoch`'s permutation are done."""

    epoch: int = 0
    consumed: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One optimizer step: the global batch, this rank's part of it (maybe empty), and the state once it is done."""

    epoch: int
    samples: list[int]
    mine: list[int]
    after: SamplerState


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """The order of an epoch: a function of seed and epoch only."""
    generator = torch.Generator().manual_seed(derive(seed, epoch))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def share(samples: list[int], rank: int, world: int) -> list[int]:
    """Rank `rank`'s contiguous part of a global batch; the parts differ by one sample at most, the first ranks take the rest."""
    each, rest = divmod(len(samples), world)
    start = rank * each + min(rank, rest)
    return samples[start : start + each + (rank < rest)]


def steps_per_epoch(size: int, batch: int) -> int:
    """The last step of an epoch takes what is left, so that no sample is dropped."""
    return -(-size // batch)


@dataclass
class ElasticSampler:
    """Deals one epoch's permutation out in global batches of `batch` samples, from `state` on."""

    size: int
    batch: int
    rank: int
    world: int
    state: SamplerState

    def rest_of_epoch(self) -> Iterator[Step]:
        """The steps from the state to the end of its epoch. Does not move the state: `done(step)` does, when the step is done."""
        order = permutation(self.state.seed, self.state.epoch, self.size)
        for start in range(self.state.consumed, self.size, self.batch):
            samples = order[start : start + self.batch]
            after = replace(self.state, consumed=start + len(samples))
            yield Step(self.state.epoch, samples, share(samples, self.rank, self.world), after)

    def done(self, step: Step) -> None:
        """The optimizer has taken `step`."""
        self.state = step.after

    @property
    def epoch_is_done(self) -> bool:
        """All samples of the epoch are consumed."""
        return self.state.consumed >= self.size

    def next_epoch(self) -> None:
        """Begin the next epoch's permutation."""
        self.state = replace(self.state, epoch=self.state.epoch + 1, consumed=0)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"epoch": self.state.epoch, "consumed": self.state.consumed, "seed": self.state.seed, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint left off, on whatever world size. Raises CheckpointError when the data set has another size."""
        if state["size"] != self.size:
            raise CheckpointError(
                f"the checkpoint was made with {state['size']} training samples and the data set has {self.size};"
                f" give the same data, or another checkpoint.dir to train anew"
            )
        self.state = SamplerState(int(state["epoch"]), int(state["consumed"]), int(state["seed"]))
