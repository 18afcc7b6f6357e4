"""Writes the comparison as a table, as CSV and as a chart."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import torch

from benchmarks.strategies.cases import Case, accelerators
from benchmarks.strategies.runs import Measured

_INK, _GRID = "#334155", "#e2e8f0"
_COLOURS = {
    "one process": "#64748b",
    "ddp": "#2563eb",
    "precision": "#7c3aed",
    "libraries": "#ea580c",
    "parts of a model": "#0d9488",
}


def seconds(measured: list[Measured], samples: int) -> list[float]:
    """Return the seconds of each epoch that counts."""
    return [samples / speed for run in measured for speed in run.speeds]


def device() -> str:
    """Return the name of the measured devices."""
    if accelerators():
        return f"{accelerators()} x {torch.cuda.get_device_name(0)}"
    cores = torch.get_num_threads()
    return f"CPU, {cores} core{'' if cores == 1 else 's'}"


def table(cases: list[Case], found: dict[str, list[Measured]], missing: dict[str, str], samples: int) -> str:
    """Return a Markdown table: medians over rounds and epochs, and ratios of epoch times."""
    medians = {name: statistics.median(seconds(runs, samples)) for name, runs in found.items()}
    lines = [
        "| strategy | s per epoch (median) | best, worst | samples/s | of single's time | of ddp's time | final loss"
        " | whole run, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in cases:
        if case.name in medians:
            times, own = seconds(found[case.name], samples), medians[case.name]
            ratios = " | ".join(
                f"{own / medians[other]:.2f}" if other in medians else "-" for other in ("single", "ddp")
            )
            loss = statistics.median(run.loss for run in found[case.name])
            whole = statistics.median(run.whole for run in found[case.name])
            spread = f"{min(times):.2f}, {max(times):.2f}"
            lines.append(
                f"| {case.name} | {own:.2f} | {spread} | {samples / own:,.0f} | {ratios} | {loss:.4f} | {whole:.1f} |"
            )
    lines += ["", *(f"Not measured: {name}: {reason}." for name, reason in missing.items())]
    return "\n".join(lines).rstrip()


def write_csv(path: Path, found: dict[str, list[Measured]], missing: dict[str, str], samples: int) -> None:
    """Write one row per epoch that counts, and one row per missing case with the reason."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "strategy",
                "round",
                "epoch",
                "seconds",
                "samples_per_second",
                "final_loss",
                "whole_run_seconds",
                "not_measured",
            ]
        )
        for name, runs in found.items():
            for number, run in enumerate(runs, 1):
                for epoch, speed in enumerate(run.speeds, 2):
                    writer.writerow(
                        [name, number, epoch, round(samples / speed, 4), speed, run.loss, round(run.whole, 3), ""]
                    )
        for name, reason in missing.items():
            writer.writerow([name, "", "", "", "", "", "", reason])


def draw(
    path: Path, cases: list[Case], found: dict[str, list[Measured]], missing: dict[str, str], samples: int, what: str
) -> None:
    """Draw a bar per case: the median time per epoch, with a line from the best to the worst."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    plt.rcParams |= {
        "font.size": 10,
        "axes.edgecolor": "#94a3b8",
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    shown = [case for case in cases if case.name in found]
    times = [seconds(found[case.name], samples) for case in shown]
    medians = [statistics.median(own) for own in times]
    reference = dict(zip((case.name for case in shown), medians, strict=True)).get("ddp")
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.42 * len(shown) + 0.16 * len(missing)), layout="constrained")
    rows = range(len(shown))
    axes.barh(rows, medians, height=0.66, color=[_COLOURS[case.kind] for case in shown], zorder=2)
    axes.hlines(rows, [min(own) for own in times], [max(own) for own in times], color=_INK, linewidth=1.4, zorder=3)
    for row, median, own in zip(rows, medians, times, strict=True):
        ratio = f"   {median / reference:.2f} times ddp" if reference else ""
        axes.annotate(
            f"{median:.2f} s{ratio}",
            (max(own), row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
            fontsize=9,
        )
    axes.set_yticks(rows, [case.name for case in shown])
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_xlim(0, 1.28 * max(max(own) for own in times))
    axes.set_xlabel("seconds per epoch: median, best to worst")
    axes.grid(axis="x", color=_GRID, linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    kinds = list(dict.fromkeys(case.kind for case in shown))
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in kinds],
        frameon=False, loc="upper right", bbox_to_anchor=(1, -0.07), ncols=len(kinds), labelcolor=_INK,
    )  # fmt: skip
    figure.suptitle(
        f"The same training under {len(shown)} strategies and launchers",
        x=0.01,
        ha="left",
        fontsize=13,
        color=_INK,
        weight="bold",
    )
    axes.set_title(what, loc="left", fontsize=9, color="#64748b")
    if missing:
        notes = "\n".join(f"not measured: {name}: {reason}" for name, reason in missing.items())
        figure.supxlabel(notes, x=0.01, ha="left", fontsize=7.5, color="#64748b")
    figure.savefig(path, dpi=150)
    plt.close(figure)
