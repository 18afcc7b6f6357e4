"""The functions that a custom training loop imports. Their names, signatures and docstrings are on
a documentation page.
"""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddpjob_trainer import api
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError, TrainingError

API = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_api.py"))


def test_the_page_of_the_api_shows_every_name_and_signature() -> None:
    """A change to the public interface also changes this page, so reviewers see it."""
    assert API["file"]("own-scripts.md").read_text() == API["made"]("own-scripts.md"), (
        "run: python docs/generate_api.py"
    )


def test_every_name_and_method_of_the_api_is_described() -> None:
    for name in api.__all__:
        value = getattr(api, name)
        if not callable(value):
            continue
        assert inspect.getdoc(value), name
        for inner, member in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(member) and not inner.startswith("_"):
                assert inspect.getdoc(member), f"{name}.{inner}"


def test_the_trainers_loop_is_not_part_of_the_api() -> None:
    """A custom script does not need strategies and reports."""
    code = "import sys, ddpjob_trainer.api; print(*(name for name in sys.modules if name.startswith('ddpjob_trainer')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ddpjob_trainer.train", "ddpjob_trainer.strategies", "ddpjob_trainer.model"} & set(loaded)


def test_checkpoints_go_to_the_jobs_checkpoint_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert api.CheckpointFolder.open(Group()).path == Path("checkpoints")
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path / "job"))
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "false")
    assert api.CheckpointFolder.open(Group(), every_steps=3).path == tmp_path / "job"
    assert not (tmp_path / "job" / "fence.json").exists(), "each node has its own folder"
    with pytest.raises(
        ConfigError, match=r"CheckpointFolder.open: unknown key 'every_step'; did you mean 'every_steps'"
    ):
        api.CheckpointFolder.open(Group(), every_step=3)
    with pytest.raises(ConfigError, match=r"keep: must be a whole number, not 'all'"):
        api.CheckpointFolder.open(Group(), keep="all")


@pytest.mark.parametrize("setting", [{"load": "weights.pt"}, {"load_average": False}, {"load_except": ["fc.*"]}])
def test_options_of_the_built_in_trainer_are_refused(
    setting: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"open: {next(iter(setting))} applies only to the built-in trainer.*torch.load"
    ):
        api.CheckpointFolder.open(Group(), **setting)


def state(**more: Any) -> dict[str, Any]:
    return {"step": 1, "sampler": api.ElasticSampler(10, 4).state_dict(), **more}


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"loss": np.float64(0.5)}, r"numpy.float64 at state\['loss'\]"),
        ({"random": {"numpy": np.random.get_state()}}, r"numpy.ndarray at state\['random'\]\['numpy'\]\[1\]"),
        ({"rates": {np.int64(3): 0.1}}, r"numpy.int64 at state\['rates'\], a key"),
        ({"pair": Pair(1, 2)}, r"Pair at state\['pair'\]"),
        ({"rule": lambda step: step}, r"builtins.function at state\['rule'\]"),
    ],
)
def test_a_state_that_could_not_be_read_back_is_not_saved(
    more: dict[str, Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, checkpoints would be written that torch.load rejects when they are needed."""
    monkeypatch.chdir(tmp_path)
    checkpoints = api.CheckpointFolder.open(Group())
    with pytest.raises(CheckpointError, match=rf"the state to save has a .*{where}, which a resume could not read"):
        checkpoints.save(lambda: state(**more), 1)
    with pytest.raises(CheckpointError, match=r"add sampler.state_dict\(\) under the key 'sampler'"):
        checkpoints.save(lambda: {"step": 1}, 1)
    assert not list(checkpoints.path.glob("step-*"))


def test_a_state_that_contains_itself_is_refused_with_the_name_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner: dict[str, Any] = {}
    inner["again"] = [inner]
    with pytest.raises(CheckpointError, match=r"contains itself at state\['own'\]\['again'\]\[0\]; leave that key"):
        api.CheckpointFolder.open(Group()).save(lambda: state(own=inner), 1)


def test_a_readable_state_survives_a_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole = state(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10).state_dict(),
        scaler=torch.amp.GradScaler("cpu").state_dict(),
        others=[torch.get_rng_state(), torch.float16, torch.device("cpu"), torch.Size([2]), b"1", None, True, (1, "a")],
    )
    checkpoints = api.CheckpointFolder.open(Group())
    checkpoints.save(lambda: whole, 1)
    checkpoints.finish()
    found = checkpoints.newest()
    assert found is not None and found.keys() == whole.keys() and found["others"][1:] == whole["others"][1:]
    optimizer.load_state_dict(found["optimizer"])


def test_arguments_that_leave_a_rank_without_samples_are_refused() -> None:
    for numbers in ((2, 0), (2, 1), (-1, 2), (0, 0)):  # in the first two cases, rank and world are swapped
        with pytest.raises(ConfigError, match=r"Dealing: rank=.* pass Dealing\(group.rank, group.world\)"):
            api.Dealing(*numbers)
    for settings in ({"micro_batches": -1}, {"accumulate": 0}):
        with pytest.raises(ConfigError, match=r"Dealing: (micro_batches|accumulate)=.*: must be at least"):
            api.Dealing(0, 1, **settings)
    for settings in ({"size": 0, "batch": 4}, {"size": 4, "batch": -1}, {"size": 4, "batch": 2, "repeats": 0}):
        with pytest.raises(
            ConfigError, match=r"ElasticSampler: (size|batch|repeats)=.* must be an integer of at least 1"
        ):
            api.ElasticSampler(**settings)


def test_an_evaluation_with_a_wrong_count_is_refused() -> None:
    """If only 3 of 4 samples were counted, the top-5 accuracy could be 133 %."""
    accumulator = api.Accumulator(classes=3)
    accumulator.add(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(TrainingError, match=r"counted=3 on rank 0, but 4 samples were added"):
        accumulator.reduce(Group(), 3)
    assert accumulator.reduce(Group(), 4).samples == 4
