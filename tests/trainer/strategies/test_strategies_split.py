"""Strategies that split the model, or the work on it, compute the same as one process. Each can
resume from the checkpoints of every other.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ddpjob_trainer.commands.check_ledger import read, verify
from ranks import TINY, final_losses, good, metrics, run, stop_at

# Batch normalization and dropout show whether a micro-batch was divided differently or got
# different random numbers. There are 1438 images, so the last step of an epoch has 38, in
# micro-batches of 10, 10, 9 and 9.
PROBLEM = [*TINY, "model.norm=batch", "model.dropout=0.2", "data.micro_batches=4"]

# Covers float32 sums in a different order: one step differs by a relative 1e-6, and 16 steps of
# momentum SGD amplify this less than a hundredfold.
TOLERANCE = 1e-4


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.glob("step-*.pt"))
    return torch.load(newest, weights_only=True)["model"]


def assert_same(folder: Path, reference: Path, *, exact: bool) -> None:
    """Compare the losses of all steps, the evaluation, the weights and the running statistics."""
    rtol = 0.0 if exact else TOLERANCE
    np.testing.assert_allclose(final_losses(folder / "run"), final_losses(reference / "run"), rtol=rtol, atol=rtol)
    for mine, other in zip(metrics(folder / "run", "eval"), metrics(reference / "run", "eval"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
        assert mine["accuracy"] == pytest.approx(other["accuracy"], abs=0 if exact else 1 / 359)
    assert weights(folder).keys() == weights(reference).keys()
    for name, value in weights(reference).items():
        torch.testing.assert_close(weights(folder)[name], value, rtol=10 * rtol, atol=rtol)


def import_once() -> None:
    """Import libraries here, because each forked rank would need a second or two for it."""
    for name in (
        "torch.distributed.pipelining",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.utils.flop_counter",
    ):
        importlib.import_module(name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with strategy=single, without interruption."""
    import_once()
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*PROBLEM, "strategy=single", f"checkpoint.dir={folder}"])
    return folder


# The comparison is exact where a single process adds up the gradients, in micro-batch order.
CASES = {
    "dp": (1, [], True),
    "fsdp": (2, [], False),
    "fsdp, 4 micro-batches on 3 ranks": (3, ["fsdp.reshard=false"], False),
    "fsdp, recomputed on 3 ranks": (3, ["fsdp.recompute=true"], False),
    "ddp_mp": (2, ["ddp_mp.devices=3"], False),
    "pipeline of 2 stages": (2, [], True),
    "pipeline of 3 stages, gpipe": (3, ["pipeline.schedule=gpipe"], True),
    "pipeline of 2 stages, 2 replicas": (4, ["pipeline.stages=2"], False),
    "pipeline of 1 stage, 3 replicas": (3, ["pipeline.stages=1"], False),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_match_those_of_one_process(case: str, alone: Path, tmp_path: Path) -> None:
    world, keys, exact = CASES[case]
    good(world, [*PROBLEM, *keys, f"strategy={case.split()[0].rstrip(',')}", f"checkpoint.dir={tmp_path}"])
    assert_same(tmp_path, alone, exact=exact)
    assert verify(read([tmp_path / "run"])).epochs == {1: 1438, 2: 1438}


def test_each_strategy_continues_from_the_previous_strategys_checkpoint(alone: Path, tmp_path: Path) -> None:
    """Each run is stopped within an epoch by SIGTERM to one rank, and continued on a different
    number of ranks. This is done seven times, with checkpoints of both formats.
    """
    arguments = [*PROBLEM, f"checkpoint.dir={tmp_path}"]
    incarnations = [("ddp", 2), ("fsdp", 3), ("pipeline", 2), ("dp", 1), ("fsdp", 2), ("ddp_mp", 3), ("pipeline", 3)]
    for number, (strategy, world) in enumerate(incarnations):
        form = "dcp" if number < 3 else "torch"
        ended = run(
            world, [*arguments, f"strategy={strategy}", f"checkpoint.format={form}"], prepare=stop_at(2 * number + 3)
        )
        assert [end.code for end in ended] == [75] * world, ended
        assert max(tmp_path.glob("step-*")).suffix == (".dcp" if form == "dcp" else ".pt")
    good(1, [*arguments, "strategy=single"])
    assert [row["world"] for row in metrics(tmp_path / "run", "start")] == [*(world for _, world in incarnations), 1]
    assert_same(tmp_path, alone, exact=False)
    assert verify(read([tmp_path / "run"])).epochs == {1: 1438, 2: 1438}


@pytest.mark.parametrize(("world", "keys"), [(3, ["strategy=fsdp"]), (4, ["strategy=pipeline", "pipeline.stages=2"])])
def test_ranks_without_samples_still_take_part_in_the_step(world: int, keys: list[str], tmp_path: Path) -> None:
    """Samples are distributed one by one, and the last batch has only one sample."""
    arguments = ["data.name=synthetic", "data.shape=1,8,8", "data.size=7", "data.batch=3", "checkpoint.every_seconds=0"]
    arguments += ["model.width=4", "train.epochs=2", "train.log_every=1", "train.ledger=true"]
    good(1, [*arguments, "strategy=single", f"checkpoint.dir={tmp_path / '1'}"])
    good(world, [*arguments, *keys, f"checkpoint.dir={tmp_path / 'more'}"])
    assert_same(tmp_path / "more", tmp_path / "1", exact=False)
    assert verify(read([tmp_path / "more" / "run"])).epochs == {1: 7, 2: 7}


def held(folder: Path) -> Callable[[int], None]:
    """Return a hook that makes each rank record the names and sizes of the weights that it
    holds.
    """

    def prepare(rank: int) -> None:
        from ddpjob_trainer.train import Trainer

        train = Trainer.train

        def write_and_train(self: Trainer) -> int:
            sizes = {}
            for name, parameter in self.strategy.parameters:
                sizes[name] = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()
            (folder / f"held-{rank}.json").write_text(json.dumps(sizes))
            return train(self)

        Trainer.train = write_and_train  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_the_parts_of_all_ranks_together_are_the_whole_model(strategy: str, alone: Path, tmp_path: Path) -> None:
    good(3, [*PROBLEM, "train.epochs=1", f"strategy={strategy}", f"checkpoint.dir={tmp_path}"], prepare=held(tmp_path))
    parts = [json.loads((tmp_path / f"held-{rank}.json").read_text()) for rank in range(3)]
    whole = {
        name: value.numel()
        for name, value in weights(alone).items()
        if "running" not in name and "num_batches" not in name
    }
    assert {name: sum(part.get(name, 0) for part in parts) for name in whole} == whole
    assert all(0 < sum(part.values()) < 0.9 * sum(whole.values()) for part in parts)
    if strategy == "pipeline":
        assert sum(len(part) for part in parts) == len(whole), "no weight is on two ranks"


def defect(what: str) -> Callable[[int], None]:
    """Return a hook that makes a common mistake."""

    def prepare(_: int) -> None:
        from ddpjob_trainer.data import sampler
        from ddpjob_trainer.model.batchnorm_stats import BatchStatistics
        from ddpjob_trainer.strategies.fsdp import Fsdp
        from ddpjob_trainer.strategies.pipeline import Pipeline
        from ddpjob_trainer.strategies.strategy import Strategy

        match what:
            case "fsdp: a stand-in counts":
                from ddpjob_trainer.strategies.fsdp import Fsdp

                Fsdp.divides = False  # placeholder samples exist only if ranks take whole micro-batches
                Strategy.loss = lambda self, scores, batch, micro: torch.nn.functional.cross_entropy(
                    scores, batch.labels, reduction="sum"
                )  # type: ignore[method-assign]
            case "fsdp: the mean over ranks is taken for the sum":
                Fsdp.weight = lambda self, count: 1 / count  # type: ignore[method-assign]
            case "pipeline: gradients stay within a replica":
                Pipeline._sum_gradients = lambda self: None  # type: ignore[method-assign]
            case "pipeline: statistics of the last micro-batch":
                BatchStatistics.exchange = lambda self: None  # type: ignore[method-assign]
            case "pipeline: random numbers by rank":
                derive = sampler.derive
                sampler.derive = lambda *parts: derive(*parts, int(os.environ["RANK"]))

    return prepare


@pytest.mark.parametrize(
    ("what", "world", "keys"),
    [
        ("fsdp: a stand-in counts", 3, []),
        ("fsdp: the mean over ranks is taken for the sum", 2, []),
        ("pipeline: gradients stay within a replica", 2, ["pipeline.stages=1"]),
        ("pipeline: statistics of the last micro-batch", 2, []),
        ("pipeline: random numbers by rank", 2, []),
    ],
)
def test_the_comparison_detects_each_common_mistake(
    what: str, world: int, keys: list[str], alone: Path, tmp_path: Path
) -> None:
    strategy = what.partition(":")[0]
    good(world, [*PROBLEM, *keys, f"strategy={strategy}", f"checkpoint.dir={tmp_path}"], prepare=defect(what))
    with pytest.raises(AssertionError):
        assert_same(tmp_path, alone, exact=False)


@pytest.mark.parametrize(
    ("world", "keys", "message"),
    [
        (2, ["strategy=single"], "set strategy=ddp, or start one process"),
        (2, ["strategy=dp"], "strategy=dp cannot use 2 ranks"),
        (
            3,
            ["strategy=pipeline", "pipeline.stages=2"],
            "pipeline.stages=2: must be at least 0 and divide the number of ranks (3); start a multiple of 2 ranks",
        ),
        (1, ["strategy=pipeline", "pipeline.stages=-1"], "pipeline.stages=-1"),
        (2, ["strategy=pipeline", "pipeline.micro_batches=0"], "pipeline.micro_batches=0: must be at least 1"),
        (
            2,
            ["strategy=pipeline", "train.accumulate=2", "data.micro_batches=0"],
            "train.accumulate: strategy=pipeline uses pipeline.micro_batches",
        ),
        (2, ["strategy=pipeline", "ddp.ordered=true"], "ddp.ordered: strategy=pipeline has no rank"),
        (
            2,
            ["strategy=pipeline", "model.sync_batchnorm=true", "data.micro_batches=0", "model.dropout=0"],
            "model.sync_batchnorm",
        ),
        (
            2,
            ["strategy=pipeline", "model.name=torchvision:mobilenet_v3_small", "data.name=synthetic"],
            "a MobileNetV3 cannot be split into stages",
        ),
        (
            1,
            ["strategy=ddp_mp", "ddp_mp.devices=9"],
            "ddp_mp.devices: cannot make 9 stages, because the model has only 7 modules with weights; write at most 7",
        ),
        (1, ["strategy=ddp_mp", "ddp_mp.devices=0"], "ddp_mp.devices=0: must be at least 1"),
        (1, ["strategy=ddp_mp", "ddp.ordered=true"], "ddp.ordered: strategy=ddp_mp has no device that holds"),
        (2, ["strategy=fsdp", "ddp.ordered=true"], "ddp.ordered: strategy=fsdp adds gradients up"),
        (
            2,
            ["strategy=fsdp", "fsdp.recompute=true", "model.sync_batchnorm=true", "data.micro_batches=0"],
            "fsdp.recompute: model.sync_batchnorm exchanges statistics in the forward pass",
        ),
    ],
)
def test_settings_that_a_split_strategy_does_not_support_are_refused(
    world: int, keys: list[str], message: str, tmp_path: Path
) -> None:
    ended = run(world, [*PROBLEM, *keys, f"checkpoint.dir={tmp_path}"])
    assert all(end.code == 1 and end.error.startswith("ConfigError") and message in end.error for end in ended), ended
