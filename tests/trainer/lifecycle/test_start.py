"""The start of a rank: it imports neither the compiler nor scikit-learn, and selects devices and
models by name.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddpjob_pod.late_dynamo import uncollected
from ddpjob_trainer import config, train
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.errors import ConfigError, DeviceError
from ddpjob_trainer.model.models import build_model
from machine import free_port, slowness
from ranks import TINY, good

PROGRAM = """
import sys
from ddpjob_trainer import config, train
code = train.run(config.load(None, sys.argv[1:]))
names = ("torch._inductor", "sympy", "sklearn", "scipy", "matplotlib", "torchvision", "rich")
slow = [name for name in names if name in sys.modules]
assert code == 0 and not slow, slow
import torch
print(torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)).item(), torch._dynamo.__file__)
import torch._dynamo.config
print(torch._dynamo.config.__spec__.name)
"""
SETS = """
import torch
from ddpjob_pod import late_dynamo
late_dynamo.put_off()
import torch._dynamo.config as settings, sys
print(settings is sys.modules["torch._dynamo.convert_frame"].config)
"""


def test_training_does_not_import_the_compiler_and_compiling_still_works(tmp_path: Path) -> None:
    """Two ranks are used so that DistributedDataParallel takes part."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "data.name=digits",
        "model.width=4",
        "train.epochs=1",
        "eval.pictures=false",
        f"checkpoint.dir={tmp_path}",
    ]
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    for process in ranks:
        out, error = process.communicate(timeout=60 * slowness())
        assert process.returncode == 0, error
        assert "2.0" in out and "_dynamo/__init__.py" in out and "torch._dynamo.config" in out


def test_garbage_collection_is_disabled_during_imports_and_restored_afterwards() -> None:
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_changed_compiler_setting_reaches_the_compiler() -> None:
    """Regression: the import hook ran the settings module twice, so a program changed a copy that
    nothing read.
    """
    done = subprocess.run([sys.executable, "-c", SETS], capture_output=True, text=True, timeout=60 * slowness())
    assert done.stdout == "True\n", done.stderr


PRELOADED = """
import json, os, sys
import ddpjob_trainer.preload
threads, known = len(os.listdir("/proc/self/task")), set(sys.modules)
child = os.fork()
if child == 0:
    from ddpjob_trainer import config, train
    code = train.run(config.load(None, sys.argv[1:]))
    imported = sorted(name for name in set(sys.modules) - known if "torch" not in name)
    print(json.dumps([threads, code, imported]), flush=True)
    os._exit(code)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_rank_forked_after_preload_trains_without_importing_our_modules_again(tmp_path: Path) -> None:
    """The compiler is replaced by its stand-in, and no thread runs that a fork would lose."""
    command = [
        sys.executable,
        "-c",
        PRELOADED,
        "data.name=digits",
        "model.width=4",
        "train.epochs=1",
        "eval.pictures=false",
        f"checkpoint.dir={tmp_path}",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60 * slowness(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    threads, code, imported = json.loads(done.stdout.splitlines()[-1])
    assert (threads, code) == (1, 0)
    assert imported == []


def test_ranks_find_each_other_although_their_agents_restarted_unequally_often(tmp_path: Path) -> None:
    """One agent has restarted its ranks. The other agent, a former spare, has not. Both use the
    store of one of the agents.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agent(rank: int) -> dict[str, str]:
        place = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port), "DDPJOB_FENCE": "0.3"}
        return {**place, "TORCHELASTIC_RESTART_COUNT": str(2 * rank)}

    good(2, [*TINY, "train.epochs=1", "train.timeout_seconds=20", f"checkpoint.dir={tmp_path}"], env=agent)


def test_the_backend_determines_the_device() -> None:
    if not torch.cuda.is_available():
        assert devices.choose("auto", 0) == devices.RankPlacement(torch.device("cpu"), "gloo")
        with pytest.raises(
            DeviceError, match=r"train.backend=nccl: local rank 0 needs cuda device 0, but 0 are visible"
        ):
            devices.choose("nccl", 0)
    assert devices.choose("gloo", 3).device.type == "cpu"
    with pytest.raises(ConfigError, match="use auto, nccl, gloo"):
        devices.choose("ncl", 0)


def test_a_rank_that_sees_a_single_device_uses_device_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm gives each rank its own single device. Under torchrun, a single visible device is the
    same device for all ranks, which cannot share it.
    """
    monkeypatch.setattr(devices, "_count", lambda kind: 1 if kind == "cuda" else 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert devices.choose("auto", 3).device == torch.device("cuda", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(DeviceError, match=r"device 3, but 1 are visible \(CUDA_VISIBLE_DEVICES=3\); start fewer"):
        devices.choose("auto", 3)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(DeviceError, match=r"local rank 1 needs cuda device 1, but 1 are visible"):
        devices.choose("nccl", 1)


def test_residual_blocks_may_start_as_the_identity() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(5)
    theirs = resnet18(num_classes=7, zero_init_residual=True).state_dict()
    ours = build_model(ModelConfig(name="torchvision:resnet18", zero_init_residual=True), (3, 32, 32), 7, 5)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
    cifar = build_model(ModelConfig(name="resnet18_cifar", zero_init_residual=True), (3, 32, 32), 7, 5).state_dict()
    assert not cifar["blocks.0.bn2.weight"].any() and cifar["blocks.0.bn1.weight"].all()
    with pytest.raises(ConfigError, match=r"model.zero_init_residual: small_cnn has no ResNet residual"):
        build_model(ModelConfig(zero_init_residual=True), (1, 8, 8), 10, 0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 5, 9), (2, 1, 1), (3, 64, 48)])
def test_the_model_small_cnn_adapts_to_the_shape_of_the_images(shape: tuple[int, int, int]) -> None:
    assert build_model(ModelConfig(width=8), shape, 7, 0)(torch.randn(3, *shape)).shape == (3, 7)


def test_the_model_resnet18_cifar_has_the_known_number_of_parameters() -> None:
    model = build_model(ModelConfig(name="resnet18_cifar"), (3, 32, 32), 10, 0)
    assert sum(weight.numel() for weight in model.parameters()) == 11_173_962
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_torchvision_models_are_built_by_name_and_mistakes_are_reported() -> None:
    assert build_model(ModelConfig(name="torchvision:squeezenet1_1"), (3, 64, 64), 5, 0)(
        torch.randn(2, 3, 64, 64)
    ).shape == (2, 5)
    with pytest.raises(ConfigError, match="did you mean torchvision:resnet50"):
        build_model(ModelConfig(name="torchvision:resnt50"), (3, 64, 64), 5, 0)
    with pytest.raises(
        ConfigError, match=r"torchvision's models need images with 3 channels, but the data's have 1; use"
    ):
        build_model(ModelConfig(name="torchvision:resnet18"), (1, 8, 8), 10, 0)
    with pytest.raises(ConfigError, match=r"'small_cnm' is unknown.*did you mean 'small_cnn'"):
        build_model(ModelConfig(name="small_cnm"), (3, 8, 8), 5, 0)


@pytest.mark.filterwarnings("ignore:The default weight initialization")
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_models_with_auxiliary_heads_return_scores_in_training(name: str) -> None:
    model = build_model(ModelConfig(name=f"torchvision:{name}"), (3, 96, 96), 5, 0)
    assert model.training and model(torch.randn(2, 3, 96, 96)).shape == (2, 5)


@pytest.mark.parametrize("key", ["data.micro_batches", "train.threads"])
def test_negative_numbers_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=-1: must be at least 0"):
        train.run(config.load(None, ["data.name=digits", f"{key}=-1", f"checkpoint.dir={tmp_path}"]))


def test_initial_weights_depend_only_on_the_seed() -> None:
    def sums(seed: int) -> list[float]:
        return [weight.sum().item() for weight in build_model(ModelConfig(width=4), (1, 8, 8), 10, seed).parameters()]

    torch.randn(5)
    assert sums(1) == sums(1) != sums(2)
