"""Draws the picture of a night."""

from __future__ import annotations

from pathlib import Path

from benchmarks.night.night import Record
from benchmarks.night.report import AIM
from benchmarks.night.schedule import GPUS, HOSTS, FaultKind


def draw(record: Record, path: Path, seed: int) -> None:
    """Draw each job's GPUs and the available ones, the losses, and how long jobs wait although
    there is room.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    minutes = [look.at / 60 for look in record.looks]
    names = sorted(record.created)
    colours = [plt.get_cmap("tab20")(number % 20) for number in range(len(names))]
    figure, (use, waits) = plt.subplots(2, 1, figsize=(13, 6), sharex=True, layout="constrained", height_ratios=(3, 1))
    use.stackplot(
        minutes, [[look.held.get(name, 0) for look in record.looks] for name in names],
        colors=colours, step="post", linewidth=0.3, edgecolor="white",
    )  # fmt: skip
    use.step(minutes, [look.offered for look in record.looks], where="post", color="black", linewidth=1.5)
    for at, kind, seconds in record.faults:
        if seconds:
            off = kind is FaultKind.POWER
            use.axvspan(at / 60, (at + seconds) / 60, 0.95, 1.0, color="#c0392b" if off else "#e67e22", linewidth=0)
        else:
            mark = "x" if kind is FaultKind.POD else "+"
            use.plot(at / 60, HOSTS * GPUS * 1.02, mark, color="black", markersize=5)
    use.set_ylim(0, HOSTS * GPUS * 1.12)
    use.set_title(
        f"GPUs in use, one colour per job; black line: GPUs of Ready nodes. Bars above: a node without power (red) or"
        f" network (orange); x: a pod, +: a coordinator is killed. Seed {seed}",
        loc="left", fontsize=9,
    )  # fmt: skip
    use.set_ylabel("GPUs")
    waits.fill_between(minutes, [look.longest for look in record.looks], step="post", color="#c0392b", linewidth=0)
    waits.axhline(AIM, color="black", linestyle="--", linewidth=1)
    waits.set_ylim(0, max(AIM * 1.5, max((look.longest for look in record.looks), default=0) * 1.1))
    waits.set_ylabel("seconds", color="#c0392b")
    waits.set_title(
        f"longest wait of a job that fits, so far (aim {AIM:.0f} s); grey: jobs that wait for nodes",
        loc="left",
        fontsize=9,
    )
    beside = waits.twinx()
    beside.step(minutes, [look.waiting for look in record.looks], where="post", color="#7f8c8d", linewidth=1)
    beside.set_ylabel("jobs", color="#7f8c8d")
    beside.set_ylim(bottom=0)
    waits.set_xlabel("minutes")
    for panel in (use, waits, beside):
        panel.spines["top"].set_visible(False)
        panel.set_xlim(0, minutes[-1] if minutes else 1)
    figure.savefig(path, dpi=110)
