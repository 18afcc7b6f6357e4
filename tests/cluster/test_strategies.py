"""Every strategy of the trainer from a DDPJob, on real pods: each loses one by force, and its losses are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob_trainer import history
from ddpjob_trainer.ledger_check import read, verify
from jobs import Jobs, Json, job
from libraries import horovod_site
from testcluster import python_host

EPOCHS = 20
# A small learning rate: where a sum in another order puts a value on the other side of a kink of the network, little comes of it.
PROBLEM = [
    "data.name=digits",
    "data.batch=200",
    "model.width=4",
    "model.norm=group",
    "optim.lr=0.002",
    f"train.epochs={EPOCHS}",
    f"train.eval_every={EPOCHS}",
    "train.log_every=1",
    "train.ledger=true",
    "checkpoint.every_seconds=1",
]
TOLERANCE = 1e-4
"""Of every loss; 5e-7 is seen. Momentum that is lost at a restart makes 1e-3 of it, a sample left out of each step 6e-2."""

SHARED = {
    "fsdp": ("Fast", []),
    "pipeline": ("Fast", ["data.micro_batches=4"]),
    "parameter-server": ("Fast", []),
    "horovod": ("Fast", []),
    "deepspeed": ("Standard", ["deepspeed.stage=2"]),
}
"""Those that share a job of two nodes otherwise than ddp does, with their mode of recovery and keys."""


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process on this machine."""
    folder = tmp_path_factory.mktemp("single")
    program = [sys.executable, "-m", "ddpjob_trainer", *PROBLEM, "strategy=single", f"checkpoint.dir={folder}"]
    subprocess.run(program, check=True, timeout=120)
    losses = curve(folder / "run")
    assert len(losses) == 8 * EPOCHS
    return losses


@pytest.mark.parametrize("name", SHARED)
def test_each_strategy_trains_on_through_the_loss_of_a_pod(name: str, alone: dict[int, float], jobs: Jobs, tmp_path: Path) -> None:
    mode, keys = SHARED[name]
    jobs.apply(strategy_job(name, tmp_path, *keys, nodes=2, recovery={"mode": mode}))
    jobs.wait("the first epochs", lambda: jobs.step(name) >= 8)
    jobs.kill(f"{name}-{len(name) % 2}-0")
    jobs.wait_phase(name, "Complete", timeout=120)
    restarts = jobs.status(name)["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (0, 1), restarts
    lives = read([tmp_path / name])
    assert len(lives) == 2 and verify(lives).epochs == dict.fromkeys(range(1, EPOCHS + 1), 1438)
    losses = curve(tmp_path / name / "run")
    assert losses.keys() == alone.keys()
    worst = max(abs(losses[step] - alone[step]) for step in alone)
    print(f"{name}: largest difference of a loss from strategy=single {worst:.1e}")
    assert worst < TOLERANCE


def test_a_strategy_of_one_process_is_refused_on_two_nodes(jobs: Jobs, tmp_path: Path) -> None:
    jobs.apply(strategy_job("dp", tmp_path, nodes=2, recovery={"maxRestarts": 0}))
    jobs.wait_phase("dp", "Failed", timeout=120)
    message = jobs.condition("dp", "Failed")["message"]
    assert "strategy=dp" in message and "strategy=ddp" in message, message
