"""Posts rank 0's figures to the job's coordinator, in the background."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.outbox import INTERVAL_SECONDS, Outbox, merged, next_pause
from ddpjob_pod.pace import Pace
from ddpjob_pod.posting import Poster
from ddpjob_runtime import protocol


class Link(Outbox):
    """Posts figures to the coordinator, with a proof that this process knows the job's token.

    If a post fails, its figures are added to the next post.
    """

    def __init__(self, address: str, token: str) -> None:
        self._poster = Poster(address, token)
        self._refused = False
        self._pace = Pace()
        super().__init__("ddpjob-report")

    def add(self, figures: dict[str, Any]) -> None:
        """Queue figures for the next post.

        The time of the step is recorded now, because the post may happen later.
        """
        self._note_step(figures)
        super().add(figures)

    def _note_step(self, figures: dict[str, Any]) -> None:
        step = figures.get("step")
        if step is not None:
            self._pace.add(step, time.monotonic())

    def _work(self) -> None:
        pause = INTERVAL_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                figures, self._pending = self._pending, {}
            if not figures:
                return
            sent = self._send(figures)
            pause = next_pause(pause, sent)
            with self._changed:
                if not sent and self._closing:
                    return
                if not sent:
                    self._pending = merged(figures, self._pending)
                self._changed.wait_for(lambda: self._closing, timeout=pause)

    def _send(self, figures: dict[str, Any]) -> bool:
        """Send the figures to the coordinator.

        Return False if they should be sent again. Return True if the coordinator has accepted them,
        or has rejected them as invalid.
        """
        status, answer = self._poster.post(self._with_speed(figures))
        if not status:
            return False
        if status == 400 and not self._refused:
            self._refused = True
            # If the disk is full, this write fails, but the script should continue. Its next report
            # may be valid.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"ddpjob_report: the coordinator rejected a report: {answer:.200}\n")
        return status in (200, 400)

    def _with_speed(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return the figures with speed and remaining time, unless the script reports these itself.

        Both are computed from the steps. They are not added to the last post, because that post
        happens some time after its step.
        """
        step, speed = figures.get("step"), self._pace.per_second
        if step is None or not speed or self._closing:
            return figures
        more = dict(figures)
        if "samplesPerSecond" not in figures:
            metrics = [(protocol.COUNTED_SPEED, round(speed, 3)), *figures.get("metrics", {}).items()]
            # If there are too many figures, keep those of the script.
            more["metrics"] = dict(metrics[-protocol.MAX_FIGURES :])
        if (figures.get("steps") or 0) > 0 and "eta" not in figures:
            more["eta"] = max(0.0, round((figures["steps"] - step) / speed, 1))
        return more


_link: Link | None = None


def post(figures: dict[str, Any]) -> None:
    """Queue the figures for the coordinator, if this is rank 0 of a job."""
    if prepare() and figures:
        assert _link is not None
        _link.add(figures)


def prepare() -> bool:
    """Start the thread that posts figures, if this is rank 0 of a job.

    Return whether this is rank 0 of a job. Later calls do not start a second thread.
    """
    global _link
    if _link is None:
        job = JobEnvironment.read()
        if not job.coordinator or not job.token or not job.is_first:
            return False
        _link = Link(job.coordinator, job.token)
    return True


def is_reporting() -> bool:
    """Whether this process is rank 0 of a job and has begun to post figures."""
    return _link is not None


def close() -> None:
    """Post the figures that are still queued. Later figures are not posted."""
    if _link is not None:
        _link.close()
