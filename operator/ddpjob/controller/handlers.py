"""Runs kopf, which watches the DDPJobs, in a separate thread.

Only this watch shows that a user has changed a job. The module uses only `kopf.on.event`, because
timers, daemons and change handlers would add finalizers and annotations to jobs. `job_cache.py`
makes up for what kopf cannot do.
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
"""A function that takes the type of an event and the object. The type is ADDED, MODIFIED or
DELETED, or None for an object from a list.
"""

CLIENT_TIMEOUT = WATCH_SECONDS + 30
CONNECT_TIMEOUT = 10.0
RETRY = 2.0
"""Delay in seconds before kopf is restarted after it has exited."""


class Patience:
    """An endless sequence of the delays in seconds between kopf's attempts at one request.

    Each request starts at the beginning of the sequence. kopf's own sequence is finite, so kopf
    would give up after about a minute of 5xx responses. An upgrade of a control plane can cause
    such responses for longer.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3), itertools.repeat(5))


def build_registry(seen: Seen) -> kopf.OperatorRegistry:
    """Return kopf's registry with the handlers for signing in and for job events.

    `seen` is called for each event.
    """
    registry = kopf.OperatorRegistry()

    async def job_changed(event: Any, **_: Any) -> None:
        seen(event["type"], event["object"])

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, id="job", registry=registry)(job_changed)
    return registry


class NoDifferences(kopf.DiffBaseStorage):
    """Keeps kopf from comparing each object with its previous state.

    For handlers of differences, kopf would store a copy of each object, but this operator has no
    such handlers.
    """

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing, so that kopf does not write an annotation with a copy of the object."""


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Return the settings that kopf runs with.

    Lists are read in pages, and a watch notices if the API server no longer responds.
    """
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = bool(settings.namespaces)
    # By default, kopf would kill the whole process some time after one of its watches has ended.
    chosen.process.ultimate_exiting_timeout = None
    chosen.persistence.diffbase_storage = NoDifferences()
    watching = chosen.watching
    watching.server_timeout, watching.client_timeout = WATCH_SECONDS, CLIENT_TIMEOUT
    watching.chunk_size = JOBS_PAGE
    chosen.networking.error_backoffs = Patience()
    watching.connect_timeout, watching.inactivity_timeout = CONNECT_TIMEOUT, 70.0
    return chosen


async def follow_jobs(settings: Settings, seen: Seen) -> None:
    """Run kopf until cancelled, and restart it whenever it exits with an error.

    An error in a watch makes kopf exit. kopf runs in a thread with its own event loop, because kopf
    cancels all newer tasks of its event loop when it exits.
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
            # The caller was cancelled before kopf had started.
            return
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
                log.warning("kopf stopped watching DDPJobs and will start again in %s s: %r", RETRY, error)
            ended.wait(RETRY)

    threading.Thread(target=thread, name="kopf", daemon=True).start()
    try:
        await loop.create_future()
    finally:
        ended.set()
        for other, stop in running:
            if not other.is_closed():
                other.call_soon_threadsafe(stop.set)
