"""What a coordinator is started with."""

from __future__ import annotations

from dataclasses import dataclass

from ddpjob_runtime.protocol import Mode


@dataclass(frozen=True)
class CoordinatorSettings:
    """Arguments of the coordinator, without addresses. Times in seconds; `hang_after` None: nothing is a hang.

    `ordered`: the operator will say in which order ranks are numbered, and the first round waits a moment for that.
    `no_restarts`: recovery.maxRestarts is 0.
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
