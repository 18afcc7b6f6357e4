"""Waits at the coordinators for what must be told at once: a break of the group, its state, a member that is lost.

A pass asks the coordinator anyway, each second; this only says when there is a reason to do so earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from ddpjob.api.types import Json
from ddpjob.engine.ports import JobKey

FOLLOWED = 200
"""Jobs that are followed at the same time; those beyond are looked at each second like all."""
_WAIT = 20
_RETRY = 1.0
_PAUSE = 0.1
"""Seconds between two questions to one coordinator, however fast it changes."""
_TIMEOUT = aiohttp.ClientTimeout(total=_WAIT + 5.0, connect=1.0)


class NewsWatch:
    """One waiting request per job that is under way. `wake(job)` is called when its coordinator has news."""

    def __init__(self, wake: Callable[[JobKey], None]) -> None:
        self._wake = wake
        self._tasks: dict[JobKey, tuple[str, asyncio.Task[None]]] = {}
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=FOLLOWED))

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    def follow(self, key: JobKey, endpoint: str) -> None:
        """Waits at the coordinator at `host:port`, and no longer at the job's one before; empty: at none."""
        before, task = self._tasks.get(key, ("", None))
        if before == endpoint:
            return
        if task is not None:
            task.cancel()
            del self._tasks[key]
        if endpoint and len(self._tasks) < FOLLOWED:
            self._tasks[key] = endpoint, asyncio.create_task(self._wait(key, endpoint))

    async def _wait(self, key: JobKey, endpoint: str) -> None:
        """Until cancelled. What cannot be reached or read is the passes' to tell."""
        version, known = 0, None
        while True:
            try:
                query = {"after": version, "wait": _WAIT}
                async with self._session.get(f"http://{endpoint}/status", params=query) as answer:
                    report: Json = await answer.json() if answer.status == 200 else {}
                version, news = int(report["version"]), _news(report)
            except (TimeoutError, aiohttp.ClientError, OSError, KeyError, ValueError, TypeError):
                await asyncio.sleep(_RETRY)
                continue
            if known is not None and news != known:
                self._wake(key)
            known = news
            await asyncio.sleep(_PAUSE)


def _news(report: Json) -> Any:
    """What of a report is worth a pass at once: all but progress."""
    incidents = report.get("incidents") or [{}]
    members = [(m["pod"], m["state"]) for m in report.get("members", ())]
    lost = [m["pod"] for m in report.get("lost", ())]
    return report.get("state"), report.get("round"), incidents[-1].get("id"), members, lost, len(report.get("notes", ()))
