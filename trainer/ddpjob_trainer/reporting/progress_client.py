"""Posts the newest progress to the job's coordinator in the background.

The trainer posts progress separately from its other figures, because the coordinator takes posted
progress as a sign that a step was taken. Users' own scripts post all their figures together.
"""

from __future__ import annotations

from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.outbox import INTERVAL_SECONDS, Outbox, merged, next_pause
from ddpjob_pod.posting import Poster

_BRIEF_SECONDS = 1.0


class ProgressClient(Outbox):
    """Posts progress to the coordinator, at most once every half second.

    Progress is posted to `/v1/progress` at the address in DDPJOB_COORDINATOR (host:port), with the
    token in DDPJOB_TOKEN.
    """

    def __init__(self, address: str, token: str) -> None:
        self._poster = Poster(address, token)
        self._newest: dict[str, Any] | None = None
        self._copies: dict[str, float] | None = None
        self._activity: str | None = None
        self._said: str | None = None  # The activity that was last sent; None for steps.
        # The latest stragglers. None before the first call to `post_stragglers`.
        self._stragglers: list[dict[str, float]] | None = None
        # The coordinator instance that last received stragglers, and the stragglers that it
        # received.
        self._said_stragglers: Any = None
        super().__init__("coordinator-link")

    @classmethod
    def from_env(cls) -> ProgressClient | None:
        """Return a client for the job that the environment describes, or None outside a job."""
        job = JobEnvironment.read()
        return cls(job.coordinator, job.token) if job.coordinator else None

    def post(self, progress: dict[str, Any]) -> None:
        """Send `progress` with the next post, replacing progress that has not been posted yet."""
        with self._changed:
            self._newest = progress
            self._changed.notify()

    def post_copies(self, copies: dict[str, float]) -> None:
        """Send the state of the checkpoints' copies in the bucket.

        This state is posted separately from progress, because a change of the state does not mean
        that a step was taken.
        """
        with self._changed:
            self._copies = copies
            self._changed.notify()

    def post_stragglers(self, stragglers: list[dict[str, float]]) -> None:
        """Send the stragglers after the next post of progress.

        The stragglers are sent only if they have changed, or if the current coordinator does not
        have them yet.
        """
        with self._changed:
            self._stragglers = stragglers

    def post_activity(self, activity: str | None, *, again: bool = False) -> None:
        """Send `activity`, which keeps this process from taking steps.

        None means that the process takes steps again. An activity that ends within a second is not
        sent. If `again` is set, the current activity is sent again as a sign of life.
        """
        with self._changed:
            self._activity = activity
            if again:
                self._said = None
            self._changed.notify()

    def _work(self) -> None:
        pause = INTERVAL_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due() or self._activity != self._said)
                self._changed.wait_for(lambda: self._is_due() or self._activity == self._said, _BRIEF_SECONDS)
                progress, self._newest = self._newest, None
                copies, self._copies = self._copies, None
                others, self._pending = self._pending, {}
            if progress is not None:
                pause = next_pause(pause, self._send(progress))
                self._said = None
                self._send_stragglers()
            elif self._closing and copies is None and not others:
                return
            if others and not self._send(others) and not self._closing:
                with self._changed:
                    self._pending = merged(others, self._pending)
            if copies is not None:
                self._send({"metrics": copies})
            if (activity := self._activity) != self._said:
                self._said = activity
                self._send({"activity": activity})
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=pause)

    def _send_stragglers(self) -> None:
        """Send the stragglers in a separate post.

        Called after each post of progress. Until a coordinator has responded, each call sends the
        same stragglers again.
        """
        stragglers = self._stragglers
        if stragglers is None or (self._poster.instance, stragglers) == self._said_stragglers:
            return
        status, _ = self._poster.post({"stragglers": stragglers})
        if 0 < status < 300 or status == 400:
            self._said_stragglers = self._poster.instance, stragglers

    def _is_due(self) -> bool:
        return self._newest is not None or self._copies is not None or bool(self._pending) or self._closing

    def _send(self, progress: dict[str, Any]) -> bool:
        return 0 < self._poster.post(progress)[0] < 300
