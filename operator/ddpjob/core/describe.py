"""Decides what the status says of the present: conditions, counts, progress; from pods and the coordinator's report."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob.api.types import ConditionType, DDPJob, JobStatus, Restart, SlotState
from ddpjob.core.classify import Cause, stuck
from ddpjob.core.conditions import with_condition, with_phase
from ddpjob.core.group import coordinator_pod, node_pods
from ddpjob.core.incidents import present_report
from ddpjob.core.progress import shown_progress
from ddpjob.core.volumes import unusable_claim
from ddpjob.core.world import PodView, Report, Role, World

BLOCKED_POLL = 10.0
"""Seconds between two tries where something outside is missing (a claim, a quota)."""
CREATION_REFUSED = "CreationRefused"
NAME_IS_TAKEN = "NameTaken"
_IN_GROUP = ("Running", "Finished")


def describe(
    job: DDPJob, status: JobStatus, world: World, now: datetime, restarts: tuple[Restart, ...], *, old_round: int, creating: bool
) -> JobStatus:
    """Conditions, counts and progress as they are now. `creating`: something is missing and is going to be tried."""
    present = [p for p in node_pods(job, status, world) if p is not None and not p.ended and p.deleted_at is None]
    training = _training(job, status, world)
    running_pods = sum(p.main.running for p in present)
    finished = sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    ready = max(0, training - finished) if training is not None else min(running_pods, job.spec.nodes)
    status = replace(status, active=min(len(present), job.spec.nodes), ready=ready, spare=max(0, running_pods - ready))
    status = _scheduled(job, status, world, present, now, creating=creating)
    running, reason, message = _running(job, status, world, training, running_pods, now)
    status = with_condition(status, ConditionType.RUNNING, running, reason, message, now)
    whole = running and reason not in ("CoordinatorUnreachable", "CoordinatorReplaced") and (training is None or training <= job.spec.nodes)
    status = _restarting(status, whole, [r for r in restarts if r.round], world, now, old_round)
    status = _fast_recovery(job, status, world, now)
    told = world.report.progress if world.report else {}
    due = status.phase is not with_phase(status).phase
    return with_phase(replace(status, progress=shown_progress(status.progress, told, now, at_once=due)))


def _training(job: DDPJob, status: JobStatus, world: World) -> int | None:
    """How many nodes train as one group, by the coordinator's word and the pods that it names; None: not known, or they do not."""
    report = present_report(status, world)
    if not job.spec.under_torchrun or report is None or report.state not in ("Running", "Succeeded"):
        return None
    alive = {p.name for p in node_pods(job, status, world) if p is not None and (p.succeeded or (p.main.running and not p.ended))}
    members = [m.pod for m in report.members if m.state in _IN_GROUP]
    if report.world is None or len(members) < report.world or not set(members) <= alive:
        return None
    return report.world


def _scheduled(job: DDPJob, status: JobStatus, world: World, pods: list[PodView], now: datetime, *, creating: bool) -> JobStatus:
    def say(holds: bool, reason: str, message: str) -> JobStatus:
        return with_condition(status, ConditionType.SCHEDULED, holds, reason, message, now)

    claim = unusable_claim(job, world)
    if claim is not None:
        return say(False, claim.reason, claim.message)
    if world.rejections:
        refused = world.rejections[0]
        if refused.name_taken:
            return say(False, NAME_IS_TAKEN, f"{refused.object}: {refused.message}; it is tried again every second")
        return say(False, CREATION_REFUSED, f"{refused.object}: {refused.message}; it is tried again every {BLOCKED_POLL:.0f} s")
    before = status.condition(ConditionType.SCHEDULED)
    if creating and before is not None and before.reason in (CREATION_REFUSED, NAME_IS_TAKEN):
        # What the next try says is not known yet. To say something else in the meantime would write, and so wake, for ever.
        return status
    everyone = [*pods, *(p for p in [coordinator_pod(job, status, world)] if p is not None and p.role is Role.COORDINATOR)]
    waiting = next((p for p in everyone if p.unschedulable and not p.node), None)
    if waiting is not None:
        return say(False, "Unschedulable", f"pod {waiting.name}: {waiting.unschedulable}{_spread_hint(job, waiting, world)}")
    placed = sum(bool(p.node) for p in pods) + sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    if placed >= job.spec.pods:
        return say(True, "AllPlaced", f"{job.spec.pods} of {job.spec.pods} pods have a node")
    return say(False, "Placing", f"{placed} of {job.spec.pods} pods have a node{_backing_off(status, now)}")


def _backing_off(status: JobStatus, now: datetime) -> str:
    held = [
        (s.not_before, i, s) for i, s in enumerate(status.slots) if s.state is SlotState.PLANNED and s.not_before and s.not_before > now
    ]
    if not held:
        return ""
    until, index, slot = min(held, key=lambda h: h[0])
    return f"; the next pod of index {index} is made at {until:%H:%M:%S} UTC, since it ended {slot.failures} times in a row: {slot.reason}"


def _spread_hint(job: DDPJob, pod: PodView, world: World) -> str:
    leaving = next((p for p in world.nodes() if p.deleted_at is not None and not p.ended), None)
    if leaving is not None and leaving.deleted_at is not None:
        return f" (pod {leaving.name} is still ending and holds its place until {leaving.deleted_at:%H:%M:%S} UTC at the latest)"
    if job.spec.scheduling.one_pod_per_node and "anti-affinity" in pod.unschedulable:
        wanted = "spec.nodes and spec.spares" if job.spec.spares else "spec.nodes"
        return (
            f" (one pod per {job.spec.scheduling.topology_key}: fewer nodes than {wanted} fit; "
            "scheduling.onePodPerNode=false lets pods share one)"
        )
    return ""


def _running(job: DDPJob, status: JobStatus, world: World, training: int | None, running_pods: int, now: datetime) -> tuple[bool, str, str]:
    wanted, report = job.spec.nodes, present_report(status, world)
    if training is not None:
        return _group_runs(job, status, world, training)
    for pod in [coordinator_pod(job, status, world), *node_pods(job, status, world)]:
        held = stuck(pod, has_run=True) if pod and pod.deleted_at is None else None
        if held is not None and not (report is None and job.spec.fast):
            return False, held.reason, held.message
    finished = sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    there = min(running_pods, wanted)
    count = f"{there} of {wanted} nodes run"
    if there + finished < job.spec.min_nodes:
        least = f", {job.spec.min_nodes} are needed" if job.spec.min_nodes < wanted else ""
        return False, "NodesMissing", count + least
    if not job.spec.under_torchrun:
        return True, "NodesRun", count + (f", {finished} have finished" if finished else "")
    if report is None:
        was = status.holds(ConditionType.RUNNING)
        where = status.rendezvous.endpoint or "its pod, which has no address yet"
        return was, "CoordinatorUnreachable", f"{count}; the coordinator at {where} does not answer"
    if report.attempt and report.state == "Forming" and status.holds(ConditionType.RUNNING):
        return True, "CoordinatorReplaced", f"{count}; a new coordinator hears from the nodes, which go on meanwhile"
    if report.backoff_until is not None and report.backoff_until > now:
        until = f"{report.backoff_until:%H:%M:%S} UTC"
        return False, "BackingOff", f"{count}; the next start is at {until}, since the same failure repeats without a step in between"
    return False, "GroupForming", f"{count} and are joining the rendezvous"


def _group_runs(job: DDPJob, status: JobStatus, world: World, training: int) -> tuple[bool, str, str]:
    wanted = job.spec.nodes
    if training == wanted:
        return True, "GroupRuns", f"{wanted} nodes train as one group"
    if training > wanted:
        return True, "GroupShrinking", f"{training} nodes train as one group, which is about to become {wanted}"
    return True, "GroupRunsSmaller", f"{training} of {wanted} nodes train as one group; {_missing(job, status, world)}"


def _missing(job: DDPJob, status: JobStatus, world: World) -> str:
    """Why a group that may be smaller is smaller."""
    for pod in node_pods(job, status, world):
        if pod is None or pod.main.running or pod.ended:
            continue
        held = stuck(pod, has_run=True)
        if held is not None:
            return held.message
        return f"pod {pod.name} waits for a node: {pod.unschedulable}" if pod.unschedulable else f"pod {pod.name} is starting"
    if status.spare:
        return f"{status.spare} more joins at the next restart" if status.spare == 1 else f"{status.spare} more join at the next restart"
    return "the missing pods are being made"


def _restarting(status: JobStatus, running: bool, broke: list[Restart], world: World, now: datetime, old_round: int) -> JobStatus:
    """True from a break until the group runs again; never for one that is over already when it is seen."""
    if not broke and status.round > old_round and status.restarts.recent:
        broke = [status.restarts.recent[-1]]
    if broke and not (running and all(r.reason not in _BEFORE_THE_REPORT for r in broke)):
        last = next((r for r in reversed(broke) if not r.consequence), broke[-1])
        return with_condition(status, ConditionType.RESTARTING, True, last.reason, last.message.splitlines()[0], now)
    if running and (broke or status.holds(ConditionType.RESTARTING)):
        status = replace(status, restarts=replace(status.restarts, recent=_timed(status, world, now)))
        return with_condition(status, ConditionType.RESTARTING, False, "Recovered", f"round {status.round} runs", now)
    return status


_BEFORE_THE_REPORT = frozenset({Cause.SCALED, Cause.SPEC_CHANGED, Cause.KEY_CHANGED, Cause.COORDINATOR_LOST})
"""Decided by the operator itself: the report that was read before knows nothing of them."""


def _timed(status: JobStatus, world: World, now: datetime) -> tuple[Restart, ...]:
    """Recent restarts with the seconds they took, for those that are over now. The coordinator measures finer than this poll."""
    report = present_report(status, world)
    measured = report.recovery_seconds if report is not None and report.down_since is None else None

    def seconds(restart: Restart, *, last: bool) -> float:
        seen = max(0.0, (now - restart.time).total_seconds())
        return round(min(seen, measured) if last and measured is not None else seen, 2 if measured is not None else 1)

    recent = status.restarts.recent
    return tuple(
        r if r.seconds is not None else replace(r, seconds=seconds(r, last=n == len(recent))) for n, r in enumerate(recent, start=1)
    )


def _fast_recovery(job: DDPJob, status: JobStatus, world: World, now: datetime) -> JobStatus:
    """Only in mode Fast, and once the coordinator has told: whether every pod can do what the mode promises."""
    report: Report | None = present_report(status, world)
    if not job.spec.fast or report is None or not report.members:
        return status
    if not report.notes:
        return with_condition(
            status, ConditionType.FAST_RECOVERY, True, "WarmWorkers", "workers start from a process that has imported torch", now
        )
    first = report.notes[0]
    others = len({n.pod for n in report.notes}) - 1
    message = f"pod {first.pod}: {first.why}" + (f" (and {others} more)" if others else "")
    return with_condition(status, ConditionType.FAST_RECOVERY, False, first.kind, message, now)
