"""Posts progress to the job's coordinator in the background, only the newest.

It never delays training, and errors are ignored. The job's token proves the sender without being
sent, because someone else may have the coordinator's address by now.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (the codec of host names: the thread must not be the first to import it)
import http.client
import threading
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.posting import TIMEOUT_SECONDS, Poster

_INTERVAL_SECONDS, _BRIEF_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 1.0, 15.0


class ProgressClient:
    """Posts progress to the coordinator, at most every half second.

    It posts to `/v1/progress` of DDPJOB_COORDINATOR (host:port), with DDPJOB_TOKEN.
    """

    def __init__(self, address: str, token: str) -> None:
        self._poster = Poster(address, token)
        self._newest: dict[str, Any] | None = None
        self._copies: dict[str, float] | None = None
        self._activity: str | None = None
        self._said: str | None = None  # The activity that the coordinator knows.
        # None: no stragglers have been posted yet.
        self._stragglers: list[dict[str, float]] | None = None
        self._said_stragglers: Any = None  # The last post of stragglers, and its coordinator.
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="coordinator-link", daemon=True)
        self._thread.start()

    @classmethod
    def from_env(cls) -> ProgressClient | None:
        """Return the client that the environment describes, or None outside of a job."""
        job = JobEnvironment.read()
        return cls(job.coordinator, job.token) if job.coordinator else None

    def post(self, progress: dict[str, Any]) -> None:
        """Send `progress` with the next post. It replaces progress that was not posted yet."""
        with self._changed:
            self._newest = progress
            self._changed.notify()

    def post_copies(self, copies: dict[str, float]) -> None:
        """Send the state of the copies in the bucket.

        It is posted by itself, because it is not a sign of a step.
        """
        with self._changed:
            self._copies = copies
            self._changed.notify()

    def post_stragglers(self, stragglers: list[dict[str, float]]) -> None:
        """Send the stragglers after the next post of progress.

        They are only sent if they have changed, or have not been sent by this process.
        """
        with self._changed:
            self._stragglers = stragglers

    def post_activity(self, activity: str | None, *, again: bool = False) -> None:
        """Send what this process does apart from steps (None: steps).

        An activity that is over within a second is not sent. With `again`, send it even if it was
        sent before, as a sign of life.
        """
        with self._changed:
            self._activity = activity
            if again:
                self._said = None
            self._changed.notify()

    def close(self) -> None:
        """Post what remains, waiting at most two seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(TIMEOUT_SECONDS)

    def _work(self) -> None:
        pause = _INTERVAL_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due() or self._activity != self._said)
                self._changed.wait_for(lambda: self._is_due() or self._activity == self._said, _BRIEF_SECONDS)
                progress, self._newest = self._newest, None
                copies, self._copies = self._copies, None
            if progress is not None:
                pause = _INTERVAL_SECONDS if self._send(progress) else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._said = None
                self._send_stragglers()
            elif self._closing and copies is None:
                return
            if copies is not None:
                self._send({"metrics": copies})
            if (activity := self._activity) != self._said:
                self._said = activity
                self._send({"activity": activity})
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=pause)

    def _send_stragglers(self) -> None:
        """Send the stragglers by themselves, and again until a coordinator has answered."""
        stragglers = self._stragglers
        if stragglers is None or (self._poster.instance, stragglers) == self._said_stragglers:
            return
        status = self._post({"stragglers": stragglers})
        if 0 < status < 300 or status == 400:
            self._said_stragglers = self._poster.instance, stragglers

    def _is_due(self) -> bool:
        return self._newest is not None or self._copies is not None or self._closing

    def _send(self, progress: dict[str, Any]) -> bool:
        return 0 < self._post(progress) < 300

    def _post(self, report: dict[str, Any]) -> int:
        """Return the status of the answer to a post, or 0 if there was none."""
        try:
            return self._poster.post(report)[0]
        except (OSError, ValueError, http.client.HTTPException):
            # A coordinator that restarts or is gone must not disturb training. The operator notices
            # it.
            return 0
