"""Shows a job in a notebook, as a small table and an SVG with the curve of its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import utc_now
from ddpjob.client.texts.job_text import header, row

_WIDTH, _HEIGHT, _POINTS = 480, 90, 480
_COLOURS = {"Running": "#1a7f37", "Complete": "#1a7f37", "Failed": "#cf222e"}
_OTHER = "#9a6700"


def job_html(body: Json, rows: Sequence[Mapping[str, float]]) -> str:
    """Return the row of `ddpjob get` as a table, and the curve of the loss over the steps."""
    titles, cells = header(), row(body, utc_now())
    shown = [(title, cell) for title, cell in zip(titles, cells, strict=True) if cell]
    heads = "".join(f'<th scope="col" style="text-align:left">{escape(title.lower())}</th>' for title, _ in shown)
    values = "".join(f'<td style="text-align:left">{_cell(title, cell)}</td>' for title, cell in shown)
    curve = _curve([(point["step"], point["loss"]) for point in rows if "loss" in point])
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table>{curve}"


def _cell(title: str, cell: str) -> str:
    colour = _COLOURS.get(cell, _OTHER)
    return f'<b style="color:{colour}">{escape(cell)}</b>' if title == "STATE" else escape(cell)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return the loss as a line; empty before the second point."""
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    finite = finite[:: max(1, len(finite) // _POINTS)]
    if len(finite) < 2:
        return ""
    first, last = finite[0][0], finite[-1][0]
    low, high = min(loss for _, loss in finite), max(loss for _, loss in finite)
    across, up = max(last - first, 1), (high - low) or 1.0
    drawn = " ".join(
        f"{(step - first) / across * _WIDTH:.1f},{(high - loss) / up * (_HEIGHT - 4) + 2:.1f}" for step, loss in finite
    )
    label = f"loss from {finite[0][1]:.4g} to {finite[-1][1]:.4g}, steps {first:g} to {last:g}"
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" style="display:block">'
        f'<polyline points="{drawn}" fill="none" stroke="#0969da" stroke-width="1.5"/></svg><small>{label}</small>'
    )
