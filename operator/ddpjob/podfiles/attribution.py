"""Which event broke a round: the first cause among failures, losses and departures; consequences never stand for it.

Pure: events in, verdict out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import wire

# Looked for in the exception's own text, not in its traceback: source lines there may name a backend.
COMMUNICATION_ERROR = re.compile(
    r"Connection (closed|reset|aborted|refused)|Dist(Backend|Network|Store)Error|\bgloo\b|\bNCCL\b|ProcessGroup|"
    r"Broken pipe|Socket Timeout|remote process exited|peer closed|TCPStore|recvValue|Timed out (after|waiting)|\bRDMA\b|UCC|\bMPI\b",
    re.I,
)
SIGABRT = 6
ORDER_SECONDS = 0.05  # what is later than the coordinator's `restart` by this much is its consequence


@dataclass(frozen=True)
class Place:
    """Where in the job something happened."""

    pod: str
    index: int


@dataclass(frozen=True)
class Failure:
    """A worker process that ended by itself. `time` is on the coordinator's clock, in seconds.

    `oom`: the container's memory limit killed it. `init`: it could not even begin, and trying again would not help.
    """

    place: Place
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
    def communication(self) -> bool:
        """True when the error is one that a peer's death brings about."""
        return not (self.oom or self.init) and bool(COMMUNICATION_ERROR.search(self.message))

    @property
    def kind(self) -> str:
        """What the break is called when this failure is its cause."""
        return "OOMKilled" if self.oom else "InitFailure" if self.init else "WorkerFailed"


@dataclass(frozen=True)
class Loss:
    """A member whose connection ended (`leaving` False) or that said that it leaves (`leaving` True)."""

    place: Place
    rank: int | None
    why: str
    time: float
    leaving: bool


@dataclass(frozen=True)
class Finish:
    """A member all of whose workers ended with exit code 0."""

    place: Place
    time: float


@dataclass(frozen=True)
class Verdict:
    """The cause of one break of the group. `sure`: nothing that may still be heard would change it."""

    kind: str  # WorkerFailed, OOMKilled, InitFailure, PeerLost, Left, Hang, Joined
    time: float
    fields: dict[str, Any]
    consequences: int
    sure: bool = True


def _suspicion(failure: Failure, told_at: float | None) -> int:
    """0: its own error; 1: an abort, which communication libraries use when a peer is gone; 2: a communication error; 3: told to end."""
    if told_at is not None and failure.time > told_at + ORDER_SECONDS:
        return 3
    if failure.communication:
        return 2
    return 1 if failure.exit_code == -SIGABRT and not failure.oom else 0


def _own(failure: Failure, losses: list[Loss], told_at: float | None) -> bool:
    """Whether a failure can be the cause although members were lost or left in the same round."""
    if _suspicion(failure, told_at) > 0:
        return not losses
    if failure.oom or failure.init:
        return True
    died_by_signal = failure.exit_code is not None and failure.exit_code < 0
    if died_by_signal and losses:
        return False  # the end of a pod takes its workers with it
    stepped_aside = failure.exit_code == wire.EXIT_STEPPED_ASIDE
    return not (stepped_aside and any(loss.leaving for loss in losses))


def judge(failures: list[Failure], losses: list[Loss], finishes: list[Finish], told_at: float | None) -> Verdict | None:
    """The cause of a broken round; None when nothing is known to have gone wrong.

    `told_at`: when the members were told to end their workers; what failed later failed because of that.
    """
    causes = [f for f in failures if _own(f, losses, told_at)]
    first_failure = min(causes, key=lambda f: (_suspicion(f, told_at), f.time)) if causes else None
    first_loss = min(losses, key=lambda e: e.time) if losses else None
    consequences = len(failures) + len(losses) - 1
    if first_loss is not None and (first_failure is None or first_loss.time <= first_failure.time):
        return _lost(first_loss, consequences)
    if first_failure is None:
        return None
    if _suspicion(first_failure, told_at) and finishes:
        return _finished_early(min(finishes, key=lambda f: f.time), consequences + 1)
    return _failed(first_failure, consequences, sure=_suspicion(first_failure, told_at) == 0)


def _lost(loss: Loss, consequences: int) -> Verdict:
    fields = {"pod": loss.place.pod, "index": loss.place.index, "message": loss.why, "traceback": ""}
    return Verdict("Left" if loss.leaving else "PeerLost", loss.time, fields, consequences)


def _finished_early(finish: Finish, consequences: int) -> Verdict:
    message = f"rank(s) of {finish.place.pod} ended with exit code 0 before the others"
    fields = {"pod": finish.place.pod, "index": finish.place.index, "exitCode": 0, "message": message, "traceback": ""}
    return Verdict("WorkerFailed", finish.time, fields, consequences)


def _failed(failure: Failure, consequences: int, sure: bool) -> Verdict:
    fields = {
        "pod": failure.place.pod,
        "index": failure.place.index,
        "rank": failure.rank,
        "localRank": failure.local_rank,
        "exitCode": failure.exit_code,
        "signal": failure.signal,
        "message": failure.message,
        "traceback": failure.traceback,
    }
    return Verdict(failure.kind, failure.time, fields, consequences, sure)
