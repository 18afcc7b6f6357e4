"""Asks the coordinators of jobs for their reports and tells them things, over HTTP to their pods."""

from __future__ import annotations

import logging

import aiohttp

from ddpjob.api.types import Json
from ddpjob.core.world import Report

log = logging.getLogger("ddpjob.coordinator")
TIMEOUT = aiohttp.ClientTimeout(total=2.0, connect=1.0)


class CoordinatorClient:
    """One session for all jobs. An unreachable coordinator is a fact to report, not an error."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=256))

    async def close(self) -> None:
        await self._session.close()

    async def report(self, endpoint: str) -> Report | None:
        """The report of the coordinator at `host:port`; None when it does not answer, or not by the contract."""
        try:
            async with self._session.get(f"http://{endpoint}/status") as answer:
                if answer.status != 200:
                    return None
                return Report.read(await answer.json())
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        except (KeyError, ValueError, TypeError) as error:
            log.warning("the coordinator at %s gives a report that cannot be read: %r", endpoint, error)
            return None

    async def tell(self, endpoint: str, token: str, verb: str, body: Json) -> None:
        """Posts `body` to `/v1/VERB`; what does not arrive is told again by the next pass, if it is still so."""
        try:
            headers = {"Authorization": f"Bearer {token}"}
            async with self._session.post(f"http://{endpoint}/v1/{verb}", json=body, headers=headers) as answer:
                if answer.status >= 400:
                    log.warning("the coordinator at %s refuses %s: %s %s", endpoint, verb, answer.status, await answer.text())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.info("the coordinator at %s was not told %s: %s", endpoint, verb, error)
