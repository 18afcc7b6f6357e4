"""Configuration: keys, types, files, environment and help. Each mistake is reported with its
remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob.missing_package import INSTALL
from ddpjob_trainer import config
from ddpjob_trainer.commands import dispatch
from ddpjob_trainer.config import loader, other_names
from ddpjob_trainer.config.command_line import without_local_rank
from ddpjob_trainer.config.sections import Interval
from ddpjob_trainer.errors import ConfigError
from ranks import TINY


def test_arguments_override_files_which_override_the_environment_and_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", "/from/env")
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "0")
    monkeypatch.setenv("DDPJOB_BACKEND", "gloo")
    file.write_text("optim: {lr: 1e-3, momentum: 0.5}\ntrain.epochs: 4\ntrain: {backend: nccl}\n")
    read = config.load(str(file), ["optim.momentum=0.8"])
    assert (read.optim.lr, read.optim.momentum, read.train.epochs, read.train.backend) == (1e-3, 0.8, 4, "nccl")
    assert (read.checkpoint.dir, read.checkpoint.shared, read.run_dir) == (
        Path("/from/env"),
        False,
        Path("/from/env/run"),
    )


def test_a_path_may_begin_with_a_tilde_for_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDPJOB_DATA_DIR", "~/data")
    read = config.load(None, ["checkpoint.dir=~/c"])
    assert (read.checkpoint.dir, read.data.dir) == (tmp_path / "c", tmp_path / "data")
    with pytest.raises(ConfigError, match=r"checkpoint.dir: must be a path, not '~nobody-of-this-name/c'"):
        config.load(None, ["checkpoint.dir=~nobody-of-this-name/c"])


@pytest.mark.parametrize(("text", "number"), [("017", 17), ("018", 18), ("-017", -17), ("00", 0)])
def test_a_number_with_leading_zeros_is_decimal(text: str, number: int) -> None:
    assert config.load(None, [f"data.seed={text}"]).data.seed == number


def test_a_value_such_as_1_30_is_not_read_as_a_number() -> None:
    with pytest.raises(ConfigError, match="1:30"):
        config.load(None, ["data.batch=1:30"])


@pytest.mark.parametrize("text", ["007", "1.10", "1e3", "0x10", "1_000", "1:30"])
def test_a_name_that_looks_like_a_number_stays_a_string(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"train: {{name: {text}}}\ncheckpoint: {{dir: {text}}}\n")
    for loaded in (
        config.load(str(tmp_path / "c.yaml"), []),
        config.load(None, [f"train.name={text}", f"checkpoint.dir={text}"]),
    ):
        assert loaded.train.name == text and loaded.checkpoint.dir == Path(text)
    assert type(config.load(None, ["data.seed=007"]).data.seed) is int
    assert type(config.load(None, ["optim.lr=1.10"]).optim.lr) is float


def test_a_single_number_is_accepted_as_a_list() -> None:
    assert config.load(None, ["optim.schedule=step", "optim.milestones=30"]).optim.milestones == (30.0,)


def test_the_name_of_a_folder_may_be_a_date(tmp_path: Path) -> None:
    """YAML reads the name as a date. Regression: the name was rejected because it is not a path."""
    (tmp_path / "c.yaml").write_text("checkpoint: {dir: 2026-1-5}\n")
    assert config.load(str(tmp_path / "c.yaml"), []).checkpoint.dir == Path("2026-1-5")
    assert config.load(None, ["checkpoint.dir=2026-11-26"]).checkpoint.dir == Path("2026-11-26")


def test_a_pattern_in_a_list_may_begin_with_a_star_and_follow_a_space() -> None:
    assert config.load(None, ["model.freeze=*.bias"]).model.freeze == ("*.bias",)
    assert config.load(None, ["model.freeze=*.bias, norm.*"]).model.freeze == ("*.bias", "norm.*")


def test_a_large_integer_keeps_its_exact_value() -> None:
    assert config.load(None, ["data.seed=9007199254740993"]).data.seed == 2**53 + 1
    assert config.load(None, ["train.epochs=1e3"]).train.epochs == 1000


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("train.lr=1", "unknown key 'train.lr'; did you mean 'optim.lr'?"),
        ("strategy.name=ddp", "did you mean 'strategy'?"),
        ("train.seed=1", "did you mean 'data.seed'?"),
        ("train.batch=64", "did you mean 'data.batch' or 'train.eval_batch'?"),
        ("train.precision=bf16", "did you mean 'amp.level'? (amp.level=O1"),
        ("optim=1", "is a section, not a key; set one of its keys, such as optim.name"),
        ("optim.lr=fast", "optim.lr: must be a number, not 'fast'"),
        ("train.epochs=1.5", "train.epochs: must be a whole number, not 1.5"),
        ("train.epochs=0", "train.epochs=0: must be above 0"),
        ("train.eval_every=-1", "train.eval_every=-1: must be at least 0; 0 means never"),
        ("train.timeout_seconds=nan", "train.timeout_seconds: must be a number, not 'nan'"),
        ("checkpoint.every_seconds=.nan", "checkpoint.every_seconds: must be a number or auto, not nan"),
        ("checkpoint.every_seconds=often", "must be a number or auto, not 'often'"),
        ("optim.milestones=[3,nan]", "optim.milestones: must be a number, not 'nan'"),
        ("train.timeout_seconds=inf", "train.timeout_seconds=inf: must be at most a month (2592000)"),
        ("data.seed=99999999999999999999", "data.seed=99999999999999999999: must fit into 64 bits"),
        ("data.name=digit", "did you mean 'digits'?"),
        ("optim.nesterov=maybe", "must be true or false, not 'maybe'"),
        ("optim.lr", "is not of the form key=value"),
        ("data.shape={a: 1}", "data.shape: must be a "),
        ("optim.lr=[", "is not YAML"),
        ("data.batch=0x" + "f" * 5_000, "is not YAML: a number has 5,002 characters; the limit is 100"),
        ("data.batch=" + "9" * 5_000, "is not YAML: a number has 5,000 characters; the limit is 100"),
        ('data.batch=!!int ""', "'' is not a number"),
    ],
)
def test_mistakes_in_the_configuration_are_reported_with_the_remedy(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [argument])
    assert any(part in str(caught.value) for part in message.split("|"))


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", Interval.AUTO), ("300", 300.0), ("0", 0.0), ("1e2", 100.0), (None, Interval.AUTO)]
)
def test_a_save_interval_is_a_number_of_seconds_or_auto(given: str | None, meant: float | Interval) -> None:
    arguments = [] if given is None else [f"checkpoint.every_seconds={given}"]
    assert config.load(None, arguments).checkpoint.every_seconds == meant


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--batch_size=256",
            "did you mean 'data.batch'? (data.batch is the total over all ranks; multiply",
        ),
        ("--batch-size", "did you mean 'data.batch'? (data.batch is the total over all ranks"),
        ("-b", "did you mean 'data.batch'?"),
        ("--lr", "did you mean 'optim.lr'?"),
        ("--learning_rate=0.1", "did you mean 'optim.lr'?"),
        ("--epochs", "did you mean 'train.epochs'?"),
        ("--num_epochs=3", "did you mean 'train.epochs'?"),
        ("--data", "did you mean 'data.dir'?"),
        ("--data=/d", "is a section, not a key; set one of its keys, such as data.dir"),
        ("--arch=resnet50", "did you mean 'model.name'? (torchvision's models as torchvision:resnet50)"),
        ("--workers", "did you mean 'data.workers'?"),
        ("--resume", "that is the default: a run continues from the newest checkpoint in checkpoint.dir"),
        ("--dist-backend", "did you mean 'train.backend'?"),
        ("--amp", "did you mean 'amp.level'? (amp.level=O1"),
        ("--opt-level=O1", "did you mean 'amp.level'?"),
        ("--random_seed=0", "did you mean 'data.seed'?"),
        ("--model_dir=x", "did you mean 'checkpoint.dir'?"),
        ("--dist-url", "set by torchrun, or by --spawn N --init"),
        ("--world-size=4", "set by torchrun, --spawn N, or the job's nodes"),
        ("--multiprocessing-distributed", "--spawn N starts N ranks"),
        ("--evaluate", "python -m ddpjob_trainer evaluate CHECKPOINT"),
    ],
)
def test_a_flag_known_from_tutorials_gets_a_hint_with_the_key(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [argument])
    assert message in str(caught.value)


def test_every_alternative_name_maps_to_an_existing_key() -> None:
    known = {field.key for field in loader.walk(config.Config)}
    names = [name for together in (*other_names.KEYS, *other_names.ADVICE) for name in together.split()]
    assert {text.partition(" ")[0] for text in other_names.KEYS.values()} <= known
    assert len(names) == len(set(names)) and not set(names) & known


@pytest.mark.parametrize("text", ["optim:\n  lr: 0.1\n  lr: 0.2\n", "optim: {lr: 0.1}\noptim.lr: 0.2\n"])
def test_a_key_given_twice_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c.yaml.*lr'? is given twice; remove one"):
        config.load(str(tmp_path / "c.yaml"), [])


@pytest.mark.parametrize("argument", ["--local-rank=1", "--local_rank=1", "--local-rank 1"])
def test_the_argument_of_torch_distributed_launch_sets_the_local_rank(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "")  # so that the variable is removed afterwards
    monkeypatch.delenv("LOCAL_RANK")
    assert without_local_rank(["a=1", *argument.split(), "b=2"]) == ["a=1", "b=2"] and os.environ["LOCAL_RANK"] == "1"
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert without_local_rank([argument.replace(" ", "=")]) == [] and os.environ["LOCAL_RANK"] == "5"
    with pytest.raises(ConfigError, match="--local-rank=x: must be a rank number"):
        without_local_rank(["--local-rank=x"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("evalute", "'evalute' is neither a command nor key=value; did you mean 'evaluate'?"),
        ("xyz", "the commands are ledger, preflight, checkpoint, evaluate, export, plot, shards"),
        ("train", "unknown command 'train'; to train, leave it out"),
    ],
)
def test_an_unknown_command_gets_a_hint_with_the_closest_command(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dispatch.run([word, "file"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "contains a list"),
        ("optim: {lr: x}", "c.yaml: optim.lr: must be a number, not 'x'"),
        ("3: 4", "is not a string"),
    ],
)
def test_invalid_configuration_files_are_reported(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        config.load(str(tmp_path / "c.yaml"), [])


def test_the_number_of_micro_batches_may_be_set_by_only_one_key() -> None:
    with pytest.raises(
        ConfigError, match=r"train.accumulate=2 has no effect with data.micro_batches=4, .* raise data.micro_batches"
    ):
        config.load(None, ["train.accumulate=2", "data.micro_batches=4"])


def test_keeping_the_best_epoch_requires_checkpoints_at_epochs() -> None:
    """Regression: the best checkpoint was chosen from the other checkpoints, and the best
    evaluation was silently lost.
    """
    keys = ["checkpoint.keep_best=1", "checkpoint.every_epochs=2"]
    for evaluated in (1, 3):
        with pytest.raises(ConfigError, match=rf"train.eval_every={evaluated} .* to a multiple of 2$"):
            config.load(None, [*keys, f"train.eval_every={evaluated}"])
    assert config.load(None, [*keys, "train.eval_every=4"]).checkpoint.keep_best == 1
    with pytest.raises(ConfigError, match=r"train.eval_every=0 turns them off; set train.eval_every=1"):
        config.load(None, [*keys, "train.eval_every=0"])


def test_missing_configuration_files_are_reported() -> None:
    with pytest.raises(
        ConfigError, match=f"nothing.yaml does not exist in {re.escape(str(Path.cwd()))}; pass an existing file"
    ):
        config.load("nothing.yaml", [])
    with pytest.raises(
        ConfigError, match="use a path or one of cifar10, cifar10-94, cifar10-96, cifar10-fast, digits, imagenet"
    ):
        config.load("digit", [])


def test_a_folder_of_data_may_have_the_name_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    assert config.load("cifar10", ["data.dir=cifar10"]).train.name == "cifar10"


@pytest.mark.parametrize("name", config.shipped())
def test_shipped_configurations_load(name: str) -> None:
    assert config.load(name, []).train.name == name


def test_every_key_has_help_and_is_restored_from_a_checkpoint() -> None:
    text = loader.help_text(config.Config)
    for field in loader.walk(config.Config):
        assert f"  {field.key}=" in text and field.doc, field.key
    flat = config.load("imagenet", ["checkpoint.dir=/c"]).flat()
    again = [f"{key}={value}" for key, value in flat.items() if value is not None]
    assert config.load(None, again).flat() == flat


def test_a_rank_starts_without_parsing_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing would take 0.1 s, and Python before 3.11.8 fails if two threads parse at the same
    time.
    """
    monkeypatch.setattr(loader, "_docs", lambda kind: pytest.fail(f"the source of {kind} was read"))
    read = config.load("imagenet", ["checkpoint.dir=/c"])
    assert read.flat()


def test_the_help_lists_keys_with_their_types_and_environment_variables() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ddpjob_trainer", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "optim.warmup_epochs=0.0   (number)" in shown and "from DDPJOB_DATA_DIR" in shown


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpjob_trainer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_invalid_arguments_exit_with_2_and_in_a_pod_with_78(tmp_path: Path) -> None:
    """The launcher copies the error file's message to the job's status."""
    failed = ended("data.nam=x")
    text = "argument: unknown key 'data.nam'; did you mean 'data.name'?"
    assert (failed.returncode, failed.stderr) == (2, f"error: {text}\n")
    file = tmp_path / "error.json"
    failed = ended("data.nam=x", DDPJOB_POD="job-0-0", TORCHELASTIC_ERROR_FILE=str(file))
    assert failed.returncode == 78 and text in json.loads(file.read_text())["message"]["message"]
    late = [*TINY, "data.batch=0", f"checkpoint.dir={tmp_path}"]
    assert ended(*late, DDPJOB_POD="job-0-0").returncode == 78, "after the settings are read"
    assert ended("--spawn", "2", *late).returncode == 2
    assert ended("data.name=imagefolder", f"data.dir={tmp_path}/x").returncode == 1, "the folder may be mounted later"


def test_torch_is_imported_only_for_training(tmp_path: Path) -> None:
    """Importing torch takes seconds."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    for words in (["--help"], ["ledger", "--help"], ["plot", "--help"]):
        assert ended(*words, PYTHONPATH=path).returncode == 0
    wrong = ended("data.nam=x", PYTHONPATH=path)
    assert (wrong.returncode, wrong.stderr[:28]) == (2, "error: argument: unknown key")
    lacks = ended(*TINY, f"checkpoint.dir={tmp_path}", PYTHONPATH=path)
    assert lacks.returncode == 2
    assert lacks.stderr == f"error: ddpjob_trainer needs the package torch; run {INSTALL.format(extra='trainer')}\n"


@pytest.mark.parametrize("command", dispatch.COMMANDS)
def test_each_command_shows_its_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # from argparse
        assert dispatch.run([command, "--help"]) == 0
    assert f"python -m ddpjob_trainer {command}" in capsys.readouterr().out


def test_a_closed_output_pipe_is_not_reported_as_an_error() -> None:
    """The command is `python -m ddpjob_trainer checkpoint FILE | head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ddpjob_trainer", "--help"]
    try:
        shown = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (shown.returncode, shown.stderr) == (141, "")
