"""Runs the stages that determine what has happened to the group since the last reconcile.

1. `ends`: which pods have ended, and why
2. `attribution`: which of these ends and new incidents are causes, and which are consequences
3. `recording`: restarts in the status, whether they count, and hosts to avoid
4. `outcome`: whether the job fails
5. `replacing`: the next attempts of pods that have ended, or a new generation

Later stages are skipped in three cases. If the group has finished, the job is complete. If the
cause of an end is still awaited, nothing is recorded, and the next reconcile starts again. If the
group has completed its last step, pods that have ended are not replaced.

Example: a drain evicts pod train-1-0, and rank 0 loses its connection to it.

    ends           train-1-0 has ended: Evicted
    attribution    the eviction is the cause, and rank 0's error a consequence
    recording      both are listed, and neither counts
    outcome        a restart helps
    replacing      slot 1 is planned at attempt 1

Why: docs/decisions/0010.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob.api.job_status import Restart
from ddpjob.core.decision import Failure
from ddpjob.core.failures.classify import Cause
from ddpjob.core.follow.attribution import attribute_ends, awaits_cause
from ddpjob.core.follow.ends import Ends, find_ends
from ddpjob.core.follow.outcome import find_failure, give_up_lost, is_finished, is_let_go
from ddpjob.core.follow.recording import record_restarts, without_restart
from ddpjob.core.follow.replacing import replace_ended
from ddpjob.core.view import View


@dataclass(frozen=True)
class Followed:
    """The result of all stages. If a stage ends the evaluation early, later stages add nothing."""

    ends: Ends
    view: View
    restarts: tuple[Restart, ...] = ()
    """Restarts that were recorded in this reconcile."""
    idle: tuple[Restart, ...] = ()
    """Ends of idle spares, which do not cause restarts."""
    failure: Failure | None = None
    complete: bool = False
    undecided: bool = False
    """Whether a pod's end seems to have a cause that has not been observed yet."""

    @property
    def news(self) -> tuple[Restart, ...]:
        """The ends of idle spares, followed by the new restarts."""
        return (*self.idle, *self.restarts)

    @property
    def lost(self) -> frozenset[str]:
        """Names of the pods that were lost with their hosts, to be deleted with grace period 0."""
        return frozenset(e.name for e in self.ends.all if e.end.cause is Cause.NODE_LOST)


def follow(view: View) -> Followed:
    """Evaluate every pod of the current generation, and the coordinator's new incidents."""
    ends = find_ends(view)
    if is_finished(ends):
        return Followed(ends, ends.view, complete=True)
    if awaits_cause(ends):
        return Followed(ends, ends.view, undecided=True)
    attribution = attribute_ends(ends)
    if is_let_go(ends):
        return Followed(ends, give_up_lost(attribution))
    recorded = record_restarts(attribution)
    failure = find_failure(recorded)
    after = replace_ended(recorded) if failure is None else without_restart(recorded.view, ends.view.status)
    return Followed(ends, after, recorded.restarts, attribution.merged.idle, failure)
