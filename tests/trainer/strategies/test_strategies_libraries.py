"""Horovod, DeepSpeed and a parameter server compute the same as one process, can be stopped and
continued like it, and report missing requirements.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.config.sections import StrategyName
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.strategies import registry
from ddpjob_trainer.strategies.contrib.deepspeed import settings
from ddpjob_trainer.strategies.registry import open_strategy
from libraries import horovod_site
from machine import slowness
from ranks import TINY, Ended, Prepare, final_losses, finish, metrics, start, stop_at, torchrun

from scripts import install_horovod

# Five micro-batches, each with its own statistics, so that ranks have different numbers of them.
# Eight steps.
SETTINGS = [*TINY, "train.epochs=1", "train.timeout_seconds=600", "data.micro_batches=5", "model.norm=batch"]
# Without batch statistics, rounding cannot move a batch's mean across a kink of the network, so
# weights can be compared as well. There are two groups of parameters, and ZeRO keeps each of them
# in one vector.
SMOOTH = ["model.norm=group", "optim.decay_norm_and_bias=false", "optim.clip_norm=0.5"]

# Covers float32 sums in a different order: 4e-7 was seen after 16 steps. Leaving out one sample of
# a step changes the loss by 1e-3.
TOLERANCE = 1e-5

DEEPSPEED = [f"strategy=deepspeed deepspeed.stage={stage}" for stage in range(4)]
HOROVOD, SERVER = "strategy=horovod", "strategy=parameter_server"


def run(world: int, arguments: list[str], prepare: Prepare | None = None) -> list[Ended]:
    """Run ranks with a long timeout, because importing the libraries takes a long time on a busy
    machine.
    """
    return finish(start(world, arguments, prepare), timeout=180)


def good(world: int, arguments: list[str], prepare: Prepare | None = None) -> None:
    ended = run(world, arguments, prepare)
    assert [end.code for end in ended] == [0] * world, ended


@pytest.fixture(scope="module")
def horovod() -> str:
    """Return a folder with a real Horovod."""
    site = str(horovod_site())
    sys.path.append(site)
    importlib.import_module("horovod.torch")  # imported once here, so forked ranks have it
    return site


@pytest.fixture(scope="module")
def deepspeed() -> None:
    """Import DeepSpeed once here, so that forked ranks have it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
    importlib.import_module(
        "deepspeed.runtime.zero.muon.muon_optimizer"
    )  # DeepSpeed's engine imports this, which also imports the compiler


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Callable[[str], Prepare]:
    """Return hooks that let ranks import a strategy's library. Skip the test if it is not
    available.
    """

    def prepare(strategy: str) -> Prepare:
        name = strategy.split()[0].removeprefix("strategy=")
        if name == "horovod":
            request.getfixturevalue("horovod")
        if name == "deepspeed":
            request.getfixturevalue("deepspeed")
        return lambda rank: None

    return prepare


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one process without interruption."""
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*SETTINGS, "strategy=single", f"checkpoint.dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train like `alone`, but without batch statistics."""
    folder = tmp_path_factory.mktemp("smooth")
    good(1, [*SETTINGS, *SMOOTH, "strategy=single", f"checkpoint.dir={folder}"])
    return folder


def newest(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return torch.load(max(folder.glob("step-*.*")), weights_only=True)


def both(*prepares: Prepare) -> Prepare:
    def prepare(rank: int) -> None:
        for one in prepares:
            one(rank)

    return prepare


def halves_and_doubles(strategy: str) -> Prepare:
    """Return a hook that halves the gradients and then doubles them with the scaling for unreadable
    samples. If the scaling works, the result is bit-identical.
    """

    def prepare(rank: int) -> None:
        named = StrategyName(strategy.split()[0].removeprefix("strategy="))
        module, _, name = registry._CLASSES[named].partition(":")
        kind = getattr(importlib.import_module(module), name)
        weight, update = kind.weight, kind.update
        kind.weight = lambda self, count: weight(self, count) / 2
        kind.update = lambda self, rate: (self.scale_gradients(2.0), update(self, rate))[1]

    return prepare


def deviation(folder: Path, reference: Path) -> float:
    """Return the largest difference between two loss curves."""
    return float(np.abs(np.array(final_losses(folder / "run")) - np.array(final_losses(reference / "run"))).max())


@pytest.mark.parametrize(
    ("strategy", "world"), [(HOROVOD, 3), (SERVER, 3), (DEEPSPEED[0], 2), (DEEPSPEED[2], 3), (DEEPSPEED[3], 2)]
)
def test_losses_weights_and_optimizer_state_match_one_process(
    strategy: str, world: int, smooth: Path, tmp_path: Path, library: Callable[[str], Prepare]
) -> None:
    good(
        world,
        [*SETTINGS, *SMOOTH, *strategy.split(), f"checkpoint.dir={tmp_path}"],
        prepare=both(library(strategy), halves_and_doubles(strategy)),
    )
    assert deviation(tmp_path, smooth) < TOLERANCE
    ours, theirs = newest(tmp_path), newest(smooth)
    assert ours["model"].keys() == theirs["model"].keys()
    for name, value in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys() != set()
    for name, state in theirs["optimizer"]["state"].items():
        torch.testing.assert_close(ours["optimizer"]["state"][name], state, rtol=TOLERANCE, atol=TOLERANCE)
    (own,), (other,) = (metrics(folder / "run", "eval")[-1:] for folder in (tmp_path, smooth))
    assert own["accuracy"] == other["accuracy"] and own["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)


@pytest.mark.parametrize(
    "walk",
    [
        [(HOROVOD, 2), (HOROVOD, 3), (SERVER, 2)],
        [(DEEPSPEED[3], 2), (DEEPSPEED[2], 3), (SERVER, 3), (DEEPSPEED[1], 1)],
    ],
    ids=["horovod", "deepspeed"],
)
def test_a_stopped_run_resumes_with_a_different_strategy_and_number_of_ranks(
    walk: list[tuple[str, int]], alone: Path, tmp_path: Path, library: Callable[[str], Prepare]
) -> None:
    """Each incarnation takes two steps, saves and exits. The last one ends the training."""
    for incarnation, (strategy, world) in enumerate(walk):
        last = incarnation == len(walk) - 1
        prepare = library(strategy) if last else both(library(strategy), stop_at(2 + 2 * incarnation))
        ended = run(world, [*SETTINGS, *strategy.split(), f"checkpoint.dir={tmp_path}"], prepare=prepare)
        assert [end.code for end in ended] == [0 if last else 75] * world, ended
    assert [row["world"] for row in metrics(tmp_path / "run", "start")] == [world for _, world in walk]
    assert deviation(tmp_path, alone) < TOLERANCE


def forgets_the_mean(rank: int) -> None:
    """Deliberate defect: the gradients are not multiplied by the number of ranks, although
    DeepSpeed divides by it.
    """
    from ddpjob_trainer.strategies.contrib.deepspeed import DeepSpeed

    DeepSpeed.weight = lambda self, count: 1 / count  # type: ignore[method-assign]


def averages_over_ranks(rank: int) -> None:
    """Deliberate defect: the mean of the ranks' own means is taken, as many scripts do. It is wrong
    if the ranks have different numbers of samples.
    """
    from ddpjob_trainer.strategies.contrib.horovod import Horovod

    backward = Horovod.backward

    def by_rank(self, micro_batches, count):  # type: ignore[no-untyped-def]
        pairs = list(micro_batches)
        own = sum(len(micro.samples) for micro, _ in pairs if micro.counts)
        self.weight = lambda _: 1 / (own * self.group.world)
        return backward(self, pairs, count)

    Horovod.backward = by_rank  # type: ignore[method-assign]


def loses_a_worker(rank: int) -> None:
    from ddpjob_trainer.strategies.contrib import parameter_server

    take = parameter_server._ServerBuffer.take
    parameter_server._ServerBuffer.take = lambda self, ranks: take(self, ranks)[:-1]  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("strategy", "defect"), [(HOROVOD, averages_over_ranks), (SERVER, loses_a_worker), (DEEPSPEED[1], forgets_the_mean)]
)
def test_a_deliberate_defect_changes_the_loss_curve(
    strategy: str, defect: Prepare, alone: Path, tmp_path: Path, library: Callable[[str], Prepare]
) -> None:
    arguments = [*SETTINGS, *strategy.split(), f"checkpoint.dir={tmp_path}"]
    ended = run(3, arguments, prepare=both(library(strategy), defect))
    assert any(end.code for end in ended) or deviation(tmp_path, alone) > 10 * TOLERANCE


@pytest.mark.parametrize("strategy", [HOROVOD, SERVER])
def test_after_a_rank_is_killed_the_others_exit_and_training_can_resume(
    strategy: str, alone: Path, tmp_path: Path, library: Callable[[str], Prepare]
) -> None:
    def dies(rank: int) -> None:
        from ddpjob_trainer.reporting.ledger import Ledger

        write = Ledger.step

        def step(self, number, taken):  # type: ignore[no-untyped-def]
            if number == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, number, taken)

        Ledger.step = step  # type: ignore[method-assign]

    arguments = [*SETTINGS, *strategy.split(), "checkpoint.every_steps=2", f"checkpoint.dir={tmp_path}"]
    # Without exiting, the other ranks would wait ten minutes for a collective.
    ended = run(3, arguments, prepare=both(library(strategy), dies))
    assert ended[1].code == -signal.SIGKILL and all(end.code not in (0, 75) for end in ended), ended
    good(2, arguments, prepare=library(strategy))
    assert deviation(tmp_path, alone) < TOLERANCE


def test_a_worker_keeps_the_servers_state_if_folders_are_not_shared(alone: Path, tmp_path: Path) -> None:
    """There are three nodes. The server's folder is lost between two incarnations."""

    def node(rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "DDPJOB_CHECKPOINT_DIR": str(tmp_path / str(rank))}

    arguments = [*SETTINGS, SERVER, "checkpoint.shared=false"]
    assert [end.code for end in finish(start(3, arguments, stop_at(4), node), timeout=180)] == [75] * 3
    shutil.rmtree(tmp_path / "0")
    assert [end.code for end in finish(start(3, arguments, env=node), timeout=180)] == [0] * 3
    losses = [row["loss"] for row in metrics(tmp_path / "0" / "run", "step")]
    np.testing.assert_allclose(losses, final_losses(alone / "run")[-len(losses) :], rtol=TOLERANCE)
    assert 0 < len(losses) < 8


@pytest.mark.slow
def test_horovodrun_starts_the_ranks(horovod: str, alone: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join([horovod, *sys.path]), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "ddpjob_trainer", *SETTINGS, HOROVOD, f"checkpoint.dir={tmp_path}"]
    command = [sys.executable, str(Path(horovod) / "bin" / "horovodrun"), "-np", "2", "-H", "localhost:2", *program]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240 * slowness()
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["world"] for row in metrics(tmp_path / "run", "start")] == [2]
    assert deviation(tmp_path, alone) < TOLERANCE


@pytest.mark.slow
def test_torchrun_starts_a_parameter_server(alone: Path, tmp_path: Path) -> None:
    """torchrun's agent serves the store in which the RPC group meets."""
    process = torchrun(3, [*SETTINGS, SERVER, f"checkpoint.dir={tmp_path}"], tmp_path)
    assert process.wait(240 * slowness()) == 0, (tmp_path / "out.txt").read_text()
    assert deviation(tmp_path, alone) < TOLERANCE


def test_results_with_fp16_compression_are_close_but_not_equal(
    alone: Path, tmp_path: Path, library: Callable[[str], Prepare]
) -> None:
    """fp16 gradients have 11 bits, so the loss changes in the fourth digit at most."""
    good(2, [*SETTINGS, HOROVOD, "horovod.compression=fp16", f"checkpoint.dir={tmp_path}"], prepare=library(HOROVOD))
    assert 0 < deviation(tmp_path, alone) < 2e-3
    assert deviation(tmp_path, alone) > deviation(alone, alone)


def test_deepspeed_counts_each_step_only_once(deepspeed: None, tmp_path: Path) -> None:
    """The step count is right after a restart, with two groups of parameters."""
    arguments = [
        *SETTINGS,
        *SMOOTH,
        *DEEPSPEED[1].split(),
        "optim.name=adamw",
        "optim.lr=0.001",
        f"checkpoint.dir={tmp_path}",
    ]
    assert [end.code for end in run(2, arguments, prepare=stop_at(4))] == [75] * 2
    good(2, arguments)
    assert {float(state["step"]) for state in newest(tmp_path)["optimizer"]["state"].values()} == {8.0}


def test_deepspeed_continues_from_a_state_with_frozen_weights(deepspeed: None, tmp_path: Path) -> None:
    keys = [*SETTINGS, "optim.name=adamw", "optim.lr=0.01", "optim.ema_decay=0.5", f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, [*keys, "model.freeze=features.*"], prepare=stop_at(4))] == [75]
    first = newest(tmp_path)["model"]
    good(2, [*keys, *DEEPSPEED[2].split()])
    last = newest(tmp_path)
    assert not any(torch.equal(value, last["model"][name]) for name, value in first.items() if "weight" in name)
    assert any(name.startswith("features.") for name in last["optimizer"]["state"])


def test_deepspeed_computes_in_short_formats_and_needs_no_launcher(deepspeed: None, tmp_path: Path) -> None:
    """DeepSpeed's engine leaves CUDA's autocast before it calls the model."""

    def bare(rank: int) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        forward = DeepSpeedEngine.forward

        def without_autocast(self: DeepSpeedEngine, *inputs: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                outputs: torch.Tensor = forward(self, *inputs)
            return outputs

        DeepSpeedEngine.forward = without_autocast
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]

    arguments = [*SETTINGS, "amp.level=O1"]
    good(1, [*arguments, "strategy=single", f"checkpoint.dir={tmp_path / 'single'}"])
    good(1, [*arguments, *DEEPSPEED[1].split(), f"checkpoint.dir={tmp_path / 'deepspeed'}"], prepare=bare)
    assert deviation(tmp_path / "deepspeed", tmp_path / "single") < TOLERANCE


def test_a_step_with_gradients_that_are_not_finite_is_skipped(
    tmp_path: Path, library: Callable[[str], Prepare]
) -> None:
    """The learning rate makes float32 overflow immediately. The weights must not change with any
    strategy.
    """

    def explodes(rank: int) -> None:
        from ddpjob_trainer.strategies.strategy import Strategy

        weight = Strategy.loss
        Strategy.loss = lambda self, *arguments: weight(self, *arguments) * 1e38 * 1e38  # type: ignore[method-assign]

    for strategy in (SERVER, DEEPSPEED[2]):
        folder = tmp_path / strategy.split()[0]
        ended = run(
            2, [*SETTINGS, *strategy.split(), f"checkpoint.dir={folder}"], prepare=both(library(strategy), explodes)
        )
        assert all("TrainingError" in end.error for end in ended), ended


# ------------------------------------------------------------ invalid input


def test_a_single_rank_cannot_be_a_parameter_server(tmp_path: Path) -> None:
    (ended,) = run(1, [*TINY, SERVER, f"checkpoint.dir={tmp_path}"])
    assert ended.code == 1 and "ConfigError" in ended.error and "start at least 2 ranks" in ended.error


@pytest.mark.parametrize(
    ("name", "remedy"), [("horovod", "scripts/install_horovod.py"), ("deepspeed", "pip install deepspeed")]
)
def test_a_missing_library_is_reported_with_the_command_to_install_it(name: str, remedy: str, tmp_path: Path) -> None:
    def without(rank: int) -> None:
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]
        sys.modules[name] = None  # type: ignore[assignment]

    (ended,) = run(1, [*TINY, f"strategy={name}", f"checkpoint.dir={tmp_path}"], prepare=without)
    assert ended.code == 1 and "ConfigError" in ended.error and remedy in ended.error
    assert not list(tmp_path.glob("step-*"))


def read(*arguments: str) -> config.Config:
    return config.load(None, ["strategy=deepspeed", *arguments])


def test_the_trainer_overrides_the_deepspeed_file_and_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    zero = {"reduce_bucket_size": 1000, "stage": 2}
    file.write_text(
        json.dumps({"train_batch_size": 64, "fp16": {"enabled": True}, "bf16": "auto", "zero_optimization": zero})
    )
    found = settings(read(f"deepspeed.config={file}", "deepspeed.stage=2", "optim.clip_norm=1.5"), Group(0, 2, 0, 2))
    assert found["zero_optimization"] == {"reduce_bucket_size": 1000, "stage": 2}
    assert (
        found["train_batch_size"] == 2
        and found["gradient_clipping"] == 1.5
        and "fp16" not in found
        and "bf16" not in found
    )
    said = capsys.readouterr().err
    assert "ignoring fp16, " in said and "; set amp.*, " in said and "data.batch" in said and "bf16" not in said


@pytest.mark.parametrize(
    ("content", "arguments", "remedy"),
    [
        (None, [], "does not exist"),
        ("{", [], "cannot be read as JSON"),
        ("[]", [], "is not a JSON object"),
        ('{"zero_optimization": {"stage": 3}}', ["deepspeed.stage=1"], "set deepspeed.stage=3"),
        ("{}", ["deepspeed.stage=4"], "use 0, 1, 2 or 3"),
        ("{}", ["deepspeed.stage=1", "optim.name=lars"], "set deepspeed.stage=0"),
        ("{}", ["deepspeed.stage=3", "optim.ema_decay=0.9"], "set deepspeed.stage=2"),
    ],
)
def test_deepspeed_settings_that_do_not_fit_are_reported(
    content: str | None, arguments: list[str], remedy: str, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=remedy):
        settings(read(f"deepspeed.config={file}", *arguments), Group())


@pytest.mark.parametrize("arguments", [["amp.level=O1", "amp.dtype=float16"], ["amp.loss_scale=128"]])
def test_deepspeed_does_not_scale_losses(arguments: list[str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"strategy=deepspeed does not scale losses; set amp.dtype=bfloat16 and leave out amp.loss_scale",
    ):
        open_strategy(read(*arguments), Group(), torch.device("cpu"))


def test_a_horovod_without_cuda_is_refused_on_a_gpu(horovod: str) -> None:
    if importlib.import_module("horovod.torch").cuda_built():
        pytest.skip("this Horovod is built with CUDA")
    with pytest.raises(
        ConfigError, match=r"HOROVOD_GPU_OPERATIONS=NCCL python scripts/install_horovod.py .* set train.backend=gloo"
    ):
        open_strategy(config.load(None, [HOROVOD]), Group(), torch.device("cuda"))


def test_other_strategies_import_none_of_the_libraries() -> None:
    program = (
        "import sys; from ddpjob_trainer import config, train; config.load(None, []);"
        " print([n for n in sys.modules if n in {names}])"
    )
    names = ("deepspeed", "horovod", "psutil", "torch.distributed.rpc.api")
    command = [sys.executable, "-c", program.format(names=names[:3])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    assert {StrategyName.HOROVOD, StrategyName.DEEPSPEED, StrategyName.PARAMETER_SERVER} < set(StrategyName)


# ------------------------------------------------------------ the installation


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").write_text(
        'set(CMAKE_CXX_STANDARD 14)\nstring(PREPEND GLOO "set(CMAKE_CXX_STANDARD 17)\\n")\n'
    )
    (tmp_path / "horovod" / "torch" / "CMakeLists.txt").write_text("    set(CMAKE_CXX_STANDARD 14)\n")
    yield tmp_path


def test_the_horovod_installer_sets_the_cpp_standard_everywhere(source: Path) -> None:
    assert install_horovod.patch(source) == 3
    texts = [file.read_text() for file in source.rglob("CMakeLists.txt")]
    assert sum(text.count("set(CMAKE_CXX_STANDARD 20)") for text in texts) == 3
    with pytest.raises(SystemExit, match="not the source of Horovod"):
        install_horovod.patch(source)


def test_the_horovod_installer_uses_every_processor_even_under_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make passes on its own flags, which allow only a single job. Regression: the build took more
    than 15 minutes.
    """
    environments: list[dict[str, str] | None] = []

    def pip(python: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        if arguments[0] == "download":
            (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 14)\n")
            folder = arguments[-2].removeprefix("--dest=")
            with tarfile.open(f"{folder}/horovod-{install_horovod.VERSION}.tar.gz", "w:gz") as archive:
                archive.add(tmp_path / "CMakeLists.txt", f"horovod-{install_horovod.VERSION}/CMakeLists.txt")
        elif arguments[0] == "wheel":
            environments.append(env)
            raise SystemExit("far enough")

    monkeypatch.setattr(install_horovod, "pip", pip)
    monkeypatch.setattr(install_horovod, "missing_tools", list)
    monkeypatch.setenv("MAKEFLAGS", " -- PYTEST=-x")
    with pytest.raises(SystemExit, match="far enough"):
        install_horovod.build(sys.executable, {"torch": "2.6.0", "tag": "cpython-311", "missing": []})
    [environment] = environments
    assert environment is not None and environment["MAKEFLAGS"] == f"-j{len(os.sched_getaffinity(0))}"


def test_the_horovod_installer_reports_missing_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(install_horovod.missing_tools()) == 3
    with pytest.raises(SystemExit, match=r"CMake .* make .* a C\+\+ compiler"):
        install_horovod.install(sys.executable, tmp_path / "site")
    with pytest.raises(SystemExit, match="pass the path of a Python interpreter"):
        install_horovod.install("/bin/false")


def test_horovod_wheels_are_cached_by_the_versions_for_which_they_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = install_horovod.probe(sys.executable)
    assert facts["torch"] == torch.__version__
    folders = {install_horovod.wheel_folder(facts), install_horovod.wheel_folder({**facts, "torch": "2.6.0+cpu"})}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    folders.add(install_horovod.wheel_folder(facts))
    assert len(folders) == 3 and all(folder.parent == tmp_path / "ddpjob" / "horovod" for folder in folders)
