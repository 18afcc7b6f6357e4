"""`python -m ddpjob_trainer plot RUN [RUN ...]` plots the curves of one or more runs,
with their restarts.

The plot shows the loss, accuracy, speed and number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_pod.metrics_log import METRICS

from ddpjob_trainer.errors import TrainerError
from ddpjob_trainer.evaluation.plots import BLUE, GRID, RED, plain, set_headline, use_style
from ddpjob_trainer.reporting.history import History, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN, _TEST, _SPEED, _RANKS, _RESTART = BLUE, "#ea580c", "#0d9488", "#7c3aed", RED
_OF_RUNS = [_TRAIN, _TEST, _SPEED, _RANKS, _RESTART, "#ca8a04", "#db2777", "#475569", "#65a30d", "#0891b2"]
_RESTARTS_NAMED = 12
_APART = 0.03
"""Minimum distance between labelled restarts, as a share of the horizontal axis. Closer labels
would overlap.
"""
_LOG_FROM = 20
"""The loss axis is logarithmic if the largest loss is more than this many times the smallest one.
"""

Where = Callable[[dict[str, Any]], float]
"""A function that returns a row's position on the horizontal axis."""


def draw(histories: list[History], target: Path, by: str = "time") -> None:
    """Draw four panels that share a horizontal axis, which shows time, steps or epochs.

    Lines stop at a restart and begin again after it, because nothing was measured in the meantime.
    The extension of `target` determines the format (PNG, SVG, PDF). Raises TrainerError if a run
    does not record `by`, or if the file cannot be written.
    """
    use_style()
    import matplotlib.pyplot as plt

    unit, name = _time_unit(max(history.end for history in histories))
    key = {"time": "time", "step": "step", "epoch": "epochs"}[by]
    for history in histories:
        if not any(key in row for rows in history.steps for row in rows):
            raise TrainerError(f"--by {by}: {history.title} has no {by}; use --by step")
    where: Where = lambda row: float(row.get(key, 0.0)) / (unit if by == "time" else 1)  # noqa: E731
    figure, panels = plt.subplots(
        4, 1, figsize=(10, 10), sharex=True, height_ratios=(1.3, 1, 1, 0.5), layout="constrained"
    )
    alone = len(histories) == 1
    for number, history in enumerate(histories):
        own = _OF_RUNS[number % len(_OF_RUNS)]
        colours = (_TRAIN, _TEST, _SPEED, _RANKS) if alone else (own,) * 4
        _loss(panels[0], history, where, colours[:2], alone)
        _accuracy(panels[1], history, where, colours[1], alone)
        _speed(panels[2], history, where, colours[2])
        _ranks(panels[3], history, where, colours[3], by, filled=alone)
    for panel in panels:
        panel.grid(color=GRID, linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    _dress(list(panels), histories)
    if alone and by == "time":
        _mark_restarts(list(panels), histories[0], unit)
    panels[-1].set_xlabel(f"time since the start of the run ({name})" if by == "time" else f"{by}s")
    set_headline(figure, _headline(histories))
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TrainerError(
            f"{target} cannot be written ({why}); choose a different file with -o, such as plot.png"
        ) from error
    finally:
        plt.close(figure)


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1, "s") if seconds < 300 else (60, "min") if seconds < 4 * 3600 else (3600, "h")


def _last_accuracy(history: History) -> float | None:
    """Return the accuracy of the latest evaluation, or None if no accuracy was recorded."""
    return history.evaluations[-1].get("accuracy") if history.evaluations else None


def _headline(histories: list[History]) -> str:
    if len(histories) > 1:
        return f"{len(histories)} runs"
    (history,) = histories
    last = [incarnation for incarnation in history.steps if incarnation][-1][-1]
    found = _last_accuracy(history)
    accuracy = "" if found is None else f", test accuracy {found:.2%}"
    restarts = history.restarts
    return f"{history.title}: {last['step']} steps, {restarts} restart{'' if restarts == 1 else 's'}{accuracy}"


def _label(history: History) -> str:
    restarts = history.restarts
    found = _last_accuracy(history)
    accuracy = "" if found is None else f", {found:.2%}"
    return f"{history.title}{accuracy}" + (f", {restarts} restart{'' if restarts == 1 else 's'}" if restarts else "")


def _dress(panels: list[Axes], histories: list[History]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    losses = [row["loss"] for history in histories for rows in history.steps for row in rows if _has(row, "loss")]
    panels[0].set_ylabel("loss")
    if losses and 0 < _LOG_FROM * min(losses) < max(losses):
        panels[0].set_yscale("log")
        panels[0].set_ylabel("loss (log scale)")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panels[0].yaxis.set_minor_formatter(NullFormatter())
    # Place the legend above the panel, so that it covers neither curves nor labels of restarts.
    columns = 2 if len(histories) > 1 else 4
    panels[0].legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=columns, fontsize=9
    )
    panels[1].set_ylabel("test accuracy (%)")
    panels[2].set_ylabel("samples/s")
    panels[2].set_ylim(bottom=0)
    for panel in panels[:3]:
        if not panel.lines:
            panel.set_yticks([])
            panel.annotate("not reported", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center")
    panels[3].set_ylabel("ranks")
    most = max(world for history in histories for _, _, world in history.worlds)
    panels[3].set_ylim(0, most * 1.25)
    panels[3].yaxis.set_major_locator(MaxNLocator(integer=True))
    values = [100 * row["accuracy"] for history in histories for row in history.evaluations if _has(row, "accuracy")]
    if values:
        room = max(1.0, 0.15 * (max(values) - min(values)))
        panels[1].set_ylim(max(0.0, min(values) - room), min(100.5, max(values) + room))


def _has(row: dict[str, Any], name: str) -> bool:
    return isinstance(row.get(name), (int, float))


def _line(panel: Axes, rows: list[dict[str, Any]], where: Where, values: list[float], **style: Any) -> None:
    """Draw one section of a curve. A lone point gets a marker, because a line needs two points."""
    if len(rows) == 1:
        style = {**style, "marker": "o", "markersize": 3}
    panel.plot([where(row) for row in rows], values, **style)


def _loss(panel: Axes, history: History, where: Where, colours: tuple[str, ...], alone: bool) -> None:
    label: str | None = "training loss" if alone else plain(_label(history))
    for incarnation in history.steps:
        rows = [row for row in incarnation if _has(row, "loss")]
        if not rows:
            continue
        losses = [row["loss"] for row in rows]
        if alone:
            _line(panel, rows, where, losses, color=colours[0], linewidth=1.1, label=label)
        else:
            _line(panel, rows, where, losses, color=colours[0], linewidth=0.7, alpha=0.25)
            _line(panel, rows, where, _smooth(losses), color=colours[0], linewidth=1.4, label=label)
        label = None
    if label is not None and not alone:
        panel.plot([], [], color=colours[0], label=label)
    label = "test loss"
    for evaluated in history.evaluated if alone else ():
        rows = [row for row in evaluated if _has(row, "loss")]  # A user's own script may not report a loss.
        if rows:
            _marked(panel, rows, where, [row["loss"] for row in rows], colours[1], label)
            label = None


def _marked(
    panel: Axes, rows: list[dict[str, Any]], where: Where, values: list[float], colour: str, label: str | None = None
) -> None:
    positions = [where(row) for row in rows]
    panel.plot(positions, values, "o-", color=colour, markersize=4, linewidth=1.2, label=label)


def _accuracy(panel: Axes, history: History, where: Where, colour: str, alone: bool) -> None:
    last = None
    for evaluated in history.evaluated:
        rows = [row for row in evaluated if _has(row, "accuracy")]  # A regression has no accuracy.
        if rows:
            values = [100 * row["accuracy"] for row in rows]
            _marked(panel, rows, where, values, colour)
            last = where(rows[-1]), values[-1]
    if last is not None and alone:
        panel.annotate(f"{last[1]:.2f}%", last, (0, 7), textcoords="offset points", ha="right", color=colour)


def _speed(panel: Axes, history: History, where: Where, colour: str) -> None:
    for incarnation in history.steps:
        rows = [row for row in incarnation if _has(row, "samplesPerSecond")]
        if not rows:
            continue
        speeds = [row["samplesPerSecond"] for row in rows]
        _line(panel, rows, where, speeds, color=colour, linewidth=0.8, alpha=0.3)
        _line(panel, rows, where, _smooth(speeds), color=colour, linewidth=1.4)


def _ranks(panel: Axes, history: History, where: Where, colour: str, by: str, *, filled: bool) -> None:
    """Draw a horizontal line at the number of ranks for each incarnation.

    The line extends from the beginning of the incarnation to its last step.
    """
    for incarnation, steps in zip(history.incarnations, history.steps, strict=True):
        if steps:
            begin, world = where(incarnation if by == "time" else steps[0]), int(incarnation.get("world", 1))
            panel.plot([begin, where(steps[-1])], [world, world], color=colour, linewidth=2.4, solid_capstyle="butt")
            if filled:
                panel.fill_between([begin, where(steps[-1])], 0, world, color=colour, alpha=0.12, linewidth=0)


def _smooth(values: list[float], reach: int = 4) -> list[float]:
    """Smooth a curve by replacing each value with the median of nearby values."""
    return [statistics.median(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]


def _mark_restarts(panels: list[Axes], history: History, unit: float) -> None:
    named, last = 0, float("-inf")
    for stopped, going, is_restart in history.gaps:
        for panel in panels:
            panel.axvspan(stopped / unit, going / unit, color=_RESTART, alpha=0.12, linewidth=0)
            panel.axvline(going / unit, color=_RESTART, linewidth=1, linestyle="--")
        if named < _RESTARTS_NAMED and going - last >= _APART * history.end:
            named, last = named + 1, going
            panels[0].annotate(
                f"{'restart' if is_restart else 'next run'}, {going - stopped:.1f} s",
                (going / unit, 1),
                (4, -4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                va="top",
                color=_RESTART,
                fontsize=9,
                rotation=90,
            )


def main(arguments: list[str]) -> int:
    """Run the command, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddpjob_trainer plot",
        description="Draw loss, accuracy, speed and ranks of one run, or of several runs in one plot.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=f"folder of a run, which contains {METRICS}")
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write: .png, .svg or .pdf; default: RUN/plot.png of the first run"
    )
    parser.add_argument(
        "--by", choices=("time", "step", "epoch"), default="time", help="horizontal axis; default: time"
    )
    options = parser.parse_args(arguments)
    histories = [read(run) for run in options.runs]
    first: Path = options.runs[0]
    output = options.output or (first if first.is_dir() else first.parent) / "plot.png"
    draw(histories, output, options.by)
    print(f"wrote {output}")
    return 0
