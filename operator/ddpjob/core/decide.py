"""Decides, from one observation of a job, what to write to its status and which actions to take.

Each reconcile calls `decide` once with three values: the job, the observed world and the time. It
returns one `Decision`, which `engine.apply` performs. An operator may die at any point, so only the
job's status is remembered between calls. The module uses neither I/O nor a clock, so a test can
replay years of a job's history in seconds.

1. `GATES`: a finished, faulty, suspended or waiting job stops here.
2. `begin`: plan slots for a job that is starting, is resuming or has changed.
3. `follow`: find pods that have ended and why, and plan their next attempts.
4. `fail` and `complete`: end the job if its deadline has passed, one of its objects is invalid, or
   its group has failed for good or finished.
5. `plan_actions` and `describe`: choose the pods to create and delete, and set the conditions.
6. `plan_notifications`: choose the messages to the coordinator.
7. `_wake`: choose the time of the next reconcile.

Example: pod train-1-0 of a running job is evicted.

    10:00:00  `follow` records an uncounted restart and plans slot 1 at attempt 1; the action is
              to create pod train-1-1, and Restarting becomes true
    10:00:01  train-1-1 exists, but its program has not started; there is nothing to do
    10:00:20  the coordinator reports that the group runs; Restarting becomes false

Why: docs/decisions/0002, and 0004 for the actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType, JobStatus
from ddpjob.core import gates
from ddpjob.core.begin import Begun, begin, explain_superseded, yield_room
from ddpjob.core.decision import BLOCKED_POLL, POLL, Decision, Event, Failure
from ddpjob.core.failures.classify import Cause
from ddpjob.core.failures.liveness import lost_since
from ddpjob.core.failures.node_health import find_next_judgement
from ddpjob.core.failures.slow_ranks import find_next_move
from ddpjob.core.follow.outcome import is_done
from ddpjob.core.follow.stages import Followed, follow
from ddpjob.core.plan.actions import plan_actions, plan_notifications
from ddpjob.core.plan.queue import plan_queue_actions
from ddpjob.core.plan.wind_down import complete, fail
from ddpjob.core.status.describe import describe
from ddpjob.core.status.events import change_events, restart_events
from ddpjob.core.status.gpu_seconds import count_gpu_seconds
from ddpjob.core.status.notifications import with_notifications
from ddpjob.core.status.restarting import judge_preflight
from ddpjob.core.view import View
from ddpjob.core.volumes import FIELD
from ddpjob.core.world import LABEL_ROLE, LABEL_UID, Role, World

GATES: tuple[Callable[[View], View | Decision], ...] = (
    gates.pass_unless_ended,
    gates.pass_valid_template,
    gates.pass_unless_suspended,
    gates.pass_with_class,
    gates.pass_with_quota,
)
"""The gates that a job passes before it may run, in this order. If a gate returns a view, the next
gate gets that view. If a gate returns a decision, the reconcile ends with that decision.
"""

_SUPERSEDED_POLL = 60.0
"""Seconds between reconciles of a job that a different operator has taken over."""


def decide(job: DDPJob, world: World, now: datetime) -> Decision:
    """Return the status that a job should have, and the actions to take.

    `job` holds the spec and the last written status. `world` was observed after `job` was read.
    `now` is timezone-aware UTC.

    The function is pure: the same arguments always give the same decision. Performing a decision
    twice is harmless, because created objects are named by index and attempt, and deletions carry a
    uid. If an operator dies partway through, the next reconcile decides from a new observation.

    A job that is being deleted, or that belongs to another controller or operator, is left alone.
    For any other job, one of the GATES makes the decision or, if all of them let the job pass,
    `_run` does. The job's GPU seconds and the notifications for its receiver are then added to that
    decision.
    """
    if job.deleting or job.spec.managed_elsewhere:
        return Decision(job.status)
    selector = f"{LABEL_UID}={job.uid},{LABEL_ROLE}={Role.NODE}"
    status = replace(job.status, observed_generation=job.generation, selector=selector)
    view = View(job, status, world, now)
    if why := explain_superseded(view):
        return Decision(job.status, (), (Event(True, Cause.KEY_CHANGED, why, once=True),), _SUPERSEDED_POLL)
    decision = with_notifications(job, world, now, _decide(view))
    return count_gpu_seconds(job, world, now, decision)


def _decide(view: View) -> Decision:
    for gate in GATES:
        passed = gate(view)
        if isinstance(passed, Decision):
            return passed
        view = passed
    rejections = tuple(r for r in view.world.rejections if not r.of_queue)
    world = replace(view.world, rejections=rejections)
    decision = _run(View(view.job.granted(view.status), view.status, world, view.now))
    if decision.status.terminal:
        return decision
    return replace(decision, actions=(*decision.actions, *plan_queue_actions(view.with_status(decision.status))))


def _run(view: View) -> Decision:
    """Return the decision for a job that should run.

    The order of the steps matters, because only `follow` shows whether the job ends. Only a job
    that continues gets new actions, conditions and messages to the coordinator.
    """
    begun = begin(view)
    followed = follow(begun.view)
    events = [*begun.events, *_restart_events(followed)]
    ended = _end_from_outside(begun, followed) or _end_of_group(followed, events)
    if ended is not None:
        return ended
    yielded = yield_room(followed.view)
    plan = plan_actions(yielded.view, followed.lost)
    described = plan.view.with_status(describe(plan.view, followed.news, creating=plan.creates))
    status, restored = _with_budget_restored(described)
    final = described.with_status(status)
    events += [*yielded.events, *change_events(view.job.status, status), *restored]
    actions = plan.actions + plan_notifications(final, followed.news, followed.lost)
    return Decision(status, actions, tuple(events), _wake(final, followed, quiet=not actions, held=plan.held))


def _end_from_outside(begun: Begun, followed: Followed) -> Decision | None:
    """Return the decision to fail a job that is past its deadline or has an invalid object.

    An invalid object fails only a job that has never run. Return None if the job continues.
    """
    view = begun.view
    if _is_too_late(view) and not is_done(followed.ends):
        return fail(view, _deadline_exceeded(view.job))
    refused = next((r for r in view.world.rejections if r.final and not r.of_gang and not r.of_budget), None)
    if refused is None or view.has_run:
        return None
    where = f" ({FIELD})" if refused.is_claim else ""
    message = f"the API server rejects {refused.object}{where}: {refused.message}"
    return fail(view, Failure("InvalidClaim" if refused.is_claim else "InvalidPod", message))


def _end_of_group(followed: Followed, events: list[Event]) -> Decision | None:
    """Return the final decision on a job whose group has failed for good or finished its work.

    Return None if the job continues.
    """
    view = followed.view
    if followed.failure is not None:
        return fail(view, followed.failure, events)
    if followed.complete or (is_done(followed.ends) and _is_too_late(view)):
        # A short training run may start and finish between two reconciles, so its preflight is
        # judged here.
        return complete(view.with_status(judge_preflight(view, (), formed=True)), events)
    return None


def _restart_events(followed: Followed) -> list[Event]:
    failure = followed.failure
    # The failure has its own event, so a restart with the same reason does not get one.
    restarts = tuple(r for r in followed.restarts if failure is None or r.reason != failure.reason)
    return restart_events(followed.view, restarts, followed.idle, failed=failure is not None)


def _wake(view: View, followed: Followed, *, quiet: bool, held: datetime | None) -> float:
    """Return the seconds until the next reconcile.

    `quiet` is true if this reconcile had no actions. `held` is the time at which the next delayed
    object may be created.
    """
    world = view.world
    blocked = bool(world.rejections or world.problems) or view.claim_problem is not None
    quiet = quiet and not followed.news and not followed.undecided and not _is_somebody_silent(view)
    moments = (_deadline(view), held, find_next_judgement(view), find_next_move(view))
    due = [max(0.0, (moment - view.now).total_seconds()) for moment in moments if moment is not None]
    return min([BLOCKED_POLL if blocked else max(POLL, world.report_seconds) if quiet else POLL, *due])


def _deadline(view: View) -> datetime | None:
    """Return the time by which the job must have finished."""
    seconds, start = view.job.spec.run_policy.active_deadline_seconds, view.status.start_time
    return start + timedelta(seconds=seconds) if seconds is not None and start else None


def _is_too_late(view: View) -> bool:
    deadline = _deadline(view)
    return deadline is not None and view.now >= deadline


def _deadline_exceeded(job: DDPJob) -> Failure:
    """Return the failure of a job that has reached its deadline.

    The message includes the last unmet condition, so that a job that never started shows why.
    """
    message = (
        f"the job did not finish within runPolicy.activeDeadlineSeconds = {job.spec.run_policy.active_deadline_seconds}"
    )
    known = (job.status.condition(kind) for kind in (ConditionType.SCHEDULED, ConditionType.RUNNING))
    missing = next((c for c in known if c is not None and not c.status), None)
    if missing is not None:
        message += f"; at the deadline, the condition {missing.type} was False ({missing.reason}): {missing.message}"
    return Failure("DeadlineExceeded", message)


def _with_budget_restored(view: View) -> tuple[JobStatus, list[Event]]:
    """Reset the number of counted restarts once training has run long enough without a failure."""
    status = view.status
    running, counts = status.condition(ConditionType.RUNNING), status.restarts
    if running is None or not running.status or not counts.counted:
        return status, []
    since = max(running.since, counts.last_counted or running.since)
    seconds = view.job.spec.recovery.reset_after_seconds
    if view.now < since + timedelta(seconds=seconds):
        return status, []
    message = (
        f"training ran for {seconds} s without a failure, so the number of counted restarts is reset from "
        f"{counts.counted} to 0"
    )
    return replace(status, restarts=replace(counts, counted=0)), [Event(False, "BudgetRestored", message)]


def _is_somebody_silent(view: View) -> bool:
    """Whether a pod or the coordinator is silent and may soon be declared lost."""
    world = view.world
    return bool(world.silent) or any(lost_since(pod, world, view.now) is not None for pod in world.pods)
