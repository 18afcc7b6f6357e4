"""torch.compile and channels_last change how the model computes, but not its results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import write_image_folder
from ddpjob_trainer import config, train
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model, choose_layout
from ddpjob_trainer.strategies import step_region
from ddpjob_trainer.strategies.registry import open_strategy
from ranks import TINY, final_losses, good

ARGUMENTS = [*TINY, "train.epochs=1", "model.norm=batch", "data.micro_batches=2"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    good(1, [*ARGUMENTS, f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch.compile on the CPU needs a C++ compiler"
)
def test_a_compiled_run_has_the_same_loss_curve(tmp_path: Path) -> None:
    """The training runs in a separate process with the compiler's real front end. Float32 sums may
    be in a different order.
    """
    keys = [
        *TINY,
        "data.batch=719",
        "train.threads=1",
    ]  # both steps have the same size, so there is one graph for training and one for evaluation
    good(1, [*keys, f"checkpoint.dir={tmp_path / 'plain'}"])
    arguments = [*keys, "model.compile=default", f"checkpoint.dir={tmp_path}"]
    code = (
        "import sys; from ddpjob_trainer import config, train; import torch;"
        "code = train.run(config.load(None, sys.argv[1:]));"
        "from torch._dynamo.utils import counters; print('compiled graphs',"
        " counters['stats']['unique_graphs']); sys.exit(code)"
    )
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("compiled graphs")[1]) > 0
    np.testing.assert_allclose(
        final_losses(tmp_path / "run"), final_losses(tmp_path / "plain" / "run"), rtol=1e-3, atol=1e-4
    )
    saved = torch.load(max(tmp_path.glob("step-*.pt")), weights_only=True)["model"]
    assert saved.keys() == build_model(config.load(None, keys).model, (1, 8, 8), 10, 0).state_dict().keys()


def counted(folder: Path, *, again: bool = False) -> Callable[[int], None]:
    """Return a hook that makes a rank compile without generating code, fail if anything is compiled
    again (unless `again`), and record the number of graphs.
    """

    import torch._dynamo as dynamo  # Do this here, before ranks are forked, because it takes seconds.

    def prepare(rank: int) -> None:
        step_region.BACKEND = "eager"
        dynamo.config.error_on_recompile = not again
        training = train.Trainer.train

        def trained(self: train.Trainer) -> int:
            code = training(self)
            (folder / f"graphs-{rank}").write_text(str(dynamo.utils.counters["stats"]["unique_graphs"]))
            return code

        train.Trainer.train = trained  # type: ignore[method-assign]

    return prepare


OWN_IMAGES = """
import torch


def read(folder):
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (770, 1, 8, 8), generator=drawn, dtype=torch.uint8)
    labels = torch.randint(0, 10, (770,), generator=drawn)
    return (pixels[:650], labels[:650]), (pixels[650:], labels[650:]), 10


def add_noise(images, labels, generator):
    return images + torch.randn(images.shape, generator=generator), labels
"""
OWN = "data.name=compiled_images:read"


@pytest.mark.parametrize(
    ("world", "mode", "more"),
    [
        (1, "default", []),
        (2, "reduce-overhead", [OWN]),
        (1, "true", [OWN, "data.batch_transform=compiled_images:add_noise"]),
    ],
)
def test_a_whole_run_compiles_one_graph_for_steps_and_one_for_evaluations(
    world: int, mode: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last steps of both epochs and the last batches of both evaluations are smaller. The
    results are bit-identical.
    """
    (tmp_path / "compiled_images.py").write_text(OWN_IMAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = [*TINY, "model.norm=batch", "data.micro_batches=2", "train.eval_batch=50", "data.batch=300", *more]
    good(world, [*keys, f"checkpoint.dir={tmp_path / 'plain'}"])
    good(
        world,
        [*keys, f"model.compile={mode}", f"checkpoint.dir={tmp_path / 'compiled'}"],
        prepare=counted(tmp_path),
    )
    assert final_losses(tmp_path / "compiled" / "run") == final_losses(tmp_path / "plain" / "run")
    assert [(tmp_path / f"graphs-{rank}").read_text() for rank in range(world)] == ["2"] * world


def test_each_image_size_is_compiled_once(tmp_path: Path) -> None:
    """Each of two sizes lasts two epochs, with full and smaller batches. A third graph is for
    evaluations.
    """
    write_image_folder(tmp_path / "images", 10)
    keys = [*TINY, "data.name=imagefolder", f"data.dir={tmp_path / 'images'}", "data.workers=0", "train.epochs=4"]
    keys += ["data.batch=8", "data.image_size=16", "data.early_sizes=12:2", "model.norm=batch", "train.eval_batch=12"]
    good(1, [*keys, f"checkpoint.dir={tmp_path / 'plain'}"])
    compiled = [*keys, "model.compile=true", f"checkpoint.dir={tmp_path / 'compiled'}"]
    good(1, compiled, prepare=counted(tmp_path, again=True))
    assert final_losses(tmp_path / "compiled" / "run") == final_losses(tmp_path / "plain" / "run")
    assert (tmp_path / "graphs-0").read_text() == "3"


@pytest.mark.parametrize(
    ("device", "level", "shape", "name", "wanted"),
    [
        ("cuda", "O1", (3, 8, 8), "small_cnn", True),
        ("cuda", "O0", (3, 8, 8), "small_cnn", False),
        ("cpu", "O1", (3, 8, 8), "small_cnn", False),
        ("cuda", "O1", (5,), "small_cnn", False),
        ("cuda", "O1", (3, 8, 8), "mine:build", False),
    ],
)
def test_channels_last_is_chosen_for_images_in_16_bits_on_a_gpu(
    device: str, level: str, shape: tuple[int, ...], name: str, wanted: bool
) -> None:
    keys = config.load(None, [f"amp.level={level}", f"model.name={name}"])
    assert choose_layout(keys.model, keys.amp, shape, torch.device(device)).channels_last is wanted
    chosen = config.load(None, ["model.channels_last=false", f"amp.level={level}"])
    assert choose_layout(chosen.model, chosen.amp, shape, torch.device(device)).channels_last is False


def test_without_a_c_compiler_the_error_message_has_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    message = (
        r"model.compile: no C\+\+ compiler \(g\+\+, clang\+\+, c\+\+\) is installed; install g\+\+, set CXX to a"
        r" compiler, or set model.compile=false"
    )
    with pytest.raises(ConfigError, match=message):
        train.run(config.load(None, [*ARGUMENTS, "model.compile=default", f"checkpoint.dir={tmp_path}"]))
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler \(/nowhere/g\+\+\)"):
        build_model(config.load(None, ["model.compile=default"]).model, (1, 8, 8), 10, 0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_channels_last_run_has_the_same_loss_curve(world: int, plain: list[float], tmp_path: Path) -> None:
    good(world, [*ARGUMENTS, "model.channels_last=true", f"checkpoint.dir={tmp_path}"])
    np.testing.assert_allclose(final_losses(tmp_path / "run"), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_images_and_weights_have_the_channels_last_layout(level: str) -> None:
    settings = config.load(
        None,
        [
            "strategy=single",
            "data.name=cifar10",
            "model.name=resnet18_cifar",
            "model.channels_last=true",
            f"amp.level={level}",
        ],
    )
    strategy = open_strategy(settings, Group(), torch.device("cpu"))
    strategy.prepare(build_model(settings.model, (3, 32, 32), 10, 0), (3, 32, 32))
    seen = []
    for module in strategy.model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda layer, given, result: seen.append((layer.weight, given[0], result)))
    with torch.no_grad():
        strategy.logits(torch.randn(2, 3, 32, 32))
    assert len(seen) == 20 and all(
        tensor.is_contiguous(memory_format=torch.channels_last) for tensors in seen for tensor in tensors
    )
