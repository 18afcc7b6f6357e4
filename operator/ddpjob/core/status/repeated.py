"""Counts the steps that a restart made twice, which is its main cost where checkpoints are rare.

The worker of rank 0 reports at its start after which step it continues, where that state came
from, and which step was the last one before the restart (`protocol.START`). The difference is
repeated work. It is exact where a node's memory has survived (`ddpjob_pod.snapshot_store` notes
each step there), and unknown otherwise: an account that is not known is never shown as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ddpjob_runtime import protocol

from ddpjob.api.job_status import ConditionType, JobStatus, Restart, Restarts
from ddpjob.core.status.conditions import with_condition
from ddpjob.core.status.messages import count
from ddpjob.core.view import View, is_number

UNKNOWN = "unknown"
"""Where training continued from, if the script has not said."""


def count_repeats(view: View) -> JobStatus:
    """Return the status with what the coordinator's current round has repeated.

    Workers report it at their start. What they repeat is unknown if they have made their first step
    without a report.
    """
    status, report = view.status, view.report
    if report is None:
        return status
    start = protocol.read_start(report.progress.get(protocol.START))
    counts, mark, restart = status.restarts, f"{report.generation}.{report.round}", current_restart(status)
    if start and counts.seen_start != mark:
        counts = _with_repeats(replace(counts, seen_start=mark), restart, start)
    elif not start and restart is not None and restart.seconds is not None and not restart.continued_from:
        counts = _with_repeats(counts, restart, {"source": UNKNOWN})
    if "seconds" in start:
        counts = _with_seconds(counts, current_restart(replace(status, restarts=counts)), start["seconds"])
    return status if counts is status.restarts else replace(status, restarts=counts)


def current_restart(status: JobStatus) -> Restart | None:
    """Return the restart that began the job's current round.

    None if the job's start or a resumption began it, or if the status no longer lists it.
    """
    recent, since = status.restarts.recent, status.start_time
    began = [r for r in recent if status.round and r.round == status.round and (since is None or r.time >= since)]
    # Of many pods that were lost at once, the first one may no longer be listed.
    return next((r for r in reversed(began) if not r.consequence), began[-1] if began else None)


def makes_new_steps(status: JobStatus) -> bool:
    """Whether a group that runs makes steps for the first time, as far as is known.

    It does not before its first step, nor while it repeats steps.
    """
    restart = current_restart(status)
    if restart is None:
        return status.trained
    return restart.seconds is not None and not (restart.repeated_steps and restart.repeated_seconds is None)


def _with_repeats(counts: Restarts, restart: Restart | None, start: dict[str, Any]) -> Restarts:
    if restart is None:
        return counts  # Nothing was repeated: the job has begun, or was resumed.
    repeated = count_steps(start)
    again = replace(restart, repeated_steps=repeated, continued_from=start["source"])
    unknown = (repeated is None) - (restart.continued_from == UNKNOWN)
    return replace(
        counts,
        repeated_steps=counts.repeated_steps + (repeated or 0),
        unknown_repeats=max(0, counts.unknown_repeats + unknown),
        recent=tuple(again if r is restart else r for r in counts.recent),
    )


def count_steps(start: Mapping[str, Any]) -> int | None:
    """Return how many steps a start has repeated, as reported; None if that is not known."""
    return start["made"] - start["step"] if "made" in start else None


def _with_seconds(counts: Restarts, restart: Restart | None, seconds: float) -> Restarts:
    said = restart is not None and restart.continued_from not in ("", UNKNOWN)
    if restart is None or not said or restart.repeated_seconds is not None:
        return counts
    over = replace(restart, repeated_seconds=round(seconds, 2))
    return replace(
        counts,
        repeated_seconds=round(counts.repeated_seconds + seconds, 2),
        recent=tuple(over if r is restart else r for r in counts.recent),
    )


def judge_snapshots(view: View) -> JobStatus:
    """Return the status with the condition SnapshotsHeld, if two states do not fit or did not."""
    status, figures = view.status, view.reported_progress
    condition = partial(with_condition, status, ConditionType.SNAPSHOTS_HELD, now=view.now)
    needed, risk = figures.get(protocol.SNAPSHOT_BYTES), figures.get(protocol.AT_RISK)
    if is_number(needed) and needed > 0:
        why = f"two states of the training need {needed / 2**30:.1f} GiB of each pod's memory"
        remedy = "raise storage.snapshotMemory and resources.limits.memory, or set recovery.snapshots: none"
        cost = "a loss repeats the work since the last checkpoint"
        return condition(False, "NoRoom", f"{why}, and there is less: {cost}; {remedy}")
    before = status.condition(ConditionType.SNAPSHOTS_HELD)
    if before is None or before.status or not is_number(risk):
        return status
    return condition(True, "Held", f"a loss repeats at most {count(int(risk), 'step')}")


_SOURCES = {
    protocol.MEMORY: "from memory",
    protocol.STORAGE: "from a checkpoint",
    protocol.SCRATCH: "from the beginning",
}


def repeats(restart: Restart | None) -> str:
    """Return how many steps were made twice after a restart, in words.

    Empty if the script has not reported it.
    """
    return "" if restart is None else describe_repeats(restart.continued_from, restart.repeated_steps)


def describe_repeats(source: str, steps: int | None) -> str:
    """Return how many steps were made twice, and where they continued from (protocol.SOURCES)."""
    if source not in _SOURCES:
        return ""
    number = "an unknown number of steps" if steps is None else count(steps, "step")
    return f"{number} repeated ({_SOURCES[source]})"
