"""What a loop of one's own imports: the page is its golden list of names, signatures and docstrings."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob_trainer import api
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError

API = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_api.py"))


def test_the_page_shows_every_name_and_signature() -> None:
    """A change of the public surface is one of this page, which a review sees."""
    assert API["file"]("own-loop.md").read_text() == API["made"]("own-loop.md"), "run: python docs/generate_api.py"


def test_every_name_and_method_is_described() -> None:
    for name in api.__all__:
        value = getattr(api, name)
        if not callable(value):
            continue
        assert inspect.getdoc(value), name
        for inner, member in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(member) and not inner.startswith("_"):
                assert inspect.getdoc(member), f"{name}.{inner}"


def test_the_loop_of_the_trainer_is_no_part_of_it() -> None:
    """A script of one's own does not pay for strategies and reports."""
    code = "import sys, ddpjob_trainer.api; print(*(name for name in sys.modules if name.startswith('ddpjob_trainer')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ddpjob_trainer.train", "ddpjob_trainer.strategies", "ddpjob_trainer.model"} & set(loaded)


def test_the_folder_is_the_job_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert api.CheckpointFolder.open(Group()).path == Path("checkpoints")
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path / "job"))
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "false")
    assert api.CheckpointFolder.open(Group(), every_steps=3).path == tmp_path / "job"
    assert not (tmp_path / "job" / "fence.json").exists(), "each node has its own"
    with pytest.raises(
        ConfigError, match=r"CheckpointFolder.open: unknown key 'every_step'; did you mean 'every_steps'"
    ):
        api.CheckpointFolder.open(Group(), every_step=3)
    with pytest.raises(ConfigError, match=r"keep: 'all' is not valid: expected whole number"):
        api.CheckpointFolder.open(Group(), keep="all")


@pytest.mark.parametrize("setting", [{"load": "weights.pt"}, {"load_average": False}, {"load_except": ["fc.*"]}])
def test_what_only_the_built_in_trainer_does_is_refused(
    setting: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"open: {next(iter(setting))} is of the built-in trainer .*torch.load"):
        api.CheckpointFolder.open(Group(), **setting)
