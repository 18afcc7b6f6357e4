"""What a start of a rank costs and does: no compiler, no scikit-learn; devices and models chosen by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddpjob_trainer import config, devices, train
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.models import ModelConfig, build_model
from ranks import TINY, free_port, good

PROGRAM = """
import sys
from ddpjob_trainer import config, train
code = train.run(config.load(None, sys.argv[1:]))
slow = [name for name in ("torch._inductor", "sympy", "sklearn", "scipy", "matplotlib", "torchvision", "rich") if name in sys.modules]
assert code == 0 and not slow, slow
import torch
print(torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)).item(), torch._dynamo.__file__)
import torch._dynamo.config
print(torch._dynamo.config.__spec__.name)
"""


def test_training_imports_no_compiler_and_compiling_still_works(tmp_path: Path) -> None:
    """Two ranks, so that DistributedDataParallel takes part."""
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
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    for process in ranks:
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert "2.0" in out and "_dynamo/__init__.py" in out and "torch._dynamo.config" in out


PRELOADED = """
import json, os, sys
import ddpjob_trainer.preload
threads, known = len(os.listdir("/proc/self/task")), set(sys.modules)
child = os.fork()
if child == 0:
    from ddpjob_trainer import config, train
    code = train.run(config.load(None, sys.argv[1:]))
    print(json.dumps([threads, code, sorted(name for name in set(sys.modules) - known if "torch" not in name)]), flush=True)
    os._exit(code)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_rank_forked_after_preload_trains_and_imports_nothing_of_ours(tmp_path: Path) -> None:
    """With the compiler's stand-in, and no thread that a fork would lose."""
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    threads, code, imported = json.loads(done.stdout.splitlines()[-1])
    assert (threads, code) == (1, 0)
    assert imported == []


def test_ranks_of_agents_that_have_restarted_differently_find_each_other(tmp_path: Path) -> None:
    """A spare's agent has restarted nothing, the one beside it has; both use the store of one of them."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agent(rank: int) -> dict[str, str]:
        place = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port), "DDPJOB_FENCE": "0.3"}
        return {**place, "TORCHELASTIC_RESTART_COUNT": str(2 * rank)}

    good(2, [*TINY, "train.epochs=1", "train.timeout_seconds=20", f"checkpoint.dir={tmp_path}"], env=agent)


def test_backend_and_device() -> None:
    if not torch.cuda.is_available():
        assert devices.choose("auto", 0) == devices.Placement(torch.device("cpu"), "gloo")
        with pytest.raises(ConfigError, match=r"train.backend=nccl: local rank 0 needs cuda device 0, and 0 are visible"):
            devices.choose("nccl", 0)
    assert devices.choose("gloo", 3).device.type == "cpu"
    with pytest.raises(ConfigError, match="write auto, nccl, gloo"):
        devices.choose("ncl", 0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 5, 9), (2, 1, 1), (3, 64, 48)])
def test_small_cnn_adapts_to_the_images(shape: tuple[int, int, int]) -> None:
    assert build_model(ModelConfig(width=8), shape, 7, 0)(torch.randn(3, *shape)).shape == (3, 7)


def test_resnet18_cifar_has_the_known_size() -> None:
    model = build_model(ModelConfig(name="resnet18_cifar"), (3, 32, 32), 10, 0)
    assert sum(weight.numel() for weight in model.parameters()) == 11_173_962
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_torchvision_models_by_name_and_mistakes() -> None:
    assert build_model(ModelConfig(name="torchvision:squeezenet1_1"), (3, 64, 64), 5, 0)(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    with pytest.raises(ConfigError, match="did you mean torchvision:resnet50"):
        build_model(ModelConfig(name="torchvision:resnt50"), (3, 64, 64), 5, 0)
    with pytest.raises(ConfigError, match=r"'small_cnm' is not known.*did you mean 'small_cnn'"):
        build_model(ModelConfig(name="small_cnm"), (3, 8, 8), 5, 0)


@pytest.mark.filterwarnings("ignore:The default weight initialization")
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_models_with_auxiliary_heads_return_scores_in_training(name: str) -> None:
    model = build_model(ModelConfig(name=f"torchvision:{name}"), (3, 96, 96), 5, 0)
    assert model.training and model(torch.randn(2, 3, 96, 96)).shape == (2, 5)


@pytest.mark.parametrize("key", ["data.micro_batches", "train.threads"])
def test_numbers_below_zero_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: -1 is less than 0; write"):
        train.run(config.load(None, ["data.name=digits", f"{key}=-1", f"checkpoint.dir={tmp_path}"]))


def test_weights_depend_on_the_seed_only() -> None:
    def sums(seed: int) -> list[float]:
        return [weight.sum().item() for weight in build_model(ModelConfig(width=4), (1, 8, 8), 10, seed).parameters()]

    torch.randn(5)
    assert sums(1) == sums(1) != sums(2)
