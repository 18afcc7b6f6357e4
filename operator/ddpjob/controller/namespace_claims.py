"""Claims namespaces, so that if two operators watch a namespace, only the first acts on its jobs.

Without claims, each operator would mistake the other operator's key for a change of its own key,
and would restart jobs. Helm prevents most installations in which two operators would watch the same
namespace, but not all of them. Two operators without permission for Leases restart each job once
(`slots.is_superseded`).
"""

from __future__ import annotations

import asyncio
import logging
import time

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.election import Lease
from ddpjob.controller.kube.rest import ApiError, Rest
from ddpjob.engine.ports import Unavailable

log = logging.getLogger("ddpjob.claims")

CLAIM_NAME = "ddpjob-jobs"
"""Name of the Lease that an operator uses to claim a namespace. Each namespace with jobs contains
such a Lease."""
CLAIM_SECONDS, RENEW_SECONDS, RETRY_SECONDS = 600, 200, 10


class _Claim(Lease):
    """The Lease that claims a namespace.

    It stays valid while the operator that holds it is restarted or upgraded.
    """

    def _taken(self, spec: Json) -> Json:
        return {**super()._taken(spec), "leaseDurationSeconds": CLAIM_SECONDS}


class _Namespace:
    """What this replica knows about the claim on one namespace.

    `due` is the time at which the claim must be requested again, and `renewed` is the time at which
    the claim was last renewed. Both are in monotonic seconds.
    """

    def __init__(self, claim: _Claim) -> None:
        self.claim, self.lock = claim, asyncio.Lock()
        self.mine, self.due, self.renewed, self.refused = False, 0.0, float("-inf"), False


class NamespaceClaims:
    """Claims namespaces for a release of the operator. All replicas of the release share the
    claims.

    `release` is the name of the Lease that these replicas use for their own election.
    """

    def __init__(self, rest: Rest, release: str) -> None:
        self.rest, self.release = rest, release
        self._namespaces: dict[str, _Namespace] = {}

    async def mine(self, name: str) -> bool:
        """Return whether this release acts in a namespace. Claim the namespace if no release has
        claimed it.

        Raises Unavailable.
        """
        if name not in self._namespaces:
            # Forget namespaces that no recent call has asked about. They have no jobs left, and
            # might no longer exist.
            left = time.monotonic() - CLAIM_SECONDS
            self._namespaces = {n: k for n, k in self._namespaces.items() if k.due > left or k.lock.locked()}
            self._namespaces[name] = _Namespace(_Claim(self.rest, name, CLAIM_NAME, self.release))
        known = self._namespaces[name]
        async with known.lock:
            if time.monotonic() >= known.due:
                await self._ask(name, known)
        return known.mine

    def is_sole(self, name: str) -> bool:
        """Whether this release holds the namespace's Lease, which keeps other operators from acting
        there.
        """
        known = self._namespaces.get(name)
        return known is not None and known.mine and not known.refused

    async def _ask(self, name: str, known: _Namespace) -> None:
        now = time.monotonic()
        refused = False
        try:
            held = await known.claim.hold()
        except ApiError as error:
            # Either the operator has no permission for Leases in this namespace, or the namespace
            # is being deleted.
            log.info("namespace %s is not claimed: %s", name, error)
            if known.due and not known.mine:
                known.due = now + RETRY_SECONDS  # A different operator held the namespace.
                return
            held = refused = True
        except Unavailable:
            if not known.mine or now - known.renewed >= CLAIM_SECONDS:
                raise
            return
        if not held and (known.mine or not known.due):
            log.error(
                "namespace %s: a different operator is managing its jobs (Lease %s/%s), so this operator does not. "
                "Assign the namespace to one operator with watchNamespaces. The claim of a stopped operator expires "
                "%s s after its last renewal",
                *(name, name, CLAIM_NAME, CLAIM_SECONDS),
            )
        known.mine, known.refused, known.due = held, refused, now + (RENEW_SECONDS if held else RETRY_SECONDS)
        known.renewed = now if held else known.renewed
