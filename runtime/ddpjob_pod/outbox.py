"""Passes figures to a background thread, so that training never waits for a network or a disk."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from ddpjob_runtime import protocol

from ddpjob_pod.posting import TIMEOUT_SECONDS

INTERVAL_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
"""The usual and the longest pause between two posts, in seconds. While the coordinator does not
respond, the pause grows from the first value to the second.
"""


class Outbox:
    """Collects figures until a background thread sends them. Only the latest value of each figure
    is kept.

    Subclasses define `_work`, which runs in the thread and takes the figures from `_pending`.
    """

    def __init__(self, thread: str) -> None:
        self._pending: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name=thread, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, figures: dict[str, Any]) -> None:
        """Queue figures for the next post. They replace queued figures with the same names."""
        if os.getpid() != self._process:
            return  # A forked data-loader process has a copy of this object, but not of its thread.
        with self._changed:
            self._pending = merged(self._pending, figures)
            self._changed.notify()

    def close(self) -> None:
        """Send the figures that are still queued. Wait at most two seconds for the thread."""
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
    """Return how many seconds to wait before the next post.

    `pause` is the previous result. It is doubled, up to a limit, if the last post was not sent.
    """
    return INTERVAL_SECONDS if sent else min(2 * pause, LONGEST_PAUSE_SECONDS)


def merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of both arguments. A newer figure replaces an older one with the same
    name.

    Only the last MAX_FIGURES entries in "metrics" are kept.
    """
    both = {**older, **newer}
    if "metrics" in older and "metrics" in newer:
        metrics = {**{k: v for k, v in older["metrics"].items() if k not in newer["metrics"]}, **newer["metrics"]}
        both["metrics"] = dict(list(metrics.items())[-protocol.MAX_FIGURES :])
    return both
