"""The sampler deals every sample of an epoch out exactly once, whatever the world size is and however it changes."""

from __future__ import annotations

import pytest
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.sampler import Dealing, ElasticSampler, Micro, SamplerState, Step, permutation, share, steps_per_epoch
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 97),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    lives=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=12),
    micro_batches=st.integers(0, 9),
    accumulate=st.integers(1, 3),
    equal=st.booleans(),
)
def test_each_sample_once_per_epoch_over_any_sequence_of_worlds(
    size: int, batch: int, seed: int, lives: list[tuple[int, int]], micro_batches: int, accumulate: int, equal: bool
) -> None:
    state = SamplerState(seed=seed).__dict__ | {"size": size}
    taken: dict[int, list[int]] = {}
    reference: dict[int, list[list[int]]] = {}
    for world, steps in [*lives, (2, 3 * steps_per_epoch(size, batch))]:
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
                assert counting(dealt) == next(alone.rest_of_epoch()).micros, "the same micro-batches, whoever has them"
                if equal:
                    assert len({len(step.micros) for step in dealt}) == 1, "all ranks go through as many micro-batches"
            else:
                assert max(len(step.mine) for step in dealt) - min(len(step.mine) for step in dealt) <= accumulate
                assert len({len(step.micros) for step in dealt}) == 1, "all ranks go through as many portions"
            taken.setdefault(dealt[0].epoch, []).extend(together)
            reference.setdefault(dealt[0].epoch, []).append(together)
            for sampler, step in zip(samplers, dealt, strict=True):
                sampler.done(step)
        state = samplers[0].state_dict()
    assert len(taken) >= 3
    for epoch, samples in taken.items():
        if epoch < max(taken):
            assert sorted(samples) == list(range(size))
            assert samples == permutation(seed, epoch, size), "the order depends on seed and epoch only"
            assert [len(step) for step in reference[epoch][:-1]] == [batch] * (steps_per_epoch(size, batch) - 1), (
                "the global batch is constant"
            )


def counting(dealt: list[Step]) -> list[Micro]:
    return [micro for step in dealt for micro in step.micros if micro.counts]


def joined(dealt: list[Step]) -> list[int]:
    """All ranks' samples in the order of the global batch."""
    return [sample for micro in sorted(counting(dealt), key=lambda micro: micro.number) for sample in micro.samples]


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_share_gives_empty_parts_when_ranks_outnumber_samples() -> None:
    assert [share([7, 8], rank, 4) for rank in range(4)] == [[7], [8], [], []]


def test_another_data_set_is_refused() -> None:
    sampler = ElasticSampler(10, 2, Dealing(), SamplerState())
    with pytest.raises(CheckpointError, match="11 training samples and the data set has 10"):
        sampler.load_state_dict({"epoch": 0, "consumed": 0, "seed": 0, "size": 11})
