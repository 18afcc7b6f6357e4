"""Optional settings give the same results as one process, even if ranks hold only parts of the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.strategies.registry import open_strategy
from ranks import TINY, final_losses, good, metrics, run, stop_at
from test_strategies_split import import_once

PROBLEM = [*TINY, "train.epochs=1", "model.norm=batch", "data.micro_batches=4"]

OPTIMIZER = [
    "optim.name=lars",
    "optim.trust_coefficient=0.02",
    "optim.clip_norm=0.05",
    "optim.decay_norm_and_bias=false",
]

# Each option with the tolerance for sums in a different order. A bfloat16 value has 8 significant
# bits, so rounding in the other direction changes it by 0.4 %.
OPTIONS = {
    # Two epochs, because training must continue with the weights after the average was evaluated in
    # their place.
    "all of the optimizer's": ([*OPTIMIZER, "optim.ema_decay=0.8", "train.epochs=2"], 1e-4),
    "AdamW, channels last": (["optim.name=adamw", "optim.lr=0.001", "model.channels_last=true"], 1e-3),
    "LAMB, a rate for each layer": (
        ["optim.name=lamb", "optim.lr=0.02", "optim.layer_decay=0.7", "optim.decay_norm_and_bias=false"],
        1e-3,
    ),
    "statistics of all ranks": (["model.sync_batchnorm=true", "data.micro_batches=0"], 1e-4),
    "none": ([], 1e-4),
    "O2 and a loss scale": (["amp.level=O2", "amp.loss_scale=128", "optim.clip_norm=0.3"], 2e-3),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run of strategy=single with an option."""
    import_once()
    done: dict[str, Path] = {}

    def folder(option: str) -> Path:
        if option not in done:
            done[option] = tmp_path_factory.mktemp("alone")
            good(1, [*PROBLEM, *OPTIONS[option][0], "strategy=single", f"checkpoint.dir={done[option]}"])
        return done[option]

    return folder


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        ("all of the optimizer's", "fsdp"),
        ("all of the optimizer's", "pipeline"),
        ("AdamW, channels last", "fsdp"),
        ("AdamW, channels last", "pipeline"),
        ("LAMB, a rate for each layer", "fsdp"),
        ("LAMB, a rate for each layer", "pipeline"),
        ("LAMB, a rate for each layer", "ddp_mp"),
        ("LAMB, a rate for each layer", "parameter_server"),
        ("statistics of all ranks", "fsdp"),
        ("statistics of all ranks", "ddp_mp"),
        ("O2 and a loss scale", "fsdp"),
        ("O2 and a loss scale", "pipeline"),
        ("O2 and a loss scale", "ddp_mp"),
        # Gradients arrive as one vector, although the weights have a different memory layout or
        # format.
        ("AdamW, channels last", "ddp ddp.ordered=true"),
        ("AdamW, channels last", "pipeline pipeline.stages=1"),
        ("AdamW, channels last", "parameter_server"),
        ("O2 and a loss scale", "pipeline pipeline.stages=1"),
        ("O2 and a loss scale", "parameter_server"),
    ],
)
def test_an_option_gives_the_same_results_as_in_one_process(
    option: str, strategy: str, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    keys, tolerance = OPTIONS[option]
    reference = alone(option)
    good(2, [*PROBLEM, *keys, *f"strategy={strategy}".split(), f"checkpoint.dir={tmp_path}"])
    np.testing.assert_allclose(final_losses(tmp_path / "run"), final_losses(reference / "run"), rtol=tolerance)
    for mine, other in zip(metrics(tmp_path / "run", "eval"), metrics(reference / "run", "eval"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=tolerance)
    saved, wanted = (torch.load(max(folder.glob("step-*.pt")), weights_only=True) for folder in (tmp_path, reference))
    assert saved.keys() == wanted.keys()
    for name, value in wanted["model"].items():
        assert saved["model"][name].dtype == value.dtype
        torch.testing.assert_close(saved["model"][name], value, rtol=10 * tolerance, atol=10 * tolerance)
    if "average" in wanted:
        for name, value in wanted["average"]["averages"].items():
            torch.testing.assert_close(
                saved["average"]["averages"][name], value, rtol=10 * tolerance, atol=10 * tolerance
            )


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_momentum_has_the_channels_last_layout_of_its_weights(
    form: str, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = alone("none")
    arguments = [*PROBLEM, f"checkpoint.format={form}", f"checkpoint.dir={tmp_path}"]
    first = ["strategy=single"] if form == "torch" else ["strategy=fsdp", "model.channels_last=true"]
    world = 1 if form == "torch" else 2
    assert [end.code for end in run(world, [*arguments, *first], prepare=stop_at(4))] == [75] * world
    good(1, [*arguments, "strategy=single", "model.channels_last=true"])
    np.testing.assert_allclose(final_losses(tmp_path / "run"), final_losses(reference / "run"), rtol=OPTIONS["none"][1])


def overflow(folder: Path) -> Callable[[int], None]:
    """Return a hook that makes the last rank's gradients infinite or NaN in step 3. Each rank
    records the steps that it skipped.
    """

    def prepare(rank: int) -> None:
        from ddpjob_trainer.optim.precision import Update
        from ddpjob_trainer.strategies.strategy import Strategy

        update, skipped = Strategy.update, []

        def broken(self: Strategy, rate: float) -> Update:
            if len(skipped) == 2 and rank == 1:
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.fill_(float("inf"))
            done = update(self, rate)
            skipped.append(bool(done.skipped))
            (folder / f"skipped-{rank}.txt").write_text(str(skipped))
            return done

        Strategy.update = broken  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("keys", [[], ["amp.level=O1", "amp.loss_scale=128"]], ids=["plain", "scaled"])
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    strategy: str, keys: list[str], tmp_path: Path
) -> None:
    good(2, [*PROBLEM, *keys, f"strategy={strategy}", f"checkpoint.dir={tmp_path}"], prepare=overflow(tmp_path))
    for rank in range(2):
        assert (tmp_path / f"skipped-{rank}.txt").read_text() == str([step == 2 for step in range(8)])


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_torch_that_is_too_old_is_reported_with_the_required_version(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with torch 2.6, FSDP2 failed in the first backward pass, and a pipeline failed
    while its schedule was created.
    """
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    settings = config.load(None, [*TINY, f"strategy={strategy}"])
    with pytest.raises(
        ConfigError, match=r"needs torch 2\.7 or later, but this is 2\.6\.0\+cpu; install a later torch"
    ):
        open_strategy(settings, Group(0, 2), torch.device("cpu"))
