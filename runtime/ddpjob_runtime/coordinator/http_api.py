"""Answers HTTP requests, one per connection, on the port to which members also connect.

Anyone can read the health and the metrics. All other requests (for the report, progress posts and
changes) need the job's token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator import metrics, progress
from ddpjob_runtime.coordinator.coordinator import Coordinator
from ddpjob_runtime.coordinator.loop import within
from ddpjob_runtime.protocol import Command, Hangs, Report, is_number

NONCE, PROOF = protocol.NONCE_HEADER.lower(), protocol.PROOF_HEADER.lower()
MAX_HEADERS = 16 * 1024
MAX_BODY = 256 * 1024
MAX_WAIT = 60.0
REQUEST_SECONDS = 10.0
KIND_NAMES = {str: "string", bool: "boolean", int: "whole number", list: "list", object: "value"}
REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
    413: "Content Too Large", 503: "Service Unavailable",
}  # fmt: skip


class BadRequest(Exception):
    """A request is invalid. The response to the client has the status and the text of this
    exception.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def serve(server: Any, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one HTTP request. `first` is its first byte, which has already been read."""
    instance, proved, headers = "", False, dict[str, str]()
    try:
        request = await within(REQUEST_SECONDS, _read(first, reader))
        if request is None:
            return
        method, target, headers, body = request
        instance = server.instance
        proved = _is_proved(server, method, target, headers, body)
        known = proved or _has_token(server, headers)
        if known:
            server.strangers.recognize(writer)
        status, kind, content = await _answer(server, reader, method, target, body, known)
    except BadRequest as refused:
        status, kind, content = refused.status, "application/json", json.dumps({"error": str(refused)})
    data = content.encode(errors="backslashreplace")
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    head += f"{protocol.INSTANCE_HEADER}: {instance if proved else server.instance}\r\n"
    if proved:
        seal = protocol.seal(server.token, "answer", instance, headers[NONCE], data)
        head += f"{protocol.PROOF_HEADER}: {seal}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
    await within(REQUEST_SECONDS, writer.drain())


def _is_proved(server: Any, method: str, target: str, headers: dict[str, str], body: bytes) -> bool:
    """Whether the request has a valid proof for this coordinator, and does not repeat an earlier
    change.
    """
    nonce, proof = headers.get(NONCE, ""), headers.get(PROOF, "")
    parts = ("request", server.instance, nonce, method, target, body)
    if not 0 < len(nonce) <= protocol.MAX_NONCE or not protocol.is_sealed(proof, server.token, *parts):
        return False
    return method != "POST" or server.use(nonce)


def _has_token(server: Any, headers: dict[str, str]) -> bool:
    """Whether the request contains the token itself, as requests from the job's scripts do."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("latin-1", "replace"), server.token.encode()
    )


async def _read(first: bytes, reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(413, "the request headers are too long") from None
    if len(head) > MAX_HEADERS:
        raise BadRequest(413, f"the request headers are longer than {MAX_HEADERS} bytes")
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadRequest(400, f"not an HTTP/1.1 request: {lines[0][:80]!r}")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 12):
        raise BadRequest(400, f"Content-Length: must be a number of bytes, not {length[:80]!r}")
    if int(length) > MAX_BODY:
        raise BadRequest(413, f"the body is longer than {MAX_BODY} bytes")
    return parts[0], parts[1], headers, await reader.readexactly(int(length))


async def _answer(
    server: Any, reader: asyncio.StreamReader, method: str, target: str, body: bytes, known: bool
) -> tuple[int, str, str]:
    """Return the status, the content type and the body of the response to a request.

    `known` indicates whether the client knows the job's token.
    """
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise BadRequest(400, f"not a path: {error}") from None
    route = ROUTES.get(url.path)
    if route is None:
        raise BadRequest(404, "there is no path {}; use one of {}".format(url.path, ", ".join(sorted(ROUTES))))
    if route[0] != method:
        raise BadRequest(405, f"{url.path} accepts {route[0]}, not {method}")
    if not known and url.path in GUARDED:
        raise BadRequest(
            401,
            "this path needs the job's token: send Authorization: Bearer TOKEN, or a proof made with the token",
        )
    if method == "POST":
        return _change(server, route[1], body)
    if url.path == protocol.STATUS_PATH:
        await _wait(server, reader, parse_qs(url.query))
        return 200, "application/json", _report(server.coordinator.report())
    if url.path == protocol.METRICS_PATH:
        return (
            200,
            "text/plain; version=0.0.4",
            metrics.render(server.coordinator.report(), server.coordinator.rounds.incidents.counts),
        )
    if not server.store_ready:
        raise BadRequest(503, "the store does not accept connections yet")
    return 200, "application/json", json.dumps({"ok": True})


def _report(report: Report) -> str:
    """Return the report as JSON, with shortened texts if it is larger than the operator accepts."""
    # A job has at most `most` pods, and the operator ignores any further entries.
    most = report.nodes + protocol.MAX_SPARES
    report = replace(report, members=report.members[:most], lost=report.lost[:most])
    text, allowed = _json(report), protocol.MAX_TEXTS
    if _bytes(text) > allowed:
        allowed += _bytes(text) - _bytes(_json(replace(report, members=(), lost=())))
    for shorten in (_shorten_for_operator, _shorten, _drop_texts):
        if _bytes(text) > allowed:
            text = _json(shorten(report))
    return text


def _json(report: Report) -> str:
    return json.dumps(report.write(), ensure_ascii=False)


def _bytes(text: str) -> int:
    return len(text.encode(errors="backslashreplace"))


def _shorten_for_operator(report: Report) -> Report:
    overdue = report.overdue and replace(
        report.overdue, traceback=protocol.clip(report.overdue.traceback, protocol.MAX_STACKS)
    )
    return replace(report, incidents=protocol.shortened(report.incidents), overdue=overdue)


def _shorten(report: Report) -> Report:
    short = protocol.shortened(report.incidents, detailed=0)
    return replace(report, incidents=short, overdue=report.overdue and replace(report.overdue, traceback=""))


def _drop_texts(report: Report) -> Report:
    """Return the report with only names and numbers.

    Shortening the texts may not be enough, because one character may take six bytes in JSON.
    """
    last = tuple(replace(i, message="", traceback="") for i in report.incidents[-protocol.DETAILED_INCIDENTS :])
    overdue = report.overdue and replace(report.overdue, where="", traceback="")
    figures = {name: value for name, value in report.progress.items() if name != "metrics"}
    return replace(report, incidents=last, overdue=overdue, notes=(), progress=figures)


def _change(server: Any, change: Any, body: bytes) -> tuple[int, str, str]:
    try:
        content = json.loads(body)
    except RecursionError:
        raise BadRequest(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from None
    try:
        change(server.coordinator, content)
    except ValueError as error:
        raise BadRequest(400, str(error)) from None
    return 200, "application/json", "{}"


def _progress(coordinator: Coordinator, content: Any) -> None:
    coordinator.report_progress(progress.check(content))


def _gone(coordinator: Coordinator, content: Any) -> None:
    _fields(content, {"pods": list, "why": str})
    for pod in _strings(content["pods"]):
        coordinator.gone(pod, content["why"])


def _leave(coordinator: Coordinator, content: Any) -> None:
    _fields(content, {"pods": list, "why": str})
    for pod in _strings(content["pods"]):
        coordinator.send_away(pod, content["why"])


def _strings(pods: list[Any]) -> list[str]:
    if not all(isinstance(pod, str) for pod in pods):
        raise ValueError("pods: must be a list of strings")
    return pods


def _stop(coordinator: Coordinator, content: Any) -> None:
    _fields(content, {"ok": bool, "why": str})
    coordinator.stop(content["ok"], content["why"])


def _size(coordinator: Coordinator, content: Any) -> None:
    _fields(content, {"nodes": int, "minNodes": int})
    coordinator.resize(content["nodes"], content["minNodes"])


def _patience(coordinator: Coordinator, content: Any) -> None:
    with_hangs = isinstance(content, dict) and "hangs" in content
    _fields(content, {"backoff": list, "hangAfter": object, **({"hangs": str} if with_hangs else {})})
    if len(content["backoff"]) != 2 or not all(map(is_number, content["backoff"])):
        raise ValueError("backoff: must be [INITIAL, MAXIMUM], two numbers of seconds")
    if content["hangAfter"] is not None and not is_number(content["hangAfter"]):
        raise ValueError("hangAfter: must be a number of seconds or null")
    if (hangs := content.get("hangs")) not in (None, *Hangs):
        raise ValueError(f"hangs: must be one of {', '.join(Hangs)}, not {hangs!r:.80}")
    initial, maximum = content["backoff"]
    coordinator.set_patience(content["hangAfter"], initial, maximum, hangs and Hangs(hangs))


def _order(coordinator: Coordinator, content: Any) -> None:
    _fields(content, {"pods": list})
    coordinator.set_order(_strings(content["pods"]))


def _exit(coordinator: Coordinator, content: Any) -> None:
    to_some = isinstance(content, dict) and "before" in content
    _fields(content, {"why": str, "before": int} if to_some else {"why": str})
    # A request that names "before" is meant for a coordinator of an earlier attempt. The request
    # may have reached this coordinator because both coordinators have the same address.
    if not to_some or coordinator.settings.attempt < content["before"]:
        coordinator.exit(content["why"])


def _fields(content: Any, wanted: dict[str, type]) -> None:
    if not isinstance(content, dict):
        raise ValueError("the body must be a JSON object")
    for name, kind in wanted.items():
        value = content.get(name)
        if name not in content or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name}: must be a {KIND_NAMES[kind]}")
    for name in content:
        if name not in wanted:
            raise ValueError("{}: unknown field; the fields are {}".format(name, ", ".join(wanted)))


ROUTES = {
    **dict.fromkeys((protocol.HEALTH_PATH, protocol.STATUS_PATH, protocol.METRICS_PATH), ("GET", None)),
    Command.PROGRESS.path: ("POST", _progress),
    Command.GONE.path: ("POST", _gone),
    Command.LEAVE.path: ("POST", _leave),
    Command.SIZE.path: ("POST", _size),
    Command.PATIENCE.path: ("POST", _patience),
    Command.ORDER.path: ("POST", _order),
    Command.STOP.path: ("POST", _stop),
    Command.EXIT.path: ("POST", _exit),
}
GUARDED = {protocol.STATUS_PATH, *(command.path for command in Command)}
"""Paths for which the job's token is required. Requests to these paths change the job, or their
responses contain more than numbers.
"""


async def _wait(server: Any, reader: asyncio.StreamReader, query: dict[str, list[str]]) -> None:
    """Wait until the report's version differs from the query's `news`, or for `wait` seconds (long
    polling).

    If either parameter is missing, return immediately. Raises ConnectionResetError if the client
    disconnects.
    """
    news, seconds = _number(query, "news"), _number(query, "wait")
    if news is None or seconds is None:
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(seconds, MAX_WAIT)
    client = asyncio.ensure_future(reader.read(1))
    try:
        while server.coordinator.news == news and loop.time() < deadline:
            change = asyncio.ensure_future(server.wait_for_change())
            await asyncio.wait({change, client}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            if client.done():
                raise ConnectionResetError("the client disconnected")
    finally:
        client.cancel()


def _number(query: dict[str, list[str]], name: str) -> float | None:
    if name not in query:
        return None
    try:
        value = float(query[name][-1])
    except ValueError:
        raise BadRequest(400, f"{name}: must be a number, not {query[name][-1]!r}") from None
    if not value >= 0:
        raise BadRequest(400, f"{name}: must not be negative")
    return value
