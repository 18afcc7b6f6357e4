"""The incidents in a generation, oldest first. Each time the group breaks, one is added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpjob_runtime.protocol import (
    DETAILED_INCIDENTS,
    MAX_INCIDENTS,
    NUMBERS_PER_ATTEMPT,
    Incident,
    IncidentKind,
    time_of,
)

OWN_FAILURES = (IncidentKind.WORKER_FAILED, IncidentKind.OOM_KILLED, IncidentKind.HANG)
"""Kinds of incidents that are failures of the job itself. If they recur, the
next round is delayed.
"""


class Incidents:
    """Keeps the latest incidents, and counts the incidents of each kind."""

    def __init__(self, attempt: int) -> None:
        self.recent: tuple[Incident, ...] = ()
        self.counts: dict[IncidentKind, int] = {}
        self._next_id = attempt * NUMBERS_PER_ATTEMPT + 1

    def add(
        self, kind: IncidentKind, unix_seconds: float, details: dict[str, Any], consequences: int, backoff: float = 0.0
    ) -> None:
        """Record a break.

        `details` contains additional fields of the `Incident`. `backoff` is the delay in seconds of
        the next round.
        """
        incident = Incident(
            self._next_id, time_of(unix_seconds), kind, consequences=consequences, backoff_seconds=backoff, **details
        )
        detailed = self.recent[1 - DETAILED_INCIDENTS :]
        older = tuple(replace(i, traceback="") if i.traceback else i for i in self.recent[: 1 - DETAILED_INCIDENTS])
        self.recent = (*older, *detailed, incident)[-MAX_INCIDENTS:]
        self._next_id += 1
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def add_init_failure(self, unix_seconds: float, pod: str, index: int, message: str) -> None:
        """Record that the entry point of a pod cannot start.

        If several pods report the same message in a row, they share one incident.
        """
        last = self.recent[-1] if self.recent else None
        if last is not None and last.kind == IncidentKind.INIT_FAILURE and last.message == message:
            self.recent = (*self.recent[:-1], replace(last, consequences=last.consequences + 1))
        else:
            self.add(IncidentKind.INIT_FAILURE, unix_seconds, {"pod": pod, "index": index, "message": message}, 0)
