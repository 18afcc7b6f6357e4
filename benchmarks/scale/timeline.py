"""Records when each pod of a storm was gone, and when its replacement was planned, shown and
running.

The benchmark observes everything with its own watches, so the operator and the bare client are
measured alike. The operator's requests cannot be seen from outside. Its plan can: a status with the
replacement's attempt is written just before the replacement is created. The bare client plans a pod
when it sends the request.

    deleted     the benchmark begins to delete the pods, all at once
    gone        the watch shows that the pod is gone
    planned     the watch shows the job's status with the new attempt, or the bare client's request
    replaced    the watch shows the replacement
    runs        the watch shows that the replacement has an address
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Id = tuple[str, str, int]
"""A pod's namespace, job and index."""
STEPS = ("gone", "planned", "replaced", "runs")
GAPS = (("", "gone"), ("gone", "planned"), ("planned", "replaced"), ("gone", "replaced"), ("replaced", "runs"))
QUANTILES = {"p50": 0.5, "p90": 0.9, "max": 1.0}


class Timeline:
    """The steps of every lost pod, in seconds since this object was created.

    `lost` names the pods, which have attempt 0. Their replacements have attempt 1.
    """

    def __init__(self, lost: Iterable[Id] = ()) -> None:
        self._began = time.monotonic()
        self._steps: dict[Id, dict[str, float]] = {pod: {} for pod in lost}

    def mark(self, step: str, pod: Id, attempt: int) -> None:
        """Record a step at this moment, unless it is known or does not belong to a lost pod."""
        if pod in self._steps and attempt == int(step != "gone"):
            self._steps[pod].setdefault(step, time.monotonic() - self._began)

    def count(self, step: str) -> int:
        """Return how many pods have reached a step."""
        return sum(step in steps for steps in self._steps.values())

    def last(self, step: str) -> float:
        """Return when the last pod reached a step."""
        return max(steps[step] for steps in self._steps.values())

    def gaps(self, begin: str, end: str) -> list[float]:
        """Return the seconds between two steps, sorted. `begin` may be empty for the deletion.

        A watch may show a replacement before the status that plans it, because they are different
        watches. The gap is then 0.
        """
        whole = (steps for steps in self._steps.values() if end in steps and (not begin or begin in steps))
        return sorted(max(0.0, steps[end] - steps.get(begin, 0.0)) for steps in whole)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yield each pod's namespace, job, index and steps. A step that is not known is empty."""
        for pod, steps in sorted(self._steps.items()):
            yield (*pod, *(f"{steps[step]:.4f}" if step in steps else "" for step in STEPS))


def gap_table(timelines: Mapping[str, Timeline]) -> str:
    """Return a Markdown table of all gaps, with percentiles for each client."""
    heads = [f"{client}, {quantile}" for client in timelines for quantile in QUANTILES]
    lines = [f"| seconds | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for begin, end in GAPS:
        cells = [
            f"{_quantile(timeline.gaps(begin, end), share):.2f}"
            for timeline in timelines.values()
            for share in QUANTILES.values()
        ]
        lines.append(f"| {begin or 'deleted'} to {end} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of the sorted values does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def write_timelines(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Write one CSV line per lost pod and client."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "namespace", "job", "index", *STEPS])
        writer.writerows((client, *row) for client, timeline in timelines.items() for row in timeline.rows())
