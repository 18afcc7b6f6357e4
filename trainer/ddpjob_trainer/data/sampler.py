"""Decides which samples each step uses, and which rank processes them. The number of ranks may
change.

If training loses a node and continues with fewer ranks, it should compute the same numbers. A
step's result must therefore not depend on the number of ranks, and ranks must not keep their own
counts.

- The state is `{epoch, consumed, seed}`. An epoch is one permutation, a function of seed and epoch.
  A step takes the next `batch` samples of the permutation; the last step takes the rest.
- The samples of a step are its global batch. They are divided into `micro_batches` fixed
  micro-batches, which act as virtual ranks. Normalization statistics, dropout and mixing stay
  within a micro-batch, so it does not matter which rank computes it.
- `Dealing` gives each rank a contiguous part of the micro-batches. Earlier parts may be larger by
  one micro-batch (`share`).

Example, with 10 samples, batch=6, micro_batches=3, and the permutation a b c d e f g h i j:

    step 1, 2 ranks   micro-batches ab cd ef   rank 0: ab cd   rank 1: ef            consumed=6
    step 2, 3 ranks   micro-batches gh i j     rank 0: gh      rank 1: i   rank 2: j consumed=10

In step 1, rank 1 waits for rank 0 half of the time. Ranks share micro-batches if the busiest rank
would otherwise get more than 110 % of an even share (_WORTH_DIVIDING), and if the model permits it
(`Dividing.EXACT`). Step 1 then has two passes. In the first, rank 0 computes ab and rank 1 cd. In
the second, rank 0 computes e and rank 1 f, and they exchange the statistics of ef
(`model/shared_parts.py`).

With repeated augmentation (`repeats`), the sampler distributes versions of samples. The number
`sample + repeat * size` stands for version `repeat` of `sample`, and seeds its augmentation.

docs/decisions/0006 explains why. `ddpjob_trainer ledger RUN` verifies the result from each rank's
records.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ddpjob_trainer.data.randomness import derive
from ddpjob_trainer.errors import CheckpointError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class SamplerState:
    """A position in training: `consumed` samples of epoch `epoch` have been used."""

    epoch: int = 0
    consumed: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """One rank's part of a micro-batch that several ranks share.

    `number` and `key` belong to the micro-batch, which has `size` samples. The part has `count` of
    these samples, beginning at index `start`. `holders` are the ranks that have a part of the
    micro-batch, including this rank. `before` is the sample before this part in the micro-batch.
    For the first part, it is the micro-batch's last sample. If images are mixed, `before` is the
    partner of the part's first sample.
    """

    number: int
    key: int
    start: int
    count: int
    size: int
    holders: range
    before: int


@dataclass(frozen=True)
class Micro:
    """A micro-batch: samples that go through the model together.

    `key` seeds all random numbers of the micro-batch, so they are the same on every rank. If a rank
    has no samples of its own, it computes samples of other ranks, because it must take part in
    collectives. `counts` is then False, and the results are ignored. If ranks share micro-batches,
    `parts` describes this rank's parts, and `samples` contains the samples of all these parts in
    order.
    """

    number: int
    samples: list[int]
    key: int
    counts: bool = True
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class DataShare:
    """A rank's share of the samples: part number `part` of `parts` equal parts.

    `counts` indicates whether the rank's losses and results are added up. If several ranks see the
    same samples, as the stages of a pipeline do, only one of them counts. Part number `parts` is
    empty, and belongs to a parameter server.
    """

    part: int
    parts: int
    counts: bool = True


@dataclass(frozen=True)
class Step:
    """One optimizer step: its global batch, this rank's micro-batches, and the state afterwards."""

    epoch: int
    samples: list[int]
    micros: list[Micro]
    after: SamplerState

    @property
    def mine(self) -> list[int]:
        """The samples of the step that this rank takes. There may be none."""
        return [sample for micro in self.micros if micro.counts for sample in micro.samples]


def permutation(seed: int, epoch: int, size: int) -> list[int]:
    """Return the order in which an epoch takes the samples.

    The order depends only on the seed, the epoch, and the number of samples.
    """
    order: list[int] = _order(seed, epoch, size).tolist()
    return order


def _order(seed: int, epoch: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive(seed, epoch)))


def _versions(order: torch.Tensor, repeats: int) -> torch.Tensor:
    """Return the numbers of the versions that an epoch takes, (size,), in order.

    `order` (size,) is the permutation of the samples. All versions of a sample are adjacent, so
    they come only from the first size / repeats samples (rounded up).
    """
    if repeats == 1:
        return order
    size = len(order)
    versions = order[: -(-size // repeats), None] + size * torch.arange(repeats)
    return versions.flatten()[:size]


def share(items: Sequence[T], part: int, parts: int) -> Sequence[T]:
    """Divide the items into `parts` contiguous parts, and return part number `part`.

    The sizes of parts differ by at most one item, and earlier parts are larger. Parts numbered
    `parts` or above are empty.
    """
    begin, end = _bounds(len(items), part, parts)
    return items[begin:end]


def _bounds(size: int, part: int, parts: int) -> tuple[int, int]:
    """Divide `size` items into `parts` parts, and return the bounds of part number `part`."""
    if part >= parts:
        return size, size
    each, rest = divmod(size, parts)
    start = part * each + min(part, rest)
    return start, start + each + (part < rest)


def _part_of(item: int, size: int, parts: int) -> int:
    """Return which of `parts` contiguous parts of `size` items contains `item`.

    There must be at least as many items as parts.
    """
    each, rest = divmod(size, parts)
    larger = rest * (each + 1)
    return item // (each + 1) if item < larger else rest + (item - larger) // each


def steps_per_epoch(size: int, batch: int) -> int:
    """Return the number of steps in an epoch of `size` samples.

    The last step takes the remaining samples, so no sample is dropped.
    """
    return -(-size // batch)


_WORTH_DIVIDING = 1.1
"""Ranks share micro-batches if the busiest rank would otherwise compute more than this many times
an even share.
"""


class Dividing(enum.Enum):
    """What to do if distributing whole micro-batches would leave ranks idle."""

    NO = 0
    """Distribute whole micro-batches anyway, and leave ranks idle."""
    EXACT = 1
    """Let several ranks compute parts of a micro-batch (see `Part`). The micro-batches themselves
    remain the same.
    """
    LOCAL = 2
    """Give each rank an even share of the samples. Divide this share into as few micro-batches as
    `Dealing.stretch` allows. Statistics and randomness then depend on the number of ranks.
    """


@dataclass(frozen=True)
class Dealing:
    """How a global batch is divided into micro-batches, and how these are distributed among ranks.

    If `micro_batches` is above 0, the number of micro-batches does not depend on the number of
    ranks. Everything within a micro-batch (normalization statistics, dropout, mixed images) is then
    the same on any number of ranks. If whole micro-batches cannot be distributed evenly, `dividing`
    determines what happens.

    If `micro_batches` is 0, the global batch is divided into `accumulate` portions. All ranks work
    on the same portion at a time, and each rank takes one contiguous share of it. This suits models
    that treat each sample separately, and models whose statistics cover all ranks.

    If `equal` is set, all ranks get the same number of micro-batches, although some of these do not
    count. A strategy needs this if its forward pass is a collective. If ranks share micro-batches,
    a rank's share in one pass is at most `stretch` times as large as a micro-batch. This limit
    ensures that activations fit into memory.
    """

    rank: int = 0
    world: int = 1
    micro_batches: int = 0
    accumulate: int = 1
    equal: bool = False
    dividing: Dividing = Dividing.NO
    stretch: float = 1.25

    def __post_init__(self) -> None:
        """Raise ConfigError for values that would silently leave a rank without samples."""
        # The rank number `world` is valid. It belongs to a parameter server, which does not take
        # samples.
        if not 0 <= self.rank <= self.world or self.world < 1:
            raise ConfigError(
                f"Dealing: rank={self.rank} is out of range for world={self.world}; pass "
                "Dealing(group.rank, group.world)"
            )
        if self.micro_batches < 0:
            raise ConfigError(f"Dealing: micro_batches={self.micro_batches}: must be at least 0")
        if self.accumulate < 1:
            raise ConfigError(f"Dealing: accumulate={self.accumulate}: must be at least 1")

    def deal(self, samples: list[int], state: SamplerState) -> list[Micro]:
        """Return this rank's micro-batches of a global batch. There is always at least one.

        `samples` is the global batch that follows `state`. If this rank has no samples, its
        micro-batch does not count.
        """
        if not self.micro_batches:
            # If there are fewer samples than portions, the last portions would be empty, so leave
            # them out.
            filled = range(min(self.accumulate, len(samples)))
            return [self._deal_portion(k, list(share(samples, k, self.accumulate)), state) for k in filled]
        if passes := self.passes(len(samples)):
            return [self._deal_divided(number, passes, samples, state) for number in range(passes)]
        count = min(self.micro_batches, len(samples))
        mine = [self._deal_whole(k, samples, state) for k in share(range(count), self.rank, self.world)]
        least = -(-count // self.world) if self.equal else 1
        if len(mine) >= least:
            return mine
        return mine + [replace(self._deal_whole(0, samples, state), counts=False)] * (least - len(mine))

    def passes(self, samples: int) -> int:
        """Return the number of passes in which ranks share a global batch of `samples` samples.

        The result is 0 if ranks take whole micro-batches instead. It is the same on all ranks.
        """
        count = self.micro_batches
        if self.dividing is Dividing.NO or not count:
            return 0
        # The divisor is the number of micro-batches that one pass can take.
        passes = math.ceil(count / max(1, int(min(count, self.world * self.stretch))))
        if self.dividing is Dividing.LOCAL:
            passes = max(passes, self.accumulate)
        saves = self.dividing is Dividing.LOCAL and passes < -(-count // self.world)
        if self.busiest <= _WORTH_DIVIDING and not saves:
            return 0
        smallest = count // passes * (samples // count)
        # A pass with fewer samples than ranks would leave a rank idle.
        return passes if smallest >= self.world else 0

    @property
    def busiest(self) -> float:
        """The busiest rank's work with whole micro-batches, relative to an even share."""
        return -(-self.micro_batches // self.world) * self.world / self.micro_batches if self.micro_batches else 1.0

    def _deal_divided(self, number: int, passes: int, samples: list[int], state: SamplerState) -> Micro:
        """Return this rank's even share of the samples in pass `number` of `passes`."""
        count = self.micro_batches
        numbers = share(range(count), number, passes)
        begins = [_bounds(len(samples), k, count)[0] for k in numbers]
        first, last = begins[0], _bounds(len(samples), numbers[-1], count)[1]
        begin, end = (first + bound for bound in _bounds(last - first, self.rank, self.world))
        if self.dividing is Dividing.LOCAL:
            return self._micro(number * self.world + self.rank, samples[begin:end], state, number, self.rank)
        parts = []
        for k, start, stop in zip(numbers, begins, [*begins[1:], last], strict=True):
            from_, to = max(begin, start), min(end, stop)
            if from_ < to:
                holders = [_part_of(item - first, last - first, self.world) for item in (start, stop - 1)]
                key = self._key(state, k)
                before = samples[from_ - 1 if from_ > start else stop - 1]
                parts.append(
                    Part(k, key, from_ - start, to - from_, stop - start, range(holders[0], holders[1] + 1), before)
                )
        assert sum(part.count for part in parts) == end - begin, "parts must cover this rank's share"
        return Micro(number, samples[begin:end], parts[0].key, parts=tuple(parts))

    def _deal_portion(self, number: int, portion: list[int], state: SamplerState) -> Micro:
        mine = list(share(portion, self.rank, self.world))
        micro = self._micro(number, mine or portion[:1], state)
        return micro if mine else replace(micro, counts=False)

    def _deal_whole(self, number: int, samples: list[int], state: SamplerState) -> Micro:
        return self._micro(number, list(share(samples, number, self.micro_batches)), state)

    @classmethod
    def _micro(cls, number: int, samples: list[int], state: SamplerState, *key: int) -> Micro:
        return Micro(number, samples, cls._key(state, *(key or (number,))))

    @staticmethod
    def _key(state: SamplerState, *numbers: int) -> int:
        return derive(state.seed, state.epoch, state.consumed, *numbers)


@dataclass
class ElasticSampler:
    """Distributes each epoch's permutation of `size` samples in global batches of `batch`.

    The sampler begins at `state`. The samples of a step depend only on the state, and `dealing`
    decides which of these samples this rank takes. A checkpoint of `state_dict()` can therefore be
    resumed on any number of ranks, and each sample is still taken once per epoch. The last step of
    an epoch takes the remaining samples.

    If `repeats` is above 1, each sample has that many versions with different augmentation, and an
    epoch takes `size` versions. For example, with size 10 and repeats 3, an epoch takes three
    versions of each of the first three samples in the permutation, and one version of the fourth.
    torchvision's RASampler and timm's RepeatAugSampler take the same versions, but drop up to 255
    of them per epoch.
    """

    size: int
    batch: int
    dealing: Dealing = Dealing()
    state: SamplerState = SamplerState()
    repeats: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for values that would leave an epoch without any steps."""
        for key in ("size", "batch", "repeats"):
            if (value := getattr(self, key)) < 1:
                raise ConfigError(f"ElasticSampler: {key}={value}: must be an integer of at least 1")

    def rest_of_epoch(self) -> Iterator[Step]:
        """Yield the remaining steps of the current epoch, computed on demand.

        Only `done(step)` changes the state.
        """
        return self._epoch_from(self.state)

    def upcoming(self, epochs: int) -> Iterator[Step]:
        """Yield the steps that remain until `epochs` epochs are complete, computed on demand."""
        state = self.state
        while state.epoch < epochs:
            yield from self._epoch_from(state)
            state = replace(state, epoch=state.epoch + 1, consumed=0)

    def _epoch_from(self, before: SamplerState) -> Iterator[Step]:
        order = _versions(_order(before.seed, before.epoch, self.size), self.repeats)
        for start in range(before.consumed, self.size, self.batch):
            taken = order[start : start + self.batch]
            if self.repeats > 1:
                # A micro-batch consists of consecutive numbers in this order. Move the versions of
                # a sample apart, so that a micro-batch rarely has two of them. Otherwise, its
                # statistics would come from fewer images, and mixup would pair versions of the same
                # image.
                taken = taken[torch.argsort(taken // self.size, stable=True)]
            samples: list[int] = taken.tolist()
            after = replace(before, consumed=start + len(samples))
            yield Step(before.epoch, samples, self.dealing.deal(samples, before), after)
            before = after

    def done(self, step: Step) -> None:
        """Advance the state after the optimizer has taken `step`."""
        self.state = step.after

    @property
    def epoch_is_done(self) -> bool:
        """Whether all samples of the epoch are consumed."""
        return self.state.consumed >= self.size

    def next_epoch(self) -> None:
        """Begin the next epoch, which has a different permutation."""
        self.state = replace(self.state, epoch=self.state.epoch + 1, consumed=0)

    def state_dict(self) -> dict[str, int]:
        """Return the state to keep in a checkpoint."""
        return {"epoch": self.state.epoch, "consumed": self.state.consumed, "seed": self.state.seed, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, on any number of ranks.

        Raises CheckpointError if the data set has a different size.
        """
        if state["size"] != self.size:
            raise CheckpointError(
                f"the checkpoint was made with {state['size']} training samples, but the data set has"
                f" {self.size}; use the same data, or a different checkpoint.dir to start from scratch"
            )
        self.state = SamplerState(int(state["epoch"]), int(state["consumed"]), int(state["seed"]))
