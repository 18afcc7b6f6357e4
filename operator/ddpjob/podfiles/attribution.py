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


@dataclass(frozen=True)
class Place:
    """Where in the job something happened."""

    pod: str
    index: int


@dataclass(frozen=True)
class Failure:
    """A worker process that ended by itself. `time` is on the coordinator's clock, in seconds."""

    place: Place
    rank: int | None
    local_rank: int | None
    exit_code: int | None
    signal: str | None
    message: str
    traceback: str
    time: float

    @property
    def communication(self) -> bool:
        """True when the error is one that a peer's death brings about."""
        return bool(COMMUNICATION_ERROR.search(self.message))


@dataclass(frozen=True)
class Loss:
    """A member whose connection ended (`leaving` False) or that said that it leaves (`leaving` True)."""

    place: Place
    rank: int | None
    why: str
    time: float
    leaving: bool


@dataclass(frozen=True)
class Verdict:
    """The cause of one break of the group."""

    kind: str  # WorkerFailed, PeerLost, Left
    time: float
    fields: dict[str, Any]
    consequences: int


def _suspicion(failure: Failure) -> int:
    """0: its own error; 1: an abort, which communication libraries use when a peer is gone; 2: a communication error."""
    if failure.communication:
        return 2
    return 1 if failure.exit_code == -SIGABRT else 0


def _own(failure: Failure, losses: list[Loss]) -> bool:
    """Whether a failure can be the cause although members were lost or left in the same round."""
    if _suspicion(failure) > 0:
        return not losses
    died_by_signal = failure.exit_code is not None and failure.exit_code < 0
    if died_by_signal and losses:
        return False  # the end of a pod takes its workers with it
    stepped_aside = failure.exit_code == wire.EXIT_STEPPED_ASIDE
    return not (stepped_aside and any(loss.leaving for loss in losses))


def judge(failures: list[Failure], losses: list[Loss]) -> Verdict | None:
    """The cause of a broken round; None when nothing is known to have gone wrong (a rendezvous formed anew by itself)."""
    causes = [f for f in failures if _own(f, losses)]
    first_failure = min(causes, key=lambda f: (_suspicion(f), f.time)) if causes else None
    first_loss = min(losses, key=lambda e: e.time) if losses else None
    if first_loss is not None and (first_failure is None or first_loss.time <= first_failure.time):
        return _lost(first_loss, len(failures) + len(losses) - 1)
    if first_failure is not None:
        return _failed(first_failure, len(failures) + len(losses) - 1)
    return None


def _lost(loss: Loss, consequences: int) -> Verdict:
    fields = {
        "pod": loss.place.pod,
        "index": loss.place.index,
        "rank": None,
        "localRank": None,
        "exitCode": None,
        "signal": None,
        "message": loss.why,
        "traceback": "",
    }
    return Verdict("Left" if loss.leaving else "PeerLost", loss.time, fields, consequences)


def _failed(failure: Failure, consequences: int) -> Verdict:
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
    return Verdict("WorkerFailed", failure.time, fields, consequences)
