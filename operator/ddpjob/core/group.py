"""Decides what has become of the group since the last look: slots, restarts, a new generation, success or failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from ddpjob.api.types import DDPJob, JobStatus, Placement, Restart, Slot, SlotState
from ddpjob.core.classify import COUNTED, Cause, End, stuck, vanished, why_ended
from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER, Incident, PodView, Role, World, coordinator_pod_name, node_pod_name

RECENT = 10
"""Entries kept in `status.restarts.recent`."""
_TRACEBACK_LIMIT = 3000

_REGROUPS = frozenset({Cause.RENDEZVOUS_LOST})


@dataclass(frozen=True)
class Failure:
    """The job has failed: what `status.conditions` will say."""

    reason: str
    message: str


@dataclass(frozen=True)
class Followed:
    """The status after the look; `restarts` are new in it."""

    status: JobStatus
    restarts: tuple[Restart, ...] = ()
    failure: Failure | None = None
    complete: bool = False


def coordinator_pod(job: DDPJob, status: JobStatus, world: World) -> PodView | None:
    """The pod that holds the coordinator of the present generation."""
    if job.spec.rendezvous.placement is Placement.MASTER:
        name = node_pod_name(job, 0, status.slots[0].attempt) if status.slots else ""
    else:
        name = coordinator_pod_name(job, status.rendezvous.generation)
    return next((p for p in world.pods if p.name == name), None)


def node_pods(job: DDPJob, status: JobStatus, world: World) -> list[PodView | None]:
    """The pod of every slot's present attempt, in the order of the slots."""
    by_name = {p.name: p for p in world.nodes()}
    return [by_name.get(node_pod_name(job, i, slot.attempt)) for i, slot in enumerate(status.slots)]


def new_generation(job: DDPJob, status: JobStatus, world: World) -> JobStatus:
    """All slots anew, for `spec.nodes` nodes, around a new coordinator. A name that was ever used is not used again."""
    used: dict[int, int] = {}
    for pod in world.nodes():
        used[pod.index] = max(used.get(pod.index, -1), pod.attempt)
    for index, slot in enumerate(status.slots):
        if slot.state is not SlotState.PLANNED:
            used[index] = max(used.get(index, -1), slot.attempt)
    floor = max((slot.attempt for slot in status.slots), default=0)
    slots = []
    for index in range(job.spec.nodes):
        planned = status.slots[index].attempt if index < len(status.slots) else floor
        slots.append(Slot(attempt=max(planned, used.get(index, -1) + 1)))
    first = not status.slots
    rendezvous = replace(
        status.rendezvous,
        generation=0 if first else status.rendezvous.generation + 1,
        state=SlotState.PLANNED,
        endpoint="",
        nodes=job.spec.nodes,
    )
    return replace(status, slots=tuple(slots), rendezvous=rendezvous, template_hash=template_mark(job, world))


def template_mark(job: DDPJob, world: World) -> str:
    """What all pods of a generation have in common: the spec they were made from and the key of their token."""
    return f"{job.spec.template_hash}-{world.key_mark}"


def follow(job: DDPJob, status: JobStatus, world: World, now: datetime) -> Followed:
    """Looks at every pod of the present generation and at the coordinator's incidents.

    Losses are recorded in the returned status before any action makes their traces go.
    """
    pods = node_pods(job, status, world)
    slots, ends = _follow_slots(job, status, pods)
    status = replace(status, slots=slots)
    status, coordinator_end = _follow_coordinator(job, status, world)
    restarts, failure = _restarts_of_ends(job, ends, pods, now)
    status, told, told_failure = _restarts_of_incidents(status, world)
    failure = failure or told_failure or _cannot_start(job, status, world) or _no_coordinator(coordinator_end)
    if failure is None and _finished(job, status, world):
        return Followed(status, complete=True)
    if _others_finished(job, status):
        return Followed(_give_up_lost(status, ends))
    restarts += told
    if coordinator_end is not None:
        restarts.append(_restart_of_coordinator(job, status, coordinator_end, now))
    status = record(status, restarts)
    if failure is None and status.restarts.counted > job.spec.recovery.max_restarts:
        failure = _budget_spent(job, status)
    if failure is None:
        status = _replace(job, status, world, ends, coordinator_end)
    return Followed(status, tuple(restarts), failure)


Ends = dict[int, End]


def _follow_slots(job: DDPJob, status: JobStatus, pods: list[PodView | None]) -> tuple[tuple[Slot, ...], Ends]:
    slots, ends = [], {}
    for index, (slot, pod) in enumerate(zip(status.slots, pods, strict=True)):
        state, end = _follow_slot(job, index, slot, pod)
        slots.append(replace(slot, state=state, node=pod.node if pod else slot.node))
        if end is not None:
            ends[index] = end
    return tuple(slots), ends


def _follow_slot(job: DDPJob, index: int, slot: Slot, pod: PodView | None) -> tuple[SlotState, End | None]:
    if slot.state in (SlotState.SUCCEEDED, SlotState.LOST):
        return slot.state, None
    if pod is None:
        if slot.state is SlotState.PLANNED:
            return slot.state, None
        return SlotState.LOST, vanished(node_pod_name(job, index, slot.attempt))
    if pod.ended and pod.succeeded:
        return SlotState.SUCCEEDED, None
    if pod.ended or pod.deleted_at is not None:
        return SlotState.FAILED, why_ended(pod)
    return (SlotState.RUNNING if pod.main.running else SlotState.CREATED), None


def _follow_coordinator(job: DDPJob, status: JobStatus, world: World) -> tuple[JobStatus, End | None]:
    pod = coordinator_pod(job, status, world)
    state = status.rendezvous.state
    if pod is None:
        gone = state is not SlotState.PLANNED and job.spec.rendezvous.placement is Placement.DEDICATED
        return status, (vanished(coordinator_pod_name(job, status.rendezvous.generation)) if gone else None)
    container = pod.containers.get(COORDINATOR_CONTAINER)
    dedicated = pod.role is Role.COORDINATOR
    if (container is not None and container.ended) or (dedicated and (pod.ended or pod.deleted_at is not None)):
        if dedicated:
            return status, why_ended(pod)
        assert container is not None
        return status, why_ended(replace(pod, containers={TRAINER_CONTAINER: container}))
    running = container is not None and container.running
    port = job.spec.rendezvous.endpoint_port
    endpoint = f"{pod.address}:{port}" if pod.address else ""
    rendezvous = replace(status.rendezvous, state=SlotState.RUNNING if running else SlotState.CREATED, endpoint=endpoint)
    return replace(status, rendezvous=rendezvous), None


def _restarts_of_ends(job: DDPJob, ends: Ends, pods: list[PodView | None], now: datetime) -> tuple[list[Restart], Failure | None]:
    restarts: list[Restart] = []
    failure = None
    for index, end in ends.items():
        pod = pods[index]
        if end.cause is Cause.INIT_FAILURE and failure is None:
            failure = Failure(Cause.INIT_FAILURE, with_traceback(end.message, end.traceback))
        restarts.append(
            Restart(
                time=now,
                pod=pod.name if pod else end.message.split()[1],
                index=index,
                node=pod.node if pod else "",
                reason=end.cause,
                message=with_traceback(end.message, end.traceback),
                counted=end.counted,
            )
        )
    if not job.spec.under_torchrun:
        restarts = _one_cause(restarts)
    return restarts, failure


def _one_cause(restarts: list[Restart]) -> list[Restart]:
    """Nobody tells causes from consequences for `command`: of nodes that end together one stands for all.

    A disruption explains its peers' failures, so it comes first.
    """
    return sorted(restarts, key=lambda r: r.counted)[:1]


def _restarts_of_incidents(status: JobStatus, world: World) -> tuple[JobStatus, list[Restart], Failure | None]:
    """The coordinator's incidents not looked at before. PeerLost and Left show in the pods themselves."""
    report = world.report
    if report is None or report.generation != status.rendezvous.generation:
        return status, [], None
    seen = status.restarts.seen_incident if status.restarts.seen_generation == report.generation else 0
    new = [i for i in report.incidents if i.id > seen]
    restarts = [_restart_of_incident(i, status) for i in new if i.kind == "WorkerFailed"]
    init = next((i for i in new if i.kind == "InitFailure"), None)
    failure = Failure(Cause.INIT_FAILURE, with_traceback(f"pod {init.pod}: {init.message}", init.traceback)) if init else None
    last = max((i.id for i in new), default=seen)
    counts = replace(status.restarts, seen_generation=report.generation, seen_incident=last)
    return replace(status, restarts=counts), restarts, failure


def _restart_of_incident(incident: Incident, status: JobStatus) -> Restart:
    how = f"signal {incident.signal}" if incident.signal else f"exit code {incident.exit_code}"
    summary = f"rank {incident.rank} in pod {incident.pod} ended with {how}: {incident.message}".rstrip(": ")
    node = status.slots[incident.index].node if 0 <= incident.index < len(status.slots) else ""
    return Restart(
        time=incident.time,
        pod=incident.pod,
        index=incident.index,
        node=node,
        rank=incident.rank,
        reason=Cause.WORKER_FAILED,
        message=with_traceback(summary, incident.traceback),
        counted=Cause.WORKER_FAILED in COUNTED,
    )


def with_traceback(summary: str, traceback: str) -> str:
    """The summary, and below it the traceback's end."""
    if not traceback.strip():
        return summary
    tail = traceback.strip()[-_TRACEBACK_LIMIT:]
    return f"{summary}\n{tail}"


def _restart_of_coordinator(job: DDPJob, status: JobStatus, end: End, now: datetime) -> Restart:
    return Restart(
        time=now,
        pod=coordinator_pod_name(job, status.rendezvous.generation),
        reason=Cause.COORDINATOR_LOST,
        message=with_traceback(f"the coordinator was lost: {end.message}", end.traceback),
        counted=end.counted,
    )


def record(status: JobStatus, restarts: list[Restart]) -> JobStatus:
    """The status with restarts counted; all those of one look are one round."""
    if not restarts:
        return status
    counted = sum(r.counted for r in restarts)
    counts = replace(
        status.restarts,
        counted=status.restarts.counted + counted,
        uncounted=status.restarts.uncounted + len(restarts) - counted,
        recent=(*status.restarts.recent, *restarts)[-RECENT:],
    )
    return replace(status, restarts=counts, round=status.round + 1)


def _cannot_start(job: DDPJob, status: JobStatus, world: World) -> Failure | None:
    """A wrong image: nothing to wait for."""
    has_run = any(s.state not in (SlotState.PLANNED, SlotState.CREATED) for s in status.slots) or status.round > 0
    for pod in [coordinator_pod(job, status, world), *node_pods(job, status, world)]:
        held = stuck(pod, has_run=has_run) if pod else None
        if held is not None and held.final:
            return Failure(held.reason, held.message)
    return None


def _no_coordinator(end: End | None) -> Failure | None:
    if end is None or end.cause is not Cause.INIT_FAILURE:
        return None
    hint = "the image must have python3 and torch" if "executable file not found" in end.message else ""
    return Failure(
        Cause.INIT_FAILURE, with_traceback(f"the coordinator cannot start: {end.message}" + (f" ({hint})" if hint else ""), end.traceback)
    )


def _finished(job: DDPJob, status: JobStatus, world: World) -> bool:
    """Under torchrun a node ends with 0 only when every node has finished (the launcher's exit barrier)."""
    states = [slot.state for slot in status.slots]
    if all(state is SlotState.SUCCEEDED for state in states):
        return True
    ended = all(state in (SlotState.SUCCEEDED, SlotState.FAILED, SlotState.LOST) for state in states)
    if not job.spec.under_torchrun or not ended:
        return False
    report = world.report
    told = report is not None and report.generation == status.rendezvous.generation and report.state == "Succeeded"
    return told or SlotState.SUCCEEDED in states


def _others_finished(job: DDPJob, status: JobStatus) -> bool:
    return job.spec.under_torchrun and any(slot.state is SlotState.SUCCEEDED for slot in status.slots)


def _give_up_lost(status: JobStatus, ends: Ends) -> JobStatus:
    slots = [replace(s, state=SlotState.LOST) if i in ends else s for i, s in enumerate(status.slots)]
    return replace(status, slots=tuple(slots))


def _budget_spent(job: DDPJob, status: JobStatus) -> Failure:
    """Also when nothing new has happened: recovery.maxRestarts may have been lowered."""
    spent = f"{status.restarts.counted} failures, recovery.maxRestarts is {job.spec.recovery.max_restarts}"
    last = next((r for r in reversed(status.restarts.recent) if r.counted), None)
    return Failure("RestartBudgetSpent", f"{spent}; the last one: {last.reason}: {last.message}" if last else spent)


def _replace(job: DDPJob, status: JobStatus, world: World, ends: Ends, coordinator_end: End | None) -> JobStatus:
    """Another attempt for every lost slot, or a new generation where the rendezvous itself cannot go on."""
    regroup = (
        coordinator_end is not None
        or (ends and not job.spec.under_torchrun)
        or (0 in ends and job.spec.rendezvous.placement is Placement.MASTER)
        or any(end.cause in _REGROUPS for end in ends.values())
    )
    if regroup:
        return new_generation(job, status, world)
    slots = [Slot(attempt=s.attempt + 1) if i in ends else s for i, s in enumerate(status.slots)]
    return replace(status, slots=tuple(slots))
