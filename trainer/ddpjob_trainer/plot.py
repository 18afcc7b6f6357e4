"""`python -m ddpjob_trainer plot RUN [RUN ...]`: loss, accuracy, speed and ranks of a run with every restart, or of several at once."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_trainer.history import METRICS, History, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN, _TEST, _SPEED, _RANKS, _RESTART, _INK = "#2563eb", "#ea580c", "#0d9488", "#7c3aed", "#b91c1c", "#334155"
_OF_RUNS = ["#2563eb", "#ea580c", "#0d9488", "#7c3aed", "#b91c1c", "#ca8a04", "#db2777", "#475569", "#65a30d", "#0891b2"]
_RESTARTS_NAMED = 12

Where = Callable[[dict[str, Any]], float]
"""A row's place on the horizontal axis."""


def draw(histories: list[History], target: Path, by: str = "time") -> None:
    """Four panels over one axis of time or steps, as PNG (or what the file's ending says)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 10, "axes.edgecolor": "#94a3b8", "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}
    unit, name = _time_unit(max(history.end for history in histories))
    where: Where = (lambda row: float(row["time"]) / unit) if by == "time" else (lambda row: float(row["step"]))
    figure, panels = plt.subplots(4, 1, figsize=(10, 10), sharex=True, height_ratios=(1.3, 1, 1, 0.5), layout="constrained")
    alone = len(histories) == 1
    for number, history in enumerate(histories):
        own = _OF_RUNS[number % len(_OF_RUNS)]
        colours = (_TRAIN, _TEST, _SPEED, _RANKS) if alone else (own,) * 4
        _loss(panels[0], history, where, colours[:2], alone)
        _accuracy(panels[1], history, where, colours[1], alone)
        _speed(panels[2], history, where, colours[2])
        _ranks(panels[3], history, where, colours[3], by, filled=alone)
    for panel in panels:
        panel.grid(color="#e2e8f0", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    _dress(list(panels), histories)
    if alone and by == "time":
        _mark_restarts(list(panels), histories[0], unit)
    panels[-1].set_xlabel(f"time since the start of the run ({name})" if by == "time" else "steps")
    figure.suptitle(_headline(histories), x=0.01, ha="left", fontsize=12, color=_INK, weight="bold")
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1, "s") if seconds < 300 else (60, "min") if seconds < 4 * 3600 else (3600, "h")


def _headline(histories: list[History]) -> str:
    if len(histories) > 1:
        return f"{len(histories)} runs"
    (history,) = histories
    last = [life for life in history.steps if life][-1][-1]
    accuracy = f", test accuracy {history.evaluations[-1]['accuracy']:.2%}" if history.evaluations else ""
    restarts = len(history.lives) - 1
    return f"{history.title}: {last['step']} steps, {restarts} restart{'' if restarts == 1 else 's'}{accuracy}"


def _label(history: History) -> str:
    restarts = len(history.lives) - 1
    accuracy = f", {history.evaluations[-1]['accuracy']:.2%}" if history.evaluations else ""
    return f"{history.title}{accuracy}" + (f", {restarts} restart{'' if restarts == 1 else 's'}" if restarts else "")


def _dress(panels: list[Axes], histories: list[History]) -> None:
    from matplotlib.ticker import MaxNLocator

    panels[0].set_yscale("log")
    panels[0].set_ylabel("loss (log scale)")
    panels[0].legend(frameon=False, loc="upper right", fontsize=9)
    panels[1].set_ylabel("test accuracy (%)")
    panels[2].set_ylabel("images/s")
    panels[2].set_ylim(bottom=0)
    panels[3].set_ylabel("ranks")
    most = max(world for history in histories for _, _, world in history.worlds)
    panels[3].set_ylim(0, most * 1.25)
    panels[3].yaxis.set_major_locator(MaxNLocator(integer=True))
    values = [100 * row["accuracy"] for history in histories for row in history.evaluations]
    if values:
        room = max(1.0, 0.15 * (max(values) - min(values)))
        panels[1].set_ylim(max(0.0, min(values) - room), min(100.5, max(values) + room))


def _loss(panel: Axes, history: History, where: Where, colours: tuple[str, ...], alone: bool) -> None:
    for number, life in enumerate(history.steps):
        label = None if number else "training loss" if alone else _label(history)
        losses = [row["loss"] for row in life]
        if alone:
            panel.plot([where(row) for row in life], losses, color=colours[0], linewidth=1.1, label=label)
        else:
            panel.plot([where(row) for row in life], losses, color=colours[0], linewidth=0.7, alpha=0.25)
            panel.plot([where(row) for row in life], _smooth(losses), color=colours[0], linewidth=1.4, label=label)
    if history.evaluations and alone:
        places = [where(row) for row in history.evaluations]
        losses = [row["loss"] for row in history.evaluations]
        panel.plot(places, losses, "o-", color=colours[1], markersize=4, linewidth=1.2, label="test loss")


def _accuracy(panel: Axes, history: History, where: Where, colour: str, alone: bool) -> None:
    places = [where(row) for row in history.evaluations]
    values = [100 * row["accuracy"] for row in history.evaluations]
    panel.plot(places, values, "o-", color=colour, markersize=4, linewidth=1.2)
    if values and alone:
        panel.annotate(f"{values[-1]:.2f} %", (places[-1], values[-1]), (-6, -16), textcoords="offset points", ha="right", color=colour)


def _speed(panel: Axes, history: History, where: Where, colour: str) -> None:
    for life in history.steps:
        places, speeds = [where(row) for row in life], [row["samplesPerSecond"] for row in life]
        panel.plot(places, speeds, color=colour, linewidth=0.8, alpha=0.3)
        panel.plot(places, _smooth(speeds), color=colour, linewidth=1.4)


def _ranks(panel: Axes, history: History, where: Where, colour: str, by: str, *, filled: bool) -> None:
    """A level for each life, over its time, or over the steps it made."""
    for life, steps in zip(history.lives, history.steps, strict=True):
        if steps:
            begin, world = where(life if by == "time" else steps[0]), int(life["world"])
            panel.plot([begin, where(steps[-1])], [world, world], color=colour, linewidth=2.4, solid_capstyle="butt")
            if filled:
                panel.fill_between([begin, where(steps[-1])], 0, world, color=colour, alpha=0.12, linewidth=0)


def _smooth(values: list[float], reach: int = 4) -> list[float]:
    """The median of each value and its neighbours."""
    return [statistics.median(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]


def _mark_restarts(panels: list[Axes], history: History, unit: float) -> None:
    for number, (stopped, going) in enumerate(history.gaps):
        for panel in panels:
            panel.axvspan(stopped / unit, going / unit, color=_RESTART, alpha=0.12, linewidth=0)
            panel.axvline(going / unit, color=_RESTART, linewidth=1, linestyle="--")
        if number < _RESTARTS_NAMED:
            panels[0].annotate(
                f"restart, {going - stopped:.1f} s",
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
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ddpjob_trainer plot", description="Draw loss, accuracy, speed and ranks of a run, or of several over each other."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=f"folder of a run, which holds {METRICS}")
    parser.add_argument("-o", "--output", type=Path, help="picture to write: .png, .svg or .pdf; default: RUN/plot.png of the first run")
    parser.add_argument("--by", choices=("time", "step"), default="time", help="horizontal axis; default: time")
    options = parser.parse_args(arguments)
    histories = [read(run) for run in options.runs]
    first: Path = options.runs[0]
    output = options.output or (first if first.is_dir() else first.parent) / "plot.png"
    draw(histories, output, options.by)
    print(f"wrote {output}")
    return 0
