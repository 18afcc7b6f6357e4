"""Tests that need a GPU (`make test-gpu`): training runs like those in tests/trainer, in separate
processes.

The CPU in float32 is the reference. The pytest process does not initialize CUDA before it starts
other processes. Only tests that start no processes initialize CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
COUNT = torch.cuda.device_count()
KEYS = [
    "data.batch=200", "model.width=8", "model.norm=batch", "data.micro_batches=8", "train.epochs=2",
    "train.log_every=1", "optim.lr=0.05", "checkpoint.every_seconds=0", "train.timeout_seconds=120",
    "eval.pictures=false",
]  # fmt: skip
WHOLE = ["amp.level=O0", "amp.tf32=false"]
Figure = Callable[[str, Any], None]
two_devices = pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices, but there are only {COUNT}")


def trainer(*words: str) -> None:
    """Run the trainer until it succeeds."""
    command = [sys.executable, "-m", "ddpjob_trainer", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def trained(folder: Path, *keys: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Train and return the lines of metrics.jsonl. Several ranks are started by --spawn."""
    spawn = ["--spawn", str(ranks)] if ranks > 1 else []
    trainer(*KEYS, *keys, f"checkpoint.dir={folder}", *spawn)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if line["event"] == "step"]


def check_same_curve(folder: Path, figure: Figure, *keys: str) -> None:
    """Check that the GPU's loss curve matches the CPU's."""
    on_cpu = losses(trained(folder / "cpu", "train.backend=gloo", *keys, *WHOLE))
    on_gpu = losses(trained(folder / "gpu", *keys, *WHOLE))
    figure("largest difference of a loss", float(np.max(np.abs(np.array(on_gpu) / on_cpu - 1))))
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=5e-3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process on the CPU."""
    return losses(trained(tmp_path_factory.mktemp("cpu"), "train.backend=gloo", *WHOLE))


def groups() -> list[int]:
    """Return the group sizes 1, 2, 4, ... up to the number of devices. Without devices, return a
    single size, whose test is skipped.
    """
    return sorted({1, *(2**k for k in range(1, 10) if 2**k <= COUNT), max(COUNT, 1)})


@pytest.mark.parametrize("ranks", groups())
def test_a_group_over_nccl_has_the_loss_curve_of_one_process(
    ranks: int, reference: list[float], tmp_path: Path, figure: Figure
) -> None:
    lines = trained(tmp_path, "train.backend=nccl", *WHOLE, ranks=ranks)
    assert lines[0]["world"] == ranks and lines[0]["precision"] == "float32"
    np.testing.assert_allclose(losses(lines), reference, rtol=2e-3)
    figure("largest difference of a loss", float(np.max(np.abs(np.array(losses(lines)) / reference - 1))))


FEATURES = {
    "adamw": ["optim.name=adamw", "optim.lr=0.002"],
    "lamb": ["optim.name=lamb", "optim.lr=0.01", "optim.decay_norm_and_bias=false"],
    "lars": ["optim.name=lars", "optim.lr=0.5"],
    "nesterov, clipping, smoothing": ["optim.nesterov=true", "optim.clip_norm=0.5", "optim.label_smoothing=0.1"],
    "average of the weights": ["optim.ema_decay=0.9"],
    "a rate per block, bce": ["optim.layer_decay=0.75", "optim.loss=bce"],
    "accumulation": ["train.accumulate=2", "data.micro_batches=0"],
    "layout": ["model.channels_last=true"],
    "frozen layers": ["model.freeze=features.0*"],
    "statistics of all": ["model.sync_batchnorm=true", "data.micro_batches=0"],
    "ordered": ["ddp.ordered=true"],
    "single": ["strategy=single"],
    "fsdp": ["strategy=fsdp"],
    "fsdp, dcp": ["strategy=fsdp", "checkpoint.format=dcp"],
    "dp": ["strategy=dp", "data.micro_batches=1"],
    "erasing, cutout, repeats": [
        "data.name=shapes",
        "data.size=1000",
        "data.erase=0.5",
        "data.cutout=4",
        "data.repeats=2",
    ],
    "mixing": ["data.name=shapes", "data.size=1000", "data.mixup=0.2", "data.cutmix=1"],
    "own images, optimizer, schedule, metric": [
        "data.name=examples.own_parts:images",
        "data.shift=1",
        "optim.name=examples.own_parts:optimizer",
        "optim.lr=0.001",
        "optim.schedule=examples.own_parts:schedule",
        "train.callbacks=examples.own_parts:PrecisionOfThree",
    ],
    "curves": ["eval.pr=exact", "checkpoint.keep_best=1"],
    "binned curves": ["eval.pr=binned"],
    "profile": ["report.profile_steps=[3,2]"],
    "checked machines": ["preflight.run=true"],
    "torchvision": ["data.name=synthetic", "data.size=400", "data.shape=[3,64,64]", "model.name=torchvision:resnet18"],
}
"""Settings whose curve on a GPU equals that on the CPU."""


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_has_the_same_loss_curve_as_on_the_cpu(feature: str, tmp_path: Path, figure: Figure) -> None:
    check_same_curve(tmp_path, figure, *FEATURES[feature])


def test_stochastic_depth_draws_the_same_numbers_in_each_run(tmp_path: Path, figure: Figure) -> None:
    """The GPU's generator draws different numbers from the CPU's."""
    keys = ["model.name=resnet18_cifar", "model.drop_path=0.2", "data.name=synthetic", "data.size=400", *WHOLE]
    first, second = (losses(trained(tmp_path / run, *keys)) for run in ("first", "second"))
    figure("largest difference of a loss", float(np.max(np.abs(np.array(first) / second - 1))))
    np.testing.assert_allclose(first, second, rtol=5e-3)
    without = losses(trained(tmp_path / "without", *keys, "model.drop_path=0"))
    assert not np.allclose(first, without, rtol=5e-3)


@pytest.mark.parametrize("operations", ["data.randaugment_ops=2", "data.trivialaugment=true"])
def test_image_operations_give_the_same_pixels_as_on_the_cpu(operations: str, tmp_path: Path, figure: Figure) -> None:
    from benchmarks.trainer import made_data

    made_data.cifar10(tmp_path, 1000)
    check_same_curve(tmp_path, figure, "data.name=cifar10", f"data.dir={tmp_path}", operations)


@pytest.mark.parametrize("kind", ["imagefolder", "shards"])
def test_images_read_by_workers_reach_the_device(kind: str, tmp_path: Path, figure: Figure) -> None:
    from benchmarks.trainer import made_data

    made_data.jpegs(tmp_path / "imagefolder", 400)
    if kind == "shards":
        trainer("shards", str(tmp_path / "imagefolder"), str(tmp_path / kind))
    keys = [f"data.name={kind}", f"data.dir={tmp_path / kind}", "data.image_size=32", "data.batch=80"]
    check_same_curve(tmp_path, figure, *keys)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_training_learns_at_each_level_of_precision(
    level: str, dtype: str, reference: list[float], tmp_path: Path
) -> None:
    found = losses(trained(tmp_path, f"amp.level={level}", f"amp.dtype={dtype}"))
    assert found[-1] < 0.9 * found[0]
    if level != "O3":
        np.testing.assert_allclose(found, reference, rtol=0.15)


def test_a_checkpoint_from_the_gpu_is_evaluated_on_either_device(tmp_path: Path) -> None:
    trained(tmp_path, *WHOLE)
    found = {}
    for backend in ("nccl", "gloo"):
        trainer("evaluate", str(tmp_path), f"train.backend={backend}", *WHOLE)
        found[backend] = json.loads(next((tmp_path / "eval").glob("*.json")).read_text())
    assert found["nccl"]["loss"] == pytest.approx(found["gloo"]["loss"], rel=1e-4)


@two_devices
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_other_strategies_match_the_cpu_on_two_devices(strategy: str, reference: list[float], tmp_path: Path) -> None:
    np.testing.assert_allclose(losses(trained(tmp_path, f"strategy={strategy}", *WHOLE, ranks=2)), reference, rtol=2e-3)


@two_devices
def test_a_model_split_over_two_devices_has_the_loss_curve_of_one_device(
    reference: list[float], tmp_path: Path
) -> None:
    lines = trained(tmp_path, "strategy=ddp_mp", "ddp_mp.devices=2", *WHOLE)
    np.testing.assert_allclose(losses(lines), reference, rtol=2e-3)


@two_devices
def test_data_parallel_trains_on_all_devices(tmp_path: Path) -> None:
    """Each device computes the statistics of its own part, so the curve is close to the reference
    but not equal.
    """
    found = losses(trained(tmp_path, "strategy=dp", *WHOLE))
    assert found[-1] < 0.9 * found[0]


def test_bfloat16_is_the_default_and_learns_as_well_as_float32(
    reference: list[float], tmp_path: Path, figure: Figure
) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip(f"{torch.cuda.get_device_name()} has no bfloat16")
    lines = trained(tmp_path)
    assert lines[0]["precision"] == "bfloat16 (O1)"
    np.testing.assert_allclose(losses(lines), reference, rtol=0.1)
    figure("last loss", losses(lines)[-1])


def test_a_run_can_switch_between_gpu_and_cpu_when_it_resumes(tmp_path: Path) -> None:
    """The run uses bfloat16 on the GPU, float32 on the CPU, and bfloat16 again."""
    for epochs, backend in ((1, "nccl"), (2, "gloo"), (3, "nccl")):
        lines = trained(tmp_path, f"train.backend={backend}", f"train.epochs={epochs}", "optim.schedule=constant")
    assert lines[-1]["event"] == "end" and losses(lines)[-1] < losses(lines)[0]


def test_a_resumed_run_is_bit_identical_to_an_undisturbed_one(tmp_path: Path) -> None:
    """Snapshots are copied to pinned memory while training continues."""
    keys = ["ddp.ordered=true", "checkpoint.every_steps=3", "optim.schedule=constant", *WHOLE]
    trained(tmp_path / "straight", *keys)
    trained(tmp_path / "parts", *keys, "train.epochs=1")
    trained(tmp_path / "parts", *keys)
    saved = [torch.load(max((tmp_path / run).glob("step-*.pt")), weights_only=True) for run in ("straight", "parts")]
    assert all(torch.equal(value, saved[1]["model"][name]) for name, value in saved[0]["model"].items())


def test_a_snapshot_is_in_pinned_memory_and_does_not_follow_the_weights() -> None:
    from ddpjob_trainer.checkpoints.snapshot import Staging

    weights = torch.randn(1 << 22, device="cuda")
    wanted = weights.cpu()
    staging = Staging()
    taken = staging.take({"model": {"w": weights}}, whole=True)
    weights.zero_()
    staging.settle()
    assert taken["model"]["w"].is_pinned() and torch.equal(taken["model"]["w"], wanted)


def test_a_step_that_is_not_finite_is_skipped_on_the_device() -> None:
    """The fused optimizer uses found_inf, so the host reads nothing."""
    from ddpjob_trainer.config.sections import OptimConfig
    from ddpjob_trainer.optim.optimizers import build_optimizer
    from ddpjob_trainer.optim.precision import Precision

    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer, precision = build_optimizer(OptimConfig(), [("w", weight)]), Precision(device=torch.device("cuda"))
    values, skipped = [], []
    for gradient in (1.0, float("inf"), 1.0):
        weight.grad = torch.full_like(weight, gradient)
        update = precision.step(optimizer, [weight])
        values.append(weight.detach().clone())
        skipped.append(update.skipped)
    assert isinstance(skipped[1], torch.Tensor) and [bool(each) for each in skipped] == [False, True, False]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[1], values[2])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_run_has_the_same_loss_curve_on_the_gpu(mode: str, reference: list[float], tmp_path: Path) -> None:
    np.testing.assert_allclose(losses(trained(tmp_path, f"model.compile={mode}", *WHOLE)), reference, rtol=5e-3)


def test_dali_decodes_the_same_images_as_the_workers(tmp_path: Path) -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        pytest.skip("NVIDIA DALI is not installed: pip install nvidia-dali-cuda130")
    from ddpjob_trainer import config
    from ddpjob_trainer.data.catalog import open_data
    from PIL import Image
    from sklearn.datasets import load_sample_image

    for part in ("train", "val"):
        for name in ("china.jpg", "flower.jpg"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(load_sample_image(name)).save(tmp_path / part / name / "0.jpg", quality=90)
    keys = ["data.name=imagefolder", f"data.dir={tmp_path}", "data.image_size=64", "data.workers=1"]
    pixels = []
    for decoder in ("auto", "dali"):
        data = open_data(config.load(None, [*keys, f"data.decoder={decoder}"]).data, torch.device("cuda"))
        pixels.append(next(iter(data.train_stream([(0, [0, 1])]))).images)
    assert pixels[1].is_cuda and (pixels[0] - pixels[1]).abs().mean() < 0.1


def test_workers_of_the_fork_server_can_use_the_gpu(tmp_path: Path, figure: Figure) -> None:
    """Workers in recovery.mode Fast are forked from a process that has imported torch but not
    touched CUDA.
    """
    (tmp_path / "job.yaml").write_text(
        f"""
apiVersion: ddpjob.io/v1alpha1
kind: DDPJob
metadata: {{name: gpu-fork}}
spec:
  image: unused
  module: ddpjob_trainer
  args: {json.dumps([*KEYS, f"checkpoint.dir={tmp_path}", f"train.run_dir={tmp_path / 'run'}", "train.backend=nccl"])}
  nodes: 1
  gpusPerNode: {COUNT}
  recovery: {{mode: Fast}}
"""
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "ddpjob.cli", "run", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ColdWorkers" not in done.stdout + done.stderr
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["world"] == COUNT


def test_step_times_are_measured_on_the_device(tmp_path: Path, figure: Figure) -> None:
    """ResNet-18 trains on generated CIFAR images. The phases, measured by events, add up to the
    time of a step. The figures are for information.
    """
    keys = [
        "data.name=synthetic", "data.size=12800", "data.batch=256", "data.micro_batches=0", "train.log_every=10",
        "model.name=resnet18_cifar", "model.channels_last=true", "train.eval_every=9",
    ]  # fmt: skip
    began = time.monotonic()
    last = [line for line in trained(tmp_path, *keys, ranks=COUNT) if line["event"] == "step"][-1]
    seconds = 256 / last["samplesPerSecond"]
    phases = last["phases"]
    assert phases["forward"] > 0 and phases["backward"] > phases["forward"] / 2
    assert 0.5 * seconds < sum(phases.values()) < 1.5 * seconds
    assert all(value > 1e8 for value in last["ranks"]["memoryBytes"])
    for name in ("samplesPerSecond", "phases", "mfu"):
        figure(name, last.get(name))
    figure("seconds of the whole", round(time.monotonic() - began, 1))


@two_devices
def test_a_late_rank_is_distinguished_from_waiting_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's model is slow on the host, and rank 0 waits for rank 1 on the device."""
    (tmp_path / "late.py").write_text(
        "import os, time\n"
        "from ddpjob_trainer.config.sections import ModelConfig\n"
        "from ddpjob_trainer.model.models import SmallCnn\n"
        "class Late(SmallCnn):\n"
        "    def forward(self, images):\n"
        "        time.sleep(0.1 * (os.environ['RANK'] == '1'))\n"
        "        return super().forward(images)\n"
        "def build(shape, classes):\n"
        "    return Late(shape, classes, ModelConfig(width=8))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    lines = trained(tmp_path / "run", "model.name=late:build", "data.micro_batches=2", ranks=2)
    own = [line["ranks"]["ownSeconds"] for line in lines if line["event"] == "step"][-1]
    assert own[1] > 0.1 > own[0]
