"""Watches Kubernetes nodes, and tells of those whose readiness, out-of-service taint or existence has changed.

Not by kopf: its handlers are not told of nodes that were deleted while a watch was interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType

from ddpjob.api.types import Json
from ddpjob.controller.handlers import SERVER_TIMEOUT
from ddpjob.controller.rest import ApiError, Rest
from ddpjob.core.hosts import HostView
from ddpjob.engine.ports import Unavailable

log = logging.getLogger("ddpjob.hosts")

Hosts = Mapping[str, HostView]
Told = Callable[[Hosts | None, frozenset[str]], None]

_NODES = "/api/v1/nodes"
_PAGE = "500"
_SILENCE = 75.0
"""Seconds. The API server sends a bookmark each minute."""
_RETRY = 1.0
_FORBIDDEN_RETRY = 600.0
"""Seconds until the API server is asked again whether nodes may be read."""


class HostWatch:
    """Keeps what `HostView` holds of every node, and calls `told(hosts, changed)` when some of it changes.

    Nodes' heartbeats change nothing of it. `hosts` None: they are not known (yet), or may not be read.
    """

    def __init__(self, rest: Rest, told: Told) -> None:
        self.rest, self.told = rest, told
        self._hosts: Hosts | None = None
        self._version = ""
        self._said_forbidden = False

    async def run(self) -> None:
        """For ever. An API server that is away is asked again; what is known stays."""
        while True:
            pause = 0.0
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except Unavailable as away:
                pause = away.retry_after or _RETRY
                log.info("nodes are not watched for %s s: %s", pause, away)
            except ApiError as error:
                self._version = ""
                pause = _RETRY
                if error.status == HTTPStatus.FORBIDDEN:
                    self._forget(error)
                    pause = _FORBIDDEN_RETRY
                elif error.status != HTTPStatus.GONE:
                    log.warning("nodes are listed again in %s s: %s", pause, error)
            await asyncio.sleep(pause)

    def _forget(self, error: ApiError) -> None:
        if not self._said_forbidden:
            self._said_forbidden = True
            log.warning(
                "nodes are not watched, so a lost one is known by its pods' silence alone: %s. "
                "To change that, give the operator get, list and watch of nodes by a ClusterRole",
                error,
            )
        if self._hosts is not None:
            self._hosts = None
            self.told(None, frozenset())

    async def _list(self) -> None:
        """All nodes, in pages: what is not among them is deleted."""
        found: dict[str, HostView] = {}
        query = {"limit": _PAGE}
        while True:
            page = await self.rest.request("GET", _NODES, query=query)
            for body in page["items"]:
                host = HostView.read(body)
                found[host.name] = host
            token = page["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        self._version = page["metadata"]["resourceVersion"]
        known = self._hosts or {}
        changed = frozenset(n for n in known.keys() | found.keys() if known.get(n) != found.get(n))
        if changed or self._hosts is None:
            self._tell(found, changed)

    async def _follow(self) -> None:
        """One watch, from the version that was seen last to its end."""
        query = {"resourceVersion": self._version, "allowWatchBookmarks": "true", "timeoutSeconds": str(SERVER_TIMEOUT)}
        async for event in self.rest.watch(_NODES, query, _SILENCE):
            kind, body = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(int(body.get("code") or 0), str(body.get("reason") or ""), str(body.get("message") or ""))
            self._version = body["metadata"]["resourceVersion"]
            if kind != "BOOKMARK":
                self._take(body, deleted=kind == "DELETED")

    def _take(self, body: Json, *, deleted: bool) -> None:
        host = HostView.read(body)
        known = dict(self._hosts or {})
        if deleted:
            known.pop(host.name, None)
        elif known.get(host.name) == host:
            return
        else:
            known[host.name] = host
        self._tell(known, frozenset({host.name}))

    def _tell(self, hosts: dict[str, HostView], changed: frozenset[str]) -> None:
        """With a mapping that stays as it is: a pass that has it sees one moment."""
        self._hosts = MappingProxyType(hosts)
        self.told(self._hosts, changed)
