"""Draws precision-recall curves and the confusion matrix as PNG.

Run it as `python -m ddpjob_trainer.evaluation.plots RUN/eval/epoch-NNN.json`. The plots are
readable for ten classes (each class separately) and for a thousand (the distribution, with the
worst classes named). This module does not import torch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, BLUE, RED, GRID = "#334155", "#2563eb", "#b91c1c", "#e2e8f0"
_EACH_BY_ITSELF = 20
_NUMBERS_IN_CELLS = 25

Matrix = npt.NDArray[np.int64]


def draw(path: Path) -> list[Path]:
    """Draw the plots for which a result file has numbers, and return the plots' files.

    The plots are written to the folder of the result file, `path`.
    """
    use_style()
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    written = []
    if "prCurves" in result:
        written.append(_save(_precision_recall(result, path.stem), path.with_name(f"{path.stem}-pr.png")))
    table = path.with_name(f"{path.stem}-confusion.csv")
    if table.exists():
        matrix = np.loadtxt(table, delimiter=",", dtype=np.int64, ndmin=2)
        written.append(_save(_confusion(matrix, result, path.stem), path.with_name(f"{path.stem}-confusion.png")))
    return written


def use_style() -> None:
    """Set up matplotlib to draw to files, in the common style of the trainer's plots."""
    import matplotlib

    matplotlib.use("Agg")
    colours = {"axes.edgecolor": "#94a3b8", "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    matplotlib.rcParams |= {"font.size": 10, **colours}


def set_headline(figure: Figure, text: str) -> None:
    """Put a title at the upper left of a figure."""
    figure.suptitle(plain(text), x=0.01, ha="left", fontsize=12, color=INK, weight="bold")


def plain(text: str) -> str:
    """Return text in a form that matplotlib draws literally.

    Without this, text between two dollar signs would be drawn as a formula. Line breaks and bytes
    that are not UTF-8 become question marks.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text).replace("$", r"\$")


def _save(figure: Figure, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=150, format="png")
    return temporary.rename(path)


def _names(result: dict[str, Any], longest: int = 18) -> list[str]:
    names = [str(entry.get("name", entry["class"])) for entry in result["classes"]]
    return [plain(name if len(name) <= longest else f"{name[: longest - 1]}…") for name in names]


# ------------------------------------------------------------ precision and recall


def _precision_recall(result: dict[str, Any], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _curves(left, result)
    precision = np.array([entry["averagePrecision"] for entry in result["classes"]])
    if len(precision) <= _EACH_BY_ITSELF:
        _bars(right, precision, _names(result))
    else:
        _distribution(right, precision, _names(result))
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    averages = f"{result['macroAP']:.4f} macro, {result['microAP']:.4f} micro"
    headline = f"{title}: average precision {averages}, {result['samples']:,} samples"
    set_headline(figure, headline)
    return figure


def _curves(panel: Axes, result: dict[str, Any]) -> None:
    curves = dict(result["prCurves"])
    pooled = curves.pop("micro", None)
    if len(curves) <= _EACH_BY_ITSELF:
        _each_curve(panel, curves, _names(result))
    else:
        _bands(panel, list(curves.values()))
    if pooled is not None:
        panel.step(
            pooled["recall"],
            pooled["precision"],
            where="post",
            color=INK,
            linewidth=2.2,
            label="all decisions pooled (micro)",
        )
    panel.set(xlabel="recall", ylabel="precision", xlim=(0, 1.01), ylim=(0, 1.02))
    panel.grid(color=GRID, linewidth=0.8)
    panel.legend(
        framealpha=0.85,
        edgecolor="none",
        loc="lower left",
        fontsize=8,
        ncols=2 if 6 < len(curves) <= _EACH_BY_ITSELF else 1,
    )


def _each_curve(panel: Axes, curves: dict[str, Any], names: list[str]) -> None:
    from matplotlib import colormaps

    for number, curve in curves.items():
        colour = colormaps["tab20"](int(number) % 20)
        panel.step(
            curve["recall"],
            curve["precision"],
            where="post",
            color=colour,
            linewidth=1.2,
            alpha=0.9,
            label=names[int(number)],
        )


def _bands(panel: Axes, curves: list[dict[str, Any]]) -> None:
    """Draw how the precision of many classes is distributed at each recall."""
    recalls = np.linspace(0, 1, 101)
    values = np.empty((len(curves), len(recalls)))
    for row, curve in zip(values, curves, strict=True):
        falling = np.asarray(curve["recall"])
        row[:] = np.asarray(curve["precision"])[np.searchsorted(-falling, -recalls, side="right") - 1]
    lowest, low, middle, high, highest = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95), axis=0)
    panel.fill_between(
        recalls, lowest, highest, color=BLUE, alpha=0.12, linewidth=0, label=f"90 % of {len(curves):,} classes"
    )
    panel.fill_between(recalls, low, high, color=BLUE, alpha=0.25, linewidth=0, label="half of the classes")
    panel.plot(recalls, middle, color=BLUE, linewidth=1.4, label="median class")


def _bars(panel: Axes, precision: npt.NDArray[np.float64], names: list[str]) -> None:
    from matplotlib import colormaps

    rows = np.arange(len(precision))
    panel.barh(rows, precision, color=[colormaps["tab20"](number % 20) for number in range(len(precision))], height=0.7)
    for row, value in zip(rows, precision, strict=True):
        at, side = (value - 0.01, "right") if value > 0.25 else (value + 0.01, "left")
        panel.text(at, float(row), f"{value:.4f}", ha=side, va="center", fontsize=8)
    panel.set_yticks(rows, names)
    panel.invert_yaxis()
    panel.set(xlabel="average precision of each class", xlim=(0, 1))


def _distribution(panel: Axes, precision: npt.NDArray[np.float64], names: list[str]) -> None:
    panel.hist(precision, bins=np.linspace(0, 1, 41).tolist(), color=BLUE, alpha=0.75)
    panel.axvline(float(precision.mean()), color=RED, linewidth=1.2, linestyle="--")
    panel.text(
        float(precision.mean()), 0.98, " mean", color=RED, fontsize=9, va="top", transform=panel.get_xaxis_transform()
    )
    worst = np.argsort(precision, kind="stable")[:12]
    lines = "\n".join(f"{precision[number]:.3f}  {names[number]}" for number in worst)
    left = precision.mean() > 0.5
    panel.text(
        0.03 if left else 0.97,
        0.97,
        f"lowest:\n{lines}",
        transform=panel.transAxes,
        fontsize=8,
        va="top",
        ha="left" if left else "right",
        family="monospace",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )
    panel.set(xlabel="average precision of a class", ylabel="classes", xlim=(0, 1))


# ------------------------------------------------------------ confusion matrix


def _confusion(matrix: Matrix, result: dict[str, Any], title: str) -> Figure:
    from matplotlib.figure import Figure

    classes, names = len(matrix), _names(result)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    with_numbers = classes <= _NUMBERS_IN_CELLS
    size = (max(7.0, 4.6 + 0.52 * classes), max(4.4, 2.2 + 0.45 * classes)) if with_numbers else (12.5, 8.4)
    figure = Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    if with_numbers:
        _cells(left, matrix, shares, names)
    else:
        _many_cells(figure, left, shares)
    left.set(xlabel="predicted class", ylabel="true class")
    _worst_pairs(right, matrix, names)
    headline = f"{title}: {result['accuracy']:.2%} of {result['samples']:,} correct"
    set_headline(figure, headline)
    return figure


def _cells(panel: Axes, matrix: Matrix, shares: npt.NDArray[np.float64], names: list[str]) -> None:
    panel.imshow(shares**0.5, cmap="Blues", vmin=0, vmax=1.15, aspect="auto")
    size = 9 if len(matrix) <= 12 else 6.5
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            colour = "white" if shares[row, column] > 0.4 else INK
            panel.text(column, row, f"{count:,}", ha="center", va="center", fontsize=size, color=colour)
    style: dict[str, Any] = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 3 else {}
    panel.set_xticks(np.arange(len(matrix)), names, **style)
    panel.set_yticks(np.arange(len(matrix)), names)
    panel.tick_params(length=0)


def _many_cells(figure: Figure, panel: Axes, shares: npt.NDArray[np.float64]) -> None:
    """Draw a matrix with so many classes that several cells share a pixel.

    Each pixel shows the largest of its cells, so that single mistakes and the whole diagonal stay
    visible.
    """
    from matplotlib.colors import LogNorm

    each = -(-len(shares) // 500)
    room = -len(shares) % each
    side = (len(shares) + room) // each
    blocks = np.pad(shares, ((0, room), (0, room))).reshape(side, each, side, each).max((1, 3))
    image = panel.imshow(
        np.ma.masked_less_equal(blocks, 0.0),
        cmap="YlGnBu",
        norm=LogNorm(vmin=max(1e-3, float(shares[shares > 0].min(initial=1.0))), vmax=1.0),
        extent=(-0.5, len(shares) - 0.5, len(shares) - 0.5, -0.5),
        interpolation="nearest",
    )
    figure.colorbar(image, ax=panel, shrink=0.7, label="share of the true class (log scale)")


def _worst_pairs(panel: Axes, matrix: Matrix, names: list[str], most: int = 24) -> None:
    panel.axis("off")
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    most = min(most, max(6, 2 * len(matrix)))
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [(int(wrong.flat[cell]), *divmod(int(cell), len(matrix))) for cell in order if wrong.flat[cell]]
    lines = [f"{count:>5,}  {names[true]} → {names[guess]}" for count, true, guess in pairs]
    text = "\n".join(["most frequent mistakes", "(true → predicted)", "", *(lines or ["none"])])
    panel.text(0, 1, text, transform=panel.transAxes, va="top", fontsize=8, family="monospace", color=INK)


if __name__ == "__main__":
    os.nice(10)  # Drawing must not slow down the ranks on this machine.
    for name in sys.argv[1:]:
        draw(Path(name))
