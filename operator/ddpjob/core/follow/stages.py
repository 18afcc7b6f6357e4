"""Works through what has happened to the group since the last reconcile, stage by stage."""

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
    """The group after all stages, or after the stage that ends them early."""

    ends: Ends
    view: View
    restarts: tuple[Restart, ...] = ()
    """New restarts in the status."""
    idle: tuple[Restart, ...] = ()
    """Ends of spares, which do not cause restarts."""
    failure: Failure | None = None
    complete: bool = False
    undecided: bool = False
    """Whether an end looks like a consequence and its cause is still awaited."""

    @property
    def news(self) -> tuple[Restart, ...]:
        """Ends of spares and new restarts."""
        return (*self.idle, *self.restarts)

    @property
    def lost(self) -> frozenset[str]:
        """Names of pods to delete immediately (grace period 0)."""
        return frozenset(e.name for e in self.ends.all if e.end.cause is Cause.NODE_LOST)


def follow(view: View) -> Followed:
    """Evaluate every pod of the current generation, and the coordinator's new incidents.

    Ends are found, attributed, recorded and counted. Then they fail the job, or the pods are
    replaced. A group whose work is done does not replace pods.
    """
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
