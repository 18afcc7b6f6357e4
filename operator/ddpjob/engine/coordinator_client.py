"""An HTTP client for jobs' coordinators, which both implementations of `Cluster` use.

A coordinator runs the user's image, and its address may by now belong to a different pod. A peer
must therefore prove that it knows the job's token before its response is trusted. The token itself
is never sent, and the size of a response is limited.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

import aiohttp
from ddpjob_runtime import protocol
from ddpjob_runtime.protocol import INSTANCE_HEADER, NONCE_HEADER, PROOF_HEADER, STATUS_PATH, Command, Record, Report
from yarl import URL

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import utc_now
from ddpjob.objects.platform import Platform

log = logging.getLogger("ddpjob.coordinator")

SECONDS = 2.0
"""Timeout for a request, in seconds. A long poll also gets the time that it asks the coordinator to
wait."""
CONNECT_SECONDS = 1.5
"""Timeout for opening a connection, in seconds. Linux retransmits a lost SYN after 1 s, so the
timeout is longer than 1 s."""
SMALL = 64 * 1024
"""Responses of up to this many bytes are always read immediately. LARGE_ANSWERS limits how many
larger responses are read at once."""
LARGE_ANSWERS = 64
"""Maximum number of responses with more than SMALL bytes that are read at the same time."""
SAME_CLOCK = timedelta(seconds=1)
"""Clock differences below this value are ignored. The measurement is inexact, because it includes
the time that the response took."""
LONGEST_AGE = timedelta(days=3650)


@dataclass(frozen=True)
class Target:
    """A job's coordinator. `endpoint` is `host:port`, with an IPv6 address in brackets."""

    endpoint: str
    token: str
    """The job's token. Both sides prove that they know it, without sending it."""
    pods: int = protocol.MAX_PODS
    """The number of pods in the job, which limits how much of a report is read and kept."""


def target_of(job: DDPJob, platform: Platform, endpoint: str) -> Target:
    """Return the target for the job's coordinator at `host:port`."""
    pods = max(job.spec.pods, len(job.status.slots))
    return Target(endpoint, platform.token(job), pods)


class CoordinatorClient:
    """Sends requests to the coordinators of all jobs, over one HTTP session.

    The session is opened at the first request. An unreachable coordinator is an observation, not an
    error.
    """

    def __init__(self, clock: Callable[[], datetime] = utc_now) -> None:
        self.clock = clock
        self._opened: aiohttp.ClientSession | None = None
        self.large = asyncio.Semaphore(LARGE_ANSWERS)
        self._last: CoordinatorLink | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the HTTP session, which belongs to the event loop that first requested it.

        The session itself allows any number of connections. The code that opens links limits them.
        """
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def link(self, target: Target) -> CoordinatorLink:
        """Return a link to a coordinator. Reuse the last link if it has the same target."""
        if self._last is None or self._last.target != target:
            self._last = CoordinatorLink(self, target)
        return self._last

    async def report(self, target: Target) -> Report | None:
        """Return the coordinator's report, or None if there is no readable response."""
        try:
            return await self.link(target).report()
        except UNREACHABLE:
            return None
        except Exception as error:
            # A bad response from a coordinator must not stop the reconcile, so continue without a
            # report.
            log.warning(
                "%s", describe_error(f"the report of the coordinator at {target.endpoint} cannot be used", error)
            )
            return None

    async def notify(self, target: Target, verb: str, body: Json) -> None:
        """Send `POST /v1/VERB` to the coordinator.

        If the message is lost and is still needed, the next reconcile sends it again.
        """
        try:
            await self.link(target).request("POST", Command(verb).path, json.dumps(body).encode())
        except UNREACHABLE as error:
            log.info(
                "%s", describe_error(f"the coordinator at {target.endpoint} did not receive the request {verb}", error)
            )
        except Exception as error:
            log.warning("%s", describe_error(f"the coordinator at {target.endpoint} rejects {verb}", error))


def _watched_socket(info: Any) -> socket.socket:
    """Return a socket that notices within seconds if the other host disappears during a wait."""
    made = socket.socket(*info[:3])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


UNREACHABLE = (TimeoutError, aiohttp.ClientError, OSError)


class CoordinatorLink:
    """Sends requests to one coordinator, and verifies that this coordinator sent the responses."""

    def __init__(self, client: CoordinatorClient, target: Target) -> None:
        self.target = target
        self._client = client
        self._instance = ""
        self.size = 0
        """Size of the last response in bytes."""

    async def report(self, known: Report | None = None, wait: float = 0.0) -> Report:
        """Read `GET /status`.

        If a report is already `known`, wait up to `wait` seconds for a newer one. Raises one of
        UNREACHABLE if there is no response, and a different error if the response cannot be trusted
        or read.
        """
        path = STATUS_PATH
        if known is not None:
            path += f"?news={known.news}&wait={wait:g}"
        body = await self.request("GET", path, wait=wait if known is not None else 0.0)
        return read_report(body, self._client.clock(), self.target.pods)

    async def request(self, method: str, path: str, body: bytes = b"", wait: float = 0.0) -> bytes:
        """Return the response to a request once the coordinator has proved its identity.

        Raises the same errors as `report`.
        """
        async with asyncio.timeout(wait + SECONDS):
            # Use a copy of `_instance`, because a concurrent request can change it.
            nonce, instance = secrets.token_hex(16), self._instance
            status, headers, content = await self._ask(method, path, body, nonce, instance)
            offered = headers.get(INSTANCE_HEADER, "")[:64]
            if status == 401 and offered not in ("", instance):
                # A coordinator rejects a proof that was made for a different instance. Retry with
                # the instance that this coordinator has named.
                instance = self._instance = offered
                status, headers, content = await self._ask(method, path, body, nonce, instance)
        proof = headers.get(PROOF_HEADER, "")
        known = self.target.token, "answer", instance, nonce, content
        if not protocol.is_sealed(proof, *known):
            raise ValueError(f"the response ({status}) does not prove that it comes from this job's coordinator")
        if status != 200:
            raise ValueError(f"the response is {status} {content[:150]!r}")
        return content

    async def _ask(self, method: str, path: str, body: bytes, nonce: str, instance: str) -> tuple[int, Any, bytes]:
        proof = protocol.seal(self.target.token, "request", instance, nonce, method, path, body)
        headers = {NONCE_HEADER: nonce, PROOF_HEADER: proof}
        url = URL(f"http://{self.target.endpoint}{path}", encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with self._client.session.request(
            method, url, data=body or None, headers=headers, allow_redirects=False, timeout=timeout
        ) as answer:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError(f"the response is encoded: {answer.headers['Content-Encoding'][:40]!r}")
            async with asyncio.timeout(SECONDS):
                # A long poll has finished waiting when the response begins, so the usual timeout
                # applies.
                content = await self._read(answer.content)
            return answer.status, answer.headers, content

    async def _read(self, stream: aiohttp.StreamReader) -> bytes:
        most = protocol.largest_report(self.target.pods)
        content = await _until(stream, b"", SMALL)
        if len(content) > SMALL:
            async with self._client.large:
                content = await _until(stream, content, most)
        if len(content) > most:
            raise ValueError(
                f"the response has more than {most} bytes, the limit for {self.target.pods} pods; make the"
                " program report less"
            )
        self.size = len(content)
        return content


async def _until(stream: aiohttp.StreamReader, begun: bytes, limit: int) -> bytes:
    """Return the bytes in `begun`, followed by the bytes that are read from the stream.

    Reading stops at the end of the stream, or once the result is longer than `limit` bytes.
    """
    parts, size = [begun], len(begun)
    while size <= limit and (part := await stream.readany()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def describe_error(what: str, error: BaseException) -> str:
    """Describe an error in one short line for the log.

    The message is escaped, because it may quote text from a user's coordinator.
    """
    return f"{what}: {type(error).__name__}: {str(error)!r}"[:200]


# --- reports ----------------------------------------------------------------------------------------------------


def read_report(body: bytes, received: datetime, pods: int = protocol.MAX_PODS) -> Report:
    """Read the report in a response, with times on the local clock and without unused fields.

    Raises ValueError if the report violates the contract.
    """
    try:
        report = Report.read(json.loads(body, parse_constant=_not_json))
        known = 2 * pods + 16  # Pods that have ended stay in the report for a while.
        report = replace(
            report,
            members=report.members[:known],
            lost=report.lost[:known],
            notes=report.notes[:known],
            incidents=protocol.shortened(report.incidents),
            overdue=report.overdue
            and replace(report.overdue, traceback=protocol.clip_kept(report.overdue.traceback, protocol.MAX_STACKS)),
        )
        ahead = received - report.now if report.now is not None else timedelta(0)
        placed: Report = _on_our_clock(report, received, ahead)
        return placed
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except OverflowError as error:
        raise ValueError(f"a number or a time is out of bounds: {error}") from None


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _on_our_clock(record: Any, received: datetime, offset: timedelta) -> Any:
    """Convert the record's times to the local clock.

    `offset` is the time by which the local clock is ahead of the coordinator's clock.
    """
    shift = offset if abs(offset) >= SAME_CLOCK else timedelta(0)
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, datetime):
            changes[field.name] = _moment(value + shift, received, field.name)
        elif isinstance(value, Record):
            changes[field.name] = _on_our_clock(value, received, shift)
        elif isinstance(value, tuple) and value and isinstance(value[0], Record):
            changes[field.name] = tuple(_on_our_clock(item, received, shift) for item in value)
    return replace(record, **changes) if changes else record


def _moment(moment: datetime, received: datetime, name: str) -> datetime:
    """Return a time from a report after checking it.

    Raises ValueError if the time is out of bounds. Only `backoff_until` can lie in the future. If
    any other time does, the clocks are wrong, and `received` is returned instead.
    """
    if abs(moment - received) > LONGEST_AGE:
        raise ValueError(f"{name}: {moment} is out of bounds")
    return moment if name == "backoff_until" else min(moment, received)
