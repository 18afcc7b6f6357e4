"""`python -m ddpjob_trainer plot RUN -o FILE.png`: loss, accuracy and speed over time, with every restart marked."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_trainer.errors import TrainerError
from ddpjob_trainer.progress import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN, _TEST, _SPEED, _RESTART, _INK = "#2563eb", "#ea580c", "#0d9488", "#b91c1c", "#334155"


@dataclass
class History:
    """What metrics.jsonl tells; times in seconds since the first line."""

    title: str = ""
    lives: list[dict[str, Any]] = field(default_factory=list)
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    """The step lines of each life."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(last sign of life, next step) around each restart."""
        found = []
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if before and after:
                found.append((before[-1]["time"], after[0]["time"]))
        return found


def read(run: Path) -> History:
    """Raises TrainerError when the run has no metrics."""
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise TrainerError(f"{path} does not exist: name the folder of a run, the one that holds {METRICS}")
    history = History(title=path.resolve().parent.name)
    began = None
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # A writer was killed in the middle of this line.
        began = row["time"] if began is None else began
        row["time"] -= began
        _sort_in(history, row)
    if not any(history.steps):
        raise TrainerError(f"{path} holds no step yet: let the run train for some steps first")
    return history


def _sort_in(history: History, row: dict[str, Any]) -> None:
    if row["event"] == "start":
        history.lives.append(row)
        history.steps.append([])
    elif row["event"] == "step" and history.steps and row["loss"] is not None:
        history.steps[-1].append(row)
    elif row["event"] == "eval":
        history.evaluations.append(row)


def draw(history: History, target: Path) -> None:
    """Three panels over one time axis, as PNG (or what the file's ending says)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 10, "axes.edgecolor": "#94a3b8", "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}
    unit, name = _time_unit(max(row["time"] for life in history.steps for row in life))
    figure, panels = plt.subplots(3, 1, figsize=(10, 8.5), sharex=True, height_ratios=(1.25, 1, 1), layout="constrained")
    _loss(panels[0], history, unit)
    _accuracy(panels[1], history, unit)
    _speed(panels[2], history, unit)
    for panel in panels:
        panel.grid(color="#e2e8f0", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
    _mark_restarts(list(panels), history, unit)
    panels[-1].set_xlabel(f"time since the start of the run ({name})")
    figure.suptitle(_headline(history), x=0.01, ha="left", fontsize=12, color=_INK, weight="bold")
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1, "s") if seconds < 300 else (60, "min") if seconds < 4 * 3600 else (3600, "h")


def _headline(history: History) -> str:
    last = [life for life in history.steps if life][-1][-1]
    accuracy = f", test accuracy {history.evaluations[-1]['accuracy']:.2%}" if history.evaluations else ""
    restarts = len(history.lives) - 1
    return f"{history.title}: {last['step']} steps, {restarts} restart{'' if restarts == 1 else 's'}{accuracy}"


def _loss(panel: Axes, history: History, unit: float) -> None:
    for number, life in enumerate(history.steps):
        label = "training loss" if number == 0 else None
        panel.plot([row["time"] / unit for row in life], [row["loss"] for row in life], color=_TRAIN, linewidth=1.1, label=label)
    if history.evaluations:
        times = [row["time"] / unit for row in history.evaluations]
        panel.plot(times, [row["loss"] for row in history.evaluations], "o-", color=_TEST, markersize=4, linewidth=1.2, label="test loss")
    panel.set_yscale("log")
    panel.set_ylabel("loss (log scale)")
    panel.legend(frameon=False, loc="upper right")


def _accuracy(panel: Axes, history: History, unit: float) -> None:
    times = [row["time"] / unit for row in history.evaluations]
    values = [100 * row["accuracy"] for row in history.evaluations]
    panel.plot(times, values, "o-", color=_TEST, markersize=4, linewidth=1.2)
    panel.set_ylabel("test accuracy (%)")
    if values:
        panel.annotate(f"{values[-1]:.2f} %", (times[-1], values[-1]), (-6, -16), textcoords="offset points", ha="right", color=_TEST)
        room = max(1.0, 0.25 * (max(values) - min(values)))
        panel.set_ylim(max(0.0, min(values) - room), min(100.5, max(values) + room))


def _speed(panel: Axes, history: History, unit: float) -> None:
    for life in history.steps:
        times, speeds = [row["time"] / unit for row in life], [row["samplesPerSecond"] for row in life]
        panel.plot(times, speeds, color=_SPEED, linewidth=0.8, alpha=0.3)
        panel.plot(times, _smooth(speeds), color=_SPEED, linewidth=1.4)
    panel.set_ylabel("images/s")
    panel.set_ylim(bottom=0)


def _smooth(values: list[float], reach: int = 4) -> list[float]:
    """The median of each value and its neighbours."""
    return [statistics.median(values[max(0, place - reach) : place + reach + 1]) for place in range(len(values))]


def _mark_restarts(panels: list[Axes], history: History, unit: float) -> None:
    for number, (stopped, going) in enumerate(history.gaps):
        for panel in panels:
            panel.axvspan(stopped / unit, going / unit, color=_RESTART, alpha=0.12, linewidth=0)
            panel.axvline(going / unit, color=_RESTART, linewidth=1, linestyle="--")
        if number < 12:
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
    parser = argparse.ArgumentParser(prog="python -m ddpjob_trainer plot", description="Draw loss, accuracy and speed of a run.")
    parser.add_argument("run", type=Path, help=f"folder of the run, which holds {METRICS}")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture to write: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    draw(read(options.run), options.output)
    print(f"wrote {options.output}")
    return 0
