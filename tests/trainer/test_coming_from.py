"""docs/coming-from.md: each of its DDPJob commands is valid, flags from other tools get a hint, and
their launchers work.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob_trainer import config
from ddpjob_trainer.commands import spawn_ranks
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.commands.dispatch import COMMANDS
from ddpjob_trainer.config import other_names
from ddpjob_trainer.errors import ConfigError
from machine import free_port
from ranks import TINY, metrics

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
OF_TRAINERS = PAGE.partition("## On Kubernetes")[0]
ROWS = [line.strip("| ").split(" | ") for line in OF_TRAINERS.splitlines() if line.startswith(("| `", "| no"))]
OURS = [text for row in ROWS for text in re.findall(r"`([^`]*-m ddpjob_trainer [^`]*)`", row[1])]
FLAGS = sorted({flag for row in ROWS for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row[0])})
OF_LAUNCHERS = {"-m", "-np", "--multi_gpu", "--main_process_ip", "--local_rank"}
"""Flags of horovodrun and accelerate, not of the script, and one that torch.distributed.launch
appends.
"""


def test_the_page_has_rows_for_other_tools() -> None:
    assert len(ROWS) > 50 and len(OURS) > 40 and len(FLAGS) > 30


@pytest.mark.parametrize("command", OURS)
def test_a_ddpjob_command_on_the_page_is_valid(command: str) -> None:
    arguments = shlex.split(command.split("-m ddpjob_trainer ")[1])
    if arguments[0] in COMMANDS:
        arguments = arguments[2:]
    _, arguments = spawn_ranks.read(arguments)
    assert "--config" in arguments or not arguments
    file = arguments.pop(1) if arguments else None
    config.load(file, arguments[1:])


def test_the_moving_average_changes_per_step_as_in_torchvisions_script() -> None:
    """torchvision's reference script (references/classification/train.py) adjusts the decay by
    ranks, batch, steps and epochs.
    """
    (ours,) = (command for command in OURS if "optim.ema_decay=0.9997" in command)
    read = config.load("imagenet", ours.split("imagenet ")[1].split())
    moved = (1 - 0.9999) * read.data.batch * 1 / read.train.epochs
    assert 1 - read.optim.ema_decay == pytest.approx(moved, rel=0.01)


def test_randaugment_is_as_strong_as_timms() -> None:
    """timm's levels range from 0 to 10, torchvision's from 0 to 30. timm's table gives the angle in
    degrees.
    """
    from torchvision.transforms import v2

    angle = pytest.importorskip("timm.data.auto_augment")._rotate_level_to_arg
    (ours,) = (command for command in OURS if "randaugment_magnitude" in command)
    page, recipe = config.load("imagenet", ours.split("imagenet ")[1].split()), config.load("imagenet-lamb", [])
    magnitudes, _ = v2.RandAugment._AUGMENTATION_SPACE["Rotate"]
    for keys, level in ((page, 9), (recipe, 7)):
        found = magnitudes(31, 224, 224)[keys.data.randaugment_magnitude]
        assert float(found) == pytest.approx(abs(angle(level, {})[0]))


@pytest.mark.parametrize("flag", ["bucket_cap_mb", "static_graph"])
def test_an_option_that_ddp_leaves_alone_is_not_reported_as_set(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"'{flag}': there is no such key; strategy=ddp uses torch's default"):
        config.load(None, [f"{flag}=50"])


@pytest.mark.parametrize("flag", sorted(set(FLAGS) - OF_LAUNCHERS))
def test_a_flag_from_another_tool_gets_a_hint(flag: str) -> None:
    """A flag has an entry of its own, or is the last part of a key's name."""
    name = flag.lstrip("-").replace("-", "_")
    if not other_names.remark(flag):
        with pytest.raises(ConfigError, match=rf"did you mean '\w+.{name}'"):
            config.load(None, [f"--{name}=1"])


@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.launch", "--nproc-per-node=2"],
        ["-m", "torch.distributed.run", "--nproc-per-node=2"],
    ],
    ids=["launch", "torchrun"],
)
def test_other_tools_launchers_can_train_on_two_ranks(launcher: list[str], tmp_path: Path) -> None:
    """torch.distributed.launch without --use-env appends --local-rank=N."""
    keys = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"]
    command = [sys.executable, *launcher, f"--master-port={free_port()}", "-m", "ddpjob_trainer", *keys]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert [row["world"] for row in metrics(tmp_path / "run", "start")] == [2]
    assert verify(read([tmp_path])).epochs == {1: 1438}
