"""A small Kubernetes API server over HTTP.

It has paged lists, watches with bookmarks, versions and preconditions, and faults on demand.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from ddpjob.api.job import GROUP, KIND, PLURAL, VERSION
from ddpjob.api.schema import schema_of
from ddpjob.controller.kube.rest import METADATA_LIST
from simulation.store import Backup, Json, Refusal, Store

KINDS = {
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "networkpolicies": "NetworkPolicy",
    "nodes": "Node",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "podgroups": "PodGroup",
    "podgroups.scheduling.volcano.sh": "PodGroup.scheduling.volcano.sh",
    "workloads": "Workload",
    "resourceflavors": "ResourceFlavor",
    "workloadpriorityclasses": "WorkloadPriorityClass",
    "priorityclasses": "PriorityClass",
    "leases": "Lease",
    "events": "Event",
    PLURAL: KIND,
}
CLUSTERED = {"nodes", "resourceflavors", "workloadpriorityclasses", "priorityclasses"}
DISCOVERY = {
    "/api/v1": {
        "pods": "Pod",
        "services": "Service",
        "configmaps": "ConfigMap",
        "nodes": "Node",
        "namespaces": "Namespace",
    },
    f"/apis/{GROUP}/{VERSION}": {PLURAL: KIND},
    "/apis/apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
}
INDEX = "/openapi/v3"
BOOKMARK_SECONDS = 60.0


@dataclass
class Fault:
    """How a request fails.

    `how` is a status (with `headers`) or a name. `reset` breaks the connection before the request
    is executed, `reset-after` afterwards. `hang` neither executes nor answers the request,
    `hang-after` executes it but never answers. `slow` executes and answers it after `seconds`;
    `late` executes it immediately and answers after `seconds`. `page` answers with a different
    server's HTML page and does not execute the request; `empty` answers with an empty body.
    """

    how: int | str
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "the fault of a test"
    reason: str = "InternalError"
    seconds: float = 0.0


Faults = Callable[[str, str], "Fault | None"]
"""Maps (method, path) to the fault of the request. None means no fault."""


class ApiServer:
    """Serves a store. `faults` chooses the fault of each request; `requests` records all requests
    as (method, path, query).
    """

    def __init__(self, store: Store, history: int = 1000) -> None:
        self.store, self.kept = store, history
        self.faults: Faults = lambda method, path: None
        self.gone_as_event = False
        """Whether a watch from an expired version gets the error in its stream, instead of as its
        HTTP status.
        """
        self.drop_events: Callable[[str, Json], bool] = lambda kind, body: False
        """Events that no watch receives. A client must survive such gaps."""
        self.status_schema: Json | None = schema_of("status")
        """The CRD in the cluster. None means that it is not installed."""
        self.serves_gangs = False
        """Whether the server has PodGroups of Kubernetes and Volcano. Most clusters do not serve
        them.
        """
        self.serves_queues = False
        """Whether the server has Kueue's Workloads."""
        self.is_published = True
        """Whether the index of the published schemas lists the CRD."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.acted: list[tuple[str, str]] = []
        """Writes that took place, whether or not the client got a response."""
        self.events: list[Json] = []
        self.read_whole: set[tuple[str, str]] = set()
        """Method and kind of requests whose responses had whole objects."""
        self.url = ""
        self.watching = 0
        self._oldest = store.version
        self._errors, self._error = 0, b""
        self._history: list[tuple[int, str, str, bytes, Json]] = []
        self._news = asyncio.Event()
        self._pages: dict[str, tuple[list[Json], int]] = {}
        self._watches: set[web.StreamResponse] = set()
        store.watchers.append(self._remember)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[ApiServer]:
        """Listen on a free loopback port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, keepalive_timeout=3600)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def compact(self) -> None:
        """Expire watches from versions before the current one, as etcd does."""
        self._history.clear()
        self._oldest = self.store.version

    def restore(self, backup: Backup) -> None:
        """Restore the objects as from a backup of etcd. Versions go back, and a watch that started
        at a later version receives nothing.
        """
        self.store.restore(backup)
        self._history.clear()
        self._oldest = self.store.version
        self.break_watches()

    def break_watches(self) -> None:
        """Close every watch's connection."""
        for response in list(self._watches):
            transport = response._req.transport if response._req is not None else None
            if transport is not None:
                transport.abort()

    def send_error(self, code: int, reason: str) -> None:
        """Send an error event to every watch."""
        self._errors += 1
        status = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "", "metadata": {}}
        self._error = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        self._news.set()
        self._news = asyncio.Event()

    def _openapi(self, path: str) -> Json:
        """Return the index of the published schemas, or the schema of DDPJobs."""
        if path == INDEX:
            digest = hashlib.sha256(json.dumps(self.status_schema).encode()).hexdigest()
            known = {"apis/ddpjob.io/v1alpha1": {"serverRelativeURL": f"{INDEX}/apis/ddpjob.io/v1alpha1?hash={digest}"}}
            return {"paths": known if self.is_published and self.status_schema is not None else {}}
        status = {"properties": {"status": self.status_schema}}
        return {"components": {"schemas": {"io.ddpjob.v1alpha1.DDPJob": status}}}

    def _remember(self, kind: str, what: str, body: Json) -> None:
        if not self.drop_events(kind, body):
            line = json.dumps({"type": what, "object": body}).encode() + b"\n"
            self._history.append(
                (self.store.version, kind, body["metadata"]["namespace"], line, body["metadata"].get("labels", {}))
            )
        if len(self._history) > self.kept:
            self._oldest = self._history[0][0]
            del self._history[0]
        self._news.set()
        self._news = asyncio.Event()

    # ---- one request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append((request.method, request.path, query))
        fault = self.faults(request.method, request.path)
        if fault is None:
            return await self._answer(request, query)
        if isinstance(fault.how, int):
            return _status(fault.how, fault.reason, fault.message, fault.headers)
        if fault.how == "slow":
            await asyncio.sleep(fault.seconds)
            return await self._answer(request, query)
        if fault.how == "late":
            answer = await self._answer(request, query)
            await asyncio.sleep(fault.seconds)
            return answer
        if fault.how == "page":
            return web.Response(text="<html>Please sign in</html>", content_type="text/html")
        if fault.how == "empty":
            return web.Response()
        if fault.how.endswith("-after"):
            await self._answer(request, query)
        if fault.how.startswith("hang"):
            await asyncio.sleep(3600)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _answer(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        try:
            return await self._route(request, query)
        except Refusal as refusal:
            return _status(refusal.status, refusal.reason, refusal.message)

    async def _route(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        path = request.path
        if path.startswith(INDEX):
            return web.json_response(self._openapi(path))
        discovered = _discover(path)
        if path == f"/apis/{GROUP}/{VERSION}" and self.status_schema is None:
            return _status(404, "NotFound", "404 page not found")
        if discovered is not None:
            return web.json_response(discovered)
        match = re.fullmatch(
            r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(?:/(status))?", path
        )
        unserved = {"podgroups": not self.serves_gangs, "workloads": not self.serves_queues}
        if match is None or match[2] not in KINDS or unserved.get(match[2]):
            if path.endswith(("customresourcedefinitions", "/namespaces")):
                return await self._watch(request, "", "-", query) if "watch" in query else _list([], self.store.version)
            return _status(404, "NotFound", f"the server could not find the requested resource {path}")
        namespace, plural, name, part = match.groups()
        kind = KINDS.get(f"{plural}.{path.split('/')[2]}") or KINDS[plural]
        if not _metadata_only(request):
            self.read_whole.add((request.method, kind))
        if request.method == "GET" and name is None:
            if query.get("watch") in ("1", "true"):
                return await self._watch(request, kind, namespace, query)
            return self._list(kind, namespace, query, _metadata_only(request))
        body = await request.json() if request.can_read_body else {}
        if match[2] in CLUSTERED:
            namespace = ""
        if request.method != "GET":
            self.acted.append((request.method, path))
        answer = self._act(request.method, kind, namespace or "", name, part, body)
        return web.json_response(_partial(answer) if _metadata_only(request) else answer)

    def _act(self, method: str, kind: str, namespace: str, name: str | None, part: str | None, body: Json) -> Json:
        store = self.store
        if name is None:
            if kind == "Event":
                named = body["metadata"]["name"]
                if any(event["metadata"]["name"] == named for event in self.events):
                    raise Refusal(409, "AlreadyExists", f'events "{named}" already exists')
                self.events.append(body)
                return body
            return store.create(kind, body, namespace)
        if method == "GET":
            return store.get(kind, name, namespace)
        if method == "PUT" and part == "status":
            return store.replace_status(kind, name, body, namespace)
        if method == "PUT":
            return store.replace(kind, name, body, namespace)
        if method == "PATCH":
            meta = body["metadata"]
            if "ownerReferences" in meta:
                return store.own(kind, name, meta.get("uid"), meta["ownerReferences"], namespace)
            return store.label(kind, name, meta.get("uid"), meta["labels"], namespace)
        uid = body.get("preconditions", {}).get("uid")
        return store.delete(kind, name, uid, body.get("gracePeriodSeconds"), namespace)

    # ---- lists and watches

    def _list(self, kind: str, namespace: str | None, query: dict[str, str], metadata_only: bool) -> web.Response:
        token = query.get("continue")
        if token is not None:
            if token not in self._pages:
                raise Refusal(410, "Expired", "The provided continue parameter is too old")
            items, version = self._pages[token]  # the client may ask for smaller pages from here on
        else:
            selected = _selector(query.get("labelSelector", ""))
            items = [
                body
                for body in self.store.all(kind)
                if namespace in (None, body["metadata"]["namespace"]) and selected(body["metadata"].get("labels", {}))
            ]
            version = self.store.version
            if metadata_only:
                items = [_partial(body) for body in items]
            if "limit" in query:
                items = json.loads(json.dumps(items))  # all pages are from the same snapshot
        limit = int(query.get("limit", "0")) or len(items)
        rest = items[limit:]
        if not rest:
            # Like the real server: an empty metadata list has null instead of items.
            return _list(items or None if metadata_only else items, version)
        token = f"page-{len(self.requests)}"
        self._pages[token] = rest, version
        return _list(items[:limit], version, token)

    async def _watch(
        self, request: web.Request, kind: str, namespace: str | None, query: dict[str, str]
    ) -> web.StreamResponse:
        loop, metadata_only = asyncio.get_running_loop(), _metadata_only(request)
        sent = int(query.get("resourceVersion") or self.store.version)
        expired = sent < self._oldest
        if expired and not self.gone_as_event:
            raise Refusal(410, "Expired", f"too old resource version: {sent} ({self._oldest})")
        response = web.StreamResponse()
        await response.prepare(request)
        self._watches.add(response)
        selected = _selector(query.get("labelSelector", ""))
        ends = loop.time() + float(query.get("timeoutSeconds") or 1800)
        bookmark = loop.time() + BOOKMARK_SECONDS
        self.watching += 1
        errors = self._errors
        try:
            if expired:
                error = {
                    "kind": "Status",
                    "status": "Failure",
                    "code": 410,
                    "reason": "Expired",
                    "message": "too old",
                    "metadata": {},
                }
                await response.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
                return response
            while loop.time() < ends:
                news = self._news
                if self._errors > errors:
                    await response.write(self._error)
                    return response
                for version, of_kind, where, line, labels in list(self._history):
                    if version > sent and of_kind == kind and namespace in (None, where) and selected(labels):
                        if request.headers.get("Accept", "").partition(",")[0] == METADATA_LIST:
                            return response  # an event cannot be written because it is a list, so the stream ends
                        await response.write(_partial_event(line) if metadata_only else line)
                sent = max(sent, self.store.version)
                if loop.time() >= bookmark:
                    bookmark = loop.time() + BOOKMARK_SECONDS
                    if sent > self.store.version or not query.get("allowWatchBookmarks"):
                        continue
                    mark = {"type": "BOOKMARK", "object": {"kind": kind, "metadata": {"resourceVersion": str(sent)}}}
                    await response.write(json.dumps(mark).encode() + b"\n")
                try:
                    async with asyncio.timeout_at(min(ends, bookmark)):
                        await news.wait()
                except TimeoutError:
                    continue
        except ConnectionError:
            pass  # the client has gone
        finally:
            self.watching -= 1
            self._watches.discard(response)
        return response


class RandomFaults:
    """Injects random faults of all kinds, determined by a seed. Requests whose path contains an
    entry of `spare` have no faults.
    """

    def __init__(self, chance: random.Random, rate: float, spare: tuple[str, ...] = ()) -> None:
        self.random, self.rate, self.spare = chance, rate, spare
        self.struck: list[tuple[str, str, int | str]] = []

    def __call__(self, method: str, path: str) -> Fault | None:
        if self.random.random() >= self.rate or any(part in path for part in self.spare):
            return None
        kinds: list[Fault] = [
            Fault(500),
            Fault(503, reason="ServiceUnavailable"),
            Fault(429, {"Retry-After": "1"}, reason="TooManyRequests"),
            Fault("reset"),
            Fault("reset-after"),
            Fault("hang"),
            Fault("hang-after"),
            Fault("page"),
            Fault("slow", seconds=self.random.uniform(0.1, 12)),
        ]
        if method == "PUT":
            kinds.append(Fault(409, reason="Conflict"))
        fault = self.random.choice(kinds)
        self.struck.append((method, path, fault.how))
        return fault


def _discover(path: str) -> Json | None:
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        groups = [p.split("/")[2:] for p in DISCOVERY if p.startswith("/apis/")]
        return {
            "groups": [
                {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
                for group, version in groups
            ]
        }
    if path in DISCOVERY:
        verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
        resources = [
            {
                "name": plural,
                "kind": kind,
                "singularName": kind.lower(),
                "verbs": verbs,
                "namespaced": plural not in ("nodes", "namespaces", "customresourcedefinitions"),
            }
            for plural, kind in DISCOVERY[path].items()
        ]
        return {"resources": resources}
    return None


def _selector(text: str) -> Callable[[Json], bool]:
    """Return a predicate for a label selector with `a=b` and `a in (b,c)`."""
    wanted: dict[str, set[str]] = {}
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", text):
        name, _, value = part.strip(", ").partition("=")
        if " in " in name:
            name, _, value = name.partition(" in ")
        if name:
            wanted[name.strip()] = {v.strip() for v in value.strip("() ").split(",")}
    return lambda labels: all(labels.get(name) in values for name, values in wanted.items())


def _metadata_only(request: web.Request) -> bool:
    return "as=PartialObjectMetadata" in request.headers.get("Accept", "")


def _partial(body: Json) -> Json:
    return {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": body["metadata"]}


def _partial_event(line: bytes) -> bytes:
    event = json.loads(line)
    return json.dumps({**event, "object": _partial(event["object"])}).encode() + b"\n"


def _list(items: list[Json] | None, version: int, token: str = "") -> web.Response:
    meta = {"resourceVersion": str(version), **({"continue": token} if token else {})}
    return web.json_response({"kind": "List", "metadata": meta, "items": items})


def _status(status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body: dict[str, Any] = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
    return web.json_response(body, status=status, headers=headers)
