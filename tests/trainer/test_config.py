"""Configuration: keys, types, files, environment, help; each mistake is named with its remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob_trainer import config, fields
from ddpjob_trainer.errors import ConfigError


def test_argument_beats_file_beats_environment_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", "/from/env")
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "0")
    monkeypatch.setenv("DDPJOB_BACKEND", "gloo")
    file.write_text("optim: {lr: 1e-3, momentum: 0.5}\ntrain.epochs: 4\ntrain: {backend: nccl}\n")
    read = config.load(str(file), ["optim.momentum=0.8"])
    assert (read.optim.lr, read.optim.momentum, read.train.epochs, read.train.backend) == (1e-3, 0.8, 4, "nccl")
    assert (read.checkpoint.dir, read.checkpoint.shared, read.run_dir) == (Path("/from/env"), False, Path("/from/env/run"))


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDPJOB_DATA_DIR", "~/data")
    read = config.load(None, ["checkpoint.dir=~/c"])
    assert (read.checkpoint.dir, read.data.dir) == (tmp_path / "c", tmp_path / "data")
    with pytest.raises(ConfigError, match=r"checkpoint.dir: '~nobody-of-this-name/c' is not valid: expected path"):
        config.load(None, ["checkpoint.dir=~nobody-of-this-name/c"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("optim=1", "it is a section; give one of its keys, such as optim.name"),
        ("optim.lr=fast", "optim.lr: 'fast' is not valid: expected number"),
        ("train.epochs=1.5", "train.epochs: 1.5 is not valid: expected whole number"),
        ("train.epochs=0", "train.epochs: 0 is not above 0"),
        ("data.name=digit", "did you mean 'digits'?"),
        ("optim.nesterov=maybe", "expected true or false"),
        ("optim.lr", "is not key=value"),
        ("data.shape={a: 1}", "expected|is not a list"),
        ("optim.lr=[", "is not YAML"),
    ],
)
def test_mistakes_are_named_with_the_remedy(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [argument])
    assert any(part in str(caught.value) for part in message.split("|"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML"), ("- 1", "holds a list"), ("optim: {lr: x}", "c.yaml: optim.lr: 'x'"), ("3: 4", "is not text")],
)
def test_bad_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        config.load(str(tmp_path / "c.yaml"), [])


def test_missing_files_are_named() -> None:
    with pytest.raises(ConfigError, match=r"configuration file nothing.yaml does not exist"):
        config.load("nothing.yaml", [])
    with pytest.raises(ConfigError, match="write a path or one of cifar10, cifar10-fast, digits, imagenet"):
        config.load("digit", [])


@pytest.mark.parametrize("name", config.shipped())
def test_shipped_configurations_load(name: str) -> None:
    assert config.load(name, []).train.name == name


def test_every_key_has_help_and_survives_the_way_to_a_checkpoint() -> None:
    text = fields.help_text(config.Config)
    for field in fields.walk(config.Config):
        assert f"  {field.key}=" in text and field.doc, field.key
    flat = config.load("imagenet", ["checkpoint.dir=/c"]).flat()
    again = [f"{key}={value}" for key, value in flat.items() if value is not None]
    assert config.load(None, again).flat() == flat


def test_command_line_help_and_error() -> None:
    shown = subprocess.run([sys.executable, "-m", "ddpjob_trainer", "--help"], capture_output=True, text=True, check=True).stdout
    assert "optim.warmup_epochs=0.0   (number)" in shown and "from DDPJOB_DATA_DIR" in shown
    failed = subprocess.run([sys.executable, "-m", "ddpjob_trainer", "data.nam=x"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and failed.stderr == "error: argument: unknown key 'data.nam'; did you mean 'data.name'?\n"
