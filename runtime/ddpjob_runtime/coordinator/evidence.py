"""Collects evidence of why a round broke, while reports are still arriving.

The verdict is the first of these that is available:

1. the coordinator's own reason to end the round (a hang or a resize);
2. a sure first cause;
3. members that did not reconnect to a new coordinator;
4. any other first cause;
5. a member that left for an unknown reason.
"""

from __future__ import annotations

from typing import Any

from ddpjob_runtime.coordinator.first_cause import Finish, MemberLoss, Source, Verdict, WorkerFailure, first_cause
from ddpjob_runtime.coordinator.incidents import OWN_FAILURES
from ddpjob_runtime.protocol import EXIT_STEPPED_ASIDE, IncidentKind


class Evidence:
    """Collects evidence about one round: failures, losses, departures, and the coordinator's own
    reasons to end the round.
    """

    def __init__(self) -> None:
        self._failures: list[WorkerFailure] = []
        self._failed: set[tuple[Source, int | None, int | None]] = set()
        self._losses: list[MemberLoss] = []
        self._finishes: list[Finish] = []  # single ranks that exited with code 0 on nodes that still have workers
        self._known: Verdict | None = None  # a hang or a planned restart, whose cause is known from the start
        # members that never reconnected, which explain everything except sure failures
        self._absent: Verdict | None = None
        self._fallback: Verdict | None = None  # used if nothing better is known

    def add_failure(self, failure: WorkerFailure) -> None:
        self._failures.append(failure)
        self._failed.add(failure.worker)

    def knows(self, failure: WorkerFailure) -> bool:
        """Whether this failure was reported before. A reconnecting member repeats its reports."""
        return failure.worker in self._failed

    def add_loss(self, loss: MemberLoss) -> None:
        self._losses.append(loss)

    def add_finish(self, finish: Finish) -> None:
        self._finishes.append(finish)

    @property
    def somebody_leaves(self) -> bool:
        """Whether a member was asked to leave. In that case, all members may be saving together."""
        return any(loss.leaving for loss in self._losses)

    @property
    def saving(self) -> bool:
        """Whether a member is leaving and a worker has already saved and exited."""
        return self.somebody_leaves and any(f.exit_code == EXIT_STEPPED_ASIDE for f in self._failures)

    def resized(self, time: float, details: dict[str, Any]) -> None:
        """Set the cause to a planned restart with a different size."""
        self._known = Verdict(IncidentKind.JOINED, time, details, 0)

    def hangs(self, time: float, details: dict[str, Any]) -> None:
        """Set the cause to a hang, and count all failures and losses as its consequences."""
        self._known = Verdict(IncidentKind.HANG, time, details, self._count)

    def absent(self, time: float, details: dict[str, Any]) -> None:
        """Set the cause to members that did not reconnect to a new coordinator."""
        self._absent = Verdict(IncidentKind.PEER_LOST, time, details, self._count, sure=False)

    def came_apart(self, time: float, details: dict[str, Any]) -> None:
        """Record that a member has left the round for an unknown reason.

        This counts as the cause only if no other cause is known.
        """
        self._fallback = Verdict(IncidentKind.PEER_LOST, time, details, 0, sure=False)

    @property
    def _count(self) -> int:
        return len(self._failures) + len(self._losses)

    def verdict(self, finishes: list[Finish], ended_at: float | None) -> Verdict | None:
        """Return the most likely cause so far; None if no cause is known.

        `ended_at` is the time at which members were first asked to stop their workers.
        """
        if self._known is not None:
            return self._known
        verdict = first_cause(self._failures, self._losses, [*finishes, *self._finishes], ended_at)
        if self._absent is not None and (verdict is None or not verdict.sure):
            return self._absent
        return verdict or self._fallback

    def is_own(self, verdict: Verdict) -> bool:
        """Whether the cause is a failure of the job itself. Repeated failures of this kind delay
        the next round.

        A cause set by `came_apart` counts as such a failure.
        """
        return verdict.kind in OWN_FAILURES or verdict is self._fallback
