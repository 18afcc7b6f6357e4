"""The trainer's strategies on real pods. A pod of each job is force-deleted, and its losses equal
those of one process.

One strategy is tested in each mode of recovery. The others train through a loss in
tests/local/test_process_strategies.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Jobs, Json, job
from strategy_jobs import PROBLEM, assert_exact, held, let_go, losses_of_one_process, steps_begun

SHARED = {"fsdp": ("Fast", []), "deepspeed": ("Standard", ["deepspeed.stage=2"])}
"""Recovery mode and settings of each strategy."""


def strategy_job(name: str, folder: Path, *keys: str, nodes: int, **spec: object) -> Json:
    storage = {"checkpoints": {"hostPath": str(folder / name), "shared": True}}
    (folder / name).mkdir()
    return job(name, **held([*PROBLEM, f"strategy={name}", *keys], {}), nodes=nodes, storage=storage, **spec)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses_of_one_process(tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("name", SHARED)
def test_each_strategy_continues_after_the_loss_of_a_pod(
    name: str, alone: dict[int, float], jobs: Jobs, tmp_path: Path
) -> None:
    mode, keys = SHARED[name]
    jobs.apply(strategy_job(name, tmp_path, *keys, nodes=2, recovery={"mode": mode}))
    jobs.wait("the first epochs", lambda: steps_begun(tmp_path / name) >= 8)
    jobs.kill(f"{name}-{len(name) % 2}-0")
    let_go(tmp_path / name)
    jobs.wait_phase(name, "Complete", timeout=120)
    restarts = jobs.status(name)["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (0, 1), restarts
    assert_exact(tmp_path / name, alone)


def test_a_single_process_strategy_is_refused_on_two_nodes(jobs: Jobs, tmp_path: Path) -> None:
    jobs.apply(strategy_job("dp", tmp_path, nodes=2, recovery={"maxRestarts": 0}))
    jobs.wait_phase("dp", "Failed", timeout=120)
    message = jobs.condition("dp", "Failed")["message"]
    assert "strategy=dp" in message and "strategy=ddp" in message, message
