"""Strategies that split the model need only torchrun's environment, which a DDPJob also
provides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import final_losses, good, metrics, stop_torchrun, torchrun
from test_strategies_split import PROBLEM, TOLERANCE


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*PROBLEM, "train.epochs=1", "strategy=single", f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


@pytest.mark.parametrize(("strategy", "world"), [("dp", 1), ("fsdp", 2), ("ddp_mp", 2)])
def test_torchrun_starts_a_split_strategy(strategy: str, world: int, alone: list[float], tmp_path: Path) -> None:
    agent = torchrun(
        world, [*PROBLEM, "train.epochs=1", f"strategy={strategy}", f"checkpoint.dir={tmp_path}"], tmp_path
    )
    try:
        assert agent.wait(180) == 0, (tmp_path / "out.txt").read_text()
    finally:
        agent.kill()
    assert final_losses(tmp_path / "run") == pytest.approx(alone, rel=TOLERANCE)
    assert len(metrics(tmp_path / "run", "eval")) == 1


def test_sigterm_to_torchrun_stops_a_pipeline_with_a_checkpoint(tmp_path: Path) -> None:
    step = stop_torchrun(2, [*PROBLEM, "train.epochs=400", "strategy=pipeline"], tmp_path)
    assert len(final_losses(tmp_path / "run")) == step
