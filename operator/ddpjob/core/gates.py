"""The gates that a job must pass before it may run. A gate either lets the job pass or ends the
reconcile.

A view lets the job pass to the next gate. A decision ends the reconcile, because the job may not
run now. `decide.GATES` defines the order of the gates, and each gate relies on the previous ones:

1. A job that has ended is only wound down. Its spec no longer matters.
2. A new job with a faulty podTemplate fails. A job that has already run keeps its pods.
3. A suspended job loses its pods.
4. A job that starts or resumes gets the values of its class before gate 5 reads the spec.
5. A job in a queue gets pods only while it holds quota, and never more pods than were granted.

Example of a new job that names a class and a queue:

    first reconcile    gate 4 writes the class to the status, and the next reconcile reads it
    second reconcile   gate 5 requests quota. The job is Queued, and has no pods
    later              Kueue grants the quota, and all gates let the job pass

Waiting for a class or quota is treated as a suspension (`suspend`), so a job loses and regains its
pods in only one way.

Why: docs/decisions/0017 and 0018.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob.api.job_classes import lacks_class
from ddpjob.api.job_status import ConditionType
from ddpjob.core.decision import BLOCKED_POLL, POLL, Decision, Event, Failure
from ddpjob.core.failures.classify import Cause
from ddpjob.core.plan.job_class import CLASS_REFUSED, find_class_fault, take_class, with_class_applied
from ddpjob.core.plan.queue import explain_waiting, is_queued, plan_queue_actions, with_admitted, with_grant
from ddpjob.core.plan.wind_down import fail, wind_down
from ddpjob.core.status.conditions import with_condition, with_phase
from ddpjob.core.status.messages import event_text
from ddpjob.core.suspend import is_left, suspend
from ddpjob.core.view import View


def pass_unless_ended(view: View) -> View | Decision:
    """Wind down a job that has ended."""
    if not view.status.terminal:
        return view
    return wind_down(view.with_status(replace(view.job.status, observed_generation=view.job.generation)))


def pass_valid_template(view: View) -> View | Decision:
    """Fail a job that has a faulty podTemplate and has never run a pod.

    A job that has run pods keeps them as they are.
    """
    job, problems = view.job, view.world.problems
    # The job's class may supply fields that podTemplate lacks, so wait for the class first.
    judged = bool(job.oversized) or not lacks_class(job)
    waits = job.spec.run_policy.suspend and view.status.slots
    if problems and judged and not view.has_run and not waits:
        return fail(view, Failure("InvalidPodTemplate", "; ".join(problems)))
    return view


def pass_unless_suspended(view: View) -> View | Decision:
    """Remove the pods of a suspended job."""
    return suspend(view) if view.job.spec.run_policy.suspend else view


def pass_with_class(view: View) -> View | Decision:
    """Apply a starting job's class, and show in the status which class applies."""
    fault, taken = find_class_fault(view), take_class(view)
    if fault is not None:
        return _without_class(view, *fault)
    if taken is not None:
        return Decision(taken, wake=0.0)  # The next reconcile reads the job with its class.
    return view.with_status(with_class_applied(view))


def _without_class(view: View, reason: str, message: str) -> Decision:
    """Return the decision for a job that cannot get its class.

    A new job that violates the class's rules fails. Other jobs wait without pods.
    """
    if reason == CLASS_REFUSED and not view.has_run:
        return fail(view, Failure(reason, message))
    known = view.status.condition(ConditionType.CLASS_APPLIED)
    events = [Event(True, reason, event_text(message))] if known is None or known.reason != reason else []
    view = view.with_status(with_condition(view.status, ConditionType.CLASS_APPLIED, False, reason, message, view.now))
    if not view.status.slots and not view.status.holds(ConditionType.SUSPENDED):
        return Decision(with_phase(view.status), events=tuple(events), wake=BLOCKED_POLL)
    decision = suspend(view, reason, message, events)
    return decision if decision.status.terminal else replace(decision, wake=BLOCKED_POLL)


def pass_with_quota(view: View) -> View | Decision:
    """Remove the pods of a queued job without quota, and give a job with quota the granted size."""
    granted = with_grant(view)
    if not is_queued(granted.with_status(view.job.status)):
        return granted
    admitted = granted.with_status(with_admitted(granted))
    return admitted if admitted.status.queue is not None else _without_quota(admitted)


def _without_quota(view: View) -> Decision:
    """Return the decision for a job that is waiting in its queue or has lost its quota.

    Such a job is treated as suspended.
    """
    reason, message = explain_waiting(view)
    events, had = list[Event](), view.job.status.queue
    if had is not None:
        held = next((w for w in view.world.workloads if w.uid == had.uid), None)
        lost = next((w for w in view.world.workloads if w.evicted and w.grant is not None and not w.additional), None)
        # Use the queue that granted the quota, because the label may now name a different one.
        queue = next((w.asks[0] for w in (held, lost) if w is not None and w.asks[0]), view.job.queue)
        if lost is None and held is not None and held.admitted and not (held.finished or held.leaving):
            why = f"the quota granted by queue {queue} no longer fits the job's spec"
            events.append(Event(False, Cause.SPEC_CHANGED, f"{why}; the job requests new quota; checkpoints are kept"))
        else:
            why = lost.message if lost is not None else "the job's Workload is gone"
            evicted = f"queue {queue} has withdrawn the quota: {why}; checkpoints are kept"
            events.append(Event(True, "Evicted", evicted))
    elif not view.status.holds(ConditionType.SUSPENDED):
        events.append(Event(False, reason, message))
    decision = suspend(view, reason, message, events)
    if decision.status.terminal or any(is_left(pod, view.world) for pod in view.world.pods):
        return decision
    actions = plan_queue_actions(view.with_status(decision.status))
    blocked = view.world.rejections or not view.world.serves_queues
    wake = BLOCKED_POLL if blocked else POLL if actions else decision.wake
    return replace(decision, actions=(*decision.actions, *actions), wake=wake)
