"""The HTTP half of the coordinator's port: health, report, metrics for all; progress and changes for holders of the job's token.

One request per connection.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import metrics
import progress

MAX_HEADERS = 16 * 1024
MAX_BODY = 256 * 1024
MAX_WAIT = 60.0
REQUEST_SECONDS = 10.0
KIND_NAMES = {str: "string", bool: "boolean", int: "whole number", list: "list", object: "value"}
REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large",
    503: "Service Unavailable",
}  # fmt: skip


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def serve(coordinator: Any, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request, whose first byte is already read."""
    try:
        task = asyncio.ensure_future(_read(first, reader))
        done, _ = await asyncio.wait({task}, timeout=REQUEST_SECONDS)
        if not done:
            task.cancel()
            return
        method, target, headers, body = task.result()
        status, kind, content = await _answer(coordinator, reader, method, target, headers, body)
    except Refused as refused:
        status, kind, content = refused.status, "application/json", json.dumps({"error": str(refused)})
    except asyncio.CancelledError:
        raise
    data = content.encode()
    head = "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n"
    writer.write(head.format(status, REASONS[status], kind, len(data)).encode() + data)
    await writer.drain()


async def _read(first: bytes, reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused(413, "the request's header is too long") from None
    if len(head) > MAX_HEADERS:
        raise Refused(413, f"the request's header is longer than {MAX_HEADERS} bytes")
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise Refused(400, f"not an HTTP/1.1 request: {lines[0][:80]!r}")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = headers.get("content-length", "0")
    if not length.isdigit():
        raise Refused(400, f"Content-Length: must be a number of bytes, not {length[:80]!r}")
    if int(length) > MAX_BODY:
        raise Refused(413, f"the body is longer than {MAX_BODY} bytes")
    return parts[0], parts[1], headers, await reader.readexactly(int(length))


async def _answer(
    coordinator: Any, reader: asyncio.StreamReader, method: str, target: str, headers: dict[str, str], body: bytes
) -> tuple[int, str, str]:
    url = urlsplit(target)
    route = ROUTES.get(url.path)
    if route is None:
        raise Refused(404, "no such path: {}; known: {}".format(url.path, ", ".join(sorted(ROUTES))))
    if route[0] != method:
        raise Refused(405, f"{url.path} takes {route[0]}, not {method}")
    if method == "POST":
        return _change(coordinator, route[1], headers, body)
    if url.path == "/status":
        await _wait(coordinator, reader, parse_qs(url.query))
        return 200, "application/json", json.dumps(coordinator.group.report())
    if url.path == "/metrics":
        return 200, "text/plain; version=0.0.4", metrics.render(coordinator.group)
    if not coordinator.store_ready:
        raise Refused(503, "the store does not accept connections yet")
    return 200, "application/json", json.dumps({"ok": True})


def _change(coordinator: Any, change: Any, headers: dict[str, str], body: bytes) -> tuple[int, str, str]:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1", "replace"), coordinator.token.encode()):
        raise Refused(401, "needs the header Authorization: Bearer TOKEN with the job's token")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    try:
        change(coordinator.group, content)
    except ValueError as error:
        raise Refused(400, str(error)) from None
    return 200, "application/json", "{}"


def _progress(group: Any, content: Any) -> None:
    group.report_progress(progress.check(content))


def _gone(group: Any, content: Any) -> None:
    _fields(content, {"pod": str, "why": str})
    group.gone(content["pod"], content["why"])


def _stop(group: Any, content: Any) -> None:
    _fields(content, {"ok": bool, "why": str})
    group.stop(content["ok"], content["why"])


def _size(group: Any, content: Any) -> None:
    _fields(content, {"nodes": int, "minNodes": int})
    group.resize(content["nodes"], content["minNodes"])


def _patience(group: Any, content: Any) -> None:
    _fields(content, {"backoff": list, "hangAfter": object})
    numbers = [*content["backoff"], *([] if content["hangAfter"] is None else [content["hangAfter"]])]
    if len(content["backoff"]) != 2 or any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in numbers):
        raise ValueError("backoff: must be two numbers of seconds; hangAfter: a number of seconds or null")
    group.set_patience(content["hangAfter"], *content["backoff"])


def _exit(group: Any, content: Any) -> None:
    _fields(content, {"why": str})
    group.exit(content["why"])


def _fields(content: Any, wanted: dict[str, type]) -> None:
    if not isinstance(content, dict):
        raise ValueError("the body must be a JSON object")
    for name, kind in wanted.items():
        value = content.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name}: must be a {KIND_NAMES[kind]}")
    for name in content:
        if name not in wanted:
            raise ValueError("{}: unknown field; known: {}".format(name, ", ".join(wanted)))


ROUTES = {
    "/healthz": ("GET", None),
    "/status": ("GET", None),
    "/metrics": ("GET", None),
    "/v1/progress": ("POST", _progress),
    "/v1/gone": ("POST", _gone),
    "/v1/size": ("POST", _size),
    "/v1/patience": ("POST", _patience),
    "/v1/stop": ("POST", _stop),
    "/v1/exit": ("POST", _exit),
}


async def _wait(coordinator: Any, reader: asyncio.StreamReader, query: dict[str, list[str]]) -> None:
    """Long poll: until the report is newer than `after`, the time is over or the client is gone."""
    after, seconds = _number(query, "after"), _number(query, "wait")
    if after is None or seconds is None:
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(seconds, MAX_WAIT)
    client = asyncio.ensure_future(reader.read(1))
    try:
        while coordinator.group.version <= after and loop.time() < deadline:
            change = asyncio.ensure_future(coordinator.wait_for_change())
            await asyncio.wait({change, client}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            if client.done():
                raise ConnectionResetError("the client went away")
    finally:
        client.cancel()


def _number(query: dict[str, list[str]], name: str) -> float | None:
    if name not in query:
        return None
    try:
        value = float(query[name][-1])
    except ValueError:
        raise Refused(400, f"{name}: must be a number, not {query[name][-1]!r}") from None
    if not value >= 0:
        raise Refused(400, f"{name}: must not be negative")
    return value
