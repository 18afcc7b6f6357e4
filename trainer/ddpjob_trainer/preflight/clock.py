"""How far the nodes' clocks are apart: round trips over the store, as Cristian's algorithm has it (Distributed Computing 3, 1989)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from ddpjob_trainer.errors import PreflightError
from ddpjob_trainer.preflight.board import Board
from ddpjob_trainer.preflight.check import Result, Status

_ROUND_TRIPS = 5
_KERBEROS_SECONDS = 300.0
"""What Kerberos allows by default (RFC 4120); S3 refuses requests from 15 minutes on. Mounts and object stores then fail."""


def now() -> float:
    """Seconds since the epoch by this node's clock."""
    return time.time()


@dataclass(frozen=True)
class Offset:
    """Seconds that a clock is ahead of rank 0's, to within `bound` (half the shortest round trip)."""

    seconds: float
    bound: float


def measure(board: Board, leader: int, seconds: float) -> Offset | None:
    """On rank 0: ask another node for its time; None when it does not answer."""
    best: Offset | None = None
    for number in range(_ROUND_TRIPS):
        asked, began = now(), time.monotonic()
        board.tell(f"clock/{leader}/{number}/asked", True)
        try:
            theirs = float(board.hear(f"clock/{leader}/{number}/answered", seconds, f"the time of rank {leader}"))
        except PreflightError:
            return best
        trip = time.monotonic() - began
        if best is None or trip / 2 < best.bound:
            best = Offset(theirs - (asked + trip / 2), trip / 2)
    return best


def answer(board: Board, leader: int, seconds: float) -> None:
    """On another node's leader: say the time when rank 0 asks."""
    for number in range(_ROUND_TRIPS):
        board.hear(f"clock/{leader}/{number}/asked", seconds, "rank 0's question for the time")
        board.tell(f"clock/{leader}/{number}/answered", now())


def judge(offsets: dict[int, Offset | None], names: dict[int, str], limit: float) -> Result:
    """WARN when a clock is surely off by more than the limit, FAIL from five minutes on. `offsets`: by leader, rank 0's among them."""
    known = {leader: offset for leader, offset in offsets.items() if offset is not None}
    if len(offsets) == 1:
        return Result("clocks", Status.OK, "one node")
    if silent := [leader for leader in offsets if leader not in known]:
        return Result("clocks", Status.WARN, "no answer", tuple(names[leader] for leader in silent), "look at its own output")
    middle = statistics.median_low(offset.seconds for offset in known.values())
    apart = {leader: abs(offset.seconds - middle) - offset.bound for leader, offset in known.items()}
    spread = max(offset.seconds for offset in known.values()) - min(offset.seconds for offset in known.values())
    bound = max(offset.bound for offset in known.values())
    value = f"{spread:.3f} s apart (measured to within {max(0.001, bound):.3f} s)"
    if wrong := [leader for leader in apart if apart[leader] > limit]:
        far = max(apart.values()) > _KERBEROS_SECONDS
        status, harm = (Status.FAIL, "Kerberos and S3 refuse it") if far else (Status.WARN, "logs cannot be put in order")
        shown = tuple(f"{names[leader]} ({known[leader].seconds - middle:+.1f} s)" for leader in wrong)
        return Result("clocks", status, value, shown, f"run NTP there (chronyc tracking, timedatectl): {harm}")
    return Result("clocks", Status.OK, value)
