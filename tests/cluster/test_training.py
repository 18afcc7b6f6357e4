"""The project's own trainer on the cluster: exact through a kill, with real data formats, past a damaged checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.errors import LedgerError
from jobs import Jobs, Json, job, training_job
from strategy_jobs import held, let_go


def training(name: str, folder: Path, *args: str, **spec: object) -> Json:
    """A training job whose checkpoints lie in `folder`, seen by all nodes."""
    checkpoints = {"hostPath": str(folder), "shared": True}
    storage = {"checkpoints": checkpoints, **spec.pop("storage", {})}  # type: ignore[dict-item]
    return training_job(name, *args, storage=storage, **spec)


def drop_a_sample(folder: Path) -> None:
    """What a sampler would write that loses the last sample of a step."""
    path = max(folder.rglob("rank-*.jsonl"), key=lambda p: p.stat().st_size)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = max(i for i, line in enumerate(lines) if line.get("samples"))
    lines[last]["samples"].pop()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_no_sample_is_lost_or_repeated_through_a_kill(jobs: Jobs, tmp_path: Path) -> None:
    keys = ["--config", "digits", "train.threads=1", "train.ledger=true", "train.epochs=6", "checkpoint.every_steps=5"]
    storage = {"checkpoints": {"hostPath": str(tmp_path), "shared": True}}
    jobs.apply(job("exact", **held(keys, {}), storage=storage))
    jobs.wait_phase("exact", "Running")
    jobs.wait("some epochs", lambda: jobs.status("exact").get("progress", {}).get("percent", 0) >= 2, timeout=120)
    rows = jobs.kubectl("get", "ddp").splitlines()
    assert rows[0].split() == ["NAME", "STATE", "NODES", "PROGRESS", "LOSS", "SPEED", "RESTARTS", "AGE"]
    assert rows[1].split()[1:3] == ["Running", "2/2"] and "epoch" in rows[1] and "/s" in rows[1] and "0/10" in rows[1]
    jobs.kill("exact-0-0")
    let_go(tmp_path)
    jobs.wait_phase("exact", "Complete", timeout=300)
    status = jobs.status("exact")
    assert status["restarts"]["counted"] == 0 and status["restarts"]["uncounted"] >= 1
    assert status["progress"]["percent"] == 100

    lives = read([tmp_path])
    assert len(lives) == 2, "the ledger shows the restart"
    verify(lives)
    drop_a_sample(tmp_path)
    with pytest.raises(LedgerError):
        verify(read([tmp_path]))


@pytest.mark.parametrize(
    ("write", "args"),
    [
        (datasets.write_cifar_python, ("data.name=cifar10", "data.batch=10", "model.name=resnet18_cifar")),
        (
            datasets.write_image_folder,
            ("data.name=imagefolder", "data.batch=4", "data.image_size=32", "model.name=torchvision:resnet18"),
        ),
    ],
    ids=["cifar10", "imagefolder"],
)
def test_real_formats_train_on_two_nodes(
    write: Callable[[Path], None], args: tuple[str, ...], jobs: Jobs, tmp_path: Path
) -> None:
    data, checkpoints = tmp_path / "data", tmp_path / "checkpoints"
    data.mkdir()
    checkpoints.mkdir()
    write(data)
    jobs.apply(training("formats", checkpoints, *args, "train.epochs=1", storage={"data": {"hostPath": str(data)}}))
    jobs.wait_phase("formats", "Complete", timeout=120)
    progress = jobs.status("formats")["progress"]
    assert progress["step"] >= 3 and progress["loss"] > 0


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_used(jobs: Jobs, tmp_path: Path) -> None:
    short = ("--config", "digits", "checkpoint.every_steps=10", "checkpoint.every_seconds=0")
    jobs.apply(training("first", tmp_path, *short, "train.epochs=2", nodes=1))
    jobs.wait_phase("first", "Complete", timeout=120)
    saved = sorted(tmp_path.glob("*.pt"))
    assert len(saved) >= 2
    saved[-1].write_bytes(saved[-1].read_bytes()[:1000])
    jobs.apply(training("second", tmp_path, *short, "train.epochs=3", nodes=1))
    jobs.wait_phase("second", "Complete", timeout=120)
    log = jobs.kubectl("logs", "second-0-0")
    assert saved[-1].name in log, "the damaged one is named"
    assert f"resuming after step {int(saved[-2].stem.removeprefix('step-'))} of" in log, "the one before is used"
