"""Follows all coordinators, keeps each job's last report, and wakes the job when its report
changes.

A reconcile reads the reports that are kept here, and never waits for a coordinator. Coordinators
run users' images. A coordinator that hangs, sends too much or reports something wrong must
therefore harm only its own job. Nevertheless, a break should wake its job almost at once, even if
there are a thousand jobs.

- A coordinator holds a request until it has news, or until `progress_seconds` have passed. A job
  without news therefore costs one request every 10 s. If there are more than JOBS jobs, each job
  costs proportionally fewer requests.
- News is a change that affects decisions (`_news`): a break, a different state or round, or
  different members. A new step is not news. News wakes the job, but not twice within WAKE_SECONDS.
- The first BURST requests after a quiet period are PAUSE seconds apart, and later ones are
  SLOW_PAUSE seconds apart. A coordinator that always has news therefore gets one request per
  second.
- The reports of all coordinators together stay below READ_BYTES per second. To meet this limit,
  only requests to coordinators with large reports are delayed, by at most LONGEST_SHARE seconds.
- If a coordinator stops responding, its last report stays valid for STALE_SECONDS and is then
  dropped. The request is sent again after FIRST_RETRY seconds, and this delay doubles each time, up
  to LONGEST_RETRY seconds.

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
"""Number of seconds for which a coordinator without news holds a request. The reported progress is
never much older than this. PROGRESS_SECONDS applies to up to JOBS jobs. With more jobs, the time
grows in proportion to their number. Coordinators do not hold a request for longer than
LONGEST_WAIT."""
JOBS = 50
PAUSE, SLOW_PAUSE = 0.1, 1.0
"""Delays in seconds between two requests to the same coordinator. PAUSE applies to the first BURST
requests after a quiet period. SLOW_PAUSE applies to all later requests."""
BURST = 10
WAKE_SECONDS = 1.0
"""Minimum delay in seconds between two wake-ups of the same job. If the last wake-up is longer ago,
news wakes the job immediately.
"""
FIRST_RETRY, LONGEST_RETRY = 0.5, 10.0
"""Shortest and longest delay in seconds before a failed request is sent again. After the network
has recovered, a user sees the current state within the longest delay.
"""
LONGEST_SHARE = 30.0
"""Maximum delay in seconds of a request to a coordinator with a large report. The delay leaves time
to read the reports of other coordinators."""
STALE_SECONDS = 3.0
"""Number of seconds without a response after which a coordinator's last report is dropped."""
READ_BYTES = 25_000_000
"""Maximum number of bytes to read per second from the reports of all coordinators. One CPU can read
about twice as many bytes per second.
"""


@dataclass
class FollowedCoordinator:
    """A coordinator whose reports are requested, with its last report.

    Times are in seconds on the event loop's clock.
    """

    target: Target
    task: asyncio.Task[None] | None = None
    report: Report | None = None
    failing_since: float | None = None
    """The time at which the coordinator stopped responding; None if it responded to the last
    request.
    """
    answered: float = field(default=float("-inf"))
    news: Any = None
    failures: int = 0
    size: int = 0
    """Size of the coordinator's last response in bytes."""
    credit: float = BURST
    woken: float = field(default=float("-inf"))
    wake: asyncio.TimerHandle | None = None
    refusal: str = ""
    """The reason why the coordinator's last response could not be used. Empty if the response could
    be used, or if there was no response.
    """


class ReportWatch:
    """Requests reports from the coordinators of all running jobs.

    `wake(job)` is called when the job's coordinator reports a break or a different state, and when
    the coordinator stops responding.
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
        """Request reports from this coordinator, and stop requesting them from the job's previous
        coordinator.

        If `target` is None, no reports are requested for the job.
        """
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
        """Return the last report of the job's coordinator.

        The result is None if the coordinator has not responded yet, or has stopped responding.
        """
        followed = self._followed.get(key)
        return followed.report if followed is not None else None

    def refusal(self, key: JobKey) -> str:
        """Return the reason why the coordinator's last response could not be used.

        The result is empty if the response could be used, or if there was no response.
        """
        followed = self._followed.get(key)
        return followed.refusal if followed is not None else ""

    def count(self, *, answers: bool) -> int:
        """Return the number of coordinators that responded to the last request.

        With `answers=False`, return the number of those that did not respond. This method can be
        called from any thread.
        """
        return sum((followed.failing_since is None) == answers for followed in list(self._followed.values()))

    def is_asking(self, key: JobKey) -> bool:
        """Whether the first request to the coordinator is still in progress."""
        followed = self._followed.get(key)
        return followed is not None and followed.report is None and followed.failing_since is None

    # --- one coordinator

    async def _run(self, key: JobKey, followed: FollowedCoordinator) -> None:
        """Request reports from one coordinator, one after the other, until cancelled."""
        link = CoordinatorLink(self._client, followed.target)
        while True:
            try:
                report = await link.report(followed.report, self.progress_seconds)
                self._answered(key, followed, report)
            # Keep asking, because the next response may be usable.
            except Exception as error:
                self._failed(key, followed, error)
                await asyncio.sleep(min(LONGEST_RETRY, FIRST_RETRY * 2 ** min(followed.failures - 1, 10)) * _jitter())
            else:
                await asyncio.sleep(max(self._pause(followed), self._share(followed, link.size)))

    @property
    def progress_seconds(self) -> float:
        """Maximum age in seconds of the progress that a coordinator reports."""
        return min(LONGEST_WAIT, PROGRESS_SECONDS * max(1.0, len(self._followed) / JOBS))

    def _share(self, followed: FollowedCoordinator, size: int) -> float:
        """Return the delay that keeps all reports together below READ_BYTES per second.

        The delay is the time needed to read the last reports of all coordinators at this rate. For
        a report smaller than the average, the delay is computed as if all reports had its `size`. A
        large report therefore waits only if many reports are large, and a small report never waits
        because of large ones.
        """
        self._bytes += size - followed.size
        followed.size = size
        return min(LONGEST_SHARE, min(self._bytes, len(self._followed) * size) / READ_BYTES)

    def _pause(self, followed: FollowedCoordinator) -> float:
        """Return the delay before the next request to this coordinator.

        A coordinator that always has news gets one request per second. More requests would be
        useless, because the coordinator's job is woken at most once a second.
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
        """Wake the job as soon as WAKE_SECONDS have passed since its last wake-up."""
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
    """Return the parts of a report whose changes require an immediate reconcile.

    The names of the reported figures are among these parts, but the values are not.
    """
    members = [(m.pod, m.state) for m in report.members]
    lost = [m.pod for m in report.lost]
    settings = report.nodes, report.min_nodes, report.hang_after, report.hangs, report.backoff
    last = [i.id for i in report.incidents[-1:]]
    recovery = report.recovery.last_seconds, progress_news(report.progress)
    # Leave out the start of the overdue step. It is computed for each report by comparing clocks,
    # so its value would seem to change.
    overdue = report.overdue and (report.overdue.where, report.overdue.activity)
    return report.state, report.round, last, members, lost, len(report.notes), settings, recovery, overdue
