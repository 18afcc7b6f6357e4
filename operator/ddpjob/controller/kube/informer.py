"""Caches of API server collections. `Informer` is a cache that lists and watches its collection.

kopf watches the jobs (`job_cache.py`). The objects that the operator makes for them are followed
here, because kopf does not report deletions that happen while its watch is interrupted, and does
not keep a copy of the objects for reading.

A reconcile reads the cache without asking the API server. The cache must therefore never go back in
time, must detect deletions made while no watch was open, and must survive every kind of failure.

- A list gives all objects and the version of the collection. Known objects that are not in the list
  have been deleted. The watch starts at that version and continues from the last event's version.
- Each object has its own version, and the later of two versions is kept. The operator's own
  writes enter the cache with their responses (`take`), so the next reconcile sees them even
  if the watch is late; the watch's older event is then ignored.
- Versions are compared as numbers. Kubernetes has guaranteed since 1.35 that they can be, and with
  etcd they always could.

Example of the operator's own writes to a Workload reaching the cache before the watch's events:

    list             the Workload is at version 40, the collection at 52; watch from 52
    own write        the response has version 57, which the cache keeps
    own write        the response has version 59, which the cache keeps
    watch event 57   older than 59: dropped
    watch event 59   already known: no second wake-up

A watch ends after WATCH_SECONDS, and the next watch continues from the last event. If that event's
version has expired (410 Gone), everything is listed again. If a watch breaks, etcd may have been
restored from a backup. Versions have then gone backwards, and a watch from the last known version
would be silent for a long time. The current version is therefore checked before the next watch.
While the API server is unavailable, the known state is kept.

Memory is bounded: all informers together parse one page at a time, a page larger than PAGE_BYTES is
requested again as smaller pages, and only views of objects are kept.

Why: docs/decisions/0013.
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
"""Namespace (empty for cluster-scoped objects) and name."""

PAGE = 500
PAGE_BYTES = 2 * 1024 * 1024
"""Maximum size of one page of a list in bytes. As Python objects, a page may take up 30 times as
much memory. A larger page is requested again as smaller pages, down to one object, whose size the
API server limits."""
WATCH_SECONDS = 300
"""Duration of a watch in seconds. The API server then ends the watch, and the next one follows."""
_SILENCE = 75.0
"""How long a watch may go without an event, in seconds, before it counts as dead. The API server
sends a bookmark every minute."""
TURN_SECONDS = 0.02
"""Maximum time in seconds for which one watch may block everything else, including the Lease, when
thousands of events arrive at once."""
_RETRY = 1.0
_UNREADABLE_RETRY = 600.0
"""Seconds between attempts to read an optional collection that is forbidden or not served."""


class Cache(Generic[View]):
    """A view of every object in a collection.

    The cache calls `on_change(before, after)` when a view has changed. `read` creates a view. An
    object is ignored if `read` raises an exception for it, or if `keep` is false for its namespace.
    The operator's own writes enter the cache through `take` and `forget`, so the next read shows
    them even if the watch is late. The later of two versions of an object is kept.
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
        """Set once the cache is complete, that is, once a list of the collection has been read."""
        self.answered = asyncio.Event()
        """Set when `listed` is set, or when the API server has refused access to the collection."""
        self.served = False
        """Whether the collection has been listed. False again if an optional collection is later
        forbidden or no longer served."""
        self._views: dict[Id, View] = {}
        self._versions: dict[Id, int] = {}
        self._floor = 0
        """Version of the last list. Older events are already known."""
        self._latest = 0
        """The latest known version of the collection."""
        self._logged_forbidden = False
        self._errors = WATCH_ERRORS.labels(path.rpartition("/")[2])

    def get(self, namespace: str, name: str) -> View | None:
        """Return the view of an object; None if there is none."""
        return self._views.get((namespace, name))

    def views(self) -> tuple[View, ...]:
        """Return all current views."""
        return tuple(self._views.values())

    def take(self, body: Json) -> None:
        """Store an object at its version, unless a later version is known."""
        self._take(body, self._floor)

    def _take(self, body: Json, floor: int) -> None:
        key, version = id_of(body), version_of(body)
        if version <= self._versions.get(key, floor) or not self.keep(key[0]):
            return
        try:
            view = self.read(body)
        except Exception as error:  # A user wrote the object, so the fault affects only that user's job.
            log.warning("%s: %s/%s cannot be read and is ignored: %r", self.path, *key, error)
            self._remove(key)
            self._versions[key] = version
            return
        self._keep(key, version, view)

    def take_view(self, key: Id, version: int, view: View) -> None:
        """Store the view of an object at its version, unless a later version is known."""
        if version > self._versions.get(key, self._floor) and self.keep(key[0]):
            self._keep(key, version, view)

    def _keep(self, key: Id, version: int, view: View) -> None:
        before = self._views.get(key)
        self._views[key], self._versions[key] = view, version
        if before != view:
            self.on_change(before, view)

    def forget(self, namespace: str, name: str) -> None:
        """Remove an object, because the response to a request has shown that it is gone."""
        self._remove((namespace, name))

    def _remove(self, key: Id) -> None:
        self._versions.pop(key, None)
        before = self._views.pop(key, None)
        if before is not None:
            self.on_change(before, None)

    # --- reading

    async def pages(self, query: Mapping[str, str], page: int, accept: str) -> AsyncIterator[Json]:
        """Yield the current collection in pages of `page` objects, or fewer if they are large."""
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
        """Record the version of a list.

        If it is earlier than the latest known version, the API server may have been restored from a
        backup. All known views then count as older than any object that the API server returns.
        """
        if version < self._latest:
            log.warning(
                "%s went back to version %s from %s; it may have been restored from a backup",
                self.path,
                version,
                self._latest,
            )
            self._versions, self._floor = dict.fromkeys(self._versions, 0), 0
        self._latest = version

    def _remove_but(self, found: Collection[Id], version: int) -> None:
        """Remove objects that are missing from a list at `version`.

        Keep an object that is known at a later version.
        """
        for key in [k for k, known in self._versions.items() if k not in found and known <= version]:
            self._remove(key)

    def _log_forbidden(self, error: ApiError, level: int = logging.ERROR) -> None:
        if not self._logged_forbidden:
            self._logged_forbidden = True
            log.log(level, "%s cannot be watched: %s. Grant the operator get, list and watch on it", self.path, error)


class Informer(Cache[View]):
    """A cache that follows its collection itself, using a list and a watch.

    The cache of an `optional` collection is empty if the collection is forbidden or not served.
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
        self._broken = False
        """Whether the last watch broke, perhaps because etcd was restored from a backup."""

    # --- following

    async def run(self) -> None:
        """Run until cancelled.

        While the API server is unavailable, keep the known state and retry.
        """
        while True:
            pause = 0.0
            try:
                if self._broken and self._version and await self._has_gone_back():
                    self._version = ""
                if not self._version:
                    await self.list()
                self._broken = False
                await self._follow()
            except Unavailable as error:
                self._broken = True
                pause = error.retry_after or _RETRY
                self._errors.inc()
                log.info("%s is not watched; next attempt in %s s: %s", self.path, pause, error)
            except ApiError as error:
                self._version = ""
                pause = _RETRY
                unserved = self._optional and error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
                if unserved:
                    self._nothing_there()
                if unserved and error.status == HTTPStatus.NOT_FOUND:
                    pause = _UNREADABLE_RETRY
                elif error.status == HTTPStatus.FORBIDDEN:
                    pause = self._forbidden(error)
                    self.answered.set()
                elif error.status != HTTPStatus.GONE:
                    log.warning("%s will be listed again in %s s: %s", self.path, pause, error)
                if error.status != HTTPStatus.GONE and pause == _RETRY:
                    # An optional collection may be forbidden on purpose. It is therefore retried
                    # much later and not counted as an error.
                    self._errors.inc()
            except Exception as error:
                # An invalid response, such as a proxy's error page, must not end the process.
                self._version = ""
                pause = _RETRY
                self._errors.inc()
                log.warning("%s will be listed again in %s s: the response is invalid: %r", self.path, pause, error)
            await asyncio.sleep(pause)

    def _forbidden(self, error: ApiError) -> float:
        """Log the refusal, and return the seconds until the next attempt."""
        # An optional collection may be forbidden on purpose. If a job needs the collection, its
        # conditions show that it is missing.
        self._log_forbidden(error, logging.INFO if self._optional else logging.ERROR)
        return _UNREADABLE_RETRY if self._optional else _RETRY

    def _nothing_there(self) -> None:
        """Empty the cache of an optional collection that is forbidden or not served.

        The empty cache counts as complete, so nothing waits for a list.
        """
        self.served = False
        for key in list(self._views):
            self._remove(key)
        self.listed.set()
        self.answered.set()

    async def _has_gone_back(self) -> bool:
        """Whether the API server is at an earlier version than the latest known one.

        A watch from the known version would be silent, without an error, until the API server
        reached that version again.
        """
        query = {**self._query, "limit": "1"}
        page = await self.rest.request("GET", self.path, query=query, accept=METADATA_LIST)
        return int(page["metadata"]["resourceVersion"]) < self._latest

    async def list(self) -> None:
        """List the collection in pages, and remove objects that are not in the list.

        All informers together hold only one page in memory at a time, because nothing is awaited
        while a page is in memory.
        """
        found: set[Id] = set()
        async for page in self.pages(self._query, self._page, self._list_accept):
            version = int(page["metadata"]["resourceVersion"])
            self._note_version(version)
            for body in page["items"] or ():  # The API server may send null instead of an empty list.
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
        """Follow one watch from the latest known version until it ends."""
        query = {
            **self._query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        turn = time.perf_counter()
        async for event in self.rest.watch(self.path, query, _SILENCE, accept=self._accept):
            if time.perf_counter() - turn > TURN_SECONDS:
                # Let other tasks run, because reading events that have already arrived does not.
                await asyncio.sleep(0)
                turn = time.perf_counter()
            kind, body = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(
                    int(body.get("code") or 0), str(body.get("reason") or ""), str(body.get("message") or "")
                )
            self._version = body["metadata"]["resourceVersion"]
            self._latest = int(self._version)
            if kind == "DELETED":
                self._drop(body)
            elif kind != "BOOKMARK":
                self.take(body)
            del event, body  # Free them, because the next event may come much later.

    def _drop(self, body: Json) -> None:
        """Remove a deleted object, unless it is known at a later version than in this event."""
        key = id_of(body)
        if self._versions.get(key, 0) <= version_of(body):
            if key in self._views:
                self.take(body)  # The object's last state may show why it ended.
            self._remove(key)


def id_of(body: Json) -> Id:
    """Return the namespace and name of an object."""
    meta: Mapping[str, str] = body["metadata"]
    return meta.get("namespace", ""), meta["name"]


def version_of(body: Json) -> int:
    """Return the object's version, a number that grows with every change on the API server.

    Versions within one collection can be compared. Kubernetes has guaranteed this since 1.35
    (KEP-5504), and etcd always has.
    """
    return int(body["metadata"]["resourceVersion"])
