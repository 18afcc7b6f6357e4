"""Asks a job's coordinator for its report and tells it things, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import logging

from ddpjob.api.types import Json
from ddpjob.core.world import Report

log = logging.getLogger("ddpjob.coordinator")
SECONDS = 2.0


async def fetch_report(host: str, port: int) -> Report | None:
    """None when nobody answers there, or not by the contract."""
    answer = await _request(host, port, "GET", "/status", {}, b"")
    if answer is None or answer[0] != 200:
        return None
    try:
        return Report.read(json.loads(answer[1]))
    except (KeyError, ValueError, TypeError) as error:
        log.warning("the coordinator at port %s gives a report that cannot be read: %r", port, error)
        return None


async def tell(host: str, port: int, token: str, verb: str, body: Json) -> None:
    """`POST /v1/VERB`; an unreachable coordinator is no error."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    answer = await _request(host, port, "POST", f"/v1/{verb}", headers, json.dumps(body).encode())
    if answer is not None and answer[0] >= 400:
        log.warning("the coordinator refuses %s: %s %s", verb, answer[0], answer[1].decode(errors="replace"))


async def _request(host: str, port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes] | None:
    """(status, body); None when there was no answer in time."""
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", f"Content-Length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return None
    head, separator, content = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return (int(words[1]), content) if separator and len(words) > 1 and words[1].isdigit() else None
