"""Progress to the job's coordinator: in the background, the newest only, dropped when nobody listens. Never delays training."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (the thread must not be the first to import what host names are encoded by)
import http.client
import json
import os
import socket
import threading
import time
from typing import Any

_INTERVAL_SECONDS, _TIMEOUT_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 2.0, 15.0


class CoordinatorLink:
    """Posts to `/v1/progress` of DDPJOB_COORDINATOR (host:port) with DDPJOB_TOKEN, at most each half second."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._newest: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._closing = False
        with contextlib.suppress(OSError):
            # A process' first look-up makes glibc read the environment, which in a thread ends in a crash when a variable is set meanwhile.
            socket.getaddrinfo("localhost", None)
        self._thread = threading.Thread(target=self._work, name="coordinator-link", daemon=True)
        self._thread.start()

    @classmethod
    def from_env(cls) -> CoordinatorLink | None:
        """The link that the environment describes, or None outside of a job."""
        address = os.environ.get("DDPJOB_COORDINATOR")
        return cls(address, os.environ.get("DDPJOB_TOKEN", "")) if address else None

    def post(self, progress: dict[str, Any]) -> None:
        """Take `progress` along with the next post; what was not posted yet is replaced."""
        with self._changed:
            self._newest = progress
            self._changed.notify()

    def close(self) -> None:
        """Post what is left, waiting two seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_TIMEOUT_SECONDS)

    def _work(self) -> None:
        pause = _INTERVAL_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._closing)
                progress, self._newest = self._newest, None
            if progress is None:
                return
            pause = _INTERVAL_SECONDS if self._send(progress) else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=pause)

    def _send(self, progress: dict[str, Any]) -> bool:
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_SECONDS)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/progress", json.dumps(progress), headers)
            return connection.getresponse().status < 300
        except (OSError, http.client.HTTPException):
            return False  # A coordinator that restarts or is gone must not disturb training; the operator sees it by itself.
        finally:
            connection.close()


def wall_clock() -> float:
    """Seconds since the epoch, rounded to milliseconds for logs."""
    return round(time.time(), 3)
