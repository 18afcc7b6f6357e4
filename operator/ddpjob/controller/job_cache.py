"""Caches the DDPJobs that kopf watches. Reconciles read them from this cache.

kopf (`handlers.py`) reports which job has changed, and the job's new version. This module then
reads the job from the API server, so user data never passes through kopf. If the operator itself
has written the new version, the job is not read again, because the response to the write contains
it.

This module adds three things that kopf does not do:

- kopf does not report deletions that happen while its watch is interrupted. Afterwards, kopf only
  lists the jobs again, and shows the existing jobs. This module therefore lists the names of all
  jobs whenever kopf lists, and once a minute. A job that is not on this list is gone.
- kopf does not report the end of its first list. The cache is complete once kopf has shown all jobs
  in the first list of names and each of them has been read.
- After the API server is restored from a backup, kopf keeps watching from a version that the API
  server has not reached again. The version of the list of names reveals this. `restored` is then
  set, and kopf is restarted.

Example: with 300 jobs, kopf's first list shows 300 versions, all of them new. Because more than FEW
are due, the jobs are read in pages. A user then changes one job: kopf shows the job's version, a
GET reads the job, and a reconcile starts. When the operator writes the job's status, kopf shows a
version that is already known, so nothing follows.

See docs/decisions/0020.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.informer import PAGE, Cache, Id, id_of, version_of
from ddpjob.controller.kube.rest import JSON, METADATA_LIST, ApiError, Rest
from ddpjob.engine.ports import Unavailable

log = logging.getLogger("ddpjob.jobs")

JOBS_PAGE = 100
"""Number of jobs in one page of a list. The number is small because one DDPJob can be as large as
1.5 MB.
"""
FEW = 20
"""Maximum number of changed jobs that are read with one request each. If more jobs have changed,
the whole collection is listed."""
AT_A_TIME = 4
"""Maximum number of jobs that are read at the same time with one request each."""
NAMES_SECONDS = 60.0
"""Number of seconds between two lists of the names of all jobs."""
SETTLE_SECONDS = 1.0
"""Delay in seconds before the names are listed out of turn. When kopf lists the jobs, it reports many
jobs within a short time. After the delay, one list of the names is enough for all of them.
"""
RETRY = 1.0


class JobCache(Cache[DDPJob]):
    """Caches the jobs in one namespace, or in all namespaces.

    `seen` must be called for each event from kopf's watch.
    """

    def __init__(
        self,
        rest: Rest,
        collection: Callable[[str], str],
        namespace: str,
        read: Callable[[Json], DDPJob],
        on_change: Callable[[DDPJob | None, DDPJob | None], None],
        keep: Callable[[str], bool],
        restored: asyncio.Event,
    ) -> None:
        super().__init__(rest, collection(namespace), read, on_change, keep)
        self._collection, self._restored = collection, restored
        """`_restored` is set when kopf's watch is at a later version than the API server. Such a
        watch reports nothing.
        """
        self._due: dict[Id, int] = {}
        """Jobs to read, each with the version that kopf has shown."""
        self._busy: set[Id] = set()
        """Jobs that are currently being read or written."""
        self._gone: set[Id] = set()
        """Busy jobs whose deletion kopf has shown."""
        self._some_due = asyncio.Event()
        self._look = asyncio.Event()
        """Set when the names of all jobs should be listed before the regular time."""
        self._awaited: set[Id] | None = None
        """Names from the first list whose jobs have not been read yet; None before the first list.
        """

    def seen(self, event: str | None, body: Json) -> None:
        """Process an event from kopf's watch.

        `event` is ADDED, MODIFIED or DELETED, or None if kopf has found the job in a list.
        """
        key, version = id_of(body), version_of(body)
        self._latest = max(self._latest, version)
        if event is None:
            self._look.set()
        if not self.keep(key[0]):
            return
        if event == "DELETED":
            if self._versions.get(key, 0) <= version:
                self.forget(*key)
            if key in self._busy:
                self._gone.add(key)
        elif version > self._versions.get(key, 0):
            self._due[key] = version
            self._some_due.set()

    def take(self, body: Json) -> None:
        """Put a job from a response into the cache, unless the cache has a later version of it."""
        super().take(body)
        if version_of(body) < self._versions.get(id_of(body), 0):
            # The version in the response is earlier than the version in the cache. Either the
            # response is stale, or etcd was restored from a backup.
            self._look.set()

    @contextlib.contextmanager
    def writing(self, key: Id) -> Iterator[None]:
        """Keep a job from being read while the operator writes it.

        kopf can show the job's new version before the response to the write arrives. Reading the
        job again would then be useless, because the response contains it.
        """
        self._busy.add(key)
        try:
            yield
        finally:
            self._busy.discard(key)
            self._some_due.set()
            if key in self._gone:
                # The response may have arrived after the deletion, and put the job back.
                self._gone.discard(key)
                self._look.set()

    async def run(self) -> None:
        """Keep the cache up to date until cancelled.

        While the API server is unavailable, the cache keeps the known jobs and the requests are
        retried.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(self._repeat(self._read_next))
            group.create_task(self._repeat(self._look_for_deleted))

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            pause = RETRY
            try:
                await step()
                continue
            except Unavailable as error:
                pause = error.retry_after or RETRY
                log.info("%s cannot be read; next attempt in %s s: %s", self.path, pause, error)
            except ApiError as error:
                if error.status == HTTPStatus.FORBIDDEN:
                    self._log_forbidden(error)
                    self.answered.set()
                else:
                    log.warning("%s could not be read; next attempt in %s s: %s", self.path, pause, error)
            except Exception as error:
                # An invalid response, such as a proxy's error page, must not end the process.
                log.warning("%s: the response is invalid; next attempt in %s s: %r", self.path, pause, error)
            self._errors.inc()
            await asyncio.sleep(pause)

    # --- what kopf has shown

    async def _read_next(self) -> None:
        """Wait until a job has to be read, and read it.

        If many jobs have to be read, list all of them.
        """
        await self._some_due.wait()
        self._due = {key: version for key, version in self._due.items() if self._versions.get(key, 0) < version}
        waiting = [key for key in self._due if key not in self._busy]
        if not waiting:
            self._some_due.clear()
            return
        chosen = waiting if len(waiting) > FEW else waiting[:1]
        self._busy.update(chosen)
        try:
            await (self._read_all() if len(chosen) > 1 else self._read(*chosen))
        finally:
            self._busy.difference_update(chosen)
            self._gone.difference_update(chosen)
            # A job that could not be read moves to the end of the queue.
            for key in chosen:
                if key in self._due:
                    self._due[key] = self._due.pop(key)
            self._some_due.set()

    async def _read(self, key: Id) -> None:
        version = self._due[key]
        try:
            body = await self.rest.request("GET", f"{self._collection(key[0])}/{key[1]}")
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            # If kopf has shown a later version, the job was deleted and created again.
            if self._due.get(key) == version:
                self.forget(*key)
            return
        # If the job is no longer due, kopf has shown the job's deletion during the request.
        if key in self._due:
            self.take(body)
        if self._due.get(key) == version:
            del self._due[key]
        self._arrived(key)

    async def _read_all(self) -> None:
        due, found = dict(self._due), set[Id]()
        async for page in self.pages({}, JOBS_PAGE, JSON):
            version = version_of(page)
            for body in page["items"] or ():
                key = id_of(body)
                found.add(key)
                if key in self._due:
                    self.take(body)
                    self._arrived(key)
                del body
            del page
        self._remove_but(found, version)
        for key, shown in due.items():
            if shown <= version and self._due.get(key) == shown:
                del self._due[key]
                self._arrived(key)

    def _arrived(self, key: Id) -> None:
        """Record that a job from the first list of names has been read or is gone."""
        if self._awaited is not None:
            self._awaited.discard(key)
            self._complete()

    # --- what kopf does not show

    async def _look_for_deleted(self) -> None:
        # Events and writes during the list may show later versions than the list has.
        names, known = set[Id](), self._latest
        async for page in self.pages({}, PAGE, METADATA_LIST):
            version = version_of(page)
            names.update(id_of(body) for body in page["items"] or () if self.keep(id_of(body)[0]))
        if version < known:
            self._restored.set()
            self._note_version(version)
        self._latest = max(self._latest, version)
        self._remove_but(names, version)
        self.served, self._logged_forbidden = True, False
        if self._awaited is None:
            self._awaited = names - self._versions.keys()
        else:
            self._awaited &= names
        self._complete()
        self._look.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NAMES_SECONDS):
                await self._look.wait()
                await asyncio.sleep(SETTLE_SECONDS)

    def _complete(self) -> None:
        if self._awaited == set():
            self.listed.set()
            self.answered.set()

    def _remove(self, key: Id) -> None:
        super()._remove(key)
        self._due.pop(key, None)
        self._arrived(key)
