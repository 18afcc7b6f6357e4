"""JSON over the official asyncio client: its transport, authentication and retries, without the models' cost per object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from ddpjob.api.types import Json
from ddpjob.engine.ports import Unavailable

REQUEST_SECONDS = 30
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

    async def request(self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None) -> Json:
        """The JSON answer. Raises ApiError for 4xx, Unavailable for 429, 5xx and a connection that fails."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        arguments = await self.api.param_serialize(
            method, path, query_params=list((query or {}).items()), header_params=headers, auth_settings=["BearerToken"]
        )
        method, url, headers = arguments[:3]
        try:
            response = await self.api.call_api(method, url, headers, body=body, _request_timeout=REQUEST_SECONDS)
            text = await response.read()
        except _TRANSPORT_ERRORS as error:
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        answer: Json = _parse(text)
        if response.status < 400:
            return answer
        message = str(answer.get("message") or text[:300])
        if response.status == 429 or response.status >= 500:
            after = response.headers.get("Retry-After", "")
            raise Unavailable(f"{method} {path}: {response.status}: {message}", float(after) if after.isdigit() else None, response.status)
        raise ApiError(response.status, str(answer.get("reason") or ""), message)


def _parse(text: bytes) -> Json:
    try:
        answer: Any = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
