"""Divides namespaces into shards by a hash of their names. For each shard, a single replica acts.

One process can reconcile only as many jobs as one CPU allows. With more jobs, several replicas act
at the same time, but never two for the same job. Each shard has a Lease, whose holder is elected as
in `election`. The rules in this module only decide which replica should take which Lease.

- A replica without a Lease takes a free Lease immediately. A replica that already holds Leases
  waits first, so that other replicas can take the free Lease. The wait is PATIENCE seconds for each
  Lease that the replica holds.
- A replica with at least two fewer shards than another replica asks that replica for a shard by
  writing its own name into an annotation of the Lease. The holder stops acting for that shard and
  releases the shard's Lease.
- The Leases' names contain the number of shards. Two different numbers put the same namespace into
  different shards. A replica therefore does not take a Lease while another replica holds one for a
  different number.

Example with 4 shards:

     0 s  A starts alone and takes shard 0
     6 s  shard 1 has been free for 6 s, and A holds one Lease, so A takes it
    12 s  A takes shard 2, and at 18 s shard 3
    60 s  B starts when nothing is free. A has 4, B has 0: B asks for one and gets it
    75 s  A has 3, B has 1: B asks again, and both have 2. Nobody asks again

A replica asks at most once in LEASE_SECONDS. While an upgrade changes 4 shards to 8, new replicas
wait until the old ones have released all `-of-4` Leases.

See docs/decisions/0015.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import zlib
from collections import Counter
from http import HTTPStatus

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.election import LEASE_SECONDS, RETRY_SECONDS, LeadershipLost, Lease
from ddpjob.controller.kube.rest import ApiError, Rest

log = logging.getLogger("ddpjob.election")

WANTED_BY = "ddpjob.io/wanted-by"
"""Annotation of a Lease. Its value is the name of a replica that asks the holder to release the
Lease."""
PATIENCE = 3 * RETRY_SECONDS
"""Number of seconds that a replica waits before it takes a free Lease, for each Lease that it
already holds.
"""


def shard_of(namespace: str, count: int) -> int:
    """Return the number of the shard that a namespace belongs to, from 0 to `count` - 1.

    All replicas and all releases of the operator compute the same number.
    """
    return zlib.crc32(namespace.encode()) % count


class Shards:
    """The Leases of all shards from the point of view of one replica.

    `count` is the number of shards. If there is only one shard, `name` is the name of its Lease.
    """

    def __init__(self, rest: Rest, namespace: str, name: str, identity: str, count: int) -> None:
        self.rest, self.name, self.namespace = rest, name, namespace
        names = [name] if count == 1 else [f"{name}-{index}-of-{count}" for index in range(count)]
        self.leases = [ShardLease(rest, namespace, lease, identity, self) for lease in names]
        self.taking = asyncio.Lock()
        self._family = re.compile(rf"{re.escape(name)}(-\d+-of-\d+)?")
        self._strangers: dict[str, Lease] = {}
        self._asked = float("-inf")

    @property
    def held(self) -> int:
        """Number of Leases that this replica holds now."""
        return sum(lease.held for lease in self.leases)

    def asks(self, holder: str) -> bool:
        """Return whether this replica should ask `holder` for one of its shards now.

        This replica should ask only if `holder` would still have at least as many shards as this
        replica after giving one away.
        """
        theirs = Counter(lease.holder for lease in self.leases)[holder]
        return theirs >= self.held + 2 and time.monotonic() - self._asked >= LEASE_SECONDS

    def has_asked(self) -> None:
        """Record that this replica has asked for a shard, so that it does not ask again soon."""
        self._asked = time.monotonic()

    async def another_number_is_held(self) -> bool:
        """Whether another replica holds a Lease for a different number of shards.

        This happens while an upgrade changes the number of shards. Raises the same errors as
        `Rest.request`.
        """
        try:
            found = (await self.rest.request("GET", self.leases[0].collection))["items"]
        except ApiError as error:
            if error.status == HTTPStatus.FORBIDDEN and len(self.leases) == 1:
                log.warning(
                    "the Leases cannot be listed, so an operator with a different number of shards may be running: %s",
                    error,
                )
                return False
            raise
        ours = {lease.name for lease in self.leases}
        for body in found:
            name = body["metadata"]["name"]
            if name not in ours and self._family.fullmatch(name):
                stranger = self._strangers.setdefault(name, Lease(self.rest, self.namespace, name, ""))
                stranger.observe(body)
                if stranger.is_held_by_another(body):
                    log.info("waiting for the Lease %s of an operator with a different number of shards", name)
                    return True
        return False


class ShardLease(Lease):
    """The Lease of one shard, which this replica may hand over to a replica with fewer shards."""

    def __init__(self, rest: Rest, namespace: str, name: str, identity: str, shards: Shards) -> None:
        super().__init__(rest, namespace, name, identity)
        self.shards = shards
        self.held, self.holder = False, ""
        """`held` is True while this replica holds the Lease. `holder` is the last known holder, or
        empty if the Lease was free."""
        self._free_since: float | None = None

    async def hold(self) -> bool:
        if self.held:
            return await super().hold()
        async with self.shards.taking:
            self.held = await super().hold() and await self._is_alone()
        return self.held

    async def _is_alone(self) -> bool:
        """Return whether no replica holds a Lease for a different number of shards.

        If a replica does, release this Lease and wait a moment. Two replicas with different numbers
        of shards can take their Leases at the same time. Each of them then sees the other's Lease
        here, and tries again later.
        """
        if not await self.shards.another_number_is_held():
            return True
        await super().release()
        await asyncio.sleep(random.uniform(0, RETRY_SECONDS))
        return False

    async def release(self) -> None:
        self.held = False
        await super().release()

    def observe(self, found: Json | None) -> None:
        super().observe(found)
        if found is None and self.holder not in ("", self.identity) and time.monotonic() - self._seen < LEASE_SECONDS:
            # The Lease was deleted. Its holder is expected to write it again.
            return
        holder = (found or {}).get("spec", {}).get("holderIdentity") or ""
        free = holder != self.identity and not self.is_held_by_another(found)
        self.holder = "" if free else holder
        if not free:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = time.monotonic()

    async def _may_have(self, found: Json | None) -> bool:
        annotations = (found or {}).get("metadata", {}).get("annotations", {})
        wanted_by = annotations.get(WANTED_BY, "")
        if self.held and self.holder not in ("", self.identity):
            self.held = False
            raise LeadershipLost(f"the Lease {self.namespace}/{self.name} is held by {self.holder}")
        if self.held and not self.holder:
            # The Lease was deleted, so this replica writes it again.
            return True
        if self.holder == self.identity:
            if self.held and wanted_by not in ("", self.identity) and self.shards.held > 1:
                self.held = False
                raise LeadershipLost(f"the Lease {self.namespace}/{self.name} is being released for {wanted_by}")
        elif self.holder:
            if found is not None and not wanted_by and self.shards.asks(self.holder):
                annotations = {**annotations, WANTED_BY: self.identity}
                await self._write({"metadata": {**found["metadata"], "annotations": annotations}}, found["spec"])
                self.shards.has_asked()
            return False
        else:
            patience = PATIENCE * self.shards.held
            if wanted_by not in ("", self.identity):
                patience = max(patience, LEASE_SECONDS)
            assert self._free_since is not None
            if time.monotonic() - self._free_since < patience or await self.shards.another_number_is_held():
                return False
        annotations.pop(WANTED_BY, None)
        return True
