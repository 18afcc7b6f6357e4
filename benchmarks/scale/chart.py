"""Draws the chart of a run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scale.parts import Series


def draw(series: Series, path: Path) -> None:
    """Draw CPU time, memory and requests by the number of jobs, and the storm over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (cores, memory, asked, storm) = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
    jobs = [row[0] for row in series.rest]
    for panel, column, title, aim in ((cores, 1, "processor, cores", 0.5), (memory, 2, "memory, MiB", 300)):
        panel.plot(jobs, [row[column] for row in series.rest], marker="o", color="#2471a3")
        panel.axhline(aim, color="black", linestyle="--", linewidth=1)
        panel.set_title(f"operator at rest: {title}", loc="left", fontsize=9)
        panel.set_xlabel("running jobs")
        panel.set_ylim(0, 1.15 * max(aim, *(row[column] for row in series.rest)))
    for column, label, colour in ((3, "status writes (aim 6)", "#2471a3"), (4, "reads (aim 1)", "#c0392b")):
        asked.plot(jobs, [row[column] for row in series.rest], marker="o", label=label, color=colour)
    asked.set_title("requests per job and minute", loc="left", fontsize=9)
    asked.set_xlabel("running jobs")
    asked.set_ylim(0, 7)
    asked.axhline(6, color="black", linestyle="--", linewidth=1)
    asked.legend(fontsize=8, frameon=False)
    storm.plot(series.storm, range(1, len(series.storm) + 1), color="#2471a3")
    storm.set_title(f"storm: {len(series.storm)} pods lost at once", loc="left", fontsize=9)
    storm.set_xlabel("seconds (aim 10)")
    storm.set_ylabel("pods replaced", color="#2471a3", fontsize=8)
    waits = storm.twinx()
    waits.plot(*zip(*series.probes, strict=True), "o", color="#c0392b", markersize=3)
    waits.set_ylabel("another team's new job waits, s", color="#c0392b", fontsize=8)
    waits.set_ylim(0, max(1.0, *(wait for _, wait in series.probes)) * 1.1)
    storm.axvline(10, color="black", linestyle="--", linewidth=1)
    for panel in (cores, memory, asked, storm):
        panel.spines["top"].set_visible(False)
        panel.set_xlim(left=0)
    figure.savefig(path, dpi=130)
