"""Measures how soon a job under `ddpjob run` regains its pace after a rank has become slow."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from ddpjob.api.job_spec import Json

from benchmarks.recovery.groups import Shape
from benchmarks.recovery.step_log import Incarnation
from benchmarks.recovery.trace.systems import Job

SCRIPT = Path(__file__).with_name("slow_steps.py")
SHARE = 0.95
"""Share of the earlier pace at which the job counts as recovered."""
STEPS = 40
"""Number of steps whose median is the pace."""
PATIENCE = 240.0


class SlowRankJob(Job):
    """A job of four nodes and a spare, one of which can be slowed down."""

    spares = 1
    script = SCRIPT

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, ())
        self.shape = shape

    def manifest(self) -> Json:
        """Return the DDPJob, with recovery.mode Fast and a state in memory after each step."""
        made = super().manifest()
        spec = {
            "nodes": self.shape.nodes, "spares": self.shape.spares, "gpusPerNode": 0, "image": "any:1",
            "script": str(SCRIPT), "args": [str(self.folder)], "recovery": {"mode": "Fast"},
        }  # fmt: skip
        return {**made, "spec": spec}

    def slow_down(self, node: str) -> float:
        """Make a node's steps twice as long. Return the time in Unix seconds."""
        (self.folder / "slow").write_text(node)
        return time.time()

    def cure(self) -> tuple[float, int]:
        """Slow down the last rank, and wait for the earlier pace.

        Return how many seconds that took and how many steps were repeated. Raises NotRecovered.
        """
        first = self.settle()
        wanted = pace(first) / SHARE
        moment = self.slow_down(first.nodes[max(first.nodes)])

        def cured() -> Incarnation | None:
            found = self.log.refresh().newest
            has_pace = found is not None and found is not first and found.world == first.world
            return found if found is not None and has_pace and pace(found) <= wanted else None

        found: Incarnation = self.wait("95 % of the earlier pace", cured, PATIENCE)
        formed = found.formed
        assert formed is not None
        return formed - moment, max(0, first.last_step + 1 - min(found.first.values()))


def pace(incarnation: Incarnation) -> float:
    """Return the median seconds of the newest steps of all ranks; infinite if there are few."""
    times = [moments[-STEPS - 1 :] for moments in incarnation.steps.values()]
    if min(len(moments) for moments in times) <= STEPS // 2:
        return float("inf")
    return statistics.median((moments[-1] - moments[0]) / (len(moments) - 1) for moments in times)
