"""Shows how a recovery's time was spent: the phases of the last rank, as a table and a picture.

python -m benchmarks.recovery phases FILE.csv [FILE.csv ...] [-o FILE.png]      draws what was measured with --csv
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.recovery.step_log import Incarnation
from benchmarks.recovery.tables import Sample, read_csv

CREATED, STARTED, LAUNCHER, ROUND, WORKER, DEVICE, FORMED, STEP, TORCH = (
    "noticed, pod created",
    "node started (scheduled, container)",
    "launcher: Python, torch, its round",
    "noticed, workers ended, round",
    "worker: Python, torch",
    "CUDA ready",
    "process group formed",
    "first step of all ranks",
    "a node starts and imports torch",
)
COLORS = {
    CREATED: "#7b241c", STARTED: "#c0392b", LAUNCHER: "#d68910", ROUND: "#884ea0", WORKER: "#f4d03f", DEVICE: "#76d7c4",
    FORMED: "#2471a3", STEP: "#229954", TORCH: "#909497",
}  # fmt: skip


def phases(recovered: Incarnation, moment: float, created: Callable[[str], float | None]) -> dict[str, float]:
    """Return the seconds of each phase from `moment` to the first step of all ranks.

    They are taken from the rank whose process began last, on a new node if there is one, because
    the others waited for that rank. `created` returns when a node was created. The result is empty
    if the ranks' logs have no times.
    """
    if not recovered.moments or recovered.formed is None:
        return {}
    rank, its = max(recovered.moments.items(), key=lambda item: (item[1]["launcher"] > moment, item[1]["process"]))
    ends: list[tuple[str, float]] = []
    if its["launcher"] > moment:
        if (when := created(recovered.nodes[rank])) is not None:
            ends.append((CREATED, when))
        ends += [(STARTED, its["launcher"]), (LAUNCHER, its["process"])]
    else:
        ends.append((ROUND, its["process"]))
    ends += [(WORKER, its["imported"]), (DEVICE, its["device"]), (FORMED, its["formed"]), (STEP, recovered.formed)]
    found, before = {}, moment
    for name, end in ends:
        # /proc's times have a resolution of 10 ms, and a watch may be late. A phase that ends
        # before the previous one therefore counts as zero.
        found[name] = max(0.0, end - before)
        before = max(before, end)
    return found


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw a stacked bar per case and backend, with the phases of the median-length run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars: dict[str, dict[str, float]] = {}
    for sample in reversed(samples):
        bars.setdefault(f"{sample.case}, {sample.backend}", {})
    for title in bars:
        of_case = [one for one in samples if f"{one.case}, {one.backend}" == title and one.seconds is not None]
        if found := [one for one in of_case if one.phases or one.victim == "nothing"]:
            # Use one measured run, not the medians of phases, which would not add up.
            middle = statistics.median_low([one.seconds or 0.0 for one in found])
            run = next(one for one in found if one.seconds == middle)
            bars[title] = run.phases or {TORCH: middle}
    bars = {title: bar for title, bar in bars.items() if bar}
    figure, panel = plt.subplots(figsize=(9, 1.5 + 0.36 * len(bars)), layout="constrained")
    for row, bar in enumerate(bars.values()):
        left = 0.0
        for name, seconds in bar.items():
            panel.barh(row, seconds, left=left, color=COLORS[name], height=0.7)
            left += seconds
        panel.text(left, row, f" {left:.2f} s", va="center", fontsize=8)
    panel.set_yticks(range(len(bars)), list(bars))
    used = [name for name in COLORS if any(name in bar for bar in bars.values())]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in used]
    figure.legend(handles, used, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    panel.set_xlabel("seconds from the kill")
    panel.margins(x=0.12)
    panel.set_xlim(left=0)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str]) -> int:
    """Draw the picture, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.csv")
    parser.add_argument("-o", "--output", type=Path, default=Path("recovery-phases.png"), metavar="FILE")
    options = parser.parse_args(arguments)
    draw([sample for path in options.files for sample in read_csv(path)], options.output)
    return 0
