"""Every strategy of the trainer from a DDPJob, on real pods: each loses one by force, and its losses are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpjob_trainer import history
from ddpjob_trainer.ledger_check import read, verify
from jobs import Jobs, Json, job
from libraries import horovod_site
from testcluster import python_host

EPOCHS = 40
# Each sample by itself (no batch normalisation), so that sums in another order stay close over hundreds of steps.
PROBLEM = [
    "data.name=digits",
    "data.batch=200",
    "model.width=4",
    "model.norm=group",
    "optim.lr=0.02",
    f"train.epochs={EPOCHS}",
    f"train.eval_every={EPOCHS}",
    "train.log_every=1",
    "train.ledger=true",
    "checkpoint.every_seconds=1",
]
TOLERANCE = 1e-3
"""Of every loss. A sample that is left out of a step changes the next one by as much; see tests/trainer for the exact comparison."""

SHARED = {
    "ddp": [],
    "fsdp": [],
    "ddp-mp": ["ddp_mp.devices=2"],
    "pipeline": ["data.micro_batches=4"],
    "parameter-server": [],
    "horovod": [],
    "deepspeed": ["deepspeed.stage=2"],
}
"""Those of two nodes, with their keys."""


def strategy_job(name: str, folder: Path, *keys: str, nodes: int, **spec: object) -> Json:
    template = python_host.overlay("trainer")
    trainer = template["spec"]["containers"][0]
    if name == "horovod":
        site = str(horovod_site())
        template["spec"]["volumes"].append({"name": "horovod", "hostPath": {"path": site, "type": "Directory"}})
        trainer["volumeMounts"].append({"name": "horovod", "mountPath": site, "readOnly": True})
        trainer["env"].append({"name": "PYTHONPATH", "value": site})
    storage = {"checkpoints": {"hostPath": str(folder / name), "shared": True}}
    (folder / name).mkdir()
    args = [*PROBLEM, f"strategy={name.replace('-', '_')}", *keys]
    return job(name, module="ddpjob_trainer", args=args, nodes=nodes, storage=storage, podTemplate=template, **spec)


def curve(run: Path) -> dict[int, float]:
    """The loss of every step, in the execution that counts."""
    losses: dict[int, float] = {}
    told = history.read(run)
    for life, steps in zip(told.lives, told.steps, strict=True):
        losses = {step: loss for step, loss in losses.items() if step <= life["step"]}
        losses |= {row["step"]: row["loss"] for row in steps}
    return losses


@pytest.fixture
def folder(jobs: Jobs, tmp_path: Path) -> Iterator[Path]:
    """Of the checkpoints, with what `single` made of the problem."""
    jobs.apply(strategy_job("single", tmp_path, nodes=1))
    jobs.wait_phase("single", "Complete", timeout=120)
    assert len(curve(tmp_path / "single" / "run")) == 8 * EPOCHS
    return tmp_path


def test_each_strategy_trains_on_through_the_loss_of_a_pod(jobs: Jobs, folder: Path) -> None:
    for name, keys in SHARED.items():
        jobs.apply(strategy_job(name, folder, *keys, nodes=2))
    for number, name in enumerate(SHARED):
        jobs.wait(f"{name}'s first epoch", lambda name=name: jobs.step(name) >= 8, timeout=240)
        jobs.kill(f"{name}-{number % 2}-0")
    alone = curve(folder / "single" / "run")
    for name in SHARED:
        jobs.wait_phase(name, "Complete", timeout=300)
        restarts = jobs.status(name)["restarts"]
        assert (restarts["counted"], restarts["uncounted"]) == (0, 1), (name, restarts)
        lives = read([folder / name])
        assert len(lives) == 2 and verify(lives).epochs == dict.fromkeys(range(1, EPOCHS + 1), 1438), name
        losses = curve(folder / name / "run")
        assert losses.keys() == alone.keys(), name
        worst = max(abs(losses[step] - alone[step]) for step in alone)
        print(f"{name}: largest difference of a loss from strategy=single {worst:.1e}")
        assert worst < TOLERANCE, name


def test_a_strategy_of_one_process_is_refused_on_two_nodes(jobs: Jobs, tmp_path: Path) -> None:
    jobs.apply(strategy_job("dp", tmp_path, nodes=2, recovery={"maxRestarts": 0}))
    jobs.wait_phase("dp", "Failed", timeout=120)
    message = jobs.condition("dp", "Failed")["message"]
    assert "strategy=dp" in message and "strategy=ddp" in message, message
