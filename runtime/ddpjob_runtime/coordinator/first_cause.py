"""Determines which event broke a round: the first cause among failures, losses and departures.

When one rank fails, its peers fail a moment later with connection errors. Every worker's exit code
may be 1. The order in which reports arrive does not show the cause, because a consequence is often
reported before the error that caused it.

1. Each failure gets a suspicion (`_suspicion`): 0 for a worker's own error, 1 for an abort, 2 for a
   communication error, and 3 for any failure after the members were asked to stop their workers.
   The higher the suspicion, the more likely the failure is a consequence. The failure with the
   lowest suspicion is the cause. If several failures share the lowest suspicion, the earliest of
   them is the cause.
2. If members were lost or have left, these events compete with the failures whose suspicion is 0,
   and the earliest event is the cause. A worker that was killed by a signal does not compete,
   because the workers of a lost pod are killed together with the pod. An OOM kill does compete.
3. If only suspicious failures are known, and a worker has ended with exit code 0, that exit is the
   cause. The other workers were still waiting in a collective for the worker that had exited.

In this example, all times are in seconds and have been converted to the coordinator's clock:

    10.02  rank 0  exit code 1  "Connection closed by peer"         suspicion 2
    10.03  rank 3  SIGABRT      "watchdog"                          suspicion 1
    10.05  rank 5  exit code 1  "ValueError: label 1000 of 1000"    suspicion 0: the cause

A `Verdict` is `sure` if no later report could change it, as in this example. Before rank 5 reports,
the verdict names rank 3 and is not sure, so the coordinator waits for the other members.

See docs/decisions/0010. `merge_causes` in the operator adds Kubernetes' own information.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.protocol import IncidentKind, error_mark

DEVICE_ERROR = re.compile(r"unhandled cuda error|\bCuda failure\b", re.I)
"""Matches NCCL's reports of a driver error that concerns this rank's own device."""
SIGABRT = 6
ORDER_SECONDS = 0.05
"""A failure that occurs more than this many seconds after the coordinator sent `restart` counts as
a consequence of the `restart`.
"""


@dataclass(frozen=True)
class Source:
    """The pod that an event comes from."""

    pod: str
    index: int


@dataclass(frozen=True)
class WorkerFailure:
    """A worker process that has exited on its own. `time` is in seconds on the coordinator's clock.

    `oom` means that the worker was killed because its container reached the memory limit. `init`
    means that the worker could not even start, so a retry would not help.
    """

    source: Source
    rank: int | None
    local_rank: int | None
    exit_code: int | None
    signal: str | None
    message: str
    traceback: str
    time: float
    oom: bool = False
    init: bool = False

    @property
    def stepped_aside(self) -> bool:
        """Whether the worker saved and exited because another node is leaving.

        The leaving node might not have reported its departure yet.
        """
        return self.exit_code == protocol.EXIT_STEPPED_ASIDE

    @cached_property
    def communication(self) -> bool:
        """Whether the death of a peer could have caused this error."""
        return not (self.oom or self.init) and bool(protocol.COMMUNICATION_ERROR.search(self.message))

    @cached_property
    def mark(self) -> tuple[str, str]:
        """The `error_mark` of this failure, which is equal for workers that failed alike."""
        return error_mark(self.message, self.traceback)

    @property
    def worker(self) -> tuple[Source, int | None, int | None]:
        """The worker that failed, as (pod, rank, local rank)."""
        return self.source, self.rank, self.local_rank

    @property
    def kind(self) -> IncidentKind:
        """The kind of incident to record if this failure is the cause."""
        if self.oom:
            return IncidentKind.OOM_KILLED
        return IncidentKind.INIT_FAILURE if self.init else IncidentKind.WORKER_FAILED


@dataclass(frozen=True)
class MemberLoss:
    """The loss of a member whose connection has ended, or the announced departure of a member
    (`leaving`).
    """

    source: Source
    rank: int | None
    why: str
    time: float
    leaving: bool


@dataclass(frozen=True)
class Finish:
    """The exit with code 0 of one worker, or of all workers of a member.

    `rank` is the worker's rank; None means all workers of the member. `node` is the member's group
    rank.
    """

    source: Source
    time: float
    rank: int | None = None
    local_rank: int | None = None
    node: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What is known about the cause of a break.

    `details` are fields of the break's `Incident`. If `sure`, no later report can change the
    verdict.
    """

    kind: IncidentKind
    time: float
    details: dict[str, Any]
    consequences: int
    sure: bool = True


def _suspicion(failure: WorkerFailure, ended_at: float | None) -> int:
    """Return how strongly a failure is suspected of being a consequence of another failure.

    - 0: the worker's own error.
    - 1: an abort, because communication libraries abort the process when a peer is gone. An NCCL
      error about this rank's own device also counts as 1.
    - 2: a communication error.
    - 3: any failure after the members were asked to stop their workers.
    """
    if ended_at is not None and failure.time > ended_at + ORDER_SECONDS:
        return 3
    if failure.communication:
        return 1 if DEVICE_ERROR.search(failure.message) else 2
    return 1 if failure.exit_code == -SIGABRT and not failure.oom else 0


def _own(failure: WorkerFailure, losses: list[MemberLoss], ended_at: float | None) -> bool:
    """Whether this failure can be the cause of the break. `losses` are the losses in the same
    round.
    """
    if _suspicion(failure, ended_at) > 0:
        return not losses
    if failure.oom or failure.init:
        return True
    died_by_signal = failure.exit_code is not None and failure.exit_code < 0
    if died_by_signal and losses:
        return False  # The workers of a lost pod are killed together with the pod.
    return not (failure.stepped_aside and any(loss.leaving for loss in losses))


def first_cause(
    failures: list[WorkerFailure], losses: list[MemberLoss], finishes: list[Finish], ended_at: float | None
) -> Verdict | None:
    """Return the cause of a broken round; None if nothing is known to have gone wrong.

    `ended_at` is the time at which the members were asked to stop their workers. Later failures are
    consequences.
    """
    causes = [f for f in failures if _own(f, losses, ended_at)]
    first_failure = min(causes, key=lambda f: (_suspicion(f, ended_at), f.time)) if causes else None
    first_loss = min(losses, key=lambda e: e.time) if losses else None
    consequences = len(failures) + len(losses) - 1
    if first_loss is not None and (first_failure is None or first_loss.time <= first_failure.time):
        return _judge_loss(first_loss, consequences)
    if first_failure is None:
        return None
    if _suspicion(first_failure, ended_at) and finishes:
        return _judge_early_finish(min(finishes, key=lambda e: e.time), consequences + 1)
    sure = _suspicion(first_failure, ended_at) == 0 and not first_failure.stepped_aside
    alike = _find_alike(first_failure, failures, ended_at) if not losses else set()
    return _judge_failure(first_failure, consequences, alike, sure=sure)


def _judge_loss(loss: MemberLoss, consequences: int) -> Verdict:
    details = {"pod": loss.source.pod, "index": loss.source.index, "message": loss.why}
    return Verdict(IncidentKind.LEFT if loss.leaving else IncidentKind.PEER_LOST, loss.time, details, consequences)


def _judge_early_finish(finish: Finish, consequences: int) -> Verdict:
    ended = "ended with exit code 0 before the other ranks"
    which = "" if finish.node is None else f" (group rank {finish.node})"
    details = {
        "pod": finish.source.pod,
        "index": finish.source.index,
        "rank": finish.rank,
        "local_rank": finish.local_rank,
        "exit_code": 0,
        "group_rank": finish.node,
        "message": f"the workers of pod {finish.source.pod}{which} {ended}" if finish.rank is None else ended,
    }
    return Verdict(IncidentKind.WORKER_FAILED, finish.time, details, consequences, sure=False)


def _find_alike(
    cause: WorkerFailure, failures: list[WorkerFailure], ended_at: float | None
) -> set[tuple[str, int | None]]:
    """Return the (pod, rank) of each worker that failed with the same error as the cause.

    If any worker has failed on its own with a different error, the set is empty.
    """
    if any(f.mark != cause.mark and _suspicion(f, ended_at) == 0 for f in failures):
        return set()
    return {(f.source.pod, f.rank) for f in failures if f.mark == cause.mark}


def _judge_failure(
    failure: WorkerFailure, consequences: int, alike: set[tuple[str, int | None]], sure: bool
) -> Verdict:
    details = {
        "pod": failure.source.pod,
        "index": failure.source.index,
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "exit_code": failure.exit_code,
        "signal": failure.signal,
        "message": failure.message,
        "traceback": failure.traceback,
        "alike_ranks": len(alike),
        "alike_pods": len({pod for pod, _ in alike}),
    }
    return Verdict(failure.kind, failure.time, details, consequences, sure)
