"""Follows coordinators. Each job has one pending request, its last report, and a wake-up for news.

A reconcile reads the reports kept here and never waits for a coordinator. Coordinators run users'
images, so one that hangs, floods or lies must harm only its own job. Still, a break should wake its
job within a moment, even with a thousand jobs.

- The coordinator holds a request until it has news, or for `progress_seconds`. So a quiet job costs
  one request every 10 s, and proportionally fewer with more than JOBS jobs.
- News is a change that affects decisions (`_news`): a break, a different state or round, or
  different members, but not the step. It wakes the job, but not twice within WAKE_SECONDS.
- The first BURST requests are PAUSE seconds apart, later ones SLOW_PAUSE. So a coordinator that
  always has news is asked once a second.
- All coordinators' reports together stay below READ_BYTES per second. Only coordinators with large
  reports wait to meet this limit, for at most LONGEST_SHARE.
- If a coordinator stops responding, its last report is valid for STALE_SECONDS and is then dropped.
  Retries follow after 0.5 s, then after twice as long each time, up to LONGEST_RETRY.

Example with 200 jobs, in one of which a rank fails:

    progress is at most 40 s old (10 x 200 / 50), which is 5 requests per second for all jobs
    the coordinator responds to the pending request, so its job is woken within milliseconds
    its next 9 responses are at least 0.1 s apart, and wake the job once a second
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddpjob_runtime.protocol import Report, progress_news

from ddpjob.engine.coordinator_client import UNREACHABLE, CoordinatorClient, CoordinatorLink, Target, describe_error
from ddpjob.engine.ports import JobKey

log = logging.getLogger("ddpjob.coordinator")
PROGRESS_SECONDS, LONGEST_WAIT = 10.0, 60.0
"""How long, in seconds, a coordinator holds a request without news. This limits the age of its
progress. PROGRESS_SECONDS applies to up to JOBS jobs and grows in proportion beyond that.
Coordinators themselves enforce the upper limit."""
JOBS = 50
PAUSE, SLOW_PAUSE = 0.1, 1.0
"""Delays in seconds between requests to one coordinator: during the first BURST requests, and
later."""
BURST = 10
WAKE_SECONDS = 1.0
"""Minimum delay in seconds between wake-ups of one job. The first news after a quiet second wakes
it immediately."""
FIRST_RETRY, LONGEST_RETRY = 0.5, 10.0
"""Delays in seconds between retries. The longest one is also how long a user waits for the current
state after a network has recovered."""
LONGEST_SHARE = 30.0
"""Maximum time in seconds that a coordinator with a large report waits for the reports of
others."""
STALE_SECONDS = 3.0
"""How long a coordinator may be silent, in seconds, before its report is dropped."""
READ_BYTES = 25_000_000
"""Maximum number of bytes of reports per second from all coordinators, about half of what one CPU
can read."""


@dataclass
class FollowedCoordinator:
    """A job whose coordinator is followed. Times are given by the event loop's clock."""

    target: Target
    task: asyncio.Task[None] | None = None
    report: Report | None = None
    failing_since: float | None = None
    """When the coordinator stopped responding; None if it responded to the last request."""
    answered: float = field(default=float("-inf"))
    news: Any = None
    failures: int = 0
    size: int = 0
    """Size of the coordinator's last response in bytes."""
    credit: float = BURST
    woken: float = field(default=float("-inf"))
    wake: asyncio.TimerHandle | None = None
    refusal: str = ""
    """Why the coordinator's last response could not be used. Empty if it could be used, or if there
    was none."""


class ReportWatch:
    """Follows coordinators.

    `wake(job)` is called when the job's coordinator reports a break or a different state, or stops
    responding.
    """

    def __init__(self, wake: Callable[[JobKey], None], client: CoordinatorClient | None = None) -> None:
        self._wake = wake
        self._client = client or CoordinatorClient()
        self._followed: dict[JobKey, FollowedCoordinator] = {}
        self._bytes = 0

    async def close(self) -> None:
        tasks = [followed.task for followed in self._followed.values() if followed.task is not None]
        for key in list(self._followed):
            self.follow(key, None)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def follow(self, key: JobKey, target: Target | None) -> None:
        """Follow this coordinator instead of the job's previous one. None stops following."""
        before = self._followed.get(key)
        if (before.target if before is not None else None) == target:
            return
        if before is not None:
            del self._followed[key]
            self._bytes -= before.size
            if before.task is not None:
                before.task.cancel()
            if before.wake is not None:
                before.wake.cancel()
        if target is not None:
            followed = self._followed[key] = FollowedCoordinator(target)
            followed.task = asyncio.create_task(self._run(key, followed))

    def report(self, key: JobKey) -> Report | None:
        """Return the job's last report.

        The result is None while the job's coordinator does not respond or has not been asked.
        """
        followed = self._followed.get(key)
        return followed.report if followed is not None else None

    def refusal(self, key: JobKey) -> str:
        """Return why the coordinator's last response could not be used.

        The result is empty if it could be used, or if there was none.
        """
        followed = self._followed.get(key)
        return followed.refusal if followed is not None else ""

    def count(self, *, answers: bool) -> int:
        """Return how many coordinators responded to the last request, or how many did not.

        May be called from any thread.
        """
        return sum((followed.failing_since is None) == answers for followed in list(self._followed.values()))

    def is_asking(self, key: JobKey) -> bool:
        """Whether the coordinator's first response is still pending."""
        followed = self._followed.get(key)
        return followed is not None and followed.report is None and followed.failing_since is None

    # --- one coordinator

    async def _run(self, key: JobKey, followed: FollowedCoordinator) -> None:
        """Follow one coordinator until cancelled."""
        link = CoordinatorLink(self._client, followed.target)
        while True:
            try:
                report = await link.report(followed.report, self.progress_seconds)
            except Exception as error:  # The next response may be usable.
                self._failed(key, followed, error)
                await asyncio.sleep(min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(followed.failures - 1, 10)) * _jitter())
            else:
                self._answered(key, followed, report)
                await asyncio.sleep(max(self._pause(followed), self._share(followed, link.size)))

    @property
    def progress_seconds(self) -> float:
        """Maximum age of a coordinator's progress in seconds."""
        return min(LONGEST_WAIT, PROGRESS_SECONDS * max(1.0, len(self._followed) / JOBS))

    def _share(self, followed: FollowedCoordinator, size: int) -> float:
        """Return how long to wait so that all reports stay below READ_BYTES per second.

        The wait is the time to read the last reports of all coordinators at this rate. If this
        report is smaller than the average, all reports are taken to have its `size`. So a large
        report waits only if many reports are large, and a small report never waits for large ones.
        """
        self._bytes += size - followed.size
        followed.size = size
        return min(LONGEST_SHARE, min(self._bytes, len(self._followed) * size) / READ_BYTES)

    def _pause(self, followed: FollowedCoordinator) -> float:
        """Return the delay before the next request.

        A coordinator that always has news is asked once a second, because it cannot wake its job
        more often.
        """
        now = _now()
        followed.credit = min(BURST, followed.credit + now - followed.answered) - 1
        followed.answered = now
        return PAUSE if followed.credit > 0 else SLOW_PAUSE

    def _answered(self, key: JobKey, followed: FollowedCoordinator, report: Report) -> None:
        news = _news(report)
        changed = followed.report is None or news != followed.news
        followed.report, followed.news = report, news
        followed.failing_since, followed.failures, followed.refusal = None, 0, ""
        if changed:
            self._plan_wake(key, followed)

    def _failed(self, key: JobKey, followed: FollowedCoordinator, error: Exception) -> None:
        followed.failures += 1
        if followed.failing_since is None:
            followed.failing_since = _now()
            if followed.report is None:
                self._plan_wake(key, followed)
            else:
                asyncio.get_running_loop().call_later(STALE_SECONDS, self._stale, key, followed, followed.failing_since)
        refusal = "" if isinstance(error, UNREACHABLE) else f"{str(error)!r:.200}"
        if refusal and refusal != followed.refusal:
            log.warning("%s", describe_error(f"the report of {key.namespace}/{key.name} cannot be used", error))
        followed.refusal = refusal

    def _stale(self, key: JobKey, followed: FollowedCoordinator, since: float) -> None:
        if followed.failing_since == since and self._followed.get(key) is followed:
            followed.report = None
            self._plan_wake(key, followed)

    def _plan_wake(self, key: JobKey, followed: FollowedCoordinator) -> None:
        """Wake the job, but not twice within WAKE_SECONDS."""
        if followed.wake is not None:
            return
        left = followed.woken + WAKE_SECONDS - _now()
        if left <= 0:
            self._wake_now(key, followed)
        else:
            followed.wake = asyncio.get_running_loop().call_later(left, self._wake_now, key, followed)

    def _wake_now(self, key: JobKey, followed: FollowedCoordinator) -> None:
        followed.wake, followed.woken = None, _now()
        self._wake(key)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _jitter() -> float:
    return random.uniform(0.75, 1.25)


def _news(report: Report) -> Any:
    """Return the parts of a report that require an immediate reconcile if they change.

    For progress, only the set of reported figures matters, not their values.
    """
    members = [(m.pod, m.state) for m in report.members]
    lost = [m.pod for m in report.lost]
    settings = report.nodes, report.min_nodes, report.hang_after, report.hangs, report.backoff
    last = [i.id for i in report.incidents[-1:]]
    recovery = report.recovery.last_seconds, progress_news(report.progress)
    # Leave out the time, which differs in each report, because clocks are compared each time.
    overdue = report.overdue and (report.overdue.where, report.overdue.activity)
    return report.state, report.round, last, members, lost, len(report.notes), settings, recovery, overdue
