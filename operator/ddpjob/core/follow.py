"""Follows the group since the last reconcile: slots, restarts, a new generation, success or failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob_runtime.protocol import COMMUNICATION_ERROR, CoordinatorState, IncidentKind, MemberState

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import ConditionType, JobStatus, Restart, Slot, SlotState
from ddpjob.core.decision import Failure
from ddpjob.core.failures.avoided_nodes import FAULTS, RECENT, avoided
from ddpjob.core.failures.classify import (
    Cause,
    End,
    names_entry_point,
    of_platform,
    stuck,
    vanished,
    why_ended,
    with_traceback,
    without_wait,
    wrong_platform,
)
from ddpjob.core.failures.liveness import given_up, lost_since
from ddpjob.core.failures.merge_causes import Attributed, Finding, attribute
from ddpjob.core.failures.new_incidents import NewIncidents, new_incidents, with_seen
from ddpjob.core.failures.node_health import MOVE_CAUSES, judge_failing, judge_nodes
from ddpjob.core.failures.policy import PROGRAM_ERROR, evaluate_rules, repeated_everywhere, repeated_program_error
from ddpjob.core.plan.gang import is_broken_up
from ddpjob.core.plan.slots import (
    QUICK,
    Repeated,
    can_replace,
    in_a_row,
    new_generation,
    next_attempt,
    next_coordinator,
    repeated,
    with_slots,
)
from ddpjob.core.status.messages import cause_first, count
from ddpjob.core.view import View
from ddpjob.core.world import (
    COORDINATOR_CONTAINER,
    PodView,
    Role,
    coordinator_pod_name,
    host_port,
    is_down,
    node_pod_name,
    platform_of,
)

FINISH = timedelta(seconds=60)
"""How long the other pods may take to end when one has ended with exit code 0."""
UNPREPARED = timedelta(seconds=60)
"""How long a coordinator's pod may be without volumes and network: it has a ConfigMap, and folders of its host."""
CAUSE_WAIT = timedelta(seconds=5)
"""How long the end of a pod that looks like a consequence waits for another pod's: torchrun needs a while to end."""
_PASSED = frozenset({MemberState.READY, MemberState.RUNNING, MemberState.FINISHED})
"""States of members that have passed the check of their node."""
_LOSSES = frozenset({IncidentKind.PEER_LOST, IncidentKind.LEFT})
"""What the coordinator reports of the end of a pod that trained."""
_REGROUPS = frozenset({Cause.RENDEZVOUS_LOST})
"""Causes after which only a new generation helps."""


@dataclass(frozen=True)
class Followed:
    """The outcome of `follow`."""

    status: JobStatus
    restarts: tuple[Restart, ...] = ()
    """Restarts that are new in the status."""
    idle: tuple[Restart, ...] = ()
    """Ends of spares, which restart nothing."""
    failure: Failure | None = None
    complete: bool = False
    done: bool = False
    """Whether the group has made its last step, although some of its pods may not have ended yet."""
    lost: frozenset[str] = frozenset()
    """Names of pods to delete immediately (grace period 0)."""
    undecided: bool = False
    """Whether a pod has ended of what looks like a consequence, so that the cause is waited for a moment."""


@dataclass(frozen=True)
class Ended:
    """A slot's or coordinator's pod that is of no more use; `pod` None: it has vanished."""

    end: End
    pod: PodView | None
    name: str


Ends = dict[int, Ended]
"""By index of the slot."""


def follow(view: View) -> Followed:
    """Evaluates every pod of the current generation, and the coordinator's new incidents.

    Slots and coordinator get their states; what ended is attributed, recorded and counted against
    the budget; slots that lost their pod get another attempt, or the whole group another
    generation. Restarts are in the returned status before any action removes the pods that they
    were seen in. Pure.
    """
    view, ends = _follow_slots(view)
    view, coordinator = _follow_coordinator(view)
    coordinator = _with_host_suspected(view, coordinator)
    ends, coordinator = _with_start_errors_judged(view, ends, coordinator)
    ends = _with_preflights_judged(view, ends)
    gone = [*ends.values(), *([coordinator] if coordinator else [])]
    lost = frozenset(e.name for e in gone if e.end.cause is Cause.NODE_LOST)
    if _finished(view, ends):
        return Followed(view.status, complete=True, done=True)
    if _awaits_cause(view, ends):
        return Followed(view.status, lost=lost, undecided=True)
    incidents = new_incidents(view)
    findings = [_finding_of_end(view, index, ended, incidents) for index, ended in ends.items()]
    attributed = attribute(view.status, _one_for_command(view.job, findings), incidents.findings, incidents.lost)
    if _let_go(view, ends):
        status = with_seen(view.status, incidents, attributed.seen_round)
        return Followed(_give_up_lost(status, ends), done=True, lost=lost)
    restarts, faults = list(attributed.restarts), attributed.idle
    final = _failure_of(attributed)
    if final is None:
        restarts, ends = _with_failing_replaced(view, restarts, ends)
    recorded = record(view.status, restarts)
    if final is not None:  # Nothing is restarted for it.
        recorded = replace(recorded, restarts=replace(recorded.restarts, uncounted=view.status.restarts.uncounted))
    status = with_seen(recorded, incidents, attributed.seen_round)
    if coordinator is not None:
        restart = _coordinator_restart(view.with_status(status), coordinator)
        if coordinator.pod is not None and coordinator.pod.name in {ended.name for ended in ends.values()}:
            restart = replace(restart, counted=False)  # placement Master: the pod that both were in has counted already
        restarts.append(restart)
        status = record(status, [restart])
        if coordinator.end.cause in FAULTS:
            faults = (*faults, replace(restart, reason=coordinator.end.cause))
    view = view.with_status(status)
    failure = final or _cannot_start(view) or _no_coordinator(view, coordinator)
    if failure is None and status.restarts.counted > view.job.spec.recovery.max_restarts:
        failure = _budget_spent(view)
    if failure is None and restarts:
        failure = _program_error(view)
    if not view.world.one_host:
        status = replace(status, avoided_nodes=avoided(status, view.now, trained=view.trained, faults=faults))
    view = view.with_status(status)
    status = _replace(view, ends, coordinator, attributed) if failure is None else view.status
    return Followed(status, tuple(restarts), attributed.idle, failure, lost=lost)


def finished_while_ending(view: View) -> bool:
    """Whether the pods of the generation before, which were asked to end, have finished their work instead."""
    before = view.status.rendezvous.generation - 1
    pods = [*view.world.nodes(), *(p for p in view.world.departed if p.role is not Role.COORDINATOR)]
    return view.job.spec.under_torchrun and any(p.generation == before and _is_success(p, launcher=True) for p in pods)


# --- slots and coordinator --------------------------------------------------------------------------------------


def _follow_slots(view: View) -> tuple[View, Ends]:
    slots, ends = [], {}
    leaving = {verdict.index: verdict.end for verdict in judge_nodes(view) if not verdict.reason}
    for index, (slot, pod) in enumerate(zip(view.status.slots, view.pods, strict=True)):
        since = _silent_since(view, slot, pod)
        state, end = _follow_slot(view, index, slot, pod)
        if since is not None and end is None and pod is not None and given_up(view, pod, since):
            state, end = SlotState.FAILED, _host_lost(view, pod, since)
        if end is None and index in leaving:
            state, end = SlotState.FAILED, leaving[index]
        node = pod.host if pod else slot.node
        same = (slot.state, slot.node, slot.lost_since) == (state, node, since)
        slots.append(slot if same else replace(slot, state=state, node=node, lost_since=since))
        if end is not None:
            ends[index] = Ended(end, pod, node_pod_name(view.job, index, slot.attempt))
    return view.with_slots(slots), ends


def _silent_since(view: View, slot: Slot, pod: PodView | None) -> datetime | None:
    """Remembered from the first reconcile that saw it, where the beginning is not known."""
    since = lost_since(pod, view.world, view.now) if pod is not None else None
    return min(since, slot.lost_since) if since is not None and slot.lost_since is not None else since


def _host_lost(view: View, pod: PodView, since: datetime | None) -> End:
    seconds, hosts = _seconds(view, since), view.world.hosts
    if not is_down(pod.host, hosts):
        return End(Cause.NODE_LOST, f"pod {pod.name} on Kubernetes node {pod.host} has been silent for {seconds} s")
    what = "is deleted" if (hosts or {})[pod.host].deleted else f"has not been ready for {seconds} s"
    return End(Cause.NODE_LOST, f"Kubernetes node {pod.host} of pod {pod.name} {what}")


def _seconds(view: View, since: datetime | None) -> int:
    return round((view.now - (since or view.now)).total_seconds())


def _follow_slot(view: View, index: int, slot: Slot, pod: PodView | None) -> tuple[SlotState, End | None]:
    hosts, launcher = view.world.hosts, view.job.spec.under_torchrun
    if slot.state in (SlotState.SUCCEEDED, SlotState.LOST):
        return slot.state, None
    if pod is None:
        name = node_pod_name(view.job, index, slot.attempt)
        last = view.world.last_of(name)
        if slot.state is SlotState.PLANNED and last is None:
            return slot.state, None
        if last is not None and _is_success(last, launcher=launcher):
            return SlotState.SUCCEEDED, None  # removed between two looks, as by a cleaner
        return SlotState.LOST, vanished(name, slot.node, hosts, last, launcher=launcher)
    if _is_success(pod, launcher=launcher):
        return SlotState.SUCCEEDED, None
    if pod.ended or pod.deleted_at is not None:
        return SlotState.FAILED, why_ended(pod, hosts, launcher=launcher)
    group = view.status.rendezvous.generation
    if pod.generation < group:
        # Its coordinator is another, which nobody asks: the status was changed by hand, or the pod was created late.
        why = f"pod {pod.name} belongs to generation {pod.generation} of the group, which is at generation {group}"
        return SlotState.FAILED, End(Cause.RENDEZVOUS_LOST, why)
    elsewhere = wrong_platform(pod)
    if elsewhere is not None:
        return SlotState.FAILED, elsewhere
    return (SlotState.RUNNING if pod.main.running else SlotState.CREATED), None


def _is_success(pod: PodView, *, launcher: bool) -> bool:
    """Whether the program has finished its work.

    One of the user's that saves at SIGTERM may well end with 0; the launcher does so only when all have.
    """
    return pod.ended and pod.succeeded and (launcher or pod.deleted_at is None)


def _follow_coordinator(view: View) -> tuple[View, Ended | None]:
    """The coordinator's state and endpoint, or its end. In placement Master it is a container of slot 0's pod."""
    job, rendezvous, hosts, pod = view.job, view.status.rendezvous, view.world.hosts, view.coordinator
    name = coordinator_pod_name(job, rendezvous.generation, rendezvous.attempt)
    if pod is None:
        dedicated = job.spec.rendezvous.placement is Placement.DEDICATED
        last = view.world.last_of(name)
        gone = dedicated and (rendezvous.state is not SlotState.PLANNED or last is not None)
        return view, (Ended(vanished(name, "", hosts, last), None, name) if gone else None)
    container = pod.containers.get(COORDINATOR_CONTAINER)
    dedicated = pod.role is Role.COORDINATOR
    if dedicated and ((container is not None and container.ended) or pod.ended or pod.deleted_at is not None):
        return view, Ended(why_ended(pod, hosts), pod, name)
    if container is not None and container.ended:
        # Judged as if it were the pod's only container.
        alone = replace(pod, role=Role.COORDINATOR, containers={COORDINATOR_CONTAINER: container})
        return view, Ended(why_ended(alone, hosts), pod, name)
    since = lost_since(pod, view.world, view.now) if dedicated else None
    if given_up(view, pod, since):
        return view, Ended(_host_lost(view, pod, since), pod, name)
    if job.spec.fast and given_up(view, pod, view.world.deaf_since):
        why = f"pod {name} has not heard most of its members for {_seconds(view, view.world.deaf_since)} s"
        return view, Ended(End(Cause.RENDEZVOUS_LOST, f"{why}, although their Kubernetes nodes are ready"), pod, name)
    running = container is not None and container.running
    endpoint = host_port(pod.address, job.spec.rendezvous.endpoint_port) if pod.address else ""
    state = SlotState.RUNNING if running else SlotState.CREATED
    status = replace(view.status, rendezvous=replace(rendezvous, state=state, endpoint=endpoint))
    return view.with_status(status), None


def _with_start_errors_judged(view: View, ends: Ends, coordinator: Ended | None) -> tuple[Ends, Ended | None]:
    """A container that cannot start is the job's fault where its own program is missing, else its host's.

    Before the first step it is also the job's if it has happened on two hosts. An image that is not for their platform
    is the job's where no other platform is there.
    """
    everyone = [*ends.values(), *([coordinator] if coordinator is not None else [])]
    hosts = {e.pod.host for e in everyone if e.pod is not None and e.end.cause is Cause.START_ERROR}
    hosts |= {r.node for r in view.status.restarts.recent if r.node and r.reason == Cause.START_ERROR}
    everywhere = len(hosts) > 1 and not view.trained

    def judged(ended: Ended) -> Ended:
        if ended.end.cause is not Cause.START_ERROR:
            return ended
        if of_platform(ended.end) and _has_other_platform(view, hosts):
            return ended
        program = () if ended is coordinator else view.job.spec.command
        if not everywhere and not names_entry_point(ended.end, program):
            return ended
        return replace(ended, end=replace(ended.end, cause=Cause.INIT_FAILURE))

    return {i: judged(e) for i, e in ends.items()}, judged(coordinator) if coordinator is not None else None


def _has_other_platform(view: View, hosts: set[str]) -> bool:
    """Whether a Kubernetes node that is ready has a different architecture or system than all of `hosts`."""
    known = view.world.hosts or {}
    failed = {platform_of(known[name]) for name in hosts if name in known}
    return any(host.ready and platform_of(host) not in failed for host in known.values())


def _with_host_suspected(view: View, ended: Ended | None) -> Ended | None:
    """A coordinator that ends or does not start before anybody has heard it: its host is suspected first.

    The next one goes elsewhere, and this does not count. Where an earlier one has left a host within the hour, it is
    the program's fault, or the job's; an image that is not for its host never is.
    """
    pod, report, rendezvous = view.coordinator, view.report, view.status.rendezvous
    if pod is None or pod.role is not Role.COORDINATOR or not pod.host or pod.deleted_at is not None:
        return ended
    if view.world.one_host or (report is not None and report.attempt == rendezvous.attempt):
        return ended
    platform = wrong_platform(pod) if ended is None else None
    if platform is not None:
        return Ended(platform, pod, pod.name)
    if any(avoided.reason.startswith(Cause.START_ERROR) for avoided in view.status.avoided_nodes):
        return ended
    where = f"the coordinator's pod {pod.name} on Kubernetes node {pod.host}"
    if ended is None and pod.prepared is False and view.now - (pod.scheduled or view.now) >= UNPREPARED:
        why = f"{where} has had no volumes or no network for {_seconds(view, pod.scheduled)} s"
        return Ended(End(Cause.START_ERROR, f"{why}; the next one goes elsewhere"), pod, pod.name)
    if ended is None or ended.end.cause is not Cause.EXIT_CODE or not _ended_soon(view, pod):
        return ended
    why = f"{where} ended before it was heard, so that the next one goes elsewhere: {ended.end.message}"
    return replace(ended, end=replace(ended.end, cause=Cause.START_ERROR, message=why))


def _ended_soon(view: View, pod: PodView) -> bool:
    began, over = pod.main.started or pod.created, pod.main.finished or view.now
    return began is not None and over - began < QUICK


def _with_preflights_judged(view: View, ends: Ends) -> Ends:
    """A preflight that nobody passes is the job's fault: a folder that it may not write to, a wrong gpusPerNode.

    Before the first step, once each slot has failed twice, or as often as is remembered.
    """
    failed = {i: e for i, e in ends.items() if e.end.cause is Cause.PREFLIGHT_FAILED}
    before = sum(r.reason == Cause.PREFLIGHT_FAILED for r in view.status.restarts.recent)
    passed = view.report is not None and any(m.state in _PASSED for m in view.report.members)
    if passed or view.trained or before + len(failed) <= min(2 * len(view.status.slots), RECENT):
        return ends
    why = "no pod has passed: "
    return ends | {
        i: replace(e, end=replace(e.end, cause=Cause.INIT_FAILURE, message=why + e.end.message))
        for i, e in failed.items()
    }


# --- what is recorded -------------------------------------------------------------------------------------------


def _with_failing_replaced(view: View, restarts: list[Restart], ends: Ends) -> tuple[list[Restart], Ends]:
    """The new restarts and ends, with those of pods that are replaced although they live.

    A job whose budget is spent by these restarts replaces nothing.
    """
    # A pod that leaves its place may fail again before its deletion reaches it.
    leaving = {r.pod for r in view.status.restarts.recent if r.reason in MOVE_CAUSES}
    restarts = [replace(r, counted=False) if r.pod in leaving else r for r in restarts]
    failing = {f.number: f for f in judge_failing(view, restarts) if f.index not in ends}
    recorded = [failing[n].failure if n in failing else restart for n, restart in enumerate(restarts)]
    counted = view.status.restarts.counted + sum(restart.counted for restart in recorded)
    if counted > view.job.spec.recovery.max_restarts:
        return restarts, ends
    for each in failing.values():
        end, failure = each.end, each.failure
        moved = replace(failure, reason=end.cause, message=end.message, counted=False, consequence=True)
        recorded.append(replace(moved, rank=None))
        ends = ends | {each.index: Ended(end, view.pods[each.index], failure.pod)}
    return recorded, ends


def _finding_of_end(view: View, index: int, ended: Ended, new: NewIncidents) -> Finding:
    end, slot = ended.end, view.status.slots[index]
    of_program = not (end.before_program and end.cause is Cause.EXIT_CODE)
    ruled = evaluate_rules(view.job.spec, end.cause, end.exit_code, trained=view.trained or not of_program)
    restart = Restart(
        time=min(end.time or view.now, view.now),
        pod=ended.name,
        index=index,
        node=slot.node,
        rank=end.rank,
        reason=end.cause,
        message=with_traceback(end.message, end.traceback),
        counted=ruled.counted,
    )
    idle = _was_idle(view, index, ended, new)
    return Finding(restart, made_in=slot.round, fails=ruled.fails, why=ruled.why, exit_code=end.exit_code, idle=idle)


def _was_idle(view: View, index: int, ended: Ended, new: NewIncidents) -> bool:
    """Whether the pod was a spare, so that the group trains and keeps its rendezvous without it.

    Its label follows a second after it has taken over: what the coordinator says of it comes first.
    """
    pod, report = ended.pod or view.world.last_of(ended.name), view.report
    if pod is None or pod.role is not Role.SPARE or report is None:
        return False
    if not can_replace(view) or (index == 0 and view.job.spec.rendezvous.placement is Placement.MASTER):
        return False
    if any(incident.pod == ended.name and incident.kind in _LOSSES for incident in report.incidents):
        return False
    if any(m.pod == ended.name and (m.state == MemberState.RUNNING or m.rank is not None) for m in report.members):
        return False
    if report.state == CoordinatorState.RESTARTING and not view.status.holds(ConditionType.RESTARTING):
        # After a worker's failure the same nodes restart: no spare takes over.
        return not new.lost and all(finding.restart.reason != Cause.JOINED for finding in new.findings)
    return report.state == CoordinatorState.RUNNING


def _one_for_command(job: DDPJob, findings: list[Finding]) -> list[Finding]:
    """With `command`, of nodes that end together one represents all: causes and consequences look alike.

    A disruption explains the failures of its peers, so it comes first. What a rank raises whose peer is gone, comes
    last.
    """
    if job.spec.under_torchrun:
        return findings
    return sorted(findings, key=lambda f: (f.contestable, _is_of_peer(f.restart.message), f.restart.time))[:1]


def _is_of_peer(message: str) -> bool:
    """Whether a rank's error is one that the death of a peer causes. Names of pods may hold a backend's name."""
    said = message.partition("\n")[0].partition(": ")[2]
    return COMMUNICATION_ERROR.search(said) is not None


def _awaits_cause(view: View, ends: Ends) -> bool:
    """Whether all pods of a `command` that have ended have lost a peer, whose own end may be seen in a moment."""
    if view.job.spec.under_torchrun or not ends:
        return False
    if all(slot.state is not SlotState.RUNNING for slot in view.status.slots):
        return False
    return all(
        ended.end.rank is not None
        and ended.end.time is not None
        and abs(view.now - ended.end.time) < CAUSE_WAIT
        and _is_of_peer(ended.end.message)
        for ended in ends.values()
    )


def _coordinator_restart(view: View, ended: Ended) -> Restart:
    """In mode Fast training continues without a coordinator: its loss is no break and begins no round.

    Unless it cannot be replaced alone.
    """
    end, fast = ended.end, view.job.spec.fast and can_replace(view)
    ruled = evaluate_rules(view.job.spec, end.cause, end.exit_code, trained=True)
    return Restart(
        time=view.now,
        pod=ended.name,
        reason=Cause.COORDINATOR_LOST,
        node=ended.pod.host if ended.pod else "",
        message=with_traceback(f"the coordinator was lost: {end.message}", end.traceback),
        counted=ruled.counted and not fast,
        round=0 if fast else view.status.round + 1,
        seconds=0.0 if fast else None,
    )


def record(status: JobStatus, restarts: list[Restart]) -> JobStatus:
    """The status with restarts counted and remembered, and the round that the last of them began."""
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
    kind = f"{fatal.restart.reason}: " if fatal.why else ""
    return Failure(fatal.fails, kind + cause_first(without_wait(fatal.restart.message), fatal.why))


def _program_error(view: View) -> Failure | None:
    """No restart helps a wrong program. Only before the first step: later there is progress to keep."""
    spec, recent = view.job.spec, view.status.restarts.recent
    said = None if view.trained else repeated_program_error(spec, recent) or repeated_everywhere(spec, recent)
    if said is None:
        return None
    last = next(r for r in reversed(recent) if r.counted)
    return Failure(PROGRAM_ERROR, cause_first(without_wait(last.message), said))


def _cannot_start(view: View) -> Failure | None:
    """The failure of a job with a wrong image, which waiting does not cure."""
    if view.has_run:
        return None
    for pod in [view.coordinator, *view.pods]:
        held = stuck(pod, has_run=False) if pod else None
        if held is not None and held.final:
            return Failure(held.reason, held.message)
    return None


def _no_coordinator(view: View, ended: Ended | None) -> Failure | None:
    if ended is None or ended.end.cause is not Cause.INIT_FAILURE or view.trained:
        return None
    end = ended.end
    hint = " (the image must have python3 and torch)" if "executable file not found" in end.message else ""
    message = f"the coordinator cannot start: {end.message}{hint}"
    return Failure(Cause.INIT_FAILURE, with_traceback(message, end.traceback))


def _finished(view: View, ends: Ends) -> bool:
    """Whether the job is complete.

    Under torchrun a node ends with 0 only when every node of the group has finished (the launcher's
    exit barrier). Spares and nodes that never joined are not waited for.
    """
    states = [slot.state for slot in view.status.slots]
    if all(state is SlotState.SUCCEEDED for state in states):
        return True
    if not view.job.spec.under_torchrun or (SlotState.RUNNING in states and not _overdue(view)):
        return False
    return _let_go(view, ends)


def _overdue(view: View) -> bool:
    """Whether pods still run although one has ended with 0 a while ago, and with it the training of all."""
    ends = [pod.main.finished for pod in view.pods if pod is not None and pod.ended and pod.succeeded]
    return any(end is not None and view.now >= end + FINISH for end in ends)


def _let_go(view: View, ends: Ends) -> bool:
    """Whether the launchers were let go, which is when every one of the group has finished.

    A slot that was given up earlier says it too: the coordinator may be gone since, and its report with it.
    """
    if not view.job.spec.under_torchrun:
        return False
    reported = view.report is not None and view.report.state == CoordinatorState.SUCCEEDED
    given_up = (s.state is SlotState.LOST and i not in ends for i, s in enumerate(view.status.slots))
    return reported or any(given_up) or any(s.state is SlotState.SUCCEEDED for s in view.status.slots)


def _give_up_lost(status: JobStatus, ends: Ends) -> JobStatus:
    slots = [replace(s, state=SlotState.LOST) if i in ends else s for i, s in enumerate(status.slots)]
    return replace(status, slots=tuple(slots))


def _budget_spent(view: View) -> Failure:
    """Also without a new failure: recovery.maxRestarts may have been lowered."""
    restarts, limit = view.status.restarts, view.job.spec.recovery.max_restarts
    spent = f"{count(restarts.counted, 'failure')}, recovery.maxRestarts is {limit}"
    last = next((r for r in reversed(restarts.recent) if r.counted), None)
    if last is not None:
        spent = f"{last.reason}: {cause_first(without_wait(last.message), spent)}"
    return Failure("RestartBudgetSpent", spent)


# --- replacements -----------------------------------------------------------------------------------------------


def _replace(view: View, ends: Ends, coordinator: Ended | None, attributed: Attributed) -> JobStatus:
    """Another attempt for every lost slot, or a new generation where the rendezvous itself is lost."""
    spec = view.job.spec
    view = view.with_status(_with_backoff(view, ends, coordinator, {f.restart.pod for f in attributed.causes}))
    regroup = (
        (coordinator is not None and not spec.fast)
        or ((coordinator is not None or ends) and not can_replace(view))
        or (ends and not spec.under_torchrun)
        or (0 in ends and spec.rendezvous.placement is Placement.MASTER)
        or any(ended.end.cause in _REGROUPS for ended in ends.values())
        or (
            any(ended.end.cause is Cause.PREEMPTED for ended in ends.values())
            and is_broken_up(view, [s for i, s in enumerate(view.status.slots) if i not in ends])
        )
    )
    if regroup:
        return new_generation(view if spec.under_torchrun else _all_wait(view, ends))
    status = next_coordinator(view.status) if coordinator is not None else view.status
    slots = [
        next_attempt(s, Repeated(s.reason, s.failures, s.not_before)) if i in ends else s
        for i, s in enumerate(status.slots)
    ]
    return with_slots(status, slots)


def _all_wait(view: View, ends: Ends) -> View:
    """The others as long as the one that has failed: without it they achieve nothing, and may fail in their turn."""
    ended = [view.status.slots[i] for i in ends]
    waiting = [(slot.not_before, slot) for slot in ended if slot.failures and slot.not_before is not None]
    if not waiting:
        return view
    until, last = max(waiting, key=lambda pair: pair[0])
    slots = [replace(s, reason=last.reason, failures=last.failures, not_before=until) for s in view.status.slots]
    return view.with_slots(slots)


def _with_backoff(view: View, ends: Ends, coordinator: Ended | None, causes: set[str]) -> JobStatus:
    """How often slots and coordinator have failed in a row.

    A consequence says nothing about the pod that had it, unless the program fails in both: then both wait as long. Of
    pods that were preempted together, each leaves its room.
    """
    slots, rendezvous = list(view.status.slots), view.status.rendezvous
    for index, ended in sorted(ends.items(), key=lambda item: item[1].name not in causes):
        slot, again, cause = slots[index], Repeated(), ended.end.cause
        if ended.name in causes or cause is Cause.PREEMPTED:
            own = slot.failures if slot.reason == cause else 0
            again = repeated(view, Repeated(cause, max(own, in_a_row(view, cause))), ended.end, ended.pod)
        elif shared := in_a_row(view.with_slots(slots), cause):
            again = repeated(view, Repeated(cause, shared - 1), ended.end, ended.pod)
        slots[index] = replace(slot, reason=again.reason, failures=again.failures, not_before=again.not_before)
    if coordinator is not None:
        before = Repeated(coordinator.end.cause, rendezvous.failures)
        again = repeated(view, before, coordinator.end, coordinator.pod)
        rendezvous = replace(rendezvous, failures=again.failures, not_before=again.not_before)
    return replace(view.status, slots=tuple(slots), rendezvous=rendezvous)
