"""Batch statistics are computed over all ranks. Any number of ranks, even with uneven or empty
shares, gives the results of one BatchNorm over the whole batch.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddpjob_trainer import config, train
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model import sync_batchnorm
from ddpjob_trainer.model.models import build_model, is_tied_to_micro_batches
from ddpjob_trainer.model.sync_batchnorm import CpuSyncBatchNorm, synchronize
from ddpjob_trainer.strategies.strategy import Strategy
from machine import free_port
from ranks import TINY, final_losses, good, run, stop_at
from torch import nn
from torch.overrides import TorchFunctionMode

SYNC = [*TINY, "model.norm=batch", "train.epochs=1"]
# Covers float32 sums in a different order, over 8 steps of momentum SGD.
TOLERANCE = 1e-4


def layer(momentum: float | None, affine: bool = True) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3, momentum=momentum, affine=affine)
    if affine:
        with torch.no_grad():
            made.weight.copy_(torch.tensor([1.0, 0.5, 2.0]))
            made.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    return made


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 5 + 3 * torch.randn(7, 3, 4, 5, generator=generator)


def _rank(rank: int, shares: list[list[int]], port: int, momentum: float | None, affine: bool, out: Path) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(shares))
    module = synchronize(nn.Sequential(layer(momentum, affine)), torch.device("cpu"))
    given = images()[shares[rank]].requires_grad_()
    for _ in range(2):
        outputs = module(given)
    (outputs * torch.arange(7.0)[shares[rank], None, None, None] * outputs).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    torch.save(
        {"outputs": outputs.detach(), "input": given.grad, "gradients": gradients, "state": module.state_dict()},
        out / f"{rank}.pt",
    )
    dist.destroy_process_group()


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
@pytest.mark.parametrize("shares", [[[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2, 3, 4], [], [5, 6]]])
def test_outputs_gradients_and_running_statistics_equal_those_of_one_process(
    shares: list[list[int]], momentum: float | None, affine: bool, tmp_path: Path
) -> None:
    port = free_port()
    context = multiprocessing.get_context("fork")
    arguments = [(rank, shares, port, momentum, affine, tmp_path) for rank in range(len(shares))]
    processes = [context.Process(target=_rank, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    alone = nn.Sequential(layer(momentum, affine))
    given = images().requires_grad_()
    for _ in range(2):
        outputs = alone(given)
    (outputs * torch.arange(7.0)[:, None, None, None] * outputs).sum().backward()
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(shares))]
    torch.testing.assert_close(torch.cat([one["outputs"] for one in found]), outputs.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([one["input"] for one in found]), given.grad, rtol=1e-4, atol=1e-4)
    for place, parameter in enumerate(alone.parameters()):
        torch.testing.assert_close(sum(one["gradients"][place] for one in found), parameter.grad, rtol=1e-4, atol=1e-3)
    for one in found:
        assert one["state"].keys() == alone.state_dict().keys()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(one["state"][name], value, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Train one process with plain BatchNorm over the whole global batch."""
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*SYNC, "data.micro_batches=1", f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


def unweighted(rank: int) -> None:
    """Deliberate defect: the ranks' means are averaged without their counts."""
    cat = torch.cat

    def forget_counts(tensors: list[torch.Tensor], *more: object) -> torch.Tensor:
        if len(tensors) == 3 and tensors[2].numel() == 1:
            tensors = [tensors[0], tensors[1] / tensors[2], torch.ones(1)]
        return cat(tensors, *more)  # type: ignore[call-overload, no-any-return]

    sync_batchnorm.torch = type("Torch", (), {**vars(torch), "cat": staticmethod(forget_counts)})  # type: ignore[assignment]


@pytest.mark.parametrize(("world", "defect"), [(1, None), (2, None), (3, None), (3, unweighted)])
def test_any_number_of_ranks_has_the_loss_curve_of_one_rank(
    world: int, defect: Callable[[int], None] | None, alone: list[float], tmp_path: Path
) -> None:
    """Neither 200 samples nor the last batch of 38 can be divided evenly among 3 ranks."""
    good(world, [*SYNC, "model.sync_batchnorm=true", f"checkpoint.dir={tmp_path}"], prepare=defect)
    if defect is None:
        np.testing.assert_allclose(final_losses(tmp_path / "run"), alone, rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert np.abs(np.array(final_losses(tmp_path / "run")) - alone).max() > 10 * TOLERANCE


def counting_stand_ins(rank: int) -> None:
    """Deliberate defect: a rank without samples includes its placeholder samples in the
    statistics.
    """
    backward = Strategy.backward_one

    def with_all(self: Strategy, micro: object, batch: object, count: int) -> torch.Tensor:
        object.__setattr__(self.config.model, "sync_batchnorm", False)
        return backward(self, micro, batch, count)  # type: ignore[arg-type]

    Strategy.backward_one = with_all  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("defect", [None, counting_stand_ins])
def test_a_rank_without_samples_does_not_change_the_statistics(
    defect: Callable[[int], None] | None, tmp_path: Path
) -> None:
    """A run grows to 3 ranks with a global batch of 2 and a last batch of 1."""
    arguments = [
        "data.name=synthetic",
        "data.shape=1,8,8",
        "data.size=5",
        "data.batch=2",
        "model.norm=batch",
        "model.sync_batchnorm=true",
    ]
    arguments += ["model.width=4", "train.epochs=2", "train.log_every=1", "checkpoint.every_seconds=0"]
    good(1, [*arguments, f"checkpoint.dir={tmp_path / '1'}"])
    assert [end.code for end in run(1, [*arguments, f"checkpoint.dir={tmp_path / '3'}"], prepare=stop_at(2))] == [75]
    good(3, [*arguments, f"checkpoint.dir={tmp_path / '3'}"], prepare=defect)
    one, three = (final_losses(tmp_path / world / "run") for world in ("1", "3"))
    assert len(one) == 6
    assert np.allclose(three, one, rtol=1e-3) is (defect is None), (one, three)


def test_a_run_with_fixed_micro_batches_continues_with_statistics_of_all_ranks(tmp_path: Path) -> None:
    """Otherwise ranks would process different numbers of micro-batches and wait for each other."""
    assert [end.code for end in run(1, [*SYNC, f"checkpoint.dir={tmp_path}"], prepare=stop_at(3))] == [75]
    good(2, [*SYNC, "model.sync_batchnorm=true", f"checkpoint.dir={tmp_path}"])


def test_samples_are_distributed_evenly_and_parameter_names_are_unchanged() -> None:
    settings = config.load(None, ["model.norm=batch", "model.sync_batchnorm=true"]).model
    model = build_model(settings, (1, 8, 8), 10, 0)
    assert any(isinstance(module, CpuSyncBatchNorm) for module in model.modules()) and not is_tied_to_micro_batches(
        model
    )
    plain = build_model(config.load(None, ["model.norm=batch"]).model, (1, 8, 8), 10, 0)
    assert is_tied_to_micro_batches(plain) and plain.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    "key", ["data.micro_batches=4", "ddp.ordered=true", "data.mixup=0.2", "data.cutmix=1.0", "model.dropout=0.1"]
)
def test_options_that_are_incompatible_with_sync_batchnorm_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.sync_batchnorm.*leave"):
        train.run(config.load(None, [*SYNC, "model.sync_batchnorm=true", key, f"checkpoint.dir={tmp_path}"]))


def test_a_single_value_per_channel_is_refused() -> None:
    os.environ.pop("RANK", None)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        synchronize(nn.Sequential(nn.BatchNorm1d(3)), torch.device("cpu"))(torch.ones(1, 3))


def test_torchs_layer_sends_an_empty_share_in_the_same_format_as_other_shares() -> None:
    """An empty share is sent in the format of the layer's input."""

    formats = []

    class Given(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), more: Any = None) -> Any:
            if function is nn.functional.batch_norm:
                formats.append(arguments[0].dtype)
            return function(*arguments, **(more or {}))

    model = synchronize(nn.Sequential(nn.BatchNorm2d(3)), torch.device("cuda"))
    with Given():
        outputs = [model(torch.ones(count, 3, 4, 4, dtype=torch.bfloat16)) for count in (0, 2)]
    assert formats == [torch.float32, torch.bfloat16]
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2
    assert (
        isinstance(model[0], nn.SyncBatchNorm)
        and model.state_dict().keys() == nn.Sequential(nn.BatchNorm2d(3)).state_dict().keys()
    )


class NormAndActivation(nn.BatchNorm2d):
    """A copy of timm's BatchNormAct2d."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_layer_that_does_more_than_normalize_is_refused() -> None:
    with pytest.raises(ConfigError, match="this model's NormAndActivation does more than normalize"):
        synchronize(nn.Sequential(NormAndActivation(3)), torch.device("cpu"))
