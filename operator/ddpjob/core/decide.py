"""The one decision about a job: from what was observed to what is written and done.

No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob_runtime.protocol import CoordinatorState, MemberState

from ddpjob.api.job import DDPJob
from ddpjob.api.job_classes import lacks_class
from ddpjob.api.job_status import ConditionType, JobStatus, Restart, SlotState, format_time
from ddpjob.core.decision import BLOCKED_POLL, POLL, Action, Creation, Decision, DeleteGang, DeletePod, Event, Failure
from ddpjob.core.failures.classify import Cause
from ddpjob.core.failures.liveness import given_up, is_overdue, lost_since
from ddpjob.core.failures.node_health import next_judgement
from ddpjob.core.follow import finished_while_ending, follow, record
from ddpjob.core.plan.actions import notifications, plan_actions
from ddpjob.core.plan.gang import is_outdated, with_placed, yields
from ddpjob.core.plan.job_class import CLASS_MISSING, CLASS_REFUSED, class_fault, takes_class, with_class_applied
from ddpjob.core.plan.queue import drop_workloads, is_queued, queue_actions, waits_for, with_admitted, with_grant
from ddpjob.core.plan.slots import can_replace, fits, new_generation, resized, with_rounds
from ddpjob.core.plan.wind_down import complete, fail, has_leftovers, wind_down
from ddpjob.core.status.conditions import GROUP_RESTARTS, QUEUED, with_condition, with_phase, without_condition
from ddpjob.core.status.describe import describe
from ddpjob.core.status.events import change_events, restart_events
from ddpjob.core.status.messages import count, event_text
from ddpjob.core.status.notifications import with_notifications
from ddpjob.core.status.restarting import preflight_passed
from ddpjob.core.status.scheduled import deletion_refused
from ddpjob.core.status.shown_progress import shown_progress, without_speed
from ddpjob.core.view import View
from ddpjob.core.volumes import FIELD
from ddpjob.core.world import LABEL_ROLE, LABEL_UID, PodView, Role, World, is_down


def decide(job: DDPJob, world: World, now: datetime) -> Decision:
    """Return what a job's status should be and what should be done at `now` (timezone-aware UTC).

    `job` holds the spec and the last written status; `world` is what was observed after it was
    read.

    The function is pure: the same arguments give the same decision, and nothing is remembered
    between two calls except in the returned status. It is idempotent: an action may be performed
    twice, since creations are named by index and attempt and deletions carry a uid. An operator
    that dies after any part of a decision continues from a new observation.

    In this order:

    1. A job that is being deleted, or that belongs to another controller, gets nothing; one that
       has ended is wound down.
    2. A podTemplate with faults fails a job that has never run a pod; otherwise the pods stay as
       they are.
    3. A suspended job loses its pods, and so does one to which its queue grants no quota. A job
       that begins takes its class first: the class is written, and nothing else is done.
    4. Slots are laid out by the spec, and the group is followed.
    5. The job ends by its deadline, an object that the API server rejects for good, a failure, or
       success.
    6. Otherwise: actions, conditions, events and messages to the coordinator.

    Finally, whatever was decided, notifications for the job's receiver are added.
    """
    if job.deleting or job.spec.managed_elsewhere:
        return Decision(job.status)
    return with_notifications(job, world, now, _decide(job, world, now))


def _decide(job: DDPJob, world: World, now: datetime) -> Decision:
    status = replace(
        job.status,
        observed_generation=job.generation,
        selector=f"{LABEL_UID}={job.uid},{LABEL_ROLE}={Role.NODE}",
    )
    view = View(job, status, world, now)
    if status.terminal:
        return wind_down(view.with_status(replace(job.status, observed_generation=job.generation)))
    # The class may provide what podTemplate lacks.
    judged = bool(job.oversized) or not lacks_class(job)
    if world.problems and judged and not view.has_run and not (job.spec.run_policy.suspend and status.slots):
        return fail(view, Failure("InvalidPodTemplate", "; ".join(world.problems)))
    if job.spec.run_policy.suspend:
        return _suspend(view)
    fault = class_fault(view)
    if fault is not None:
        return _without_class(view, *fault)
    taken = takes_class(view)
    if taken is not None:
        return Decision(taken, wake=0.0)  # The next reconcile reads the job with it.
    view = with_grant(view.with_status(with_class_applied(view)))
    queued = is_queued(view.with_status(job.status))
    if queued:
        view = view.with_status(with_admitted(view))
        if view.status.queue is None:
            return _queue(view)
    driven = replace(world, rejections=tuple(r for r in world.rejections if not r.of_queue))
    decision = _drive(View(job.granted(view.status), view.status, driven, now))
    if decision.status.terminal:
        return decision
    asked = queue_actions(view.with_status(decision.status))
    return replace(decision, actions=(*decision.actions, *asked))


def _without_class(view: View, reason: str, message: str) -> Decision:
    """Return the decision for a job that cannot have its class.

    A new job that breaks the class's rules fails; others wait.
    """
    if reason == CLASS_REFUSED and not view.has_run:
        return fail(view, Failure(reason, message))
    known = view.status.condition(ConditionType.CLASS_APPLIED)
    events = [Event(True, reason, event_text(message))] if known is None or known.reason != reason else []
    view = view.with_status(with_condition(view.status, ConditionType.CLASS_APPLIED, False, reason, message, view.now))
    if not view.status.slots and not view.status.holds(ConditionType.SUSPENDED):
        return Decision(with_phase(view.status), events=tuple(events), wake=BLOCKED_POLL)
    decision = _suspend(view, reason, message, events)
    return decision if decision.status.terminal else replace(decision, wake=BLOCKED_POLL)


def _queue(view: View) -> Decision:
    """Return the decision for a job that waits in its queue, or has lost its quota.

    It is treated as suspended.
    """
    reason, message = waits_for(view)
    events, had = list[Event](), view.job.status.queue
    if had is not None:
        held = next((w for w in view.world.workloads if w.uid == had.uid), None)
        lost = next((w for w in view.world.workloads if w.evicted and w.grant is not None), None)
        # The label may name a different queue by now.
        queue = next((w.asks[0] for w in (held, lost) if w is not None and w.asks[0]), view.job.queue)
        if lost is None and held is not None and held.admitted and not (held.finished or held.leaving):
            why = f"the quota that queue {queue} has granted does not suit the job's spec any more"
            events.append(Event(False, Cause.SPEC_CHANGED, f"{why}: it asks again; checkpoints are kept"))
        else:
            why = lost.message if lost is not None else "its Workload is gone"
            evicted = f"queue {queue} takes the quota back: {why}; checkpoints are kept"
            events.append(Event(True, "Evicted", evicted))
    elif not view.status.holds(ConditionType.SUSPENDED):
        events.append(Event(False, reason, message))
    decision = _suspend(view, reason, message, events)
    if decision.status.terminal or any(_stays(pod, view.world) for pod in view.world.pods):
        return decision
    actions = queue_actions(view.with_status(decision.status))
    blocked = view.world.rejections or not view.world.serves_queues
    wake = BLOCKED_POLL if blocked else POLL if actions else decision.wake
    return replace(decision, actions=(*decision.actions, *actions), wake=wake)


def _drive(view: View) -> Decision:
    """Return the decision for a job that should run."""
    status, events = _begin(view)
    view = view.with_status(status)
    view = view.with_status(with_placed(view))
    job, world, now = view.job, view.world, view.now
    deadline = _deadline(view)
    followed = follow(view)
    overdue = deadline is not None and now >= deadline
    if overdue and not followed.done:
        return fail(view, _too_late(job))
    refused = next((r for r in world.rejections if r.final and not r.of_gang and not r.of_budget), None)
    if refused is not None and not view.has_run:
        where = f" ({FIELD})" if refused.is_claim else ""
        message = f"the API server rejects {refused.object}{where}: {refused.message}"
        return fail(view, Failure("InvalidClaim" if refused.is_claim else "InvalidPod", message))
    view = view.with_status(followed.status)
    ends = (*followed.idle, *followed.restarts)
    # The failure has its own event.
    said = followed.failure.reason if followed.failure is not None else ""
    restarts = tuple(restart for restart in followed.restarts if restart.reason != said)
    events += restart_events(view, restarts, followed.idle, failed=followed.failure is not None)
    if followed.failure is not None:
        return fail(view, followed.failure, events)
    if followed.complete or (overdue and followed.done):
        # A short training may begin and end between two looks.
        return complete(view.with_status(preflight_passed(view, (), formed=True)), events)
    view, given_up = _yielding(view)
    events += given_up
    view = view.with_status(with_rounds(view))
    actions, held = plan_actions(view, followed.lost)
    creating = any(isinstance(a, Creation) for a in actions)
    view = view.with_status(describe(view, ends, creating=creating))
    status, restored = _with_budget_restored(view)
    view = view.with_status(status)
    events += [*change_events(job.status, status), *restored]
    actions += notifications(view, ends, followed.lost)
    blocked = bool(world.rejections or world.problems) or view.claim_problem is not None
    quiet = not actions and not ends and not followed.undecided and not _is_somebody_silent(view)
    wake = [BLOCKED_POLL if blocked else max(POLL, world.report_seconds) if quiet else POLL]
    wake += [max(0.0, (moment - now).total_seconds()) for moment in (deadline, held, next_judgement(view)) if moment]
    return Decision(status, actions, tuple(events), min(wake))


def _yielding(view: View) -> tuple[View, list[Event]]:
    """Begin a new generation that waits as a gang, if a job holds nodes and cannot train.

    It never counts.
    """
    why = yields(view)
    if not why:
        return view, []
    view = view.with_status(record(view.status, [_planned(view, Cause.YIELDED, why)]))
    return view.with_status(new_generation(view)), [Event(True, Cause.YIELDED, why)]


def _is_somebody_silent(view: View) -> bool:
    """Return whether time alone may decide that a pod or the coordinator is lost."""
    world = view.world
    return bool(world.silent) or any(lost_since(pod, world, view.now) is not None for pod in world.pods)


# --- how a reconcile begins -------------------------------------------------------------------------------------


def _begin(view: View) -> tuple[JobStatus, list[Event]]:
    """Begin a generation for a new, changed or resumed job, or resize its slots."""
    world, now = view.world, view.now
    status, events = _laid_out(view)
    if status.holds(ConditionType.SUSPENDED):
        before = status.condition(ConditionType.SUSPENDED)
        queued = before is not None and before.reason in QUEUED
        reason, why = "Resumed", "the job is in no queue" if queued else "runPolicy.suspend is false"
        if before is not None and before.reason in (CLASS_MISSING, CLASS_REFUSED):
            name = view.job.spec.class_name
            why = f"class {name} is applied" if name else "the job names no class any more"
        if queued and status.queue is not None:
            reason, why = "Admitted", f"{status.queue.cluster_queue} has granted the quota"
        for kind in (ConditionType.SUSPENDED, ConditionType.RESTARTING):
            if status.condition(kind) is not None:
                status = with_condition(status, kind, False, reason, why, now)
        continues = view.job.status.slots and view.trained
        events.append(Event(False, reason, "training continues from the newest checkpoint" if continues else why))
    if (world.runtime != status.runtime or not status.runtime) and can_replace(view.with_status(status)):
        status = replace(status, runtime=world.runtime_offered)
    if status.start_time is None:
        status = replace(status, start_time=now.replace(microsecond=0))
    return status, events


def _laid_out(view: View) -> tuple[JobStatus, list[Event]]:
    """Return the status whose slots suit the spec, and the event of a change."""
    job, status = view.job, view.status
    if not status.slots:
        return new_generation(view), []
    if view.world.problems:
        return status, []  # nothing can be built from this spec
    suspended = status.holds(ConditionType.SUSPENDED)
    fitting = fits(view)
    if fitting and is_outdated(view):
        return new_generation(view), []  # no part of it has been placed
    other_size = status.rendezvous.nodes != job.spec.nodes or len(status.slots) != job.spec.pods
    if (other_size or not fitting) and follow(view).done:
        # Other pods would have nothing to do: the job has finished unseen, or its last pods are
        # ending.
        return status, []
    if not fitting:
        cause, message = _change(view)
        view = view.with_status(replace(status, runtime=""))  # new pods also get the newest runtime
    elif not other_size:
        return status, []
    elif suspended or not job.spec.under_torchrun or (len(status.slots) < job.spec.pods and not can_replace(view)):
        cause, message = Cause.SCALED, _new_size(view)
    else:
        return _resize(view)
    if suspended:
        return new_generation(view), []
    return new_generation(_restarted(view, cause, message)), [Event(False, cause, message)]


def _change(view: View) -> tuple[Cause, str]:
    """Return why a job that is not suspended needs different pods."""
    template, _, rest = view.status.template_hash.partition("-")
    if template != view.job.spec.template_hash:
        return Cause.SPEC_CHANGED, "the part of the spec that pods are made from has changed"
    if rest.partition("-")[0] != view.world.key_mark:
        return Cause.KEY_CHANGED, "the operator's key has changed, and with it the token that the job's pods share"
    return Cause.RUNTIME_CHANGED, "the upgraded operator cannot work with the runtime in the job's present pods"


def _resize(view: View) -> tuple[JobStatus, list[Event]]:
    """Resize in place. More nodes join by a later restart of the coordinator.

    Fewer nodes are a restart now, and so are fewer spares if one of the removed pods has taken
    over.
    """
    job, status = view.job, view.status
    message = _new_size(view)
    members = view.report.members if view.report is not None else ()
    going = {pod.name for pod in view.pods[job.spec.pods :] if pod is not None}
    trains = any(member.pod in going and member.state is MemberState.RUNNING for member in members)
    if job.spec.nodes < status.rendezvous.nodes or trains:
        view = _restarted(view, Cause.SCALED, message)
    return resized(view), [Event(False, Cause.SCALED, message)]


def _restarted(view: View, cause: Cause, message: str) -> View:
    """Return the view with a planned restart.

    A job that waits for its first group, for instance for room, restarts nothing.
    """
    status, report = view.status, view.report
    running = status.condition(ConditionType.RUNNING)
    formed = running is not None and (running.status or running.reason == GROUP_RESTARTS)
    formed = formed or (report is not None and report.state != CoordinatorState.FORMING)
    if not formed and not status.holds(ConditionType.RESTARTING):
        return view
    return view.with_status(record(status, [_planned(view, cause, message)]))


def _new_size(view: View) -> str:
    spec, before = view.job.spec, view.status.rendezvous.nodes
    if spec.nodes == before:
        return f"spec.spares changed from {len(view.status.slots) - before} to {spec.spares}"
    asked = view.job.written.get("nodes", spec.nodes)
    if asked > spec.nodes:
        return f"spec.nodes changed from {before} to {asked}, of which class {spec.class_name} allows {spec.nodes}"
    return f"spec.nodes changed from {before} to {spec.nodes}"


def _planned(view: View, cause: Cause, message: str) -> Restart:
    name, number = view.job.name, view.status.round + 1
    return Restart(time=view.now, pod=name, reason=cause, message=message, counted=False, round=number)


def _deadline(view: View) -> datetime | None:
    seconds, start = view.job.spec.run_policy.active_deadline_seconds, view.status.start_time
    return start + timedelta(seconds=seconds) if seconds is not None and start else None


def _too_late(job: DDPJob) -> Failure:
    """Return the failure, with what was last missing, so that a job that never began shows why."""
    message = f"not finished within runPolicy.activeDeadlineSeconds = {job.spec.run_policy.active_deadline_seconds}"
    known = (job.status.condition(kind) for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING))
    missing = next((c for c in known if c is not None and not c.status), None)
    if missing is not None:
        message += f"; at the deadline: {missing.reason}: {missing.message}"
    return Failure("DeadlineExceeded", message)


# --- budget and suspension --------------------------------------------------------------------------------------


def _with_budget_restored(view: View) -> tuple[JobStatus, list[Event]]:
    """Restore all of maxRestarts after enough training without a failure that counts."""
    status = view.status
    running, counts = status.condition(ConditionType.RUNNING), status.restarts
    if running is None or not running.status or not counts.counted:
        return status, []
    since = max(running.since, counts.last_counted or running.since)
    seconds = view.job.spec.recovery.reset_after_seconds
    if view.now < since + timedelta(seconds=seconds):
        return status, []
    message = f"{seconds} s of training without a failure: counted restarts are reset from {counts.counted} to 0"
    return replace(status, restarts=replace(counts, counted=0)), [Event(False, "BudgetRestored", message)]


def _stays(pod: PodView, world: World) -> bool:
    """Return whether any container of a pod still runs, and its host will end it.

    It may be a sidecar of a program that has ended.
    """
    return not pod.ended or (has_leftovers(pod) and not is_down(pod.host, world.hosts))


def _overdue(leaving: list[PodView], now: datetime) -> str:
    """Return what keeps the first of the pods that should have ended."""
    pod = next((p for p in leaving if is_overdue(p, now)), None)
    if pod is None:
        return ""
    host = f", or its Kubernetes node {pod.host} does not answer" if pod.host else ""
    return f"; pod {pod.name} should have ended by {format_time(pod.deleted_at)}: a finalizer holds it{host}"


def _suspend(view: View, reason: str = "Suspended", waits: str = "", events: list[Event] | None = None) -> Decision:
    """Delete all pods with their grace period, so that scripts can save.

    The slots are planned again for the resume. A job that has finished becomes complete anyway. The
    coordinator is deleted last, because nodes need it until they have ended. `reason` and `waits`
    are those of a job that its queue does not let run, with its `events`.
    """
    followed = follow(view) if view.status.slots else None
    if followed is not None and followed.done:
        # It finished unseen, for instance while no operator ran. Starting again at the resume would
        # be pointless.
        return complete(view.with_status(followed.status), [])
    if view.status.holds(ConditionType.SUSPENDED) and finished_while_ending(view):
        return complete(view, [])
    status, now = view.status, view.now
    states = [status.rendezvous.state, *(s.state for s in status.slots)]
    created = view.coordinator is not None or any(pod is not None for pod in view.pods)
    if created or any(state is not SlotState.PLANNED for state in states):
        # Also for pods that no status shows yet, since their names are used up. The spec is checked
        # when the job resumes.
        status = replace(new_generation(view), template_hash=status.template_hash, runtime=status.runtime)
    leaving = [p for p in view.world.pods if _stays(p, view.world)]
    if events is None:
        already = status.condition(ConditionType.SUSPENDED)
        fresh = already is None or not already.status or already.reason != reason
        had_pods = leaving or view.job.status.slots
        said = "pods are deleted, checkpoints are kept" if had_pods else "no pods are created"
        events = [Event(False, reason, f"runPolicy.suspend is true: {said}")] if fresh else []
    message = (
        f"{count(len(leaving), 'pod')} still there: {deletion_refused(view.world)}"
        if leaving and view.world.deletion_refused
        else f"{count(len(leaving), 'pod')} still terminating{_overdue(leaving, now)}"
        if leaving
        else waits or "no pods run; set runPolicy.suspend to false to resume"
    )
    status = with_condition(status, ConditionType.SUSPENDED, True, reason, message, now)
    for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.RESTARTING):
        if status.condition(kind) is not None:
            status = with_condition(status, kind, False, "Suspended", "the job is suspended", now)
    for kind in (
        *(ConditionType.FAST_RECOVERY, ConditionType.NODES_HEALTHY, ConditionType.RANKS_ORDERED),
        *(ConditionType.CHECKPOINTS_COPIED, ConditionType.PREFLIGHT_PASSED),
    ):
        status = without_condition(status, kind)
    shown, reported = without_speed(status.progress), without_speed(view.reported_progress)
    progress = shown_progress(shown, reported, now, at_once=True)
    status = with_phase(replace(status, start_time=None, active=0, ready=0, spare=0, progress=progress))
    if reason not in QUEUED:
        status = without_condition(replace(status, queue=None), ConditionType.ADMITTED)
    lost = [p for p in leaving if given_up(view, p, lost_since(p, view.world, now))]
    alive = [p for p in leaving if p not in lost]
    nodes_first = [p for p in alive if p.role is not Role.COORDINATOR and not is_overdue(p, now)] or alive
    # A host that does not answer will never confirm the end of its pods, so nothing waits for them.
    actions: list[Action] = [DeletePod(p.name, p.uid, 0) for p in lost]
    actions += [DeletePod(p.name, p.uid) for p in nodes_first if p.deleted_at is None]
    if not leaving:
        actions += [DeleteGang(name, uid) for name, uid in view.world.gangs.items() if uid]
        actions += drop_workloads(view) if reason not in QUEUED else []
    return Decision(status, tuple(actions), tuple(events), BLOCKED_POLL if leaving or actions else None)
