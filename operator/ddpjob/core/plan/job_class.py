"""Decides what a job takes from its class, and when it must wait for the class.

A class is taken when a job starts or is resumed, and kept in the status, so later changes by the
platform team do not reach a running job. Why: docs/decisions/0018.
"""

from __future__ import annotations

from dataclasses import replace

from ddpjob.api.job_classes import begins, violations
from ddpjob.api.job_status import ConditionType, JobStatus
from ddpjob.core.status.conditions import with_condition, without_condition
from ddpjob.core.view import View

CLASS_MISSING, CLASS_REFUSED, CLASS_EXCEEDED = "ClassMissing", "ClassRefused", "ClassExceeded"


def find_class_fault(view: View) -> tuple[str, str] | None:
    """Return reason and message if a job cannot have its class when it begins.

    Return None if it can, or if it is not about to begin.
    """
    job, offer = view.job, view.world.offer
    if not begins(job):
        return None
    if offer.job_class is None:
        known = ", ".join(offer.known[:10]) or "none"
        message = (
            f'spec.className: "{job.spec.class_name}" is not one of the classes that namespace {job.namespace} may use '
            f"({known}); the job waits until the platform team has added it to the chart's jobClasses, or suspend the "
            "job and name another one"
        )
        return CLASS_MISSING, message
    return (CLASS_REFUSED, "; ".join(offer.problems)) if offer.problems else None


def take_class(view: View) -> JobStatus | None:
    """Return the status with the current class for a job that begins without it.

    Return None if the job already has the class or does not name one.
    """
    given, taken = view.world.offer.job_class, view.status.job_class
    if not begins(view.job) or given is None:
        return None
    if taken is not None and (taken.name, taken.mark) == (given.name, given.mark):
        return None
    return replace(view.status, job_class=given)


def with_class_applied(view: View) -> JobStatus:
    """Return the status with the condition ClassApplied for a running job.

    A job that does not name a class gets neither the class nor the condition.
    """
    job, status = view.job, view.status
    if not job.spec.class_name:
        return without_condition(replace(status, job_class=None), ConditionType.CLASS_APPLIED)
    taken = status.job_class
    if taken is None:
        return status
    exceeded = violations(job, taken)
    if exceeded:
        # The job runs with the values of the class and with as many nodes as the class allows.
        message = "not applied: " + "; ".join(exceeded)
        return with_condition(status, ConditionType.CLASS_APPLIED, False, CLASS_EXCEEDED, message, view.now)
    message = f"the job keeps the values of class {taken.name} from its start; status.jobClass contains them"
    return with_condition(status, ConditionType.CLASS_APPLIED, True, "Applied", message, view.now)
