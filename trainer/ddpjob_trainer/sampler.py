"""Which samples a step takes, and which rank takes them: exact on any world size, which may change at any step.

State is `{epoch, consumed, seed}`: one permutation per epoch, one global count of samples consumed, no counter of any rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.randomness import derive

T = TypeVar("T")


@dataclass(frozen=True)
class SamplerState:
    """Where training stands: `consumed` samples of epoch `epoch`'s permutation are done."""

    epoch: int = 0
    consumed: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Micro:
    """A micro-batch: samples that go through the model together. `key` is for its randomness, the same on whatever rank takes it.

    A rank without any takes one of another's along, so that it takes part in collectives: that one does not count.
    """

    number: int
    samples: list[int]
    key: int
    counts: bool = True


@dataclass(frozen=True)
class Step:
    """One optimizer step: the global batch, this rank's micro-batches of it, and the state once it is done."""

    epoch: int
    samples: list[int]
    micros: list[Micro]
    after: SamplerState

    @property
    def mine(self) -> list[int]:
        """The samples that fall to this rank, maybe none."""
        return [sample for micro in self.micros if micro.counts for sample in micro.samples]


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """The order of an epoch: a function of seed and epoch only."""
    generator = torch.Generator().manual_seed(derive(seed, epoch))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def share(items: list[T], part: int, parts: int) -> list[T]:
    """Contiguous part number `part`; the parts differ by one item at most, the first ones take the rest. Part `parts` and above: none."""
    each, rest = divmod(len(items), parts)
    start = part * each + min(part, rest)
    return items[start : start + each + (part < rest)] if part < parts else []


def steps_per_epoch(size: int, batch: int) -> int:
    """The last step of an epoch takes what is left, so that no sample is dropped."""
    return -(-size // batch)


@dataclass(frozen=True)
class Dealing:
    """How a global batch falls into micro-batches, and these to part `rank` of `world`.

    micro_batches > 0: so many, whole, fixed whatever the number of ranks. What happens inside one (normalisation statistics, dropout,
    mixed images) is then the same on any number of ranks.
    micro_batches 0: each rank takes one contiguous share of samples, in `accumulate` portions that all ranks go through together. For
    models in which each sample goes its own way, or whose statistics are those of all ranks together.
    equal: all ranks get as many micro-batches, some that do not count among them; where a forward pass is a collective.
    """

    rank: int = 0
    world: int = 1
    micro_batches: int = 0
    accumulate: int = 1
    equal: bool = False

    def deal(self, samples: list[int], state: SamplerState) -> list[Micro]:
        """This rank's micro-batches of the global batch that follows `state`; at least one, which may not count."""
        if self.micro_batches:
            whole = [self._micro(k, share(samples, k, self.micro_batches), state) for k in range(self.micro_batches)]
            whole = [micro for micro in whole if micro.samples]
            mine = share(whole, self.rank, self.world)
            least = -(-len(whole) // self.world) if self.equal else 1
            return mine + [replace(whole[0], counts=False)] * (least - len(mine))
        portions = [share(samples, portion, self.accumulate) for portion in range(self.accumulate)]
        return [self._portion(k, portion, state) for k, portion in enumerate(portions) if portion]

    def _portion(self, number: int, portion: list[int], state: SamplerState) -> Micro:
        mine = share(portion, self.rank, self.world)
        micro = self._micro(number, mine or portion[:1], state)
        return micro if mine else replace(micro, counts=False)

    @staticmethod
    def _micro(number: int, samples: list[int], state: SamplerState) -> Micro:
        return Micro(number, samples, derive(state.seed, state.epoch, state.consumed, number))


@dataclass
class ElasticSampler:
    """Deals one epoch's permutation out in global batches of `batch` samples, from `state` on."""

    size: int
    batch: int
    dealing: Dealing
    state: SamplerState

    def rest_of_epoch(self) -> Iterator[Step]:
        """The steps from the state to the end of its epoch. Does not move the state: `done(step)` does, when the step is done."""
        order = permutation(self.state.seed, self.state.epoch, self.size)
        before = self.state
        for start in range(self.state.consumed, self.size, self.batch):
            samples = order[start : start + self.batch]
            after = replace(before, consumed=start + len(samples))
            yield Step(before.epoch, samples, self.dealing.deal(samples, before), after)
            before = after

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
