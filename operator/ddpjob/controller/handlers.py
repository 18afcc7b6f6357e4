"""kopf's part: the watch of the DDPJobs, in a thread of its own. Nothing else shows that a user has changed one.

Only `kopf.on.event` is used: timers, daemons and change handlers would add finalizers and annotations to the jobs.
What kopf cannot do, `job_cache.py` does around it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kopf

from ddpjob.api.job import GROUP, PLURAL, VERSION
from ddpjob.api.job_spec import Json
from ddpjob.controller.job_cache import JOBS_PAGE
from ddpjob.controller.kube.informer import WATCH_SECONDS
from ddpjob.controller.login import login
from ddpjob.controller.operator_settings import Settings

log = logging.getLogger("ddpjob.kopf")
Seen = Callable[[str | None, Json], None]
"""(ADDED, MODIFIED, DELETED or None for an object that was listed; the object)"""

CLIENT_TIMEOUT = WATCH_SECONDS + 30
CONNECT_TIMEOUT = 10.0
RETRY = 2.0
"""Seconds after kopf has ended until it begins again."""


class Patience:
    """Seconds between kopf's tries of a request: an endless sequence, which starts again with every iteration.

    After its own, finite ones, kopf would end when the API server answers with 5xx for a minute, as
    it does while a control plane is upgraded.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3), itertools.repeat(5))


def build_registry(seen: Seen) -> kopf.OperatorRegistry:
    """Handlers that call `seen` with each event of a job."""
    registry = kopf.OperatorRegistry()

    async def job_changed(event: Any, **_: Any) -> None:
        seen(event["type"], event["object"])

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, id="job", registry=registry)(job_changed)
    return registry


class NoDifferences(kopf.DiffBaseStorage):
    """kopf without its comparison of each object with what it was: copies for handlers that there are not."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Nothing is kept, so that no annotation is written."""


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """kopf with lists in pages, and with watches that detect a dead peer."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = bool(settings.namespaces)
    chosen.process.ultimate_exiting_timeout = None  # It would kill the process after the end of one watch.
    chosen.persistence.diffbase_storage = NoDifferences()
    watching = chosen.watching
    watching.server_timeout, watching.client_timeout = WATCH_SECONDS, CLIENT_TIMEOUT
    watching.chunk_size = JOBS_PAGE
    chosen.networking.error_backoffs = Patience()
    watching.connect_timeout, watching.inactivity_timeout = CONNECT_TIMEOUT, 70.0
    return chosen


async def follow_jobs(settings: Settings, seen: Seen) -> None:
    """Runs kopf until cancelled; when it ends by an error, as it does at an error in a watch, again.

    In a thread of its own, since kopf cancels all younger tasks of its event loop at its end.
    """
    loop, ended = asyncio.get_running_loop(), threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def hand_over(event: str | None, body: Json) -> None:
        if not ended.is_set():
            loop.call_soon_threadsafe(seen, event, body)

    async def once() -> None:
        stop = asyncio.Event()
        running[:] = [(asyncio.get_running_loop(), stop)]
        if ended.is_set():
            return  # It was set before there was anything to stop.
        await kopf.operator(
            registry=build_registry(hand_over),
            settings=kopf_settings(settings),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
        )

    def thread() -> None:
        while not ended.is_set():
            try:
                asyncio.run(once())
            except Exception as error:
                log.warning("kopf's watch of the DDPJobs has ended, the next one begins in %s s: %r", RETRY, error)
            ended.wait(RETRY)

    threading.Thread(target=thread, name="kopf", daemon=True).start()
    try:
        await loop.create_future()
    finally:
        ended.set()
        for other, stop in running:
            if not other.is_closed():
                other.call_soon_threadsafe(stop.set)
