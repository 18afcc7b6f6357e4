"""Authenticates kopf by the service account or, without one, by the kubeconfig, and limits what
kopf reads.

kopf keeps all objects of a list in memory, and each changed object for a few seconds. Users choose
how large a DDPJob and its metadata are. Therefore, kopf gets only the names and versions of jobs.
The session that kopf uses requests only metadata, in pages of limited size, and passes on only the
fields that identify an object.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import kopf

from ddpjob.api.job import PLURAL
from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.informer import PAGE_BYTES
from ddpjob.controller.kube.rest import JSON, METADATA, METADATA_LIST, loads

WATCH_PAUSE = 1.0
"""Minimum delay in seconds between the starts of two watches of the same collection. kopf itself
starts the next watch immediately, even if the last watch has just failed."""
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")


class Connection(kopf.ConnectionInfo):
    """A connection that trusts the same certificates as kubectl.

    Since Python 3.13, the default SSL context rejects certificates without key identifiers (RFC
    5280). Go accepts such certificates, and the certificate authorities of many older clusters have
    issued them.
    """

    def as_ssl_context(self) -> ssl.SSLContext:
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


async def login(*, settings: kopf.OperatorSettings, **arguments: Any) -> kopf.AiohttpSession | None:
    """Sign in for kopf, as the handler of `kopf.on.login`.

    Return None if there are no credentials.
    """
    arguments["settings"] = settings
    found = kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)
    if found is None:
        return None
    info = Connection(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        middlewares=(_Requests(),),
        response_class=_answers(settings),
    )
    return kopf.AiohttpSession(
        server=info.server,
        aiohttp_session=session,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
    )


def _is_of_jobs(response: Any) -> bool:
    return str(response.url.path).endswith(f"/{PLURAL}")


class _Requests:
    """Changes kopf's requests for jobs to ask only for metadata.

    A watch request must not ask for a list type, because the API server would then end the watch at
    the first event.
    """

    def __init__(self) -> None:
        # Maps the path of a collection to the time at which its latest watch was started.
        self._watched: dict[str, float] = {}

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if _is_of_jobs(request):
            watch, path = "watch" in request.url.query, request.url.path
            request.headers["Accept"] = f"{METADATA if watch else METADATA_LIST},{JSON}"
            if watch:
                await asyncio.sleep(self._watched.get(path, -WATCH_PAUSE) + WATCH_PAUSE - time.monotonic())
                self._watched[path] = time.monotonic()
        return await handler(request)


def _answers(settings: kopf.OperatorSettings) -> type[aiohttp.ClientResponse]:
    """Return the class of the responses that kopf's session receives.

    If a page of a list is too large, an instance of this class makes the next attempt use smaller
    pages.
    """

    class Answer(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> Any:
            answer = await super().start(connection)
            if _is_of_jobs(self) and self.status == 200:
                self.content = _Events(self.content)  # type: ignore[assignment]
            return answer

        async def json(self, **options: Any) -> Any:
            if not isinstance(self.content, _Events):
                return await super().json(**options)
            text, size = bytearray(), settings.watching.chunk_size or 1
            async for part in self.content.stream.iter_chunked(2**16):
                text += part
                if len(text) > PAGE_BYTES and size > 1:
                    settings.watching.chunk_size = max(1, size // 4)
                    self.close()
                    raise aiohttp.ClientPayloadError(
                        f"a page of {size} jobs is too large; retrying with a smaller page"
                    )
            page = loads(bytes(text))
            return {**page, "items": [_identity(item) for item in page.get("items") or ()]}

    return Answer


class _Events:
    """The stream of a watch. Its lines contain only the fields that identify an object."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield the reduced lines.

        `size` is the number of bytes for each read from the connection.
        """
        rest = bytearray()
        async for part in self.stream.iter_chunked(size):
            *lines, last = part.split(b"\n")
            for line in lines:
                if rest or line:
                    yield _event(bytes(rest) + line)
                rest.clear()
            rest += last


def _event(line: bytes) -> bytes:
    event = loads(line)
    if event["type"] != "ERROR":
        event["object"] = _identity(event["object"])
    return json.dumps(event).encode() + b"\n"


def _identity(body: Json) -> Json:
    kept: Json = {name: body[name] for name in ("apiVersion", "kind") if name in body}
    return {**kept, "metadata": {name: body["metadata"][name] for name in _IDENTITY if name in body["metadata"]}}
