"""Draws a dashboard's panels with matplotlib, each at its place in the dashboard's grid."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.panels.board import Json, Labels, Range, Series, answered, regions, rows, step_of, worded

_COLUMNS = 24
_WIDTH, _UNIT = 1320, 36
"""The picture's width, and the height of one grid unit, in pixels."""
_COLOURS = (
    "#56a64b",
    "#e0a800",
    "#3274d9",
    "#fa6400",
    "#e02f44",
    "#8f3bb8",
    "#37872d",
    "#0a8a8a",
    "#7d64ff",
    "#6c757d",
)
_INK, _FAINT, _LINE = "#24292e", "#6e7680", "#d9dde3"
_DPI = 100


def draw(board: Json, ask: Any, variables: Labels, shown: Range, path: Path) -> list[str]:
    """Write the picture. Return the titles of panels without data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    places = [panel["gridPos"] for panel in board["panels"]]
    height = max(place["y"] + place["h"] for place in places) * _UNIT + 2 * _UNIT
    figure = plt.figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor="#f4f5f5")
    values = ", ".join(f"{name}: {variables[name]}" for name in _chosen(board) if name in variables)
    begin, end = (datetime.fromtimestamp(moment, UTC) for moment in (shown.start, shown.end))
    head = f"{begin:%Y-%m-%d %H:%M} to {end:%H:%M} UTC" + (f"     {values}" if values else "")
    figure.text(8 / _WIDTH, 1 - 24 / height, board["title"], fontsize=13, weight="bold", color=_INK)
    figure.text(1 - 8 / _WIDTH, 1 - 24 / height, head, fontsize=9, color=_FAINT, ha="right")
    figure.text(
        8 / _WIDTH, 12 / height, "Drawn from the dashboard's JSON by `python -m benchmarks.panels`, not by Grafana.",
        fontsize=8, color=_FAINT,
    )  # fmt: skip
    marks = _marks(board, ask, variables, shown)
    empty = []
    for panel in board["panels"]:
        answers = [
            (target, answered(target, ask, board, variables, shown, step_of(panel, shown)))
            for target in panel["targets"]
        ]
        if not any(series for _, series in answers):
            empty.append(panel["title"])
        place = panel["gridPos"]
        left, top = place["x"] / _COLUMNS, height - _UNIT - place["y"] * _UNIT
        box = _Box(left * _WIDTH + 4, top - place["h"] * _UNIT + 4, place["w"] / _COLUMNS * _WIDTH - 8,
                   place["h"] * _UNIT - 8)  # fmt: skip
        _card(figure, box, height, panel["title"])
        _KINDS[panel["type"]](figure, box, height, panel, answers, shown, marks)
    figure.savefig(path, dpi=_DPI, facecolor=figure.get_facecolor())
    plt.close(figure)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    return empty


def _chosen(board: Json) -> list[str]:
    return [v["name"] for v in board["templating"]["list"] if v["type"] == "query" and not v.get("multi")]


def _marks(board: Json, ask: Any, variables: Labels, shown: Range) -> list[tuple[float, float]]:
    """Return the annotations' periods, in Unix seconds."""
    found = []
    moments = shown.moments(shown.scrape)
    for each in board["annotations"]["list"]:
        target = {"expr": each["expr"], "legendFormat": each["name"]}
        for series in answered(target, ask, board, variables, shown, shown.scrape):
            found += [(moments[first], moments[last]) for first, last in regions(series.values)]
    return found


class _Box:
    """A rectangle in the picture, in pixels from the lower left corner."""

    def __init__(self, x: float, y: float, width: float, height: float) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height

    def inner(self, left: float, bottom: float, right: float, top: float) -> _Box:
        return _Box(self.x + left, self.y + bottom, self.width - left - right, self.height - bottom - top)

    def share(self, height: float) -> tuple[float, float, float, float]:
        """Return the box as fractions of the picture, as matplotlib expects."""
        return (self.x / _WIDTH, self.y / height, self.width / _WIDTH, self.height / height)


def _card(figure: Any, box: _Box, height: float, title: str) -> None:
    axes = figure.add_axes(box.share(height), facecolor="white")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color(_LINE)
    axes.text(8 / box.width, 1 - 9 / box.height, title, fontsize=9, weight="bold", color=_INK, va="top")


def _unit(panel: Json) -> str:
    return str(panel["fieldConfig"]["defaults"]["unit"])


def _empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "No data", ha="center", va="center", fontsize=11, color=_FAINT, transform=axes.transAxes)


def _bare(figure: Any, box: _Box, height: float) -> Any:
    axes = figure.add_axes(box.share(height))
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return axes


def _timeseries(
    figure: Any, box: _Box, height: float, panel: Json, answers: list[tuple[Json, list[Series]]], shown: Range,
    marks: list[tuple[float, float]],
) -> None:  # fmt: skip
    series = [one for _, found in answers for one in found]
    lines = _legend_lines(series, box.width - 30)
    axes = figure.add_axes(box.inner(62, 26 + 15 * len(lines), 14, 30).share(height))
    top = _curves(axes, panel, series, shown)
    if not series:
        _empty(axes)
    for first, last in marks:
        axes.axvspan(first, max(last, first + shown.scrape), color="#e02f44", alpha=0.12, lw=0)
        axes.axvline(first, color="#e02f44", lw=0.8, ls="--")
    _frame(axes, panel, shown, top)
    _legend(_bare(figure, box, height), box, lines)


def _curves(axes: Any, panel: Json, series: list[Series], shown: Range) -> float:
    """Draw the series as curves. Return the highest value."""
    custom, step = panel["fieldConfig"]["defaults"].get("custom", {}), step_of(panel, shown)
    moments = shown.moments(step)
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    look = {"stepAfter": "steps-post"}.get(custom.get("lineInterpolation", ""), "default")
    below = [0.0] * len(moments)
    highest = 0.0
    for index, one in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        tops = [b + v for b, v in zip(below, one.values, strict=True)] if stacked else one.values
        highest = max([highest, *(v for v in tops if not math.isnan(v))])
        if custom.get("drawStyle") == "bars":
            axes.bar(moments, one.values, 0.8 * step, below, color=colour, alpha=custom["fillOpacity"] / 100)
        else:
            if stacked:
                opacity = custom["fillOpacity"] / 100
                axes.fill_between(moments, below, tops, color=colour, alpha=opacity, lw=0)
            axes.plot(moments, tops, color=colour, lw=1.3 * custom.get("lineWidth", 1), drawstyle=look)
            alone = [i for i, v in enumerate(tops) if not math.isnan(v) and _alone(tops, i)]
            axes.plot([moments[i] for i in alone], [tops[i] for i in alone], ".", color=colour, ms=4)
        if stacked:
            below = [b if math.isnan(v) else v for b, v in zip(below, tops, strict=True)]
    return highest


def _frame(axes: Any, panel: Json, shown: Range, highest: float) -> None:
    """Set the ranges, ticks and lines of the axes."""
    defaults = panel["fieldConfig"]["defaults"]
    low, high = axes.get_ylim()
    axes.set_ylim(defaults.get("min", low), 1.05 * highest if highest > 0 and "min" in defaults else max(high, 1e-9))
    if highest <= 0:
        axes.set_ylim(0, 1)
    if defaults.get("decimals") == 0:
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: worded(value, _unit(panel)))
    ticks = list(range(math.ceil(shown.start / 120) * 120, int(shown.end) + 1, 120))
    axes.set_xticks(ticks, [datetime.fromtimestamp(tick, UTC).strftime("%H:%M") for tick in ticks])
    axes.set_xlim(shown.start, shown.end)
    axes.tick_params(labelsize=7.5, colors=_FAINT, length=0)
    axes.grid(color="#e9ecef", lw=0.7)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_LINE)


def _legend(axes: Any, box: _Box, lines: list[list[tuple[int, Series]]]) -> None:
    for row, line in enumerate(reversed(lines)):
        x, y = 12.0, (15 * row + 13) / box.height
        for index, one in line:
            axes.plot([x / box.width, (x + 12) / box.width], [y, y], color=_COLOURS[index % len(_COLOURS)], lw=3)
            axes.text((x + 17) / box.width, y, one.name, fontsize=8, color=_INK, va="center")
            x += _legend_width(one.name)


def _legend_width(name: str) -> float:
    return 34 + 6.6 * len(name)


def _legend_lines(series: list[Series], width: float) -> list[list[tuple[int, Series]]]:
    """Split the legend into lines as wide as the panel."""
    lines: list[list[tuple[int, Series]]] = [[]]
    used = 0.0
    for index, one in enumerate(series):
        if lines[-1] and used + _legend_width(one.name) > width:
            lines.append([])
            used = 0.0
        lines[-1].append((index, one))
        used += _legend_width(one.name)
    return lines


def _alone(values: list[float], index: int) -> bool:
    around = values[max(0, index - 1) : index] + values[index + 1 : index + 2]
    return all(math.isnan(value) for value in around)


def _threshold(panel: Json, value: float) -> str:
    """Return the colour of a value, which is the colour of the last step at or below it."""
    names = {"green": "#37872d", "blue": "#1f60c4", "red": "#c4162a"}
    # Grafana's default, if the panel does not set any.
    own = {"steps": [{"color": "green", "value": None}, {"color": "red", "value": 80}]}
    steps = panel["fieldConfig"]["defaults"].get("thresholds", own)["steps"]
    colour = next(s["color"] for s in reversed(steps) if s["value"] is None or value >= s["value"])
    return names[colour]


def _stat(
    figure: Any, box: _Box, height: float, panel: Json, answers: list[tuple[Json, list[Series]]], shown: Range,
    marks: list[tuple[float, float]],
) -> None:  # fmt: skip
    axes = _bare(figure, box.inner(8, 8, 8, 28), height)
    series = [one for _, found in answers for one in found]
    if not series:
        _empty(axes)
    for index, one in enumerate(series):
        x = (index + 0.5) / len(series)
        value, colour = worded(one.values[0], _unit(panel)), _threshold(panel, one.values[0])
        mode = panel["options"].get("textMode")
        big = one.name if mode == "name" else value
        room = box.width / len(series) / max(len(big), 1)
        axes.text(x, 0.6 if mode == "value_and_name" else 0.5, big, ha="center", va="center", weight="bold",
                  fontsize=min(22, room * 0.95), color=colour)  # fmt: skip
        if mode == "value_and_name":
            small = min(9, box.width / len(series) / len(one.name) * 1.25)
            axes.text(x, 0.12, one.name, ha="center", va="center", fontsize=small, color=_FAINT)


def _bargauge(
    figure: Any, box: _Box, height: float, panel: Json, answers: list[tuple[Json, list[Series]]], shown: Range,
    marks: list[tuple[float, float]],
) -> None:  # fmt: skip
    axes = _bare(figure, box.inner(12, 10, 12, 34), height)
    series = [one for _, found in answers for one in found]
    if not series:
        _empty(axes)
        return
    most = max((one.values[0] for one in series if not math.isnan(one.values[0])), default=0.0) or 1.0
    for index, one in enumerate(series):
        y, value = 1 - (index + 0.5) / len(series), one.values[0]
        axes.text(0.2, y, one.name, ha="right", va="center", fontsize=8.5, color=_INK)
        share = 0.0 if math.isnan(value) else value / most
        colour = _threshold(panel, value)
        axes.barh(y, 0.65 * share, min(0.7 / len(series), 0.2), 0.22, color=colour, alpha=0.75)
        axes.text(0.24 + 0.65 * share, y, worded(value, _unit(panel)), va="center", fontsize=9, weight="bold",
                  color=colour)  # fmt: skip


def _table(
    figure: Any, box: _Box, height: float, panel: Json, answers: list[tuple[Json, list[Series]]], shown: Range,
    marks: list[tuple[float, float]],
) -> None:  # fmt: skip
    axes = _bare(figure, box.inner(12, 6, 12, 30), height)
    columns, found = rows(panel, answers)
    if not found:
        _empty(axes)
        return
    step = 26 / (box.height - 36)
    room = int(1 / step) - 1
    left = max(0, len(found) - room)
    for column, name in enumerate(columns):
        x = column / len(columns)
        axes.text(x, 1 - step / 2, name, fontsize=8.5, weight="bold", color="#1f60c4", va="center")
        for row, cells in enumerate(found[:room], start=1):
            cell = cells[column]
            words = worded(cell, _unit(panel)) if isinstance(cell, float) else cell
            axes.text(x, 1 - step * (row + 0.5), words, fontsize=8.5, color=_INK, va="center")
    for row in range(1, min(len(found), room) + 1):
        axes.plot([0, 1], [1 - step * row] * 2, color=_LINE, lw=0.7)
    if left:
        axes.text(1, 1 - step * (room + 0.5), f"and {left} more, by scrolling", fontsize=8.5, color=_FAINT, ha="right",
                  va="center")  # fmt: skip


_KINDS = {"timeseries": _timeseries, "stat": _stat, "bargauge": _bargauge, "table": _table}
