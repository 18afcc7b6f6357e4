"""JSON over the official asyncio client: its transport, authentication and retries, without the models' cost per object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from ddpjob.api.types import Json
from ddpjob.engine.ports import Unavailable

REQUEST_SECONDS = 30
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
_TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class ApiError(Exception):
    """An answer of 4xx, with the server's message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class Rest:
    """Requests to one API server."""

    def __init__(self, api: client.ApiClient) -> None:
        self.api = api

    @classmethod
    async def connect(cls, connections: int = 64) -> Rest:
        """By the service account inside a cluster, else by the kubeconfig of the environment."""
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await config.load_kube_config()
        settings = client.Configuration.get_default_copy()
        settings.connection_pool_maxsize = connections
        settings.disable_strict_ssl_verification = True  # As in ddpjob.controller.login.
        return cls(client.ApiClient(configuration=settings))

    async def close(self) -> None:
        await self.api.close()

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None, content_type: str = JSON
    ) -> Json:
        """The JSON answer. Raises ApiError for 4xx, Unavailable for 429, 5xx and a connection that fails."""
        try:
            response = await self._send(method, path, query or {}, body, content_type, aiohttp.ClientTimeout(total=REQUEST_SECONDS))
            text = await response.read()
        except _TRANSPORT_ERRORS as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        _raise_for_status(response, text, f"{method} {path}")
        return _parse(text)

    async def watch(self, path: str, query: Mapping[str, str], silence: float) -> AsyncIterator[Json]:
        """The events of a watch, until the server ends it.

        Raises as `request` does, and Unavailable after `silence` seconds of nothing.
        """
        limits = aiohttp.ClientTimeout(total=None, connect=REQUEST_SECONDS, sock_read=silence)
        try:
            response = await self._send("GET", path, {**query, "watch": "1"}, None, JSON, limits)
            if response.status >= 400:
                _raise_for_status(response, await response.read(), f"watch {path}")
            async with response.response:
                async for line in response.response.content:
                    event = _parse(line)
                    if not event:
                        raise Unavailable(f"watch {path}: the server sent {line[:100]!r}, which is no event")
                    yield event
        except _TRANSPORT_ERRORS as error:
            raise Unavailable(f"watch {path}: {type(error).__name__}: {error}") from error

    async def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None, content_type: str, limits: aiohttp.ClientTimeout
    ) -> Any:
        headers = {"Accept": JSON, "Content-Type": content_type}
        arguments = await self.api.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        method, url, headers = arguments[:3]
        return await self.api.call_api(method, url, headers, body=body, _request_timeout=limits)


def _raise_for_status(response: Any, text: bytes, what: str) -> None:
    if response.status < 400:
        return
    answer = _parse(text)
    message = str(answer.get("message") or text[:300])
    if response.status == 429 or response.status >= 500:
        after = response.headers.get("Retry-After", "")
        raise Unavailable(f"{what}: {response.status}: {message}", float(after) if after.isdigit() else None, response.status)
    raise ApiError(response.status, str(answer.get("reason") or ""), message)


def _parse(text: bytes) -> Json:
    try:
        answer: Any = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
