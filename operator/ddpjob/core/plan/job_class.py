"""Decides which values a job takes from its class, and when the job must wait for the class.

The platform team writes classes, and users name one in spec.className. When a job starts or
resumes, the values of its class are copied to its status. A change to the class must not restart
running jobs, so each job gets the new values only when it next resumes.

- If the namespace has no such class, the job waits (ClassMissing).
- A new job fails if it sets a field that the class fixes, or if it exceeds a limit. A resumed job
  waits instead. The reason is ClassRefused in both cases.
- If a running job is changed and then violates its class, the values of the class stay in effect
  (ClassExceeded).

Example with the class h100, which allows 8 nodes:

    created with nodes=16               the job fails: ClassRefused
    created with nodes=4, later 16      the job trains with 8 nodes; ClassApplied becomes false
    the class gets a new image          running jobs keep the old image until their next resume

Why: docs/decisions/0018.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob.api.job_classes import begins, violations
from ddpjob.api.job_status import ConditionType, JobStatus
from ddpjob.core.status.conditions import with_condition, without_condition
from ddpjob.core.view import View

CLASS_MISSING, CLASS_REFUSED, CLASS_EXCEEDED = "ClassMissing", "ClassRefused", "ClassExceeded"


def find_class_fault(view: View) -> tuple[str, str] | None:
    """Return the reason and the message if a starting job cannot get its class; None if it can."""
    job, offer = view.job, view.world.offer
    if not begins(job):
        return None
    if offer.job_class is None:
        known = ", ".join(offer.known[:10]) or "none"
        message = (
            f'spec.className: "{job.spec.class_name}" is not one of the classes that namespace {job.namespace} may use '
            f"({known}); suspend the job and choose one of these, or ask the platform team to add the class to the "
            "chart's jobClasses"
        )
        return CLASS_MISSING, message
    return (CLASS_REFUSED, "; ".join(offer.problems)) if offer.problems else None


def take_class(view: View) -> JobStatus | None:
    """Return the status of a job that is about to start, updated to the current class.

    Return None if the job is not about to start, does not name a class, or already has the current
    class.
    """
    given, taken = view.world.offer.job_class, view.status.job_class
    if not begins(view.job) or given is None:
        return None
    if taken is not None and (taken.name, taken.mark) == (given.name, given.mark):
        return None
    return replace(view.status, job_class=given)


def with_class_applied(view: View) -> JobStatus:
    """Return the status of a job that may run, with the ClassApplied condition.

    If the job does not name a class, the class and the condition are removed.
    """
    job, status = view.job, view.status
    if not job.spec.class_name:
        return without_condition(replace(status, job_class=None), ConditionType.CLASS_APPLIED)
    taken = status.job_class
    if taken is None:
        return status
    exceeded = violations(job, taken)
    if exceeded:
        # The job runs with the values of the class, and with no more nodes than the class allows.
        message = "not applied: " + "; ".join(exceeded)
        return with_condition(status, ConditionType.CLASS_APPLIED, False, CLASS_EXCEEDED, message, view.now)
    message = f"the job keeps the values that class {taken.name} had when the job started (status.jobClass)"
    return with_condition(status, ConditionType.CLASS_APPLIED, True, "Applied", message, view.now)
