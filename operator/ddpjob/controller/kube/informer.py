"""Caches Kubernetes objects. An `Informer` fills its cache by a list request, then by a watch.

kopf watches the jobs (`job_cache.py`). This module follows the objects that the operator creates
for jobs. kopf would not be suitable for these objects, because it misses deletions while its watch
is interrupted, and keeps no copies to read.

A reconcile reads the cache without asking the API server. The cache must therefore never go back in
time, must detect deletions made while no watch was open, and must survive every kind of failure.

- A list contains all objects and the version of the collection. Known objects that are not in the
  list have been deleted. The watch starts at the collection's version and continues from the last
  event's version.
- Each object has its own version, and the later of two versions is kept. The responses to the
  operator's own writes enter the cache (`take`), so the next reconcile sees the writes even if the
  watch is late. If the watch then shows an older version, its event is ignored.
- Versions are compared as numbers. With etcd, this comparison has always been valid. Kubernetes has
  guaranteed it since 1.35.

In this example, the operator's own writes to a Workload reach the cache before the watch's events:

    list             the Workload is at version 40, the collection at 52; watch from 52
    own write        the response has version 57, which the cache keeps
    own write        the response has version 59, which the cache keeps
    watch event 57   older than 59: dropped
    watch event 59   already known: no second wake-up

A watch ends after WATCH_SECONDS, and the next watch continues from the last event. If that event's
version has expired (410 Gone), everything is listed again. If a watch breaks, etcd may have been
restored from a backup. Versions have then gone backwards, so a watch from the last known version
would be silent for a long time. Therefore, the current version is checked before the next watch.
While the API server is unavailable, the known state is kept.

Three rules limit the memory. All informers together parse only one page at a time. A page larger
than PAGE_BYTES is requested again as several smaller pages. Only views of objects are kept.
See docs/decisions/0013.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Generic, TypeVar

from ddpjob.controller.kube.request_metrics import WATCH_ERRORS
from ddpjob.controller.kube.rest import JSON, METADATA, METADATA_LIST, ApiError, Json, Rest, TooLarge
from ddpjob.unavailable import Unavailable

log = logging.getLogger("ddpjob.informer")
View = TypeVar("View")
Id = tuple[str, str]
"""The namespace and the name of an object. The namespace is empty for a cluster-scoped object."""

PAGE = 500
PAGE_BYTES = 2 * 1024 * 1024
"""Maximum size in bytes of one page of a list. Converted to Python objects, a page takes up to 30
times as much memory. A larger page is requested again as several smaller pages. The smallest page
is a single object, and the API server limits the size of an object."""
WATCH_SECONDS = 300
"""Number of seconds after which the API server ends a watch. The informer then opens the next
watch."""
_SILENCE = 75.0
"""Number of seconds without an event after which a watch is considered dead. A live watch gets at
least a bookmark from the API server every minute."""
TURN_SECONDS = 0.02
"""Maximum time in seconds for which one watch may occupy the event loop when thousands of events
arrive at once. Meanwhile, all other work has to wait, including renewals of the Lease.
"""
REFUSED_SECONDS = 120.0
"""Number of seconds for which a collection that has been listed stays as it is known although the
API server refuses it. While an API server starts or is upgraded, it can answer 403 or 404 for a
moment.
"""
_RETRY = 1.0
_UNREADABLE_RETRY = 600.0
"""Number of seconds after which a forbidden or unserved optional collection is requested again."""


class Cache(Generic[View]):
    """Keeps a view of every object in a collection.

    `read` converts an object to a view, and `on_change(before, after)` is called when a view has
    changed. If `read` raises an exception for an object, or if `keep` is false for its namespace,
    the object is ignored. The operator's own writes enter the cache through `take` and `forget`.
    The next read of the cache therefore shows these writes, even if the watch is late. Of two
    versions of an object, the later one is kept.
    """

    def __init__(
        self,
        rest: Rest,
        path: str,
        read: Callable[[Json], View],
        on_change: Callable[[View | None, View | None], None],
        keep: Callable[[str], bool] = lambda namespace: True,
    ) -> None:
        self.rest, self.path, self.read, self.on_change, self.keep = rest, path, read, on_change, keep
        self.listed = asyncio.Event()
        """Set when the collection has been listed for the first time. The cache is then
        complete."""
        self.answered = asyncio.Event()
        """Set together with `listed`, or earlier if the API server refuses access to the
        collection.
        """
        self.served = False
        """Whether the collection has been listed. Reset to False if an optional collection is later
        forbidden or no longer served.
        """
        self._views: dict[Id, View] = {}
        self._versions: dict[Id, int] = {}
        self._floor = 0
        """Version of the last list. Events up to this version are already part of the list."""
        self._latest = 0
        """The latest known version of the collection."""
        self._logged_forbidden = False
        self._errors = WATCH_ERRORS.labels(path.rpartition("/")[2])

    def get(self, namespace: str, name: str) -> View | None:
        """Return the view of an object, or None if the object is not in the cache."""
        return self._views.get((namespace, name))

    def views(self) -> tuple[View, ...]:
        """Return all current views."""
        return tuple(self._views.values())

    def take(self, body: Json) -> None:
        """Put an object into the cache, unless the cache already has a later version of it."""
        self._take(body, self._floor)

    def _take(self, body: Json, floor: int) -> None:
        key, version = id_of(body), version_of(body)
        if version <= self._versions.get(key, floor) or not self.keep(key[0]):
            return
        try:
            view = self.read(body)
        # A user wrote the faulty object, so the fault must not affect other users' jobs.
        except Exception as error:
            log.warning("%s: %s/%s cannot be read and is ignored: %r", self.path, *key, error)
            self._remove(key)
            self._versions[key] = version
            return
        self._keep(key, version, view)

    def take_view(self, key: Id, version: int, view: View) -> None:
        """Put the view of an object into the cache, unless a later version is known."""
        if version > self._versions.get(key, self._floor) and self.keep(key[0]):
            self._keep(key, version, view)

    def _keep(self, key: Id, version: int, view: View) -> None:
        before = self._views.get(key)
        self._views[key], self._versions[key] = view, version
        if before != view:
            self.on_change(before, view)

    def forget(self, namespace: str, name: str) -> None:
        """Remove an object from the cache, because the response to a request has shown that it is
        gone.
        """
        self._remove((namespace, name))

    def _remove(self, key: Id) -> None:
        self._versions.pop(key, None)
        before = self._views.pop(key, None)
        if before is not None:
            self.on_change(before, None)

    # --- reading

    async def pages(self, query: Mapping[str, str], page: int, accept: str) -> AsyncIterator[Json]:
        """Request the whole collection, and yield it page by page.

        A page has `page` objects, or fewer if the objects are large.
        """
        asked, limit = dict(query), page
        while True:
            asked["limit"], most = str(limit), PAGE_BYTES if limit > 1 else None
            try:
                found = await self.rest.request("GET", self.path, query=asked, accept=accept, most=most)
            except TooLarge:
                limit = max(1, limit // 4)
                continue
            limit = min(page, 2 * limit)
            token = found["metadata"].get("continue")
            yield found
            del found
            if not token:
                return
            asked["continue"] = token

    def _note_version(self, version: int) -> None:
        """Record the collection's version, as returned by a list.

        If this version is earlier than the latest known version, the API server might have been
        restored from a backup. The versions of all cached objects are then forgotten, so that any
        version of an object from the API server replaces the cached one.
        """
        if version < self._latest:
            log.warning(
                "the version of %s went back from %s to %s; the API server may have been restored from a backup",
                self.path,
                self._latest,
                version,
            )
            self._versions, self._floor = dict.fromkeys(self._versions, 0), 0
        self._latest = version

    def _remove_but(self, found: Collection[Id], version: int) -> None:
        """Remove the objects that a list of the collection does not contain.

        `version` is the version of the list. An object whose known version is later was created
        after the list, so it stays in the cache.
        """
        for key in [k for k, known in self._versions.items() if k not in found and known <= version]:
            self._remove(key)

    def _log_forbidden(self, error: ApiError, level: int = logging.ERROR) -> None:
        if not self._logged_forbidden:
            self._logged_forbidden = True
            log.log(
                level,
                "%s cannot be watched: %s. Grant the operator get, list and watch on this resource",
                self.path,
                error,
            )


class Informer(Cache[View]):
    """A cache that follows its collection on its own, by a list and then a watch.

    If an `optional` collection is forbidden or not served, the cache is empty.
    """

    def __init__(
        self,
        rest: Rest,
        path: str,
        read: Callable[[Json], View],
        on_change: Callable[[View | None, View | None], None],
        *,
        selector: str = "",
        metadata_only: bool = False,
        page: int = PAGE,
        optional: bool = False,
        keep: Callable[[str], bool] = lambda namespace: True,
    ) -> None:
        super().__init__(rest, path, read, on_change, keep)
        self._query = {"labelSelector": selector} if selector else {}
        self._list_accept, self._accept = (METADATA_LIST, METADATA) if metadata_only else (JSON, JSON)
        self._page, self._optional = page, optional
        self._version = ""
        self._refused_at: float | None = None
        """Time of the first refusal since the last event.

        A list does not reset it, because a role may permit lists and not watches.
        """
        self._broken = False
        """Whether the last watch broke, for example because etcd was restored from a backup."""

    # --- following

    async def run(self) -> None:
        """Follow the collection until cancelled.

        While the API server is unavailable, the cache keeps the known objects and the requests are
        retried.
        """
        while True:
            pause = 0.0
            try:
                if self._broken and self._version and await self._has_gone_back():
                    self._version = ""
                if not self._version:
                    await self.list()
                self._broken = False
                began = asyncio.get_running_loop().time()
                await self._follow()
                # A proxy can end each watch at once.
                pause = max(0.0, began + _RETRY - asyncio.get_running_loop().time())
                if pause:
                    self._errors.inc()
            except Unavailable as error:
                self._broken = True
                pause = error.retry_after or _RETRY
                self._errors.inc()
                log.info("%s is not watched; next attempt in %s s: %s", self.path, pause, error)
            except ApiError as error:
                self._version = ""
                pause = _RETRY
                refused = error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
                passing = refused and self._may_pass()
                unserved = refused and self._optional and not passing
                if unserved:
                    self._nothing_there()
                if unserved and error.status == HTTPStatus.NOT_FOUND:
                    pause = _UNREADABLE_RETRY
                elif error.status == HTTPStatus.FORBIDDEN and not passing:
                    pause = self._forbidden(error)
                    self.answered.set()
                elif error.status != HTTPStatus.GONE:
                    log.warning("%s could not be read; next list in %s s: %s", self.path, pause, error)
                if error.status != HTTPStatus.GONE and pause == _RETRY:
                    # A pause other than _RETRY means that the collection is optional and cannot be
                    # read. This does not count as an error, because an administrator might have
                    # forbidden it on purpose.
                    self._errors.inc()
            except Exception as error:
                # An invalid response, such as a proxy's error page, must not end the process.
                self._version = ""
                pause = _RETRY
                self._errors.inc()
                log.warning("%s: the response is invalid; next list in %s s: %r", self.path, pause, error)
            await asyncio.sleep(pause)

    def _may_pass(self) -> bool:
        """Whether a refusal may be over soon, so that the known objects should be kept."""
        now = asyncio.get_running_loop().time()
        if self._refused_at is None:
            self._refused_at = now
        return self.served and now < self._refused_at + REFUSED_SECONDS

    def _forbidden(self, error: ApiError) -> float:
        """Log that the collection is forbidden, and return the seconds until the next attempt."""
        # An administrator may have forbidden an optional collection on purpose. If a job needs the
        # collection, the conditions of that job show that it is missing.
        self._log_forbidden(error, logging.INFO if self._optional else logging.ERROR)
        return _UNREADABLE_RETRY if self._optional else _RETRY

    def _nothing_there(self) -> None:
        """Empty the cache, because its optional collection is forbidden or not served.

        The empty cache counts as complete, so no caller waits for a list.
        """
        self.served = False
        for key in list(self._views):
            self._remove(key)
        self.listed.set()
        self.answered.set()

    async def _has_gone_back(self) -> bool:
        """Whether the API server's version is earlier than the latest version known here.

        If it is, a watch from the known version would report neither events nor an error until the
        API server reaches that version again.
        """
        query = {**self._query, "limit": "1"}
        page = await self.rest.request("GET", self.path, query=query, accept=METADATA_LIST)
        return int(page["metadata"]["resourceVersion"]) < self._latest

    async def list(self) -> None:
        """Read the whole collection page by page, and remove objects that it no longer contains.

        All informers together hold only one page in memory at a time, because no informer awaits
        anything while it holds a page.
        """
        found: set[Id] = set()
        async for page in self.pages(self._query, self._page, self._list_accept):
            version = int(page["metadata"]["resourceVersion"])
            self._note_version(version)
            # The API server may send null in place of an empty list.
            for body in page["items"] or ():
                found.add(id_of(body))
                self._take(body, -1)
                del body
            del page
        self._remove_but(found, version)
        self._floor, self._version = version, str(version)
        self._logged_forbidden = False
        self.served = True
        self.listed.set()
        self.answered.set()

    async def _follow(self) -> None:
        """Watch the collection from the last known version until the watch ends."""
        query = {
            **self._query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        turn = time.perf_counter()
        async for event in self.rest.watch(self.path, query, _SILENCE, accept=self._accept):
            if time.perf_counter() - turn > TURN_SECONDS:
                # Let other tasks run. They cannot run while this loop reads events that have
                # already arrived.
                await asyncio.sleep(0)
                turn = time.perf_counter()
            kind, body = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(
                    int(body.get("code") or 0), str(body.get("reason") or ""), str(body.get("message") or "")
                )
            self._refused_at = None
            self._version = body["metadata"]["resourceVersion"]
            self._latest = int(self._version)
            if kind == "DELETED":
                self._drop(body)
            elif kind != "BOOKMARK":
                self.take(body)
            # Free the memory of `event` and `body` now, because the next event may come much later.
            del event, body

    def _drop(self, body: Json) -> None:
        """Remove a deleted object from the cache.

        Keep the object if its version in the cache is later than the deletion.
        """
        key = id_of(body)
        if self._versions.get(key, 0) <= version_of(body):
            if key in self._views:
                # The event contains the object's last state, which may show why the object ended.
                self.take(body)
            self._remove(key)


def id_of(body: Json) -> Id:
    """Return the namespace and the name of an object."""
    meta: Mapping[str, str] = body["metadata"]
    return meta.get("namespace", ""), meta["name"]


def version_of(body: Json) -> int:
    """Return the version of an object or of a list.

    The version is a number that grows with every change on the API server. Versions in the same
    collection can be compared. This comparison has always been valid with etcd, and Kubernetes has
    guaranteed it since 1.35 (KEP-5504).
    """
    return int(body["metadata"]["resourceVersion"])
