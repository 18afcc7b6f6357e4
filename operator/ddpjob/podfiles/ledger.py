"""What broke the group, oldest first: one entry per break."""

from __future__ import annotations

from typing import Any

import wire

KINDS = ("WorkerFailed", "OOMKilled", "Hang", "InitFailure", "PeerLost", "Left", "Joined")
OWN = ("WorkerFailed", "OOMKilled", "Hang")  # failures of the job itself: they make it wait when they repeat
KEPT_INCIDENTS = 50
IDS_PER_ATTEMPT = 1_000_000  # so that no number comes twice in a generation, without the coordinators having to know of each other


class Ledger:
    """The last incidents, and how many there were of each kind."""

    def __init__(self, attempt: int) -> None:
        self.incidents: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self._next = attempt * IDS_PER_ATTEMPT + 1

    def add(self, kind: str, when: float, fields: dict[str, Any], consequences: int, backoff_seconds: float = 0.0) -> None:
        """One break and its cause; `when` in Unix seconds, `backoff_seconds` is how long the next round waits because of it."""
        blank = dict.fromkeys(("pod", "index", "rank", "localRank", "exitCode", "signal", "message", "traceback"))
        entry = dict(blank, id=self._next, time=wire.iso(when), kind=kind, consequences=consequences, backoffSeconds=backoff_seconds)
        self.incidents.append(dict(entry, **fields))
        self._next += 1
        del self.incidents[:-KEPT_INCIDENTS]
        self.counts[kind] = self.counts.get(kind, 0) + 1
