"""Sends a user's requests to the API server as plain JSON.

The official client handles kubeconfig, credentials and connections.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode
from weakref import WeakSet

import yaml

from ddpjob.api.job_spec import Json
from ddpjob.client.backends.backend import Mistake, NoAnswer, NotKnown, Unreachable

SECONDS = 30
LARGEST_PAGE = 500
LARGEST_ANSWER = 16 * 1024 * 1024
"""Maximum size, in bytes, of a response that an in-cluster dashboard reads for its viewers. The
limit is doubled for the list of a job's pods or events, because a thousand pods take about 20
MB."""
LARGEST_PAGE_BYTES = 2 * 1024 * 1024
"""Maximum size, in bytes, of one page of a list that an in-cluster dashboard reads for its viewers.
A page may be larger only if it has a single object. The Python objects parsed from a page can take
30 times as much memory as the page's text."""
_parsing = threading.Lock()
"""A thread holds this lock while it parses and shapes objects. Otherwise, many viewers' threads
could each parse a large object at the same time and exhaust the memory."""
MERGE_PATCH = "application/merge-patch+json"
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Socket options for TCP keepalive. The times are in seconds, and TCP_KEEPCNT is the maximum number
of unanswered probes. On macOS, TCP_KEEPIDLE is called TCP_KEEPALIVE."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_USER_AGENT = "ddpjob"
"""The User-Agent header. The API server records it in the managedFields of each object that the
user creates or changes."""


def _with_user_agent(api: Any) -> Any:
    api.user_agent = _USER_AGENT
    return api


class ApiRefusal(Mistake):
    """The API server responded with a 4xx or 5xx status. The text is the server's message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason
        self.passing = status == 429 or status >= 500
        self.denied = status == 403


class AnswerTooLarge(Mistake):
    """The response exceeds the maximum size."""


class ApiServer:
    """One API server, found through the kubeconfig or the pod's service account.

    The methods raise Unreachable and ApiRefusal.
    """

    largest_answer: int | None = None
    """Maximum size of a response in bytes. None means no limit, which is safe in a process that
    serves only its own user."""

    def __init__(self, api: Any, namespace: str, context: str) -> None:
        self.client, self.namespace, self.context = api, namespace, context

    @classmethod
    def open(cls, kubeconfig: str | None = None, context: str | None = None) -> ApiServer:
        """Connect as kubectl would.

        The kubeconfig is $KUBECONFIG or ~/.kube/config. In a pod without a kubeconfig, the pod's
        service account is used.
        """
        from kubernetes import client, config
        from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigLoader, KubeConfigMerger

        settings = client.Configuration()
        settings.retries = False
        settings.socket_options = _keepalive_options()
        try:
            merged = KubeConfigMerger(kubeconfig or os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION).config
            if merged is None:
                raise config.ConfigException("No configuration found")
            if context is not None:
                contexts = [each["name"] for each in merged.value.get("contexts") or ()]
                if context not in contexts:
                    known = ", ".join(contexts) or "none"
                    raise Unreachable(f"context={context}: not in the kubeconfig; choose one of its contexts: {known}")
            # If a context is given, the kubeconfig need not have a current-context.
            loader = KubeConfigLoader(merged, active_context=context)
            loader.load_and_set(settings)
            chosen = loader.current_context
            namespace = chosen["context"].get("namespace") or "default"
            return cls(_with_user_agent(client.ApiClient(settings)), namespace, chosen["name"])
        except config.ConfigException as error:
            if kubeconfig is None and context is None and _NAMESPACE_FILE.exists():
                config.load_incluster_config(client_configuration=settings)
                namespace = _NAMESPACE_FILE.read_text().strip()
                return cls(_with_user_agent(client.ApiClient(settings)), namespace, "in-cluster")
            why = str(error).removeprefix("Invalid kube-config file. ").rstrip(".")
            remedy = (
                'set KUBECONFIG or --kubeconfig, or use --local (in Python, Client("local")) for jobs on this machine'
            )
            raise Unreachable(f"no cluster: {why}; {remedy}") from error
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())
            raise Unreachable(f"no cluster: the kubeconfig cannot be read: {why}") from error

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Send a request and return the JSON response."""
        response = self._send(method, path, query or {}, body, content_type)
        with self._answering():
            text = response.read()
        return self._parsed(response, text)

    def optional(self, path: str, absent: Collection[int] = (403, 404)) -> Json | None:
        """Return the JSON response to a GET request; None if the response's status is in `absent`.

        By default, None therefore means that the object does not exist, or that the user is not
        permitted to read it.
        """
        try:
            return self.request("GET", path)
        except ApiRefusal as refusal:
            if refusal.status in absent:
                return None
            raise

    def existing(self, path: str) -> Json | None:
        """Return the JSON response to a GET request, or None if the object does not exist."""
        return self.optional(path, absent=(404,))

    def items(self, path: str, query: Mapping[str, str] | None = None, *, of_a_job: bool = False) -> list[Json]:
        """Return the items of a collection. `listing` explains the parameters."""
        return self.listing(path, query, of_a_job=of_a_job)[0]

    def listing(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        of_a_job: bool = False,
        shape: Callable[[Json], Json] = lambda item: item,
    ) -> tuple[list[Json], str]:
        """Return the items of a collection, and the collection's resourceVersion.

        The collection is read in pages, and pages of large objects contain fewer objects. If
        `of_a_job` is true, the collection belongs to one job. Its total size is then limited to
        twice `largest_answer`, because the job's owner can make the collection arbitrarily large.
        `shape` is called with each item of a page before the next page is read, and returns the
        part of the item to keep.

        If reading takes so long that the next page is no longer available (status 410), the
        collection is read once more from the beginning. Without `largest_answer`, it is then read
        as a single page.
        """
        found: list[Json] = []
        limit, total, more, expired = LARGEST_PAGE, 0, "", False
        while True:
            place = {"continue": more} if more else {}
            response = self._send("GET", path, {**(query or {}), "limit": str(limit), **place})
            try:
                with self._answering():
                    bounded = self.largest_answer is not None and limit > 1
                    text = response.read(LARGEST_PAGE_BYTES) if bounded else response.read()
            except AnswerTooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            limit = min(LARGEST_PAGE, 2 * limit)
            total += len(text or b"")
            if of_a_job and self.largest_answer is not None and total > 2 * self.largest_answer:
                raise AnswerTooLarge(
                    f"{path}: the objects of this job take up more than {2 * self.largest_answer} bytes; "
                    "read them with kubectl"
                )
            with _parsing:
                try:
                    page = self._parsed(response, text)
                except ApiRefusal as refusal:
                    if refusal.status != HTTPStatus.GONE or not more or expired:
                        raise
                    found, total, more, expired = [], 0, "", True
                    limit = 0 if self.largest_answer is None else LARGEST_PAGE
                    continue
                found += map(shape, page.pop("items", None) or ())
            metadata = page.get("metadata", {})
            more = metadata.get("continue") or ""
            if not more:
                return found, str(metadata.get("resourceVersion", ""))

    def stream(self, path: str, query: Mapping[str, str], silence: float | None = None) -> Iterator[bytes]:
        """Yield the response piece by piece, as it arrives.

        Stop when the response ends, or after `silence` seconds without data.
        """
        import urllib3

        response = self._send("GET", path, query, timeout=(SECONDS, silence))
        raw = response.response
        if response.status >= 400:
            with self._answering():
                text = raw.read()
            self._parsed(response, text)
        try:
            while piece := raw.read1(65536):
                yield piece
        except (urllib3.exceptions.HTTPError, OSError):
            return  # The caller can reconnect and continue after the last piece.
        finally:
            raw.close()

    def lines(
        self,
        path: str,
        query: Mapping[str, str],
        silence: float | None = None,
        shape: Callable[[Json], Json] = lambda event: event,
    ) -> Iterator[Json]:
        """Yield the events of a watch, each transformed by `shape`."""
        rest = b""
        for piece in self.stream(path, query, silence):
            *whole, rest = (rest + piece).split(b"\n")
            for line in filter(bytes.strip, whole):
                with _parsing:
                    event = shape(json.loads(line))
                yield event
                del event

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None = None,
        content_type: str = "application/json", timeout: Any = SECONDS,
    ) -> Any:  # fmt: skip
        headers = {"Content-Type": content_type, "Accept": "application/json, */*"}
        method, url, headers, *_ = self.client.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, auth_settings=["BearerToken"]
        )
        with self._answering():
            return self.client.call_api(method, url, headers, body=body, _request_timeout=timeout)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise NoAnswer if the enclosed code gets no response or an incomplete one."""
        import urllib3
        from kubernetes.client import ApiException  # The client raises ApiException for TLS errors.

        try:
            yield
        except (urllib3.exceptions.HTTPError, OSError, ApiException) as error:
            raise NoAnswer(f"the API server at {self._where} does not answer: {_innermost_reason(error)}") from error

    @property
    def _where(self) -> str:
        return f"{self.client.configuration.host} (context {self.context})"

    def _parsed(self, response: Any, text: bytes | None) -> Json:
        answer: Json | None = None
        with suppress(ValueError):
            found = json.loads(text or b"{}")
            answer = found if isinstance(found, dict) else None
        if answer is None:
            if response.status < 400:
                raise Unreachable(
                    f"the server at {self._where} does not seem to be an API server: its response is not a JSON object"
                )
            answer = {}
        if response.status >= 400:
            message = str(answer.get("message") or (text or b"")[:300].decode(errors="replace"))
            if response.status == 401:
                raise NotKnown(f"the API server does not accept the credentials: {message}")
            raise ApiRefusal(response.status, str(answer.get("reason") or ""), message)
        return answer


class BearerServer(ApiServer):
    """One API server, accessed only with a viewer's bearer token.

    Neither a kubeconfig nor this process's service account is used. `ca` is a file with the
    certificates of the trusted authorities.
    """

    largest_answer = LARGEST_ANSWER

    def __init__(self, url: str, ca: str, token: str) -> None:
        import urllib3

        super().__init__(None, "default", "this cluster")
        self._url, self._headers = url.rstrip("/"), {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(
            8, ssl_context=_tls_context(ca), retries=False, socket_options=_keepalive_options()
        )
        self._open = WeakSet[Any]()
        self._closed = False

    @property
    def _where(self) -> str:
        return self._url

    def close(self) -> None:
        """Stop all reads, including those in other threads, and refuse later requests."""
        self._closed = True
        for response in list(self._open):
            with suppress(RuntimeError, ValueError, OSError):  # The response has already ended.
                response.shutdown()
        self._pool.clear()

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None = None,
        content_type: str = "application/json", timeout: Any = SECONDS,
    ) -> Any:  # fmt: skip
        import urllib3

        if self._closed:
            raise Mistake("the viewer has disconnected")
        connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
        seconds = urllib3.Timeout(connect=connect, read=read)
        headers = {**self._headers, "Content-Type": content_type, "Accept": "application/json, */*"}
        url = self._url + path + (f"?{urlencode(query)}" if query else "")
        with self._answering():
            response = self._pool.request(
                method, url, headers=headers, body=None if body is None else json.dumps(body), timeout=seconds,
                redirect=False, preload_content=False,
            )  # fmt: skip
        self._open.add(response)
        return SimpleNamespace(response=response, status=response.status, read=partial(self._read, response, path))

    def _read(self, response: Any, path: str, most: int | None = None) -> bytes:
        """Return the text of a response.

        Raises AnswerTooLarge if the response has more than `most` bytes. The size is limited
        because many viewers share this process, and any viewer can open an object that somebody has
        deliberately made huge.
        """
        most = LARGEST_ANSWER if most is None else most
        text: bytes = response.read(most + 1, decode_content=True)
        if len(text) > most:
            response.close()
            raise AnswerTooLarge(f"{path}: the response is larger than {most} bytes; read it with kubectl")
        return text


def _keepalive_options() -> list[tuple[int, int, int]]:
    """Return socket options that detect an unreachable host within half a minute."""
    from urllib3.connection import HTTPConnection

    options = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    found = ((getattr(socket, name, None), value) for name, value in _KEEPALIVE.items())
    return [*options, *((socket.IPPROTO_TCP, name, value) for name, value in found if name is not None)]


def _tls_context(ca: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the same certificates as kubectl.

    Certificates without key identifiers are also trusted, because many authorities issue them.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise NoAnswer(f"the API server's CA certificates cannot be read from {ca}: {error}") from error
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


_OF_TLS = re.compile(r"\[SSL: \w+\] ")


def _innermost_reason(error: BaseException) -> str:
    """Return the message of the root cause of `error`.

    urllib3 wraps the root cause in several other errors. The official client adds one more wrapper
    to TLS errors.
    """
    wrapped = error.__context__ if getattr(error, "status", None) == 0 else None
    text = _OF_TLS.sub("", str(wrapped or getattr(error, "reason", None) or error))
    return (
        text.rpartition(">: ")[2].rpartition("object at 0x")[2].partition(": ")[2] or text.rpartition(": ")[2] or text
    )
