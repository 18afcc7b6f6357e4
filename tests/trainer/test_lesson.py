"""examples/ddp_in_100_lines.py, which uses plain DDP, prints the same losses as the trainer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob_trainer.config import loader
from ranks import good, metrics

LESSON = Path(__file__).parents[2] / "examples" / "ddp_in_100_lines.py"
TOLERANCE = 2e-4
"""Tolerance of a loss of the first epoch, which is printed with four digits. Differences by rounding
grow: they are 3e-4 after 46 steps.
"""


def losses(output: str) -> list[tuple[int, float]]:
    """Return the steps and losses that the example has printed."""
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", output, re.MULTILINE)]


@pytest.mark.parametrize(
    "command", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]], ids=["alone", "torchrun"]
)
def test_the_example_prints_the_same_losses_and_accuracy_as_the_trainer(command: list[str], tmp_path: Path) -> None:
    lesson = subprocess.run(
        [sys.executable, *command, str(LESSON), "1"], capture_output=True, text=True, timeout=600, check=False
    )
    assert lesson.returncode == 0, lesson.stderr
    good(1, [*settings_of_the_lesson(), "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    rows, [last] = metrics(tmp_path / "run", "step"), metrics(tmp_path / "run", "eval")
    printed = losses(lesson.stdout)
    assert [step for step, _ in printed] == [row["step"] for row in rows]
    assert len(printed) == 3
    for (step, loss), row in zip(printed, rows, strict=True):
        assert loss == pytest.approx(row["loss"], abs=TOLERANCE), step
    [accuracy] = re.findall(r"^test accuracy (\S+)%$", lesson.stdout, re.MULTILINE)
    assert float(accuracy) == pytest.approx(100 * last["accuracy"], abs=0.3), "one image of 359 is 0.28 %"


def settings_of_the_lesson() -> list[str]:
    """Return the settings in the example's trainer command, including those in its --config
    file.
    """
    [(name, keys)] = re.findall(
        r"-m ddpjob_trainer --config (\w+) (.*) train.epochs=3$", LESSON.read_text(), re.MULTILINE
    )
    shipped = loader.read_file(Path(loader.__file__).parent / "shipped" / f"{name}.yaml")
    return [*(f"{key}={value}" for key, value in shipped.items()), *keys.split()]


def test_the_example_has_at_most_a_hundred_lines_and_needs_only_torch() -> None:
    lines = LESSON.read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    imported = {line.split()[1].split(".")[0] for line in lines if re.match(r"(import|from) ", line)}
    assert imported == {"math", "os", "sys", "torch", "sklearn"}
