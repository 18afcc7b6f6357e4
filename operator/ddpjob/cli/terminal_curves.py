"""Draws training curves in a terminal, or runs the trainer's plotting command to save them as an
image.

The curves of several jobs are drawn in one chart. Each curve has its own letter as well as its own
colour, so that the curves remain distinguishable in a file without colours.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ddpjob.client.backends.backend import METRICS, METRICS_BYTES, Mistake
from ddpjob.client.texts.metric_series import MetricSeries, Points, read_metrics
from ddpjob.core.status.messages import count
from ddpjob.core.status.shown_progress import duration
from ddpjob.missing_package import INSTALL

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 72, 8
_LOG_FROM = 20
"""A chart has a logarithmic scale if the largest loss is more than this many times the smallest."""
CUT = f"the beginning is not shown, because only the last {METRICS_BYTES >> 20} MiB of {METRICS} are read"


MOST_JOBS = 8
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_blue", "bright_green")
_PANELS = (("loss", "loss"), ("test loss", "loss"), ("test accuracy", "accuracy"), ("samples/s", "samplesPerSecond"))


def means(values: Sequence[float], width: int) -> list[float]:
    """Split `values` into at most `width` sections of equal length, and return the mean of each."""
    width = min(width, len(values))
    parts = [values[len(values) * part // width : len(values) * (part + 1) // width] for part in range(width)]
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a row of blocks whose heights show the values.

    The scale runs from the smallest to the largest value.
    """
    return chart(values, width, 1)[0] if values else ""


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a bar chart of the values as rows of blocks, the top row first.

    The bar of the smallest value fills one eighth of a row, and the bar of the largest value fills
    all rows.
    """
    shown = means(values, width)
    low, high = min(shown), max(shown)
    eighths = [1 + round((mean - low) / (high - low) * (8 * height - 1)) if high > low else 1 for mean in shown]
    return ["".join(BLOCKS[min(8, max(0, full - 8 * row))] for full in eighths) for row in reversed(range(height))]


def points(series: MetricSeries) -> tuple[list[float], list[float], int]:
    """Return all losses, all test accuracies, and the number of restarts.

    The losses and the accuracies are in the order of their steps.
    """
    losses, accuracies = series.steps.get("loss", {}), series.evaluations.get("accuracy", {})
    return (
        [losses[step] for step in sorted(losses)],
        [accuracies[step] for step in sorted(accuracies)],
        series.restarts,
    )


def is_cut(text: str) -> bool:
    """Return whether the text is only the end of a longer metrics file.

    Backend.metrics reads at most METRICS_BYTES, so a text of this size is assumed to be cut off.
    """
    return len(text.encode()) >= METRICS_BYTES


def curves(text: str, job: str) -> Iterator[str]:
    """Yield the lines that show a job's loss as a chart and its test accuracy as a row of blocks.

    `text` is the content of the job's metrics file. Raises Mistake if the file contains no steps.
    """
    series = read_metrics(text)
    losses, accuracies, restarts = points(series)
    if not (losses or series.not_finite or series.without_loss):
        raise Mistake(f"{job}: its metrics contain no step yet; wait until it has trained some steps")
    if is_cut(text):
        # The job's first start is in the part that was cut off, so each start in the rest is a
        # restart.
        yield f"{job}: at least {count(restarts + bool(series.starts), 'restart')}; {CUT}"
    else:
        yield f"{job}: {count(restarts, 'restart')}"
    if losses:
        yield from _loss_chart(losses)
    yield from filter(None, (series.after_last_loss(), series.missing_beginning()))
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


# --- several jobs -----------------------------------------------------------------------------------------------


def overlay(texts: Sequence[tuple[str, str]], by: str) -> Iterator[str]:
    """Yield the lines that show the curves of several jobs in one chart.

    The chart has a panel for each kind of curve, and all panels share the axis `by`. `texts` pairs
    the name of each job with the content of the job's metrics file. Raises Mistake if a job has no
    steps, or if the metrics of a job lack the axis.
    """
    runs = [(job, read_metrics(text)) for job, text in texts]
    positions = []
    for job, series in runs:
        if not series.made:
            raise Mistake(f"{job}: its metrics contain no step yet; wait until it has trained some steps")
        where = series.positions(by)
        if not where[0]:
            raise Mistake(f"--by {by}: the metrics of {job} do not contain {by}; use --by step")
        positions.append(where)
    right = max(max(place.values()) for where in positions for place in where if place)
    for number, (job, series) in enumerate(runs):
        losses, accuracies, restarts = points(series)
        parts = [f"{max(series.made)} steps", f"loss {losses[-1]:.4g}" if losses else "no loss"]
        parts += [f"accuracy {accuracies[-1]:.2%}"] if accuracies else []
        parts += [count(restarts, "restart")] if restarts else []
        yield _styled(number, f"{_letter(number)} {job}: {', '.join(parts)}")
        for note in filter(None, (series.after_last_loss(), series.missing_beginning())):
            yield f"  {note}"
    for title, name in _PANELS:
        drawn = []
        for (_, series), where in zip(runs, positions, strict=True):
            curve = (series.evaluations if title.startswith("test") else series.steps).get(name, {})
            drawn.append([point for part in series.stretches(curve, where) for point in part])
        if any(drawn):
            yield from _panel(title, drawn, right)
    yield f"{'':10} 0{_axis_end(by, right):>{WIDTH - 1}}"


def _letter(number: int) -> str:
    return "abcdefgh"[number]


def _styled(number: int, text: str) -> str:
    return click.style(text, fg=_COLOURS[number])


def _axis_end(by: str, right: float) -> str:
    return duration(right) if by == "time" else f"{right:.4g} {by}s"


def _panel(title: str, runs: Sequence[Points], right: float) -> Iterator[str]:
    """Yield the lines of one panel. Where curves overlap, the curve of the later job is shown."""
    columns = [_columns(points, right) for points in runs]
    values = [value for column in columns for value in column.values()]
    low, high = min(values), max(values)
    logarithmic = "loss" in title and low > 0 and high > _LOG_FROM * low

    def scaled(value: float) -> float:
        return math.log(value) if logarithmic else value

    bottom, height = scaled(low), scaled(high) - scaled(low)
    cells: dict[tuple[int, int], str] = {}
    for number, column in enumerate(columns):
        for at, value in column.items():
            row = round((scaled(value) - bottom) / height * (HEIGHT - 1)) if height > 0 else 0
            cells[row, at] = _styled(number, _letter(number))
    yield title + (", on a logarithmic scale" if logarithmic else "")
    form = "{:.2%}" if title == "test accuracy" else "{:.4g}"
    marks = {HEIGHT - 1: form.format(high), 0: form.format(low)}
    for row in reversed(range(HEIGHT)):
        yield f"{marks.get(row, ''):>10} {''.join(cells.get((row, at), ' ') for at in range(WIDTH))}".rstrip()


def _columns(points: Points, right: float) -> dict[int, float]:
    """Map the number of each column in the panel to the mean of its points.

    Columns without points are left out. `right` is the position at the right end of the axis.
    """
    found: dict[int, list[float]] = {}
    for position, value in points:
        at = round(position / right * (WIDTH - 1)) if right > 0 else 0
        found.setdefault(min(max(at, 0), WIDTH - 1), []).append(value)
    return {at: sum(values) / len(values) for at, values in found.items()}


PICTURES = (".png", ".svg", ".pdf")


def check_picture(output: Path) -> None:
    """Raise Mistake if this machine cannot draw a picture into a file with this name."""
    if output.suffix not in PICTURES:
        raise Mistake(f"--output {output}: must end in {', '.join(PICTURES)}")
    if importlib.util.find_spec("ddpjob_trainer") is None or importlib.util.find_spec("matplotlib") is None:
        needed = INSTALL.format(extra="trainer")
        raise Mistake(f"--output requires the built-in trainer: {needed}; without --output, the curves are printed")


def draw(texts: Sequence[tuple[str, str]], output: Path, by: str | None = None) -> None:
    """Draw the curves of several jobs into a file, by running `python -m ddpjob_trainer plot`.

    `texts` pairs the name of each job with the content of the job's metrics file. Raises Mistake if
    the picture cannot be drawn.
    """
    check_picture(output)
    with tempfile.TemporaryDirectory() as folder:
        places = []
        for job, text in texts:
            # The plot labels each curve with the name of its folder.
            metrics = Path(folder) / job / METRICS
            metrics.parent.mkdir(parents=True)
            metrics.write_text(text, encoding="utf-8")
            places.append(str(metrics.parent))
        axis = ["--by", by] if by is not None else []
        made = subprocess.run(
            [sys.executable, "-m", "ddpjob_trainer", "plot", *places, "--output", str(output), *axis],
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    if made.returncode:
        raise Mistake((made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1])
