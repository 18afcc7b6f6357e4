"""Training curves in a terminal, and as a picture made with the trainer's own plots."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpjob.client.backends.backend import METRICS, METRICS_BYTES, Mistake
from ddpjob.client.texts.metric_series import MetricSeries, read_metrics
from ddpjob.core.status.messages import count
from ddpjob.missing_package import INSTALL

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 72, 8
_LOG_FROM = 20
"""The scale is logarithmic if the largest loss is more than this many times the smallest."""
CUT = f"the beginning is not shown because only the last {METRICS_BYTES >> 20} MiB of {METRICS} are read"


def means(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` numbers, each the mean of its part of `values`."""
    width = min(width, len(values))
    parts = [values[len(values) * part // width : len(values) * (part + 1) // width] for part in range(width)]
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as a row of blocks, scaled from the smallest to the largest value."""
    return chart(values, width, 1)[0] if values else ""


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return rows of blocks, the uppermost first.

    The smallest value fills one eighth of a row, the largest fills all rows.
    """
    shown = means(values, width)
    low, high = min(shown), max(shown)
    eighths = [1 + round((mean - low) / (high - low) * (8 * height - 1)) if high > low else 1 for mean in shown]
    return ["".join(BLOCKS[min(8, max(0, full - 8 * row))] for full in eighths) for row in reversed(range(height))]


def points(series: MetricSeries) -> tuple[list[float], list[float], int]:
    """Return losses and test accuracies in the order of steps, and the number of starts."""
    losses, accuracies = series.steps.get("loss", {}), series.evaluations.get("accuracy", {})
    return (
        [losses[step] for step in sorted(losses)],
        [accuracies[step] for step in sorted(accuracies)],
        len(series.starts),
    )


def is_cut(text: str) -> bool:
    """Return whether `text` is only the end of the file, because Backend.metrics reads no more."""
    return len(text.encode()) >= METRICS_BYTES


def curves(text: str, job: str) -> Iterator[str]:
    """Yield lines that show the loss as a chart and the accuracy as a row.

    Raises Mistake if there are no steps.
    """
    series = read_metrics(text)
    losses, accuracies, starts = points(series)
    if not (losses or series.not_finite or series.without_loss):
        raise Mistake(f"{job}: its metrics contain no step yet; wait until it has trained some steps")
    if is_cut(text):
        # The first start is in the part that is cut off.
        yield f"{job}: at least {count(starts, 'restart')}; {CUT}"
    else:
        yield f"{job}: {count(max(starts - 1, 0), 'restart')}"
    if losses:
        yield from _loss_chart(losses)
    if note := series.after_last_loss():
        yield note
    if accuracies:
        yield "test accuracy"
        yield f"{'':10} {sparkline(accuracies, WIDTH)}"
        yield f"{'now':>10} {accuracies[-1]:.2%}, from {min(accuracies):.2%} to {max(accuracies):.2%}"


def _loss_chart(losses: Sequence[float]) -> Iterator[str]:
    shown = means(losses, WIDTH)
    low, high = min(shown), max(shown)
    logarithmic = low > 0 and high > _LOG_FROM * low
    rows = chart([math.log(value) for value in shown] if logarithmic else shown, WIDTH, HEIGHT)
    marks = {0: f"{high:.4g}", len(rows) - 1: f"{low:.4g}"}
    yield "loss" + (", on a logarithmic scale" if logarithmic else "")
    yield from (f"{marks.get(number, ''):>10} {row}".rstrip() for number, row in enumerate(rows))
    yield f"{'now':>10} {losses[-1]:.4g}"


PICTURES = (".png", ".svg", ".pdf")


def draw(text: str, job: str, output: Path) -> None:
    """Write the picture that `python -m ddpjob_trainer plot` makes. Raises Mistake."""
    if output.suffix not in PICTURES:
        raise Mistake(f"--output {output}: must end in {', '.join(PICTURES)}")
    if importlib.util.find_spec("ddpjob_trainer") is None or importlib.util.find_spec("matplotlib") is None:
        needed = INSTALL.format(extra="trainer")
        raise Mistake(f"a picture needs the built-in trainer: {needed}; without --output the curves are printed")
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / job / METRICS  # the picture's title is the folder's name
        metrics.parent.mkdir(parents=True)
        metrics.write_text(text, encoding="utf-8")
        made = subprocess.run(
            [sys.executable, "-m", "ddpjob_trainer", "plot", str(metrics.parent), "--output", str(output)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if made.returncode:
        raise Mistake((made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1])
