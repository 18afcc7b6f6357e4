"""Hands figures to a background thread, so that training never waits for a network or a disk."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from ddpjob_runtime import protocol

from ddpjob_pod.posting import TIMEOUT_SECONDS

INTERVAL_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
"""Seconds between two posts: the usual pause, and the longest one if the coordinator does not
respond."""


class Outbox:
    """Keeps the newest figure for each name until the thread that runs `_work` takes it."""

    def __init__(self, thread: str) -> None:
        self._pending: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name=thread, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, figures: dict[str, Any]) -> None:
        """Queue figures for the next post. They replace older figures with the same names."""
        if os.getpid() != self._process:
            return  # A forked data-loader process has a copy of the lock, but not the thread that sends.
        with self._changed:
            self._pending = merged(self._pending, figures)
            self._changed.notify()

    def close(self) -> None:
        """Send the remaining figures, waiting at most two seconds."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(TIMEOUT_SECONDS)

    def _work(self) -> None:
        raise NotImplementedError


def next_pause(pause: float, sent: bool) -> float:
    """Return how many seconds to wait before the next post."""
    return INTERVAL_SECONDS if sent else min(2 * pause, LONGEST_PAUSE_SECONDS)


def merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Merge figures.

    A newer figure replaces an older one with the same name. Only the last MAX_FIGURES metrics are
    kept.
    """
    both = {**older, **newer}
    if "metrics" in older and "metrics" in newer:
        metrics = {**{k: v for k, v in older["metrics"].items() if k not in newer["metrics"]}, **newer["metrics"]}
        both["metrics"] = dict(list(metrics.items())[-protocol.MAX_FIGURES :])
    return both
