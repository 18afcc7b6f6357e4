"""The sampler deals out every sample of an epoch exactly once, for any number of ranks, even if
this number changes.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from ddpjob_trainer.data import sampler as module
from ddpjob_trainer.data.randomness import mix64
from ddpjob_trainer.data.sampler import (
    Dealing,
    Dividing,
    ElasticSampler,
    Micro,
    SamplerState,
    Step,
    permutation,
    share,
    steps_per_epoch,
)
from ddpjob_trainer.errors import CheckpointError
from hypothesis import example, given, settings
from hypothesis import strategies as st


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 97),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    incarnations=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=12),
    micro_batches=st.integers(0, 9),
    accumulate=st.integers(1, 3),
    equal=st.booleans(),
)
def test_each_sample_is_used_once_per_epoch_for_any_sequence_of_rank_counts(
    size: int,
    batch: int,
    seed: int,
    incarnations: list[tuple[int, int]],
    micro_batches: int,
    accumulate: int,
    equal: bool,
) -> None:
    state = SamplerState(seed=seed).__dict__ | {"size": size}
    taken: dict[int, list[int]] = {}
    reference: dict[int, list[list[int]]] = {}
    for world, steps in [*incarnations, (2, 3 * steps_per_epoch(size, batch))]:
        dealings = [Dealing(rank, world, micro_batches, accumulate, equal) for rank in range(world)]
        samplers = [ElasticSampler(size, batch, dealing, SamplerState()) for dealing in dealings]
        for sampler in samplers:
            sampler.load_state_dict(state)
        for _ in range(steps):
            if samplers[0].epoch_is_done:
                for sampler in samplers:
                    sampler.next_epoch()
            dealt = [next(sampler.rest_of_epoch()) for sampler in samplers]
            together = joined(dealt)
            assert together == dealt[0].samples
            if micro_batches:
                alone = ElasticSampler(size, batch, Dealing(0, 1, micro_batches), samplers[0].state)
                assert counting(dealt) == next(alone.rest_of_epoch()).micros, (
                    "the micro-batches are the same, whichever rank has them"
                )
                if equal:
                    assert len({len(step.micros) for step in dealt}) == 1, (
                        "all ranks process the same number of micro-batches"
                    )
            else:
                assert max(len(step.mine) for step in dealt) - min(len(step.mine) for step in dealt) <= accumulate
                assert len({len(step.micros) for step in dealt}) == 1, "all ranks process the same number of portions"
            taken.setdefault(dealt[0].epoch, []).extend(together)
            reference.setdefault(dealt[0].epoch, []).append(together)
            for sampler, step in zip(samplers, dealt, strict=True):
                sampler.done(step)
        state = samplers[0].state_dict()
    assert len(taken) >= 3
    for epoch, samples in taken.items():
        if epoch < max(taken):
            assert sorted(samples) == list(range(size))
            assert samples == permutation(seed, epoch, size), "the order depends only on seed and epoch"
            assert [len(step) for step in reference[epoch][:-1]] == [batch] * (steps_per_epoch(size, batch) - 1), (
                "the global batch is constant"
            )


def counting(dealt: list[Step]) -> list[Micro]:
    return [micro for step in dealt for micro in step.micros if micro.counts]


def joined(dealt: list[Step]) -> list[int]:
    """Return all ranks' samples, ordered as in the global batch."""
    return [sample for micro in sorted(counting(dealt), key=lambda micro: micro.number) for sample in micro.samples]


def test_without_exactness_each_rank_processes_its_share_in_one_pass() -> None:
    def sizes(world: int, accumulate: int = 1, stretch: float = math.inf, how: Dividing = Dividing.LOCAL) -> list[int]:
        dealing = Dealing(0, world, 8 * accumulate, accumulate, dividing=how, stretch=stretch)
        return [len(micro.samples) for micro in dealing.deal(list(range(256)), SamplerState())]

    assert [sizes(world) for world in (1, 2, 3, 4, 7)] == [[256], [128], [86], [64], [37]]
    assert sizes(4, accumulate=2) == [32, 32], "with accumulation, there are still several passes"
    assert sizes(1, stretch=2.0) == [64] * 4, "memory may be too small for one pass"
    assert [sizes(world, stretch=1.5) for world in (2, 4, 6)] == [[48, 48, 32], [32, 32], [43]], "by default"
    assert sizes(1, how=Dividing.EXACT, stretch=1.25) == [32] * 8
    state, whole = SamplerState(), Dealing(2, 8, 8).deal(list(range(256)), SamplerState())
    assert Dealing(2, 8, 8, dividing=Dividing.LOCAL, stretch=math.inf).deal(list(range(256)), state) == whole


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(1, 300),
    world=st.integers(1, 17),
    micro_batches=st.integers(1, 17),
    stretch=st.sampled_from([1.0, 1.25, 2.0]),
    dividing=st.sampled_from([Dividing.EXACT, Dividing.LOCAL]),
)
@example(samples=33, world=2, micro_batches=5, stretch=1.25, dividing=Dividing.EXACT)
def test_ranks_share_micro_batches_if_whole_ones_cannot_be_divided_evenly(
    samples: int, world: int, micro_batches: int, stretch: float, dividing: Dividing
) -> None:
    batch, state = list(range(1000, 1000 + samples)), SamplerState(seed=3, epoch=1, consumed=7)
    dealings = [Dealing(rank, world, micro_batches, 1, False, dividing, stretch) for rank in range(world)]
    ranks = [dealing.deal(batch, state) for dealing in dealings]
    whole = Dealing(0, 1, micro_batches).deal(batch, state)
    passes = dealings[0].passes(samples)
    uneven = -(-micro_batches // world) * world > 1.1 * micro_batches
    if not passes:
        wanted = math.ceil(micro_batches / max(1, int(world * stretch)))
        smallest = micro_batches // wanted * (samples // micro_batches)
        assert not uneven or smallest < world
        assert all(not micro.parts for own in ranks for micro in own)
        return
    assert [len(own) for own in ranks] == [passes] * world, "every rank takes part in every pass"
    assert sorted(sample for own in ranks for micro in own for sample in micro.samples) == batch
    for number in range(passes):
        sizes = [len(own[number].samples) for own in ranks]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1, "each rank gets an even share"
        assert max(sizes) <= math.ceil(len(whole[0].samples) * max(stretch, 1) + 1), "the share fits into memory"
    if dividing is Dividing.LOCAL:
        assert len({micro.key for own in ranks for micro in own}) == world * passes, (
            "no two ranks draw the same numbers"
        )
        return
    held: dict[int, list[int]] = {}
    for rank, own in enumerate(ranks):
        for micro in own:
            assert sum(part.count for part in micro.parts) == len(micro.samples)
            left = list(micro.samples)
            for part in micro.parts:
                full = whole[part.number]
                assert (part.key, part.size) == (full.key, len(full.samples)), (
                    "the micro-batch is the same, whichever ranks have parts of it"
                )
                mine, left = left[: part.count], left[part.count :]
                assert mine == full.samples[part.start : part.start + part.count]
                assert part.before == full.samples[part.start - 1]
                held.setdefault(part.number, []).append(rank)
                assert rank in part.holders
    for own in ranks:
        for micro in own:
            for part in micro.parts:
                assert held[part.number] == list(part.holders), "exactly these ranks have a part"


def test_the_cost_of_a_step_does_not_grow_with_the_epochs_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ImageNet on 256 ranks, a rank computes one key for the order and one for its own
    micro-batch.
    """
    calls = []
    derive = module.derive
    monkeypatch.setattr(module, "derive", lambda *parts: calls.append(parts) or derive(*parts))
    steps = ElasticSampler(1_281_167, 8192, Dealing(255, 256, 256), SamplerState()).upcoming(90)
    first = next(steps)
    assert len(calls) == 2 and len(first.micros) == 1 and len(first.samples) == 8192
    for step in islice(steps, 300):
        last = step
    assert last.epoch == 1 and len(calls) == 301 + 2, "the steps continue into the next epoch"


def test_upcoming_steps_are_the_same_as_the_epochs_actual_steps() -> None:
    sampler = ElasticSampler(23, 5, Dealing(1, 2, 4), SamplerState(epoch=1, consumed=10, seed=2))
    upcoming = list(sampler.upcoming(4))
    found = []
    while sampler.state.epoch < 4:
        for step in sampler.rest_of_epoch():
            found.append(step)
            sampler.done(step)
        sampler.next_epoch()
    assert upcoming == found and len(found) == 3 + 5 + 5


@given(st.lists(st.integers(0, 2**64), min_size=1, max_size=5))
def test_the_samplers_keys_match_splitmix64(parts: list[int]) -> None:
    """A different key would change the order and the initial weights of old checkpoints."""
    golden, state = 0x9E3779B97F4A7C15, 0
    for part in parts:
        counter = (state ^ ((part + 1) * golden)) & (2**64 - 1)
        state = int(mix64(np.array([counter], dtype=np.uint64))[0])
    assert module.derive(*parts) == state >> 1


def test_the_order_of_samples_differs_between_epochs_and_seeds() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_share_gives_empty_parts_if_there_are_more_ranks_than_samples() -> None:
    assert [share([7, 8], rank, 4) for rank in range(4)] == [[7], [8], [], []]


def test_a_resume_on_a_data_set_of_a_different_size_is_refused() -> None:
    sampler = ElasticSampler(10, 2, Dealing(), SamplerState())
    with pytest.raises(CheckpointError, match="11 training samples, but the data set has 10"):
        sampler.load_state_dict({"epoch": 0, "consumed": 0, "seed": 0, "size": 11})


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 97),
    batch=st.integers(1, 40),
    repeats=st.integers(2, 5),
    seed=st.integers(0, 2**40),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=6),
    micro_batches=st.integers(0, 9),
)
def test_versions_and_their_order_are_the_same_for_any_sequence_of_rank_counts(
    size: int, batch: int, repeats: int, seed: int, worlds: list[tuple[int, int]], micro_batches: int
) -> None:
    state = SamplerState(seed=seed).__dict__ | {"size": size}
    alone = list(ElasticSampler(size, batch, Dealing(), SamplerState(seed=seed), repeats).upcoming(3))
    taken: list[list[int]] = []
    for world, steps in [*worlds, (2, len(alone))]:
        dealings = [Dealing(rank, world, micro_batches) for rank in range(world)]
        samplers = [ElasticSampler(size, batch, dealing, SamplerState(), repeats) for dealing in dealings]
        for sampler in samplers:
            sampler.load_state_dict(state)
        for _ in range(steps):
            for sampler in samplers if samplers[0].epoch_is_done else ():
                sampler.next_epoch()
            dealt = [next(sampler.rest_of_epoch()) for sampler in samplers]
            taken.append(joined(dealt))
            for sampler, step in zip(samplers, dealt, strict=True):
                sampler.done(step)
        state = samplers[0].state_dict()
    assert taken[: len(alone)] == [step.samples for step in alone]
    for epoch in range(3):
        versions = [number for step in alone if step.epoch == epoch for number in step.samples]
        chosen = permutation(seed, epoch, size)[: math.ceil(size / repeats)]
        assert len(versions) == len(set(versions)) == size, (
            "an epoch is as long as without repeats, and uses each version at most once"
        )
        assert {number % size for number in versions} == set(chosen)
        whole = [sample for sample in chosen if {sample + size * k for k in range(repeats)} <= set(versions)]
        assert len(whole) >= len(chosen) - 1, "all versions of each sample, except for the last sample"


def test_versions_match_the_samplers_of_timm_and_deit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each global batch has the same samples, for any number of ranks. torchvision's RASampler has
    the same code.
    """
    import torch
    from timm.data.distributed_sampler import RepeatAugSampler  # type: ignore[import-untyped]

    monkeypatch.setattr(module, "_order", lambda seed, epoch, size: torch.arange(size))
    size, batch, repeats = 512, 64, 3
    ours = list(ElasticSampler(size, batch, Dealing(), SamplerState(), repeats).rest_of_epoch())
    for world in (1, 4, 8):
        ranks = [list(RepeatAugSampler(range(size), world, rank, False, repeats)) for rank in range(world)]
        own = batch // world
        for number, step in enumerate(ours):
            theirs = [index for indices in ranks for index in indices[number * own : (number + 1) * own]]
            assert sorted(sample % size for sample in step.samples) == sorted(theirs)
    assert len(ours) == len(ranks[0]) // own


@pytest.mark.parametrize(("repeats", "micro_batches"), [(4, 4), (4, 8), (3, 8), (2, 2)])
def test_a_micro_batch_never_holds_a_sample_twice(repeats: int, micro_batches: int) -> None:
    """If there are at least as many micro-batches as versions, micro-batches are filled like the
    ranks of timm's sampler.
    """
    for step in ElasticSampler(960, 96, Dealing(0, 1, micro_batches), SamplerState(), repeats).rest_of_epoch():
        for micro in step.micros:
            assert len({number % 960 for number in micro.samples}) == len(micro.samples) > 1


def test_more_portions_than_samples_are_reduced_to_one_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with train.accumulate=1000000000000, every portion was searched for samples."""
    looks: list[int] = []

    def once(items: list[int], part: int, parts: int) -> object:
        looks.append(part)
        assert len(looks) < 100
        return share(items, part, parts)

    monkeypatch.setattr(module, "share", once)
    dealt = [Dealing(rank, 2, accumulate=10**12).deal([7, 3, 9], SamplerState()) for rank in range(2)]
    assert [[micro.samples for micro in micros if micro.counts] for micros in dealt] == [[[7], [3], [9]], []]
    assert [len(micros) for micros in dealt] == [3, 3]
