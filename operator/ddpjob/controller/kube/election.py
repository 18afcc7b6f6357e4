"""Leader election with client-go's algorithm. Only the replica that holds the Lease acts.

Two replicas must never act at the same time, and a replica that dies must be replaced soon. The
algorithm must not rely on synchronized clocks.

- The holder renews the Lease every RETRY_SECONDS. If no renewal has succeeded for RENEW_SECONDS,
  the holder stops acting. This time is counted from the beginning of the holder's last successful
  write.
- The other replicas read the Lease every RETRY_SECONDS. If a replica has seen no new version of the
  Lease for LEASE_SECONDS, it takes the Lease. LEASE_SECONDS is the Lease's duration, and each
  replica measures it on its own monotonic clock. Replicas never compare `renewTime`, which is for
  human readers.
- Every write contains the resource version that the writer has read, so if two replicas write at
  the same time, one of them gets a conflict.

Example: A holds the Lease, B waits, and A is partitioned right after a renewal.

     0.0  A's renewal is stored; B sees it at 1.0
     2.0  A tries to renew, gets no response, and keeps retrying
    10.0  A stops acting and cancels whatever it was doing
    16.0  B has seen no renewal for 15 s, and takes the Lease

From second 10 to second 16, no replica acts. This gives A time to stop. A holder that shuts down
cleanly releases the Lease once it has stopped, so a rolling update takes seconds. A renewal is a
single request, and a failed one is retried after _AGAIN_SECONDS. A holder therefore keeps the Lease
even if the API server refuses half of all requests.

See docs/decisions/0011 for why the official client's election is not used, and `operator_shards`
for the use of several Leases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus

from ddpjob.controller.kube.rest import ApiError, Json, Rest
from ddpjob.unavailable import Unavailable

log = logging.getLogger("ddpjob.election")

LEASE_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 15, 10, 2
"""Duration of a Lease, maximum time between two renewals, and interval between attempts, all in
seconds. The values are the defaults of Kubernetes' own components.
"""
assert RETRY_SECONDS < RENEW_SECONDS < LEASE_SECONDS, "a holder must stop before another replica may act"
_AGAIN_SECONDS = 0.5
"""Number of seconds after which a failed renewal is retried."""
_RELEASE_SECONDS = 3.0


class LeadershipLost(RuntimeError):
    """This replica could not renew its Lease in time. It has stopped acting, because another
    replica may take the Lease soon.
    """


class Lease:
    """The Lease `name` from the point of view of the replica `identity`."""

    def __init__(self, rest: Rest, namespace: str, name: str, identity: str) -> None:
        self.rest, self.name, self.namespace, self.identity = rest, name, namespace, identity
        self.collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._own: Json | None = None
        """The Lease as this replica last wrote it; None if another replica might have written it
        since.
        """
        self._version: str | None = None
        self._seen = 0.0
        """The time at which this replica first saw the current version of the Lease, in monotonic
        seconds."""
        self._read = float("-inf")
        self.written = float("-inf")
        """The time at which this replica began its last write to the Lease. Other replicas see that
        write later, and measure the Lease's duration from the time at which they see it.
        """

    @property
    def read_lately(self) -> bool:
        """Whether this replica has read the Lease from the API server within the last
        LEASE_SECONDS."""
        return time.monotonic() - self._read < LEASE_SECONDS

    async def hold(self) -> bool:
        """Take or renew the Lease, and return whether this replica holds it now.

        The result is False if another replica holds the Lease or has just taken it. Raises ApiError
        or Unavailable.
        """
        try:
            if await self._renewed():
                return True
            found = await self._find()
            self.observe(found)
            if not await self._may_have(found):
                return False
            if found is None:
                body = _lease({"name": self.name, "namespace": self.namespace}, self._taken({}))
                self._own = await self.rest.request("POST", self.collection, body=body)
            else:
                self._own = await self._write(found, self._taken(found.get("spec", {})))
        except ApiError as error:
            if error.status == HTTPStatus.CONFLICT:
                return False
            raise
        return True

    async def _renewed(self) -> bool:
        """Renew the Lease without reading it first, and return whether this succeeded.

        The renewal is tried only if this replica was the last to write the Lease. If the renewal
        fails, the caller must read the Lease.
        """
        own, self._own = self._own, None
        if own is None:
            return False
        try:
            self._own = await self._write(own, self._taken(own["spec"]))
        except ApiError as error:
            if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                raise
            return False
        except Unavailable:
            self._own = own
            raise
        self.observe(self._own)
        return True

    async def _find(self) -> Json | None:
        try:
            return await self.rest.request("GET", f"{self.collection}/{self.name}")
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def release(self) -> None:
        """Release the Lease if this replica holds it."""
        self._own = None
        found = await self.rest.request("GET", f"{self.collection}/{self.name}")
        if found.get("spec", {}).get("holderIdentity") == self.identity:
            await self._write(
                found, {**found["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
            )

    def observe(self, found: Json | None) -> None:
        """Record the Lease as the API server has returned it; None if it does not exist."""
        self._read = time.monotonic()
        version = found["metadata"]["resourceVersion"] if found is not None else ""
        if version != self._version:
            self._version, self._seen = version, time.monotonic()

    async def _may_have(self, found: Json | None) -> bool:
        """Whether this replica may take the Lease. `found` is the Lease that was just observed."""
        return not self.is_held_by_another(found)

    def is_held_by_another(self, found: Json | None) -> bool:
        """Whether another replica holds the Lease and has renewed it within the Lease's duration.

        The duration is measured on this replica's own clock. It starts when this replica first saw
        the current version of the Lease.
        """
        spec = found.get("spec", {}) if found is not None else {}
        holder = spec.get("holderIdentity") or ""
        fresh = time.monotonic() - self._seen < (spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        return bool(holder) and holder != self.identity and fresh

    def _taken(self, spec: Json) -> Json:
        self.written = time.monotonic()
        taken = {**spec, "holderIdentity": self.identity, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": _now()}
        if spec.get("holderIdentity") != self.identity:
            taken |= {"acquireTime": taken["renewTime"], "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
        return taken

    async def _write(self, found: Json, spec: Json) -> Json:
        """Replace the spec of the Lease `found`.

        The metadata contains the resource version that was read. The API server therefore rejects
        the write if another replica has written the Lease in the meantime.
        """
        return await self.rest.request("PUT", f"{self.collection}/{self.name}", body=_lease(found["metadata"], spec))


async def act_while_elected(lease: Lease, act: Callable[[], Awaitable[None]]) -> None:
    """Wait for the Lease, and run `act` as long as the Lease is renewed.

    If the Lease is lost, stop `act` and wait for the Lease again. Return when `act` returns. An
    unreachable API server does not end this function, because restarting the process would not
    help.
    """
    while True:
        try:
            return await _term(lease, act)
        except LeadershipLost as lost:
            log.warning("%s: this replica has stopped acting and waits for the Lease", lost)


async def _term(lease: Lease, act: Callable[[], Awaitable[None]]) -> None:
    """Wait for the Lease, and run `act` until it ends or the Lease is lost.

    Raises LeadershipLost if the Lease could not be renewed in time. Also raises any exception that
    `act` raises. In both cases, `act` has stopped before the exception is raised.
    """
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
        # Release the Lease only after `act` has stopped, because another replica may act as soon as
        # the Lease is free.
        await _release(lease)


async def _acquire(lease: Lease) -> float:
    """Wait until this replica holds the Lease.

    Return the time, in monotonic seconds, at which the replica began to write the Lease.
    """
    while True:
        if await _try(lease, RENEW_SECONDS):
            return lease.written
        await asyncio.sleep(RETRY_SECONDS)


async def _renew(lease: Lease, renewed: float) -> None:
    pause: float = RETRY_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        held = await _try(lease, renewed + RENEW_SECONDS - began)
        pause = RETRY_SECONDS if held else _AGAIN_SECONDS
        if held:
            renewed = lease.written
        elif time.monotonic() - renewed >= RENEW_SECONDS:
            raise LeadershipLost(
                f"the Lease {lease.namespace}/{lease.name} could not be renewed within {RENEW_SECONDS} s"
            )


async def _try(lease: Lease, seconds: float) -> bool:
    """Try once to take or renew the Lease, for at most `seconds`.

    If the attempt failed, return False instead of raising an error, because a later attempt may
    succeed.
    """
    try:
        async with asyncio.timeout(max(seconds, 0)):
            return await lease.hold()
    except (ApiError, Unavailable, TimeoutError, KeyError) as error:
        # A KeyError means that the response is not a Lease, so it comes from a different server.
        log.warning(
            "the Lease %s/%s could not be taken or renewed: %s",
            lease.namespace,
            lease.name,
            str(error) or "no response in time",
        )
        return False


async def _release(lease: Lease) -> None:
    try:
        async with asyncio.timeout(_RELEASE_SECONDS):
            await lease.release()
    except (ApiError, Unavailable, TimeoutError, KeyError) as error:
        # A KeyError means that the response is not a Lease, so it comes from a different server.
        log.warning(
            "the Lease %s/%s was not released and expires in %s s: %s",
            lease.namespace,
            lease.name,
            LEASE_SECONDS,
            str(error) or "no response in time",
        )


def _lease(metadata: Json, spec: Json) -> Json:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _now() -> str:
    return utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def utc_now() -> datetime:
    """Return the current UTC time."""
    return datetime.now(UTC)
