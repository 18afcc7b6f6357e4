"""The settings of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_runtime.protocol import Hangs, Mode


@dataclass(frozen=True)
class CoordinatorSettings:
    """The coordinator's arguments, except addresses. Times are in seconds.

    `hang_after`: None means that no time without a step ends a round by itself. `ordered`: the
    operator will send the order of the ranks, and the first round waits briefly for it.
    `no_restarts`: recovery.maxRestarts is 0. `hangs`: whether a proved hang ends the round.
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
