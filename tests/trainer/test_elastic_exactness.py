"""The result of a micro-batch does not depend on the rank that computes it: batch statistics,
dropout and ordered sums are bit-identical.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.commands.check_ledger import read, table, verify
from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data import mixup, sampler
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import LedgerError
from ddpjob_trainer.model import batchnorm_stats, shared_parts
from ddpjob_trainer.model.models import build_model
from ddpjob_trainer.strategies.registry import open_strategy
from ranks import TINY, final_losses, good, run, stop_at

# The settings have batch statistics, dropout, and a number of micro-batches that neither 2 nor 3
# ranks can share evenly.
TIED = [*TINY, "model.norm=batch", "model.dropout=0.2", "data.micro_batches=5"]
ORDERED = [*TIED, "ddp.ordered=true"]
WALK = ((1, 3), (2, 7), (3, 11), (1, None))
"""(number of ranks, step after which they stop)."""

# Covers float32 sums in a different order: one step differs by a relative 1e-6, and 16 steps of
# momentum SGD amplify this less than a hundredfold.
TOLERANCE = 1e-4
Prepare = Callable[[int], None]


def walk(folder: Path, arguments: list[str], prepare: Prepare | None = None) -> None:
    """Train with changing numbers of ranks. `prepare` may plant a defect in every rank's
    process.
    """
    for world, stop in WALK:

        def both(rank: int, stop: int | None = stop) -> None:
            if prepare:
                prepare(rank)
            if stop:
                stop_at(stop)(rank)

        ended = run(world, [*arguments, f"checkpoint.dir={folder}"], prepare=both)
        assert [end.code for end in ended] == [75 if stop else 0] * world, ended


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)["model"]
    return found


def distance(one: Path, other: Path) -> float:
    """Return the greatest difference between two runs' losses, weights and statistics.

    Differences of losses that are due to the order of a float64 sum do not count.
    """
    losses = float(np.abs(np.array(final_losses(one / "run")) - np.array(final_losses(other / "run"))).max())
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(
        losses if losses > 1e-12 else 0.0, *(float((a[name].double() - b[name].double()).abs().max()) for name in a)
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one process without interruption. Autograd adds the micro-batches' gradients in
    order.
    """
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*TIED, f"checkpoint.dir={folder}"])
    return folder


def test_the_running_statistics_match_one_update_with_the_mean(alone: Path, tmp_path: Path) -> None:
    """The reference is computed by hand: one step of one epoch, five micro-batches, momentum
    0.1.
    """
    from ddpjob_trainer.data.catalog import open_data

    arguments = [*TIED, "data.batch=1438", "train.epochs=1", "model.dropout=0", f"checkpoint.dir={tmp_path}"]
    good(1, arguments)
    settings = config.load(None, arguments)
    data = open_data(settings.data)
    model = build_model(settings.model, data.shape, data.classes, settings.data.seed)
    step = next(
        sampler.ElasticSampler(data.train_size, 1438, sampler.Dealing(0, 1, 5), sampler.SamplerState()).rest_of_epoch()
    )
    outputs = [next(data.train_batches([micro.samples], 0)).images for micro in step.micros]
    first = model.features[0]
    maps = [first(images).detach().double() for images in outputs]
    share = [len(micro.samples) / 1438 for micro in step.micros]
    mean = sum(w * m.mean((0, 2, 3)) for w, m in zip(share, maps, strict=True))
    variance = sum(w * m.var((0, 2, 3), unbiased=True) for w, m in zip(share, maps, strict=True))
    found = weights(tmp_path)
    torch.testing.assert_close(found["features.1.running_mean"].double(), 0.1 * mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["features.1.running_var"].double(), 0.9 + 0.1 * variance, rtol=1e-5, atol=1e-6)
    assert found["features.1.num_batches_tracked"] == 1


def test_a_run_on_1_2_3_1_ranks_ends_with_the_result_of_one_rank(alone: Path, tmp_path: Path) -> None:
    walk(tmp_path, TIED)
    assert 0 < distance(alone, tmp_path) < TOLERANCE, "only the order of the sums differs"


def test_with_ddp_ordered_the_same_run_is_bit_identical(alone: Path, tmp_path: Path) -> None:
    walk(tmp_path, ORDERED)
    assert distance(alone, tmp_path) == 0


def test_with_ddp_ordered_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    """A single rank would use all cores. The layers are wide enough that torch uses several
    threads, which would change the sums.
    """
    arguments = ["model.width=16", "data.batch=128", "data.micro_batches=2", "ddp.ordered=true", "optim.lr=0.1"]
    arguments += ["data.workers=0", "train.epochs=2", "optim.schedule=constant", "train.log_every=1"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for ranks in ("1", "2"):  # run() gives each rank only one thread
        command = [sys.executable, "-m", "ddpjob_trainer", "--spawn", ranks, *arguments]
        subprocess.run([*command, f"checkpoint.dir={tmp_path / ranks}"], env=environment, check=True)
    assert distance(tmp_path / "1", tmp_path / "2") == 0


def test_ddp_ordered_also_works_without_batch_normalization(tmp_path: Path) -> None:
    """The model has no batch normalization. The last step has fewer micro-batches than ranks, so
    one rank has none.
    """
    arguments = [*TINY, "data.batch=359", "data.micro_batches=3", "ddp.ordered=true", "train.epochs=1"]
    good(1, [*arguments, f"checkpoint.dir={tmp_path / '1'}"])
    assert [end.code for end in run(1, [*arguments, f"checkpoint.dir={tmp_path / '4'}"], prepare=stop_at(2))] == [75]
    good(4, [*arguments, f"checkpoint.dir={tmp_path / '4'}"])
    assert distance(tmp_path / "1", tmp_path / "4") == 0


def test_micro_batches_depend_on_accumulations_and_not_on_ranks(
    tmp_path: Path,
) -> None:
    """Accumulation helps when a device's memory is exhausted. Regression: the setting was ignored,
    so the next attempt failed in the same way.
    """
    arguments = [*TINY, "model.norm=batch", "checkpoint.keep=9", f"checkpoint.dir={tmp_path}"]
    found = []
    for epochs, (world, accumulate) in enumerate(((1, 1), (1, 4), (2, 4), (1, 2)), 1):
        good(world, [*arguments, f"train.epochs={epochs}", f"train.accumulate={accumulate}"])
        newest = max(tmp_path.glob("step-*.pt"))
        found.append(torch.load(newest, weights_only=True)["micro_batches"])
    assert found == [1, 4, 4, 2]


def test_a_run_that_divides_samples_uses_micro_batches_once_ddp_ordered_is_set(tmp_path: Path) -> None:
    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, arguments, prepare=stop_at(2))] == [75]
    good(2, [*arguments, "ddp.ordered=true"])
    saved = [torch.load(path, weights_only=True)["micro_batches"] for path in sorted(tmp_path.glob("step-*.pt"))]
    assert saved[0] == 0 and saved[-1] == 2


def test_with_ddp_ordered_a_gpu_computes_deterministically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    settings = config.load(None, ["ddp.ordered=true", "model.width=4"])
    before = torch.backends.cudnn.deterministic, torch.get_float32_matmul_precision()
    try:
        open_strategy(settings, Group(), torch.device("cuda")).prepare(
            build_model(settings.model, (1, 8, 8), 10, 0), (1, 8, 8)
        )
        assert torch.backends.cudnn.deterministic
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = before[0]
        torch.set_float32_matmul_precision(before[1])


def statistics_of_the_rank(rank: int) -> None:
    batchnorm_stats.BatchStatistics.exchange = lambda self: None  # type: ignore[method-assign]


def dropout_by_rank(rank: int) -> None:
    sampler.Dealing._key = staticmethod(lambda state, *numbers: rank)  # type: ignore[method-assign]


def a_sample_left_out(rank: int) -> None:
    deal = sampler.Dealing.deal

    def shorter(self: sampler.Dealing, samples: list[int], state: sampler.SamplerState) -> list[sampler.Micro]:
        return [
            sampler.replace(micro, samples=micro.samples[:-1]) if micro.number == 3 else micro
            for micro in deal(self, samples, state)
        ]

    sampler.Dealing.deal = shorter  # type: ignore[method-assign]


def statistics_of_the_part(rank: int) -> None:
    """Deliberate defect: statistics cover only the rank's part of a micro-batch."""
    Group.swap = lambda self, own: [  # type: ignore[method-assign]
        [values * len(holders)] for values, holders in own
    ]


def dropout_of_the_part(rank: int) -> None:
    """Deliberate defect: every part uses the first rows of the micro-batch's random numbers."""
    of_micro = shared_parts.SharedParts.of_micro

    def from_the_start(self: shared_parts.SharedParts, micro: sampler.Micro) -> AbstractContextManager[None]:
        moved = tuple(sampler.replace(part, start=0) for part in micro.parts)
        return of_micro(self, sampler.replace(micro, parts=moved))

    shared_parts.SharedParts.of_micro = from_the_start  # type: ignore[method-assign, assignment]


def gradients_of_the_part(rank: int) -> None:
    """Deliberate defect: the backward pass of batch normalization uses only the rank's own
    samples.
    """
    backward, swap = shared_parts._NormalizeParts.backward, Group.swap

    def alone(context: Any, *gradients: torch.Tensor) -> Any:
        Group.swap = lambda self, own: [[values] for values, _ in own]  # type: ignore[method-assign]
        try:
            return backward(context, *gradients)
        finally:
            Group.swap = swap  # type: ignore[method-assign]

    shared_parts._NormalizeParts.backward = staticmethod(alone)  # type: ignore[method-assign]


def test_in_these_runs_2_and_3_ranks_share_micro_batches() -> None:
    """Otherwise, these tests would not test sharing. With ddp.ordered, ranks do not share
    micro-batches.
    """
    dealings = [sampler.Dealing(0, world, 5, dividing=sampler.Dividing.EXACT) for world in (1, 2, 3)]
    assert [dealing.passes(200) for dealing in dealings] == [0, 3, 2]


@pytest.mark.parametrize(
    "defect",
    [
        statistics_of_the_rank,
        dropout_by_rank,
        a_sample_left_out,
        statistics_of_the_part,
        dropout_of_the_part,
        gradients_of_the_part,
    ],
)
def test_the_comparison_detects_each_deliberate_defect(defect: Prepare, alone: Path, tmp_path: Path) -> None:
    walk(tmp_path, TIED, defect)
    assert distance(alone, tmp_path) > 10 * TOLERANCE


MIXED = [*TINY, "data.micro_batches=5", "data.mixup=0.4", "data.cutmix=1", "train.epochs=1"]


def partner_of_the_part(rank: int) -> None:
    """Deliberate defect: the first sample of a part is mixed with a different one than in the whole
    micro-batch.
    """
    samples_for = mixup.samples_for

    def other(settings: DataConfig, micro: sampler.Micro) -> list[int]:
        parts = tuple(sampler.replace(part, before=0) for part in micro.parts)
        return samples_for(settings, sampler.replace(micro, parts=parts))

    mixup.samples_for = other


def test_images_are_mixed_as_in_whole_micro_batches(tmp_path: Path) -> None:
    good(1, [*MIXED, f"checkpoint.dir={tmp_path / '1'}"])
    good(3, [*MIXED, f"checkpoint.dir={tmp_path / '3'}"])
    good(3, [*MIXED, f"checkpoint.dir={tmp_path / 'defect'}"], prepare=partner_of_the_part)
    assert distance(tmp_path / "1", tmp_path / "3") < TOLERANCE
    assert distance(tmp_path / "1", tmp_path / "defect") > 10 * TOLERANCE


REPEATED = [*TIED, "data.repeats=3"]


def versions_by_rank(rank: int) -> None:
    """Deliberate defect: each rank uses different versions."""
    versions = sampler._versions
    sampler._versions = lambda order, repeats: versions(order, repeats).roll(rank)


def test_repeated_augmentation_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone, walked, defect = (tmp_path / name for name in ("alone", "walked", "defect"))
    good(1, [*REPEATED, f"checkpoint.dir={alone}"])
    walk(walked, REPEATED)
    assert 0 < distance(alone, walked) < TOLERANCE
    for folder in (alone, walked):
        summary = verify(read([folder / "run"]))
        assert summary.epochs == {1: 1438, 2: 1438} and summary.repeats == 3
        assert "1438 versions, each used exactly once: 3 (data.repeats) of each of 480 samples per epoch" in table(
            summary
        )
    good(3, [*REPEATED, f"checkpoint.dir={defect}"], prepare=versions_by_rank)
    with pytest.raises(LedgerError, match=r"sample \d+ in version \d was used twice"):
        verify(read([defect / "run"]))
    (refused,) = run(1, [*TIED, "data.repeats=2", f"checkpoint.dir={alone}"])
    assert "was made with data.repeats=3, but data.repeats is now 2" in refused.error


def test_without_exactness_each_sample_is_still_taken_once_and_nothing_is_exchanged(
    alone: Path, tmp_path: Path
) -> None:
    """strategy=fsdp divides like ddp, even if it computes activations twice."""

    def no_exchange(rank: int) -> None:
        del Group.swap

    folders = tmp_path / "ddp", tmp_path / "fsdp"
    for folder, keys in zip(folders, ([], ["strategy=fsdp", "fsdp.recompute=true"]), strict=True):
        good(3, [*TIED, *keys, "data.exact=false", f"checkpoint.dir={folder}"], prepare=no_exchange)
        assert verify(read([folder / "run"])).epochs == {1: 1438, 2: 1438}
        assert distance(alone, folder) > 10 * TOLERANCE
    assert distance(*folders) < TOLERANCE
    per_rank = [len(step.mine) for step in all_dealt(3, sampler.Dividing.LOCAL)]
    assert max(per_rank) - min(per_rank) <= 2, "an even share, in two passes"


STRETCH = {sampler.Dividing.LOCAL: 1.5, sampler.Dividing.EXACT: 1.25, sampler.Dividing.NO: 1.0}
"""The defaults of a run."""


def all_dealt(world: int, dividing: sampler.Dividing) -> list[sampler.Step]:
    return [
        next(
            sampler.ElasticSampler(
                1438,
                200,
                sampler.Dealing(rank, world, 5, dividing=dividing, stretch=STRETCH[dividing]),
                sampler.SamplerState(),
            ).rest_of_epoch()
        )
        for rank in range(world)
    ]
