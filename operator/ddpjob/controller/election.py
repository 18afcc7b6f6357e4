"""Which replica acts: the holder of a Lease, by client-go's algorithm.

A holder that cannot renew ends before its lease does; others wait for as long as they have themselves seen no renewal, so clocks
need not agree. A Lease given back is taken at the next try, which makes a rolling update a matter of seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ddpjob.api.types import Json
from ddpjob.controller.rest import ApiError, Rest
from ddpjob.engine.ports import Unavailable
from ddpjob.engine.reconcile import utc_now

log = logging.getLogger("ddpjob.election")

LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 10, 6, 2
_RELEASE_SECONDS = 3.0


class LeadershipLost(RuntimeError):
    """Another replica may act now; this one must end at once and begin again as a follower."""


class Lease:
    """The Lease `name` as seen by one replica."""

    def __init__(self, rest: Rest, namespace: str, name: str, identity: str) -> None:
        self.rest, self.name, self.namespace, self.identity = rest, name, namespace, identity
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._version, self._seen = "", 0.0

    async def hold(self) -> bool:
        """Takes the Lease or renews it; False when another replica holds it or was quicker. Raises ApiError and Unavailable."""
        try:
            found = await self.rest.request("GET", f"{self._collection}/{self.name}")
            spec = found.get("spec", {})
            if self._is_held_by_another(found["metadata"]["resourceVersion"], spec):
                return False
            await self._write(found, self._taken(spec))
        except ApiError as error:
            if error.status == 409:
                return False
            if error.status != 404:
                raise
            return await self._create()
        return True

    async def release(self) -> None:
        """Gives the Lease back, if this replica holds it."""
        found = await self.rest.request("GET", f"{self._collection}/{self.name}")
        if found.get("spec", {}).get("holderIdentity") == self.identity:
            await self._write(found, {**found["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()})

    def _is_held_by_another(self, version: str, spec: Json) -> bool:
        if version != self._version:
            self._version, self._seen = version, time.monotonic()
        holder = spec.get("holderIdentity") or ""
        fresh = time.monotonic() - self._seen < (spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        return bool(holder) and holder != self.identity and fresh

    def _taken(self, spec: Json) -> Json:
        taken = {**spec, "holderIdentity": self.identity, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": _now()}
        if spec.get("holderIdentity") != self.identity:
            taken |= {"acquireTime": taken["renewTime"], "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
        return taken

    async def _create(self) -> bool:
        metadata = {"name": self.name, "namespace": self.namespace}
        try:
            await self.rest.request("POST", self._collection, body=_lease(metadata, self._taken({})))
        except ApiError as error:
            if error.status == 409:
                return False
            raise
        return True

    async def _write(self, found: Json, spec: Json) -> None:
        """The resource version in the metadata makes the API server refuse a write over another replica's."""
        await self.rest.request("PUT", f"{self._collection}/{self.name}", body=_lease(found["metadata"], spec))


async def act_while_elected(lease: Lease, act: Callable[[], Awaitable[None]]) -> None:
    """Waits for the Lease, then acts while it is renewed. Raises LeadershipLost, or what `act` raises; never returns before `act` does."""
    taken = await _acquire(lease)
    acting, renewing = asyncio.ensure_future(act()), asyncio.ensure_future(_renew(lease, taken))
    try:
        done, _ = await asyncio.wait((acting, renewing), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (acting, renewing):
            task.cancel()
        await asyncio.gather(acting, renewing, return_exceptions=True)
        # Only now: the next holder must not meet this one's calls.
        await _release(lease)


async def _acquire(lease: Lease) -> float:
    """Returns when the successful try began: the Lease counts from no later than that."""
    while True:
        began = time.monotonic()
        if await _try(lease, RENEW_SECONDS):
            return began
        await asyncio.sleep(RETRY_SECONDS)


async def _renew(lease: Lease, renewed: float) -> None:
    while True:
        await asyncio.sleep(RETRY_SECONDS)
        began = time.monotonic()
        if await _try(lease, renewed + RENEW_SECONDS - began):
            renewed = began
        elif time.monotonic() - renewed >= RENEW_SECONDS:
            raise LeadershipLost(f"the Lease {lease.namespace}/{lease.name} could not be renewed in {RENEW_SECONDS} s")


async def _try(lease: Lease, seconds: float) -> bool:
    """An API server that is away for a moment is no reason to end."""
    try:
        async with asyncio.timeout(max(seconds, 0)):
            return await lease.hold()
    except (Unavailable, TimeoutError) as error:
        log.warning("the Lease %s/%s: %s", lease.namespace, lease.name, error or "no answer in time")
        return False


async def _release(lease: Lease) -> None:
    try:
        async with asyncio.timeout(_RELEASE_SECONDS):
            await lease.release()
    except (ApiError, Unavailable, TimeoutError) as error:
        log.warning("the Lease %s/%s was not given back, it ends in %s s: %s", lease.namespace, lease.name, LEASE_SECONDS, error)


def _lease(metadata: Json, spec: Json) -> Json:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _now() -> str:
    return utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
