"""Counts the steps that are repeated after each restart. If checkpoints are rare, these steps are
the main cost of a restart.

When rank 0's worker starts, it reports three things (`protocol.START`): the step after which it
continues, where that state came from, and the last step before the restart. The difference between
the two steps is repeated work. The last step is known if a node's memory has survived, because
`ddpjob_pod.snapshot_store` records each step in memory. Otherwise the number of repeated steps is
unknown. An unknown number is never shown as 0.

The number of steps that a restart repeats is recorded when the report on the new round arrives. If
the group takes its first step earlier, the number is unknown until that report arrives. The time
that the repetition takes is reported later, once the repetition is over.

Example: the group has completed step 903 when a node is lost.

    memory of another node holds step 903        0 steps repeated (from memory)
    memory is lost, and a checkpoint has 900     an unknown number of steps repeated
    the script does not report its start         the number of repeated steps is not shown
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
"""The source of a restart's state if the script has not reported a source."""


def count_repeats(view: View) -> JobStatus:
    """Return the status, with the number of steps that the reported round has repeated."""
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

    Return None if the round began with the job or with a resume, or if the restart is no longer in
    the list of recent restarts.
    """
    recent, since = status.restarts.recent, status.start_time
    began = [r for r in recent if status.round and r.round == status.round and (since is None or r.time >= since)]
    # If many pods were lost at once, the list may contain only consequences, not the cause.
    return next((r for r in reversed(began) if not r.consequence), began[-1] if began else None)


def makes_new_steps(status: JobStatus) -> bool:
    """Whether a running group is taking steps that no earlier round has taken.

    The result is False before the group's first step, and while the group repeats steps. If the
    number of repeated steps is unknown, the result is True after the first step.
    """
    restart = current_restart(status)
    if restart is None:
        return status.trained
    return restart.seconds is not None and not (restart.repeated_steps and restart.repeated_seconds is None)


def _with_repeats(counts: Restarts, restart: Restart | None, start: dict[str, Any]) -> Restarts:
    if restart is None:
        return counts  # The round began with the job or with a resume, so no restart repeats steps.
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
    """Return how many steps a round repeats, given the report on its start; None if unknown."""
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
    """Show in the SnapshotsHeld condition whether the training state fits into memory.

    The condition first appears when the state does not fit into a pod's memory.
    """
    status, figures = view.status, view.reported_progress
    condition = partial(with_condition, status, ConditionType.SNAPSHOTS_HELD, now=view.now)
    needed, risk = figures.get(protocol.SNAPSHOT_BYTES), figures.get(protocol.AT_RISK)
    if is_number(needed) and needed > 0:
        why = f"two training states need {needed / 2**30:.1f} GiB of each pod's memory"
        remedy = "raise storage.snapshotMemory and resources.limits.memory, or set recovery.snapshots: none"
        cost = "so losing a pod now would repeat the work since the last checkpoint"
        return condition(False, "NoRoom", f"{why}, which is more than is available, {cost}; {remedy}")
    before = status.condition(ConditionType.SNAPSHOTS_HELD)
    if before is None or before.status or not is_number(risk):
        return status
    return condition(True, "Held", f"losing a pod would repeat at most {count(int(risk), 'step')}")


_SOURCES = {
    protocol.MEMORY: "from memory",
    protocol.STORAGE: "from a checkpoint",
    protocol.SCRATCH: "from the beginning",
}


def repeats(restart: Restart | None) -> str:
    """Describe how many steps a restart has repeated.

    The result is empty if it is not known from which state training continued."""
    return "" if restart is None else describe_repeats(restart.continued_from, restart.repeated_steps)


def and_repeats(restart: Restart | None) -> str:
    """Return the text of `repeats` with a leading semicolon; empty if `repeats` is empty."""
    again = repeats(restart)
    return f"; {again}" if again else ""


def describe_repeats(source: str, steps: int | None) -> str:
    """Describe how many steps were repeated, and where the state came from (protocol.SOURCES)."""
    if source not in _SOURCES:
        return ""
    number = "an unknown number of steps" if steps is None else count(steps, "step")
    return f"{number} repeated ({_SOURCES[source]})"
