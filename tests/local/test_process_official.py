"""PyTorch's own examples as DDPJobs, with the manifests and diffs of `examples/`.

Each job loses a pod without notice in the middle of an epoch, resumes from its snapshot and
completes. The CPU simulates GPUs (on_cpu.py).
"""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from datasets import write_image_folder
from ddpjob.client.backends.process_backend import ProcessBackend
from machine import slowness
from process_harness import SCRIPTS, Json, Machine, Run

EXAMPLES = Path(__file__).parents[2] / "examples"
OFFICIAL = SCRIPTS / "official"


@dataclass(frozen=True)
class Example:
    """A small run of an example."""

    name: str
    """Name of its manifest and its diff."""
    args: tuple[str, ...]
    """Arguments after the manifest's own. The last value of an option counts."""
    held: int
    """The step that waits. It is in an epoch after a snapshot."""
    saved: tuple[str, ...]
    resumed: str
    """Text that the script prints when it resumes."""
    epochs: int


MULTIGPU = Example(
    "multigpu-torchrun", ("12", "4"), 6 * 32 + 10, ("snapshot.pt",), "Resuming training from snapshot at Epoch 5", 12
)
MINGPT = Example(
    "mingpt-ddp",
    (
        "trainer_config.max_epochs=4",
        "trainer_config.batch_size=64",
        "trainer_config.data_loader_workers=0",
        f"data_config.path={OFFICIAL / 'LICENSE'}",
        "data_config.block_size=16",
        "data_config.truncate=1.0",
        "gpt_config.n_layer=1",
        "gpt_config.n_head=2",
        "gpt_config.n_embd=16",
    ),
    2 * 11 + 5,
    ("gpt_snapshot.pt",),
    "Resuming training from snapshot at Epoch 2",
    4,
)
IMAGENET = Example(
    "pytorch-imagenet",
    ("--arch=shufflenet_v2_x0_5", "--epochs=3", "--batch-size=4", "--workers=0", "--print-freq=1"),
    4 + 2,
    ("checkpoint.pth.tar", "model_best.pth.tar"),
    "(epoch 1)",
    3,
)


def job(example: Example, repository: Path) -> Json:
    """Return the example's manifest for two nodes with one process each, with the scripts' paths on
    this machine.
    """
    made: Json = yaml.safe_load((EXAMPLES / f"{example.name}.yaml").read_text())
    spec = made["spec"]
    script = str(repository / Path(spec["script"]).relative_to("/examples"))
    args = example.args if example is MULTIGPU else (*spec["args"], *example.args)
    env = [{"name": "HELD", "value": str(example.held)}, {"name": "OMP_NUM_THREADS", "value": "1"}]
    spec.update(script=str(SCRIPTS / "on_cpu.py"), args=[script, *args], env=env, nodes=2, gpusPerNode=0)
    spec["recovery"] = {"mode": "Fast"}
    return made


def patched(example: Example, folder: Path) -> Path:
    """Copy the official sources and apply the diff."""
    shutil.copytree(OFFICIAL, folder)
    diff = (EXAMPLES / f"{example.name}.diff").read_text()
    subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=folder, input=diff, text=True, check=True)
    return folder


@pytest.mark.parametrize("example", [MULTIGPU, MINGPT, IMAGENET], ids=lambda example: example.name)
def test_an_official_pytorch_example_continues_after_the_loss_of_a_pod(
    example: Example, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(machine.runs))
    (tmp_path / "data").mkdir()
    write_image_folder(tmp_path / "data", 8)
    with_data = ["--data", str(tmp_path / "data")] if example is IMAGENET else []
    run = machine.start(job(example, patched(example, tmp_path / "examples")), *with_data)
    checkpoints = run.folder / "checkpoints"
    run.until(lambda r: {path.name for path in checkpoints.glob("held-*")} == {"held-0", "held-1"}, seconds=180)
    assert all((checkpoints / name).exists() for name in example.saved), list(checkpoints.iterdir())
    run.until(lambda r: r.status.get("progress", {}).get("lossDisplay"))

    def is_in_the_list(run: Run) -> bool:
        """Return whether the list of jobs shows the latest progress. Reports from before the step
        was held may still arrive.
        """
        row = machine.command("get", example.name, seconds=60 * slowness()).stdout
        return run.status["progress"]["lossDisplay"] in row and "epoch " in row

    run.until(is_in_the_list)
    ProcessBackend().kill(f"{example.name}-1-0")
    run.until(lambda r: r.status.get("restarts", {}).get("recent"))
    (checkpoints / "go").touch()
    assert run.wait(300) == 0, run.everything()
    status = run.status
    assert status["phase"] == "Complete"
    # On a very busy machine, a stalled node may be fenced as well.
    assert status["restarts"]["counted"] == 0 and status["restarts"]["uncounted"] >= 1, status["restarts"]
    progress = status["progress"]
    assert (progress["epoch"], progress["epochs"]) == (example.epochs, example.epochs), progress
    assert math.isfinite(progress["loss"]) and progress["lossDisplay"], progress
    logs = [path for path in run.folder.glob("*/pods/*.log") if example.resumed in path.read_text()]
    slots = {path.stem.rpartition("-")[0] for path in logs}
    assert slots == {f"{example.name}-0", f"{example.name}-1"}, run.everything()
    run.assert_nothing_left()
