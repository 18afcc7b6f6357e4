"""Shows a job in a notebook, as a small table with its loss curve as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import utc_now
from ddpjob.client.texts.job_text import header, row

_WIDTH, _HEIGHT, _POINTS = 480, 90, 480
_LOG_FROM = 20
"""The scale is logarithmic if a curve's largest value is more than this many times its smallest
value."""
_COLOURS = {"Running": "#1a7f37", "Complete": "#1a7f37", "Failed": "#cf222e"}
_OTHER = "#9a6700"


def job_html(body: Json, rows: Sequence[Mapping[str, float]]) -> str:
    """Return HTML with the job's row of `ddpjob get` and the curve of its loss."""
    titles, cells = header(), row(body, utc_now())
    shown = [(title, cell) for title, cell in zip(titles, cells, strict=True) if cell]
    heads = "".join(f'<th scope="col" style="text-align:left">{escape(title.lower())}</th>' for title, _ in shown)
    values = "".join(f'<td style="text-align:left">{_cell(title, cell)}</td>' for title, cell in shown)
    curve = _line([(point["step"], point["loss"]) for point in rows if "loss" in point])
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table>{curve}"


def _cell(title: str, cell: str) -> str:
    colour = _COLOURS.get(cell, _OTHER)
    return f'<b style="color:{colour}">{escape(cell)}</b>' if title == "STATE" else escape(cell)


def _line(points: Sequence[tuple[float, float]]) -> str:
    """Return the loss curve and its label as HTML; empty if there are fewer than two points."""
    curve = MetricCurve("loss", points)
    return f"{curve._repr_svg_()}<small>{curve.label}</small>" if len(curve.points) > 1 else ""


class MetricCurve:
    """A metric plotted over the steps, for notebooks and browsers."""

    def __init__(self, name: str, points: Sequence[tuple[float, float]], restarts: Sequence[int] = ()) -> None:
        finite = [(step, number) for step, number in points if math.isfinite(number)]
        every = max(1, math.ceil((len(finite) - 1) / (_POINTS - 1)))
        self.points = finite[:-1:every] + finite[-1:]
        self._name, self._restarts = name, restarts

    @property
    def label(self) -> str:
        """A phrase that gives the first and the last value of the curve."""
        (first, begin), (last, end) = self.points[0], self.points[-1]
        scale = ", on a logarithmic scale" if self._is_logarithmic else ""
        return f"{self._name} from {begin:.4g} to {end:.4g}, steps {first:g} to {last:g}{scale}"

    @property
    def _is_logarithmic(self) -> bool:
        """Whether the scale is logarithmic.

        A logarithmic scale is used if a linear scale would show only the beginning of the curve.
        """
        numbers = [number for _, number in self.points]
        return min(numbers) > 0 and max(numbers) > _LOG_FROM * min(numbers)

    def _repr_svg_(self) -> str:
        """Show the curve in a notebook; dashed lines mark restarts."""
        first, last = self.points[0][0], self.points[-1][0]
        numbers = [number for _, number in self.points]
        if self._is_logarithmic:
            numbers = [math.log(number) for number in numbers]
        low, high = min(numbers), max(numbers)
        across, up = max(last - first, 1) / _WIDTH, ((high - low) or 1.0) / (_HEIGHT - 4)
        steps = [(step - first) / across for step, _ in self.points]
        drawn = " ".join(f"{x:.1f},{(high - y) / up + 2:.1f}" for x, y in zip(steps, numbers, strict=True))
        marks = "".join(
            f'<path d="M{(step - first) / across:.1f} 0V{_HEIGHT}" stroke="#9a6700" stroke-dasharray="3"/>'
            for step in self._restarts
            if first < step < last
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(self.label)}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" style="display:block">{marks}'
            f'<polyline points="{drawn}" fill="none" stroke="#0969da" stroke-width="1.5"/></svg>'
        )

    def _repr_html_(self) -> str:
        """Show the curve, followed by its label."""
        return f"{self._repr_svg_()}<small>{escape(self.label)}</small>"

    def __repr__(self) -> str:
        return f"<MetricCurve: {self.label}>"
