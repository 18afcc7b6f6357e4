"""LARS, averaged weights, clipping and smoothed labels give the same loss curve and evaluation,
however ranks share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ddpjob_trainer.optim.precision import Precision
from ranks import TINY, final_losses, good, metrics

CRAFT = [
    *TINY,
    "train.epochs=1",
    "optim.name=lars",
    "optim.lr=5",
    "optim.trust_coefficient=0.02",
    "optim.decay_norm_and_bias=false",
]
CRAFT += ["optim.clip_norm=0.5", "optim.ema_decay=0.7", "optim.label_smoothing=0.1", "optim.schedule=one_cycle"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*CRAFT, "strategy=single", f"checkpoint.dir={folder}"])
    return folder / "run"


def own_part_only(rank: int) -> None:
    """Deliberate defect: each rank clips by the norm of only its own part of the gradients."""
    Precision.over_parts = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("strategy", "world", "defect"),
    [("ddp", 3, None), ("fsdp", 2, None), ("pipeline", 2, None), ("fsdp", 2, own_part_only)],
)
def test_every_strategy_has_the_loss_curve_of_one_process(
    strategy: str, world: int, defect: Callable[[int], None] | None, alone: Path, tmp_path: Path
) -> None:
    """The tolerance covers float32 sums in a different order over 8 steps."""
    good(world, [*CRAFT, f"strategy={strategy}", f"checkpoint.dir={tmp_path}"], prepare=defect)
    curves = final_losses(tmp_path / "run"), final_losses(alone)
    evaluated = [metrics(folder, "eval")[-1]["loss"] for folder in (tmp_path / "run", alone)]
    same = np.allclose(*curves, rtol=1e-4) and evaluated[0] == pytest.approx(evaluated[1], rel=1e-4)
    assert same is (defect is None), (curves, evaluated)


def test_muon_has_the_curve_of_one_process_if_ranks_or_stages_share_it(tmp_path: Path) -> None:
    """Its iterations enlarge the rounding of sums in a different order."""
    keys = [*TINY, "train.epochs=1", "optim.name=muon", "optim.lr=0.02", "optim.momentum=0.9"]
    keys += ["optim.muon_except=head.*", "optim.groups=head.*=5"]
    for strategy, world in (("single", 1), ("ddp", 3), ("pipeline", 2)):
        good(world, [*keys, f"strategy={strategy}", f"checkpoint.dir={tmp_path / strategy}"])
    alone, *others = (final_losses(tmp_path / strategy / "run") for strategy in ("single", "ddp", "pipeline"))
    assert alone[-1] < alone[0] - 0.1
    for curve in others:
        np.testing.assert_allclose(curve, alone, rtol=1e-3)
