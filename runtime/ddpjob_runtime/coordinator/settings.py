"""A coordinator's settings: the numbers of nodes, the recovery mode, time limits and back-off."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_runtime.protocol import Hangs, Mode


@dataclass(frozen=True)
class CoordinatorSettings:
    """The settings of a coordinator, except for its addresses. Times are in seconds.

    If `hang_after` is None, no time limit ends a round without steps. `hangs` determines whether a
    proven hang ends the round. If `ordered` is set, the operator will send the order of the ranks,
    so the first round waits briefly for it. `no_restarts` means that recovery.maxRestarts is 0.
    """

    nodes: int
    min_nodes: int
    generation: int = 0
    mode: Mode = Mode.STANDARD
    attempt: int = 0
    hang_after: float | None = None
    backoff_initial: float = 1.0
    backoff_maximum: float = 60.0
    ordered: bool = False
    no_restarts: bool = False
    hangs: Hangs = Hangs.END
