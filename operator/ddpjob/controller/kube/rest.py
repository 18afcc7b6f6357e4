"""Sends JSON requests to the API server with the transport and credentials of the official asyncio
client.

The client's models are not used, because they are too slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import json.scanner
import sys
from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import client, config
from pydantic_core import from_json

from ddpjob.controller.kube.request_metrics import API_REQUESTS
from ddpjob.unavailable import Unavailable

Json = dict[str, Any]
REQUEST_SECONDS = 30
USER_AGENT = "ddpjob-operator"
"""The user agent for all requests. The API server copies the part before the slash to
managedFields, as the operator's name."""
LONGEST_PAUSE = 60.0
"""Maximum delay in seconds that a response can impose with Retry-After. A proxy's maintenance page
can ask for a delay of an hour, although the maintenance ends sooner."""
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_DEEPEST = 50_000
"""Python's recursion limit while reading an object that is nested too deeply for the usual limit.
The API server allows 10,000 levels, and reading each level takes three nested calls.
"""
_TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class ApiError(Exception):
    """The API server responded with a 4xx status other than 429.

    The exception has the status, the reason and the message of the response.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class TooLarge(Exception):
    """The response has more bytes than the caller accepts."""


class NoCredentials(Exception):
    """There is neither a service account token nor a usable kubeconfig.

    The message says what each of the two lacks.
    """


class Rest:
    """Sends requests to one API server."""

    def __init__(self, api: client.ApiClient) -> None:
        self.api = api

    @classmethod
    async def connect(cls, connections: int = 64) -> Rest:
        """Connect with the service account in a pod, or with the kubeconfig anywhere else.

        Like kubectl, this method finds the kubeconfig through the environment. Raises NoCredentials
        if neither the service account nor the kubeconfig can be used.
        """
        try:
            config.load_incluster_config()
        except config.ConfigException as inside:
            try:
                await config.load_kube_config()
            except config.ConfigException as outside:
                raise NoCredentials(
                    "cannot sign in to an API server. In a pod, the service account's token is required"
                    f" ({inside}). Elsewhere, a kubeconfig is required ({outside})"
                ) from outside
        return cls.open(client.Configuration.get_default_copy(), connections)

    @classmethod
    def open(cls, settings: client.Configuration, connections: int) -> Rest:
        """Connect to the API server with these settings of the official client."""
        settings.connection_pool_maxsize = connections
        settings.disable_strict_ssl_verification = True  # See `login.Connection` for the reason.
        # Look up the proxy only once. With `trust_env`, aiohttp would look it up in a thread for
        # each request, and would use credentials from ~/.netrc that are not meant for the API
        # server.
        settings.proxy = settings.proxy or _proxy(settings.host)
        settings.client_session_kwargs = {"trust_env": False}
        api = client.ApiClient(configuration=settings)
        api.user_agent = USER_AGENT
        return cls(api)

    async def close(self) -> None:
        await self.api.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        most: int | None = None,
    ) -> Json:
        """Send a request, and return the JSON object in the response.

        If the response has more than `most` bytes, stop reading it and raise TooLarge. Raises
        ApiError for any 4xx status except 429. Raises Unavailable for 429, 5xx and failed
        connections. Also raises Unavailable if the response is not a JSON object, because it then
        comes from a proxy in front of the API server.
        """
        try:
            response = await self._send(
                method, path, query or {}, body, (content_type, accept), aiohttp.ClientTimeout(total=REQUEST_SECONDS)
            )
            text = await (response.read() if most is None else _read_at_most(most, response.response))
        except _TRANSPORT_ERRORS as error:
            API_REQUESTS.labels(method, "none").inc()
            raise Unavailable(f"{method} {path}: {_words(error)}") from error
        API_REQUESTS.labels(method, response.status).inc()
        _raise_for_status(response, text, f"{method} {path}")
        return _object(text, f"{method} {path}")

    async def watch(
        self, path: str, query: Mapping[str, str], silence: float, accept: str = JSON
    ) -> AsyncIterator[Json]:
        """Yield the events of a watch until the API server ends the watch.

        Raises the same errors as `request`. Also raises Unavailable if no event arrives for
        `silence` seconds.
        """
        limits = aiohttp.ClientTimeout(total=None, connect=REQUEST_SECONDS, sock_read=silence)
        try:
            response = await self._send("GET", path, {**query, "watch": "1"}, None, (JSON, accept), limits)
            API_REQUESTS.labels("WATCH", response.status).inc()
            if response.status >= 400:
                _raise_for_status(response, await response.read(), f"watch {path}")
            async with response.response:
                async for line in response.response.content:
                    yield _object(line, f"watch {path}")
        except _TRANSPORT_ERRORS as error:
            raise Unavailable(f"watch {path}: {_words(error)}") from error

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        types: tuple[str, str],
        limits: aiohttp.ClientTimeout,
    ) -> Any:
        """Send a request, and return the official client's response.

        `types` are the content types of the request's body and of the response.
        """
        # Ask for an uncompressed response. Within a cluster, compressing and decompressing a list
        # takes longer than sending it uncompressed.
        headers = {"Content-Type": types[0], "Accept": types[1], "Accept-Encoding": "identity"}
        arguments = await self.api.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        method, url, headers = arguments[:3]
        return await self.api.call_api(method, url, headers, body=body, _request_timeout=limits)


async def _read_at_most(most: int, response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async with response:
        async for part in response.content.iter_chunked(2**16):
            text += part
            if len(text) > most:
                # Closing the connection discards the rest of the response without reading it.
                response.close()
                raise TooLarge
    return bytes(text)


def _words(error: Exception) -> str:
    """Describe a transport error. aiohttp's error for a request timeout has no message."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no response within {REQUEST_SECONDS} s"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _proxy(host: str) -> str | None:
    """Return the proxy that the environment configures for the API server at this URL, or None."""
    url = urlsplit(host)
    proxies = getproxies()
    if url.hostname is None or proxy_bypass(url.hostname) or _in_a_network_of(proxies.get("no", ""), url.hostname):
        return None
    return proxies.get(url.scheme)


def _in_a_network_of(no_proxy: str, host: str) -> bool:
    """Whether NO_PROXY contains a network, such as 10.96.0.0/12, that includes the host.

    kubectl supports networks in NO_PROXY, but Python supports only names and single addresses.
    """
    for word in no_proxy.split(","):
        # Either the host or the entry in `no_proxy` can be a name instead of an address.
        with contextlib.suppress(ValueError):
            if ip_address(host) in ip_network(word.strip(), strict=False):
                return True
    return False


def _raise_for_status(response: Any, text: bytes, what: str) -> None:
    if response.status < 400:
        return
    answer = _parse(text)
    message = str(answer.get("message") or text[:300])
    if response.status == 429 or response.status >= 500:
        after = response.headers.get("Retry-After", "")
        pause = min(LONGEST_PAUSE, float(after)) if after.isdecimal() else None
        raise Unavailable(f"{what}: {response.status}: {message}", pause, response.status)
    raise ApiError(response.status, str(answer.get("reason") or ""), message)


def _object(text: bytes, what: str) -> Json:
    """Return the JSON object in the response.

    Raises Unavailable if the text is not a JSON object, because the response then cannot come from
    the API server itself.
    """
    found = _parse(text)
    if not found:
        raise Unavailable(f"{what}: the server sent {text[:100]!r}, which is not a Kubernetes object")
    return found


def _parse(text: bytes) -> Json:
    try:
        answer: Any = loads(text)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def loads(text: bytes) -> Any:
    """Read JSON text that may be nested as deeply as the API server allows.

    If such text could not be read, one user's deeply nested object would make every list that
    contains the object unreadable.
    """
    with contextlib.suppress(ValueError):
        # For a pod, this parser is three times as fast as json. It rejects text with more than 200
        # levels of nesting, and text with unpaired surrogates. The json module reads such text
        # below.
        return from_json(text)
    try:
        return json.loads(text)
    except RecursionError:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(_DEEPEST)
        try:
            return _loads_deep(text)
        finally:
            sys.setrecursionlimit(limit)


def _loads_deep(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        # Since Python 3.12, the limit on recursion in C code is separate and cannot be raised. The
        # parser in pure Python is slower, but does not use the C stack.
        decoder = json.JSONDecoder()
        decoder.parse_object, decoder.parse_array = json.decoder.JSONObject, json.decoder.JSONArray  # type: ignore[attr-defined]
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
        return decoder.decode(text.decode())
