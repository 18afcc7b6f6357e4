"""Counts the steps that a restart made twice, which is its main cost where checkpoints are rare.

The worker of rank 0 says at its start after which step it continues, where that state came from, and
which step was the last one before the restart (`protocol.START`). The difference is repeated work. It
is exact where a node's memory has survived (`ddpjob_pod.snapshot_store` notes each step there), and
unknown otherwise: an account that is not known is never shown as 0. Decision record 0023.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ddpjob_runtime import protocol

from ddpjob.api.job_status import ConditionType, JobStatus, Restart, Restarts
from ddpjob.core.status.conditions import with_condition
from ddpjob.core.status.messages import count
from ddpjob.core.view import View, is_number


def count_repeats(view: View) -> JobStatus:
    """Return the status with what the coordinator's current round has repeated, once its workers have said so."""
    status, report = view.status, view.report
    start = {} if report is None else protocol.read_start(report.progress.get(protocol.START))
    if report is None or not start:
        return status
    counts, mark = status.restarts, f"{report.generation}.{report.round}"
    if counts.seen_start != mark:
        counts = replace(counts, seen_start=mark)
        if status.round:
            counts = _with_repeats(counts, status.round, start)
    if "seconds" in start:
        counts = _with_seconds(counts, status.round, start["seconds"])
    return status if counts is status.restarts else replace(status, restarts=counts)


def _with_repeats(counts: Restarts, number: int, start: dict[str, Any]) -> Restarts:
    repeated = start["made"] - start["step"] if "made" in start else None
    cause = _cause(counts, number)
    again = None if cause is None else replace(cause, repeated_steps=repeated, continued_from=start["source"])
    return replace(
        counts,
        repeated_steps=counts.repeated_steps + (repeated or 0),
        unknown_repeats=counts.unknown_repeats + (repeated is None),
        recent=tuple(again if r is cause and again is not None else r for r in counts.recent),
    )


def _with_seconds(counts: Restarts, number: int, seconds: float) -> Restarts:
    cause = _cause(counts, number)
    if cause is None or not cause.continued_from or cause.repeated_seconds is not None:
        return counts
    over = replace(cause, repeated_seconds=round(seconds, 2))
    return replace(
        counts,
        repeated_seconds=round(counts.repeated_seconds + seconds, 2),
        recent=tuple(over if r is cause else r for r in counts.recent),
    )


def _cause(counts: Restarts, number: int) -> Restart | None:
    """Return the restart that began the job's current round; None if it is not among the last ones."""
    return next((r for r in reversed(counts.recent) if r.round == number and not r.consequence), None)


def judge_snapshots(view: View) -> JobStatus:
    """Return the status with the condition SnapshotsHeld: only where two states do not fit, or did not."""
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


def repeats(restart: Restart) -> str:
    """Return how many steps were made twice after a restart, in words; empty if the script has not said."""
    if not restart.continued_from:
        return ""
    number = "an unknown number of steps" if restart.repeated_steps is None else count(restart.repeated_steps, "step")
    return f"{number} repeated ({_SOURCES.get(restart.continued_from, restart.continued_from)})"
