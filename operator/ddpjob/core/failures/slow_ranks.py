"""Decides whether a slow rank moves to a spare.

All ranks wait for the slowest one at each step, so one throttled GPU or one busy host slows the
whole job down. The ranks measure this (`ddpjob_pod/stragglers.py`) and report which of them lag.
Moving a rank costs a restart, and helps only if the rank's host is the reason. So a rank moves only
if all of these conditions hold:

- It is reported as at least SLOWDOWN times as slow as the median rank, and each step would take at
  least COST less time if the rank kept pace. If a script reports no costs, its slow ranks are only
  reported.
- It has been reported for LASTS by the operator's clock. By default, the script reports a rank only
  after half a minute. Short loads, evaluations and checkpoints are over sooner.
- At most a quarter of the pods are slow. If more are slow, no single pod stands out.
- A spare is ready on a different Kubernetes node. On the same node, the restart would cost work and
  gain nothing.
- Within the last hour, the rank was not moved, the job has not left this Kubernetes node, and there
  were fewer than MAX_MOVES moves. If a rank is slow again after a move, its work is at fault.
- The last move of a slow rank was at least APART ago. Only one pod is moved at a time.

Example with the trainer's defaults and one spare:

     0 s  rank 3's GPU begins to throttle, and every step takes twice as long
    30 s  rank 3 is reported in the status and by an event
    60 s  a spare replaces its pod in an uncounted restart, and takes rank 3's share of the work
    later rank 3 is slow again: it stays there, and the RanksKeepPace condition reports it

Why: docs/decisions/0026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddpjob_runtime.protocol import STRAGGLERS, CoordinatorState, read_stragglers

from ddpjob.api.job_spec import Placement, SlowRanks
from ddpjob.api.job_status import Restart, SlotState, known_time
from ddpjob.core.failures.avoided_nodes import RECENT, WINDOW
from ddpjob.core.failures.classify import Cause, End
from ddpjob.core.failures.node_health import MAX_MOVES, SHARE, ready_spares
from ddpjob.core.view import View
from ddpjob.core.world import PodView

SLOWDOWN = 1.3
COST = 0.1
"""Minimum share of each step's time that a move must save. Such a move repays the cost of its
restart in about a minute."""
LASTS = timedelta(seconds=30)
APART = timedelta(minutes=5)
_MOVES = (Cause.SLOW_RANK, Cause.NODE_UNHEALTHY)


@dataclass(frozen=True)
class PaceVerdict:
    """The decision on whether to move a pod that has had a clearly slow rank for LASTS."""

    index: int
    end: End
    """Cause and message to record as the pod's end if the pod is moved."""
    what: str
    """Describes the rank and its pod, without figures that change with each report."""
    why: str = ""
    """Why the pod stays; empty if it is moved."""


@dataclass(frozen=True)
class _Slow:
    """A pod's slowest rank."""

    index: int
    pod: PodView
    rank: int
    slowdown: float
    cost: float | None
    since: datetime


def judge_slow_ranks(view: View) -> list[PaceVerdict]:
    """Decide which pods with clearly slow ranks move, starting with the slowest pod.

    The result is empty while the job is finishing, and until APART has passed since the last move.
    """
    slow = [found for found in _slow_pods(view) if view.now >= found.since + LASTS]
    if not slow or _next_after_move(view) is not None:
        return []
    verdicts: list[PaceVerdict] = []
    for found in slow:
        moving = any(not verdict.why for verdict in verdicts)
        why = _why_it_stays(view, found, slow) or ("one pod is moved at a time" if moving else "")
        where = f" on Kubernetes node {found.pod.host}" if found.pod.host else ""
        what = f"rank {found.rank} (pod {found.pod.name}{where}) has been clearly slower than the others for a minute"
        times = f"rank {found.rank}'s own work in a step takes {found.slowdown:.1f} times as long as the median rank's"
        end = End(Cause.SLOW_RANK, f"{times}, so a spare replaces pod {found.pod.name}{where}", rank=found.rank)
        verdicts.append(PaceVerdict(found.index, end, what, why))
    return verdicts


def is_named(view: View) -> bool:
    """Whether a clearly slow rank is reported, or no running group could report a slow rank."""
    return view.report is None or view.report.state is not CoordinatorState.RUNNING or any(_slow_pods(view))


def find_next_move(view: View) -> datetime | None:
    """Return the next future time at which a slow rank may be moved; None if there is none."""
    slow = list(_slow_pods(view))
    moments = [found.since + LASTS for found in slow] + [_next_after_move(view) if slow else None]
    return min((moment for moment in moments if moment is not None and moment > view.now), default=None)


def _slow_pods(view: View) -> Iterator[_Slow]:
    """Yield the pods whose ranks are reported as clearly slow, the slowest first."""
    report, procs = view.report, view.job.spec.procs_per_node
    if report is None or report.state is not CoordinatorState.RUNNING or (report.world or 0) < 2:
        return
    if any(slot.state is SlotState.SUCCEEDED for slot in view.status.slots):
        return
    members = {member.rank: member.pod for member in report.members if member.rank is not None}
    indices = {pod.name: index for index, pod in enumerate(view.pods) if pod is not None}
    entries = view.status.progress.get(STRAGGLERS) or ()
    shown = {(entry.get("rank"), entry.get("pod")): known_time(entry.get("since")) for entry in entries}
    seen = set[int]()
    reported = read_stragglers(report.progress.get(STRAGGLERS))
    for found in sorted(reported, key=lambda entry: (-entry["slowdown"], entry["rank"])):
        name, cost = members.get(found["rank"] // procs, ""), found.get("cost")
        index, since = indices.get(name), shown.get((found["rank"], name))
        pod = view.pods[index] if index is not None else None
        if index is None or index in seen or since is None or pod is None or pod.ended or pod.deleted_at is not None:
            continue
        if found["slowdown"] >= SLOWDOWN and (cost is None or cost >= COST):
            seen.add(index)
            yield _Slow(index, pod, found["rank"], found["slowdown"], cost, since)


def _why_it_stays(view: View, found: _Slow, slow: list[_Slow]) -> str:
    spec, within = view.job.spec, _within(view)
    moved = [restart for restart in within if restart.reason == Cause.SLOW_RANK]
    often = len({r.round for r in within if r.reason in _MOVES}) >= MAX_MOVES or len(within) >= RECENT
    avoided = {a.node for a in view.status.avoided_nodes if a.reason.startswith(Cause.SLOW_RANK)}
    spares = [pod for pod in ready_spares(view) if view.world.one_host or pod.host != found.pod.host]
    procs = spec.procs_per_node
    if spec.recovery.slow_ranks is SlowRanks.REPORT:
        return "recovery.slowRanks is Report"
    if found.cost is None or not spec.under_torchrun:
        return "the rank is reported but not moved, because spec.command is set or the rank's cost in time is unknown"
    if len(slow) > max(1, SHARE * spec.nodes):
        return "more than a quarter of the pods are slow, so no single pod stands out"
    if found.index == 0 and spec.rendezvous.placement is Placement.MASTER:
        return "its pod runs the coordinator, because rendezvous.placement is Master"
    if any(restart.rank is not None and restart.rank // procs == found.rank // procs for restart in moved):
        return "the same rank was slow in a different pod within the last hour, so its work is probably the cause"
    if not view.world.one_host and found.pod.host in avoided | {restart.node for restart in moved}:
        return "the job left this Kubernetes node within the last hour, but its pod was placed there again"
    if often:
        return f"within the last hour, pods were moved {MAX_MOVES} times, or the job restarted {RECENT} times"
    return "" if spares else "no spare is ready on a different Kubernetes node; set spec.spares"


def _within(view: View) -> list[Restart]:
    return [restart for restart in view.status.restarts.recent if restart.time > view.now - WINDOW]


def _next_after_move(view: View) -> datetime | None:
    """Return the time at which a pod may be moved again; None if a pod may be moved now."""
    last = max((r.time for r in _within(view) if r.reason == Cause.SLOW_RANK), default=None)
    return last + APART if last is not None and last + APART > view.now else None
