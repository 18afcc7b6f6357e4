"""Decides what has become of the group since the last look: slots, restarts, a new generation, success or failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob.api.types import DDPJob, JobStatus, Placement, Restart, Slot, SlotState
from ddpjob.core import incidents
from ddpjob.core.attribution import Attributed, Finding, attribute
from ddpjob.core.avoid import avoided
from ddpjob.core.classify import Cause, End, is_down, stuck, vanished, why_ended
from ddpjob.core.incidents import present_report
from ddpjob.core.losses import given_up, lost_since
from ddpjob.core.progress import trained
from ddpjob.core.rules import ruling
from ddpjob.core.slots import Repeated, new_generation, next_attempt, next_coordinator, repeated, with_slots
from ddpjob.core.texts import with_traceback
from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER, PodView, Role, World, coordinator_pod_name, node_pod_name

RECENT = 10
"""Entries kept in `status.restarts.recent`."""
_REGROUPS = frozenset({Cause.RENDEZVOUS_LOST})


@dataclass(frozen=True)
class Failure:
    """The job has failed: what `status.conditions` will say."""

    reason: str
    message: str


@dataclass(frozen=True)
class Followed:
    """The status after the look; `restarts` are new in it. `lost`: names of pods that are to go at once, with no time to end."""

    status: JobStatus
    restarts: tuple[Restart, ...] = ()
    failure: Failure | None = None
    complete: bool = False
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ended:
    """A slot's pod that is of no more use. Without a view it has vanished."""

    end: End
    pod: PodView | None
    name: str


Ends = dict[int, Ended]


def coordinator_pod(job: DDPJob, status: JobStatus, world: World) -> PodView | None:
    """The pod that holds the present coordinator."""
    if job.spec.rendezvous.placement is Placement.MASTER:
        name = node_pod_name(job, 0, status.slots[0].attempt) if status.slots else ""
    else:
        name = coordinator_pod_name(job, status.rendezvous.generation, status.rendezvous.attempt)
    return next((p for p in world.pods if p.name == name), None)


def node_pods(job: DDPJob, status: JobStatus, world: World) -> list[PodView | None]:
    """The pod of every slot's present attempt, in the order of the slots."""
    by_name = {p.name: p for p in world.nodes()}
    return [by_name.get(node_pod_name(job, i, slot.attempt)) for i, slot in enumerate(status.slots)]


def follow(job: DDPJob, status: JobStatus, world: World, now: datetime) -> Followed:
    """Looks at every pod of the present generation and at the coordinator's incidents.

    Losses are recorded in the returned status before any action makes their traces go.
    """
    pods = node_pods(job, status, world)
    status, ends = _follow_slots(job, status, pods, world, now)
    status, coordinator = _follow_coordinator(job, status, world, now)
    lost = frozenset(e.name for e in [*ends.values(), *([coordinator] if coordinator else [])] if e.end.cause is Cause.NODE_LOST)
    if _finished(job, status, world):
        return Followed(status, complete=True)
    told = incidents.news(job, status, world)
    findings = [_finding_of_end(job, status, index, ended, world, now) for index, ended in ends.items()]
    attributed = attribute(status, _one_for_command(job, findings), list(told.findings), list(told.lost))
    if _others_finished(job, status):
        return Followed(_give_up_lost(incidents.seen(status, told, attributed.seen_round), ends), lost=lost)
    restarts = list(attributed.restarts)
    status = incidents.seen(record(status, restarts), told, attributed.seen_round)
    if coordinator is not None:
        status, loss = _record_coordinator(job, status, coordinator, now)
        restarts.append(loss)
    failure = _failure_of(attributed) or _cannot_start(job, status, world) or _no_coordinator(status, coordinator, world)
    if failure is None and status.restarts.counted > job.spec.recovery.max_restarts:
        failure = _budget_spent(job, status)
    status = replace(status, avoided_nodes=avoided(status, now))
    if failure is None:
        status = _replace(job, status, world, ends, coordinator, attributed, now)
    return Followed(status, tuple(restarts), failure, lost=lost)


# --- slots and coordinator --------------------------------------------------------------------------------------


def _follow_slots(job: DDPJob, status: JobStatus, pods: list[PodView | None], world: World, now: datetime) -> tuple[JobStatus, Ends]:
    slots, ends = [], {}
    for index, (slot, pod) in enumerate(zip(status.slots, pods, strict=True)):
        since = _silent_since(slot, pod, world, now)
        state, end = _follow_slot(job, index, slot, pod, world)
        if end is None and pod is not None and given_up(job, pod, since, world, now):
            state, end = SlotState.FAILED, _node_lost(pod, since or now, world, now)
        slots.append(replace(slot, state=state, node=pod.node if pod else slot.node, lost_since=since))
        if end is not None:
            ends[index] = Ended(end, pod, node_pod_name(job, index, slot.attempt))
    return replace(status, slots=tuple(slots)), ends


def _silent_since(slot: Slot, pod: PodView | None, world: World, now: datetime) -> datetime | None:
    """Remembered from the first look where nobody tells."""
    since = lost_since(pod, world, now) if pod is not None else None
    return min(since, slot.lost_since) if since is not None and slot.lost_since is not None else since


def _node_lost(pod: PodView, since: datetime, world: World, now: datetime) -> End:
    seconds = round((now - since).total_seconds())
    if is_down(pod.node, world.hosts):
        gone = world.hosts is not None and pod.node not in world.hosts
        what = "is deleted" if gone else f"has not been ready for {seconds} s"
        return End(Cause.NODE_LOST, f"node {pod.node} of pod {pod.name} {what}")
    return End(Cause.NODE_LOST, f"pod {pod.name} on node {pod.node} has not been heard of for {seconds} s")


def _follow_slot(job: DDPJob, index: int, slot: Slot, pod: PodView | None, world: World) -> tuple[SlotState, End | None]:
    if slot.state in (SlotState.SUCCEEDED, SlotState.LOST):
        return slot.state, None
    if pod is None:
        if slot.state is SlotState.PLANNED:
            return slot.state, None
        return SlotState.LOST, vanished(node_pod_name(job, index, slot.attempt), slot.node, world.hosts)
    if pod.ended and pod.succeeded:
        return SlotState.SUCCEEDED, None
    if pod.ended or pod.deleted_at is not None:
        return SlotState.FAILED, why_ended(pod, world.hosts)
    return (SlotState.RUNNING if pod.main.running else SlotState.CREATED), None


def _follow_coordinator(job: DDPJob, status: JobStatus, world: World, now: datetime) -> tuple[JobStatus, Ended | None]:
    pod = coordinator_pod(job, status, world)
    state, rendezvous = status.rendezvous.state, status.rendezvous
    name = coordinator_pod_name(job, rendezvous.generation, rendezvous.attempt)
    if pod is None:
        gone = state is not SlotState.PLANNED and job.spec.rendezvous.placement is Placement.DEDICATED
        return status, (Ended(vanished(name, "", world.hosts), None, name) if gone else None)
    container = pod.containers.get(COORDINATOR_CONTAINER)
    dedicated = pod.role is Role.COORDINATOR
    if (container is not None and container.ended) or (dedicated and (pod.ended or pod.deleted_at is not None)):
        if dedicated:
            return status, Ended(why_ended(pod, world.hosts), pod, name)
        assert container is not None
        return status, Ended(why_ended(replace(pod, containers={TRAINER_CONTAINER: container}), world.hosts), pod, name)
    since = lost_since(pod, world, now) if dedicated else None
    if given_up(job, pod, since, world, now):
        return status, Ended(_node_lost(pod, since or now, world, now), pod, name)
    running = container is not None and container.running
    endpoint = f"{pod.address}:{job.spec.rendezvous.endpoint_port}" if pod.address else ""
    state = SlotState.RUNNING if running else SlotState.CREATED
    return replace(status, rendezvous=replace(rendezvous, state=state, endpoint=endpoint)), None


# --- what is recorded -------------------------------------------------------------------------------------------


def _finding_of_end(job: DDPJob, status: JobStatus, index: int, ended: Ended, world: World, now: datetime) -> Finding:
    end, slot = ended.end, status.slots[index]
    ruled = ruling(job.spec, end.cause, end.exit_code, trained=trained(status.progress, world))
    restart = Restart(
        time=min(end.time or now, now),
        pod=ended.name,
        index=index,
        node=slot.node,
        reason=end.cause,
        message=with_traceback(end.message, end.traceback),
        counted=ruled.counted,
    )
    return Finding(restart, made_in=slot.round, fails=ruled.fails, why=ruled.why, exit_code=end.exit_code)


def _one_for_command(job: DDPJob, findings: list[Finding]) -> list[Finding]:
    """Nobody tells causes from consequences for `command`: of nodes that end together one stands for all.

    A disruption explains its peers' failures, so it comes first.
    """
    return findings if job.spec.under_torchrun else sorted(findings, key=lambda f: f.contestable)[:1]


def _record_coordinator(job: DDPJob, status: JobStatus, ended: Ended, now: datetime) -> tuple[JobStatus, Restart]:
    """In mode Fast training goes on without it: a loss, but no break and no round."""
    end = ended.end
    fast = job.spec.fast
    ruled = ruling(job.spec, end.cause, end.exit_code, trained=True)
    restart = Restart(
        time=now,
        pod=ended.name,
        reason=Cause.COORDINATOR_LOST,
        node=ended.pod.node if ended.pod else "",
        message=with_traceback(f"the coordinator was lost: {end.message}", end.traceback),
        counted=ruled.counted and not fast,
        round=0 if fast else status.round + 1,
        seconds=0.0 if fast else None,
    )
    return record(status, [restart]), restart


def record(status: JobStatus, restarts: list[Restart]) -> JobStatus:
    """The status with restarts counted, and the round that the last of them began."""
    if not restarts:
        return status
    counted = [r for r in restarts if r.counted]
    old = status.restarts
    counts = replace(
        old,
        counted=old.counted + len(counted),
        uncounted=old.uncounted + len(restarts) - len(counted),
        total=old.total + len(restarts),
        last_counted=max([r.time for r in counted], default=old.last_counted),
        recent=(*old.recent, *restarts)[-RECENT:],
    )
    return replace(status, restarts=counts, round=max([status.round, *(r.round for r in restarts)]))


# --- how it ends ------------------------------------------------------------------------------------------------


def _failure_of(attributed: Attributed) -> Failure | None:
    fatal = next((f for f in attributed.causes if f.fails), None)
    if fatal is None:
        return None
    return Failure(fatal.fails, (f"{fatal.why}: {fatal.restart.reason}: " if fatal.why else "") + fatal.restart.message)


def _cannot_start(job: DDPJob, status: JobStatus, world: World) -> Failure | None:
    """A wrong image: nothing to wait for."""
    has_run = any(s.state not in (SlotState.PLANNED, SlotState.CREATED) for s in status.slots) or status.round > 0
    for pod in [coordinator_pod(job, status, world), *node_pods(job, status, world)]:
        held = stuck(pod, has_run=has_run) if pod else None
        if held is not None and held.final:
            return Failure(held.reason, held.message)
    return None


def _no_coordinator(status: JobStatus, ended: Ended | None, world: World) -> Failure | None:
    if ended is None or ended.end.cause is not Cause.INIT_FAILURE or trained(status.progress, world):
        return None
    end = ended.end
    hint = "the image must have python3 and torch" if "executable file not found" in end.message else ""
    return Failure(
        Cause.INIT_FAILURE, with_traceback(f"the coordinator cannot start: {end.message}" + (f" ({hint})" if hint else ""), end.traceback)
    )


def _finished(job: DDPJob, status: JobStatus, world: World) -> bool:
    """Under torchrun a node ends with 0 only when every node of the group has finished (the launcher's exit barrier).

    Spares and nodes that never came to join are not waited for.
    """
    states = [slot.state for slot in status.slots]
    if all(state is SlotState.SUCCEEDED for state in states):
        return True
    if not job.spec.under_torchrun or SlotState.RUNNING in states:
        return False
    report = present_report(status, world)
    return SlotState.SUCCEEDED in states or (report is not None and report.state == "Succeeded")


def _others_finished(job: DDPJob, status: JobStatus) -> bool:
    return job.spec.under_torchrun and any(slot.state is SlotState.SUCCEEDED for slot in status.slots)


def _give_up_lost(status: JobStatus, ends: Ends) -> JobStatus:
    slots = [replace(s, state=SlotState.LOST) if i in ends else s for i, s in enumerate(status.slots)]
    return replace(status, slots=tuple(slots))


def _budget_spent(job: DDPJob, status: JobStatus) -> Failure:
    """Also when nothing new has happened: recovery.maxRestarts may have been lowered."""
    failures = f"{status.restarts.counted} failure" + ("" if status.restarts.counted == 1 else "s")
    spent = f"{failures}, recovery.maxRestarts is {job.spec.recovery.max_restarts}"
    last = next((r for r in reversed(status.restarts.recent) if r.counted), None)
    return Failure("RestartBudgetSpent", f"{spent}; the last one: {last.reason}: {last.message}" if last else spent)


# --- who takes the place ----------------------------------------------------------------------------------------


def _replace(
    job: DDPJob, status: JobStatus, world: World, ends: Ends, coordinator: Ended | None, attributed: Attributed, now: datetime
) -> JobStatus:
    """Another attempt for every lost slot, or a new generation where the rendezvous itself cannot go on."""
    causes = {f.restart.pod for f in attributed.causes}
    status = _remember_repeated(job, status, ends, causes, now)
    if coordinator is not None:
        before = Repeated(coordinator.end.cause, status.rendezvous.failures)
        again = repeated(job, before, coordinator.end, coordinator.pod, now)
        status = replace(status, rendezvous=replace(status.rendezvous, failures=again.failures, not_before=again.not_before))
    regroup = (
        (coordinator is not None and not job.spec.fast)
        or (ends and not job.spec.under_torchrun)
        or (0 in ends and job.spec.rendezvous.placement is Placement.MASTER)
        or any(ended.end.cause in _REGROUPS for ended in ends.values())
    )
    if regroup:
        return new_generation(job, status, world)
    if coordinator is not None:
        status = next_coordinator(status)
    slots = [next_attempt(s, Repeated(s.reason, s.failures, s.not_before)) if i in ends else s for i, s in enumerate(status.slots)]
    return with_slots(status, slots)


def _remember_repeated(job: DDPJob, status: JobStatus, ends: Ends, causes: set[str], now: datetime) -> JobStatus:
    """A consequence says nothing of the pod that suffered it."""
    slots = list(status.slots)
    for index, ended in ends.items():
        slot = slots[index]
        again = repeated(job, Repeated(slot.reason, slot.failures), ended.end, ended.pod, now) if ended.name in causes else Repeated()
        slots[index] = replace(slot, reason=again.reason, failures=again.failures, not_before=again.not_before)
    return replace(status, slots=tuple(slots))
