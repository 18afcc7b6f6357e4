"""Posts notifications to receivers. A receiver is a webhook that the platform team names, with its
URL in a file.

A job only names a receiver, so people who create jobs cannot choose the address that the operator
sends to. Each receiver has its own workers, so a receiver that hangs does not delay the other
receivers. The namespaces that use the same receiver share its workers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.workqueue import DelayQueue
from ddpjob.controller.operator_metrics import NOTIFICATIONS
from ddpjob.core.world import NotificationOutcome
from ddpjob.engine.ports import JobKey

log = logging.getLogger("ddpjob.notify")

SECONDS = 10.0
"""Maximum duration in seconds of one attempt, from the DNS lookup to the headers of the response.
The response's body is not read.
"""
TRIES = 10
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Shortest and longest delay in seconds between two attempts. The delay doubles after each attempt,
unless the receiver asks for a longer delay. All attempts together take about 10 minutes."""
WORKERS = 2
"""Number of workers for each receiver. If two namespaces use a receiver at the same time, each
namespace gets one of the workers."""
LONGEST_URL = 4096
EVERYBODY = "*"
"""Entry that stands for all namespaces in a receiver's list of permitted namespaces."""


class Unsent(Exception):
    """An attempt to deliver a notification has failed.

    `pause` is the delay in seconds before the next attempt, as requested by the receiver. The
    message does not contain the receiver's URL, because the URL is a credential.
    """

    def __init__(self, message: str, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True)
class Receivers:
    """The receivers, and the namespaces whose jobs are allowed to use each receiver.

    `folder` contains one file for each receiver. The file has the receiver's name and contains the
    receiver's URL.
    """

    namespaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folder: Path = Path("/nonexistent")
    link: str = ""
    """URL of a web page about a job, with the placeholders {namespace} and {job}."""

    def usable_in(self, namespace: str) -> frozenset[str]:
        """Return the names of the receivers that the jobs in a namespace are allowed to use."""
        return frozenset(n for n, allowed in self.namespaces.items() if {namespace, EVERYBODY} & set(allowed))

    def url(self, name: str) -> str:
        """Read the URL of a receiver from its file.

        The file is read for each attempt, because the mounted Secret can change while the operator
        runs. Raises Unsent if the file contains no usable URL.
        """
        try:
            with (self.folder / name).open() as file:
                url = file.read(LONGEST_URL + 1).strip()
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and len(url) <= LONGEST_URL
        except (OSError, ValueError):
            raise Unsent("the Secret named by the chart's notify.secretName has no URL for this receiver") from None
        if not usable:
            raise Unsent(
                "this receiver's value in the Secret named by the chart's notify.secretName must be a URL that begins "
                "with https://"
            )
        return url

    def link_of(self, key: JobKey) -> str:
        return self.link.replace("{namespace}", key.namespace).replace("{job}", key.name)


@dataclass
class _Sending:
    """A notification whose outcome is not in the job's status yet."""

    receiver: str
    body: Json
    tries: int = 0
    outcome: NotificationOutcome | None = None


_Id = tuple[JobKey, str]


class Notifier:
    """Sends notifications to receivers.

    `wake(job)` is called as soon as the outcome of one of the job's notifications is known.
    """

    def __init__(self, receivers: Receivers, wake: Callable[[JobKey], None]) -> None:
        self.receivers, self._wake = receivers, wake
        self._sending: dict[JobKey, dict[str, _Sending]] = {}
        self._queues: dict[str, tuple[DelayQueue[_Id], asyncio.Task[None]]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Stop sending.

        Notifications that have not been sent stay pending in the statuses of their jobs, so the
        next leader sends them.
        """
        tasks = [task for _, task in self._queues.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def send(self, key: JobKey, id: str, receiver: str, body: Json) -> None:
        """Start sending a notification in the background.

        If a notification with this id is already being sent to this receiver, or if its outcome is
        known, do nothing.
        """
        known = self._sending.setdefault(key, {}).get(id)
        if known is not None and (known.receiver == receiver or known.outcome is not None):
            return
        self._sending[key][id] = _Sending(receiver, body)
        self._queue(receiver).add((key, id))

    def outcomes(self, key: JobKey, pending: Iterable[str]) -> dict[str, NotificationOutcome]:
        """Return the known outcomes of the notifications with the ids in `pending`.

        These are the notifications that are pending in the job's status. All other notifications of
        the job are forgotten, because the status already contains their outcomes.
        """
        if key not in self._sending:
            return {}
        wanted = frozenset(pending)
        kept = {id: sending for id, sending in self._sending[key].items() if id in wanted}
        if kept:
            self._sending[key] = kept
        else:
            del self._sending[key]
        return {id: sending.outcome for id, sending in kept.items() if sending.outcome is not None}

    # --- sending

    def _queue(self, receiver: str) -> DelayQueue[_Id]:
        if receiver not in self._queues:
            queue = DelayQueue[_Id](group=lambda id: id[0].namespace)
            attempt = partial(self._attempt, receiver)
            self._queues[receiver] = queue, asyncio.create_task(queue.work(attempt, WORKERS))
        return self._queues[receiver][0]

    async def _attempt(self, receiver: str, id: _Id) -> float | None:
        """Try once to deliver a notification.

        Return the number of seconds until the next attempt, or None if no attempt follows.
        """
        key, name = id
        sending = self._sending.get(key, {}).get(name)
        if sending is None or sending.outcome is not None or sending.receiver != receiver:
            return None
        sending.tries += 1
        try:
            await self._post(receiver, name, sending.body)
        except Unsent as problem:
            NOTIFICATIONS.labels("failed").inc()
            log.warning("%s/%s: receiver %s was not notified (attempt %s): %s", *key, receiver, sending.tries, problem)
            if sending.tries < TRIES:
                return min(LONGEST_PAUSE, max(problem.pause, FIRST_PAUSE * 2.0 ** (sending.tries - 1)))
            NOTIFICATIONS.labels("given_up").inc()
            sending.outcome = NotificationOutcome(delivered=False, message=f"{problem} ({TRIES} attempts)")
        else:
            NOTIFICATIONS.labels("delivered").inc()
            sending.outcome = NotificationOutcome(delivered=True)
        self._wake(key)
        return None

    async def _post(self, receiver: str, id: str, body: Json) -> None:
        """Send a notification to its receiver in one HTTP request.

        Raises Unsent if the receiver does not accept it.
        """
        url = self.receivers.url(receiver)
        headers = {"Content-Type": "application/json", "User-Agent": "ddpjob-operator", "Idempotency-Key": f'"{id}"'}
        try:
            async with (
                asyncio.timeout(SECONDS),
                self._http().post(url, data=json.dumps(body), headers=headers, allow_redirects=False) as answer,
            ):
                status, pause = answer.status, answer.headers.get("Retry-After", "")
                answer.close()
        except TimeoutError:
            raise Unsent(f"no response within {SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unsent(f"no response: {type(error).__name__}") from None
        if 300 <= status < 400:
            raise Unsent(f"HTTP {status}: redirects are not followed; the Secret must contain the receiver's final URL")
        if not 200 <= status < 300:
            seconds = float(pause) if pause.isascii() and pause.isdigit() else 0.0
            raise Unsent(f"HTTP {status}", min(LONGEST_PAUSE, seconds))

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                # Many receivers are reachable only through a proxy (HTTPS_PROXY).
                trust_env=True,
            )
        return self._session
