"""Decides how the group ends: whether its work is done, and whether its failures fail the job.

Done. Under torchrun, a node exits with 0 only once every node of the group has finished, because
the launchers wait for each other. One node with exit code 0 therefore proves that the whole group
has completed its last step (`is_done`). From then on no pod is replaced, and the other pods must
exit within FINISH. A `command` has no such barrier, so all of its nodes must succeed.

Failed. The job fails in these cases, which are checked in this order (`find_failure`):

1. A rule, or the default for the cause, fails the job (`failures.policy`).
2. The job has never run, and its image does not exist.
3. The coordinator cannot start before the first step.
4. More failures have been counted than recovery.maxRestarts allows.
5. The program fails with the same error repeatedly before the first step.

Example with 2 nodes under torchrun:

    node 0 exits with 0, and the host of node 1 then dies     complete
    the host of node 1 dies, and node 0 reports a lost peer   a restart, which does not count
    both nodes exit with code 2 before the first step         failed: ConfigurationError
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from ddpjob_runtime.protocol import CoordinatorState

from ddpjob.api.job_status import SlotState
from ddpjob.core.decision import Failure
from ddpjob.core.failures.classify import Cause, find_stuck, with_traceback, without_wait
from ddpjob.core.failures.policy import PROGRAM_ERROR, find_error_everywhere, find_repeated_error
from ddpjob.core.follow.attribution import Attribution, attribute_ends
from ddpjob.core.follow.ends import Ended, Ends, find_ends, is_success
from ddpjob.core.follow.recording import Recorded
from ddpjob.core.status.messages import count, put_cause_first
from ddpjob.core.view import View
from ddpjob.core.world import Role

FINISH = timedelta(seconds=60)
"""How long the other pods may take to exit after the first pod has exited with 0."""


# --- the work is done -------------------------------------------------------------------------------------------


def is_finished(ends: Ends) -> bool:
    """Whether the job is complete.

    Spares, and nodes that never joined the group, need not finish.
    """
    states = [slot.state for slot in ends.view.status.slots]
    if all(state is SlotState.SUCCEEDED for state in states):
        return True
    if SlotState.RUNNING in states and not _is_overdue(ends.view):
        return False
    return is_let_go(ends)


def is_done(ends: Ends) -> bool:
    """Whether the group has completed its last step. Some of its pods may not have ended yet."""
    return is_finished(ends) or is_let_go(ends)


def _is_overdue(view: View) -> bool:
    """Whether pods are still running long after the first pod has finished."""
    ends = [pod.main.finished for pod in view.pods if pod is not None and pod.ended and pod.succeeded]
    return any(end is not None and view.now >= end + FINISH for end in ends)


def is_let_go(ends: Ends) -> bool:
    """Whether the coordinator has released the launchers because the whole group has finished.

    The coordinator and its report may be gone by now. A finished slot proves the release too, and
    so does a slot that `give_up_lost` has marked as lost in an earlier reconcile.
    """
    view = ends.view
    if not view.job.spec.under_torchrun:
        return False
    reported = view.report is not None and view.report.state == CoordinatorState.SUCCEEDED
    given_up = (s.state is SlotState.LOST and i not in ends.slots for i, s in enumerate(view.status.slots))
    return reported or any(given_up) or any(s.state is SlotState.SUCCEEDED for s in view.status.slots)


def settle(view: View) -> View | None:
    """Return the final view of a group that has completed its last step; None if it has not."""
    ends = find_ends(view)
    if is_finished(ends):
        return ends.view
    return give_up_lost(attribute_ends(ends)) if is_let_go(ends) else None


def give_up_lost(attribution: Attribution) -> View:
    """Return a finished group's view, with each slot marked as lost if its pod has ended.

    A lost slot gets no new pod, because the group has nothing left to do.
    """
    ends = attribution.ends.slots
    slots = enumerate(attribution.ends.view.status.slots)
    view = attribution.ends.view.with_slots([replace(s, state=SlotState.LOST) if i in ends else s for i, s in slots])
    return attribution.with_seen(view)


def has_finished_while_ending(view: View) -> bool:
    """Whether pods of the previous generation have finished their work while terminating."""
    before = view.status.rendezvous.generation - 1
    pods = [*view.world.nodes(), *(p for p in view.world.departed if p.role is not Role.COORDINATOR)]
    return view.job.spec.under_torchrun and any(p.generation == before and is_success(p, launcher=True) for p in pods)


# --- the job fails ----------------------------------------------------------------------------------------------


def find_failure(recorded: Recorded) -> Failure | None:
    """Return why the job fails; None if a restart may help."""
    view = recorded.view
    failure = _fatal(recorded.attribution) or _cannot_start(view) or _no_coordinator(view, recorded.coordinator)
    failure = failure or _budget_spent(view)
    return failure or (_program_error(view) if recorded.restarts else None)


def _fatal(attribution: Attribution) -> Failure | None:
    fatal = attribution.fatal
    if fatal is None:
        return None
    kind = f"{fatal.restart.reason}: " if fatal.why else ""
    return Failure(fatal.fails, kind + put_cause_first(without_wait(fatal.restart.message), fatal.why))


def _program_error(view: View) -> Failure | None:
    """Return the failure of a job whose program is faulty, so that no restart can help.

    The program is judged only before the first step. Later, the job has progress that is worth
    keeping.
    """
    spec, recent = view.job.spec, view.status.restarts.recent
    said = None if view.trained else find_repeated_error(spec, recent) or find_error_everywhere(spec, recent)
    if said is None:
        return None
    last = next(r for r in reversed(recent) if r.counted)
    return Failure(PROGRAM_ERROR, put_cause_first(without_wait(last.message), said))


def _cannot_start(view: View) -> Failure | None:
    """Return the failure of a job that has never run a pod, because its image does not exist."""
    if view.has_run:
        return None
    for pod in [view.coordinator, *view.pods]:
        held = find_stuck(pod, has_run=False) if pod else None
        if held is not None and held.final:
            return Failure(held.reason, held.message)
    return None


def _no_coordinator(view: View, ended: Ended | None) -> Failure | None:
    if ended is None or ended.end.cause is not Cause.INIT_FAILURE or view.trained:
        return None
    end = ended.end
    hint = " (the image must contain python3 and torch)" if "executable file not found" in end.message else ""
    message = f"the coordinator cannot start: {end.message}{hint}"
    return Failure(Cause.INIT_FAILURE, with_traceback(message, end.traceback))


def _budget_spent(view: View) -> Failure | None:
    """Return the failure of a job with more counted failures than recovery.maxRestarts allows."""
    restarts, limit = view.status.restarts, view.job.spec.recovery.max_restarts
    if restarts.counted <= limit:
        return None
    spent = f"{count(restarts.counted, 'failure')}, but recovery.maxRestarts is {limit}"
    last = next((r for r in reversed(restarts.recent) if r.counted), None)
    if last is not None:
        spent = f"{last.reason}: {put_cause_first(without_wait(last.message), spent)}"
    return Failure("RestartBudgetSpent", spent)
