"""Checks that the CRD in the cluster has the status fields that this operator writes.

The status is the operator's only memory, and the API server drops fields that the CRD does not
describe. `helm upgrade` does not update the CRD, so the CRD can be older than the operator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob.api.job import GROUP, KIND, PLURAL, VERSION
from ddpjob.api.job_spec import Json
from ddpjob.api.schema import schema_of
from ddpjob.controller import operator_metrics as metrics
from ddpjob.controller.kube.rest import ApiError, Rest
from ddpjob.engine.ports import Unavailable

log = logging.getLogger("ddpjob.schema")

LOOK_SECONDS, RETRY_SECONDS = 60.0, 2.0
UNKNOWN_SECONDS = 45.0
"""Maximum number of seconds for which an unknown schema keeps the operator from acting. After this
time, the operator acts without the check. The schema is unknown if the API server responds with 429
or 5xx, if the API server's index does not list the schema, or if the API server answers all
requests except requests for the schema."""
INDEX = "/openapi/v3"
"""URL path of the schema index. Every authenticated client is permitted to read the index, so the
operator needs no permission to read CRDs."""
_API, _SCHEMA = f"apis/{GROUP}/{VERSION}", ".".join([*reversed(GROUP.split(".")), VERSION, KIND])
_NOT_INSTALLED = ("status",)
_SHOWN = 5
REMEDY = "kubectl apply --server-side --force-conflicts --filename charts/ddpjob-operator/crds"


class ServedSchema:
    """Checks every minute which status fields the API server's schema has.

    While the schema lacks fields that this operator writes, the check is repeated every
    RETRY_SECONDS.
    """

    def __init__(self, rest: Rest) -> None:
        self.rest = rest
        self.missing: tuple[str, ...] | None = None
        """Paths of the status fields that the API server would drop; None while they are unknown.
        """
        self._fits = asyncio.Event()
        self._seen = ""
        """URL of the schema that was read last. The URL contains a hash of the schema, so it
        changes with the schema."""
        self._logged = float("-inf")
        self._unknown_since: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the schema has all fields that this operator writes.

        Only then does the operator act.
        """
        return self.missing == ()

    async def wait(self) -> None:
        """Wait until the schema has all fields that this operator writes."""
        await self._fits.wait()

    async def run(self) -> None:
        """Check the schema repeatedly until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            try:
                await self.look()
                self._unknown_since = None
            except Unavailable as error:
                log.info("the DDPJob schema that the API server serves is unknown: %s", error)
                if error.status is None and not await self._rest_answers():
                    self._unknown_since = None
                elif self._unknown_since is None:
                    self._unknown_since = began
                elif now() - self._unknown_since >= UNKNOWN_SECONDS:
                    self._judge(self.missing or ())
            except Exception as error:
                # Either the operator lacks the permission, or a proxy blocks the request. The check
                # is useful but not necessary, so the operator acts without it.
                log.log(
                    logging.DEBUG if self.missing == () else logging.INFO,
                    "the DDPJob schema that the API server serves could not be checked: %r",
                    error,
                )
                self._judge(self.missing or ())
            await asyncio.sleep(LOOK_SECONDS if self.fits else RETRY_SECONDS)

    async def look(self) -> None:
        """Compare the schema that the API server serves with the fields that this operator writes.

        The schema is read only if its URL has changed since the last comparison.
        """
        index = await self.rest.request("GET", INDEX)
        address = str(index["paths"].get(_API, {}).get("serverRelativeURL", ""))
        if not address:
            self._seen = ""
            if not await self._is_served():
                self._judge(_NOT_INSTALLED)
                return
            if self.missing == _NOT_INSTALLED:
                self.missing = None
            raise Unavailable(f"{INDEX} does not list {_API}, although the API server serves it", status=200)
        if address != self._seen or self.missing is None:
            path, _, query = address.partition("?")
            served = await self.rest.request("GET", path, query=dict(q.split("=", 1) for q in query.split("&") if q))
            status = served["components"]["schemas"][_SCHEMA]["properties"].get("status", {})
            self._judge(tuple(lacking(schema_of("status"), status)))
            self._seen = address
        else:
            self._judge(self.missing)

    async def _rest_answers(self) -> bool:
        """Whether the API server responds to a request that is not for a schema."""
        try:
            await self._is_served()
        except Unavailable as error:
            return error.status is not None
        except ApiError:
            pass
        return True

    async def _is_served(self) -> bool:
        """Whether the API server's discovery lists DDPJobs.

        INDEX alone does not show this, because the index can lag behind, and a proxy can filter it.
        """
        try:
            found = await self.rest.request("GET", f"/{_API}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == PLURAL for resource in found["resources"])

    def _judge(self, missing: tuple[str, ...]) -> None:
        changed, self.missing = missing != self.missing, missing
        metrics.MISSING_FIELDS.set(len(missing))
        if not missing:
            if changed:
                log.info("the DDPJob definition (CRD) in the cluster has all fields that this operator writes")
            self._fits.set()
            return
        self._fits.clear()
        now = asyncio.get_running_loop().time()
        if changed or now - self._logged >= LOOK_SECONDS:
            self._logged = now
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            log.error(
                "this operator does not act on any job, because the DDPJob definition (CRD) in the cluster"
                " lacks %s%s, which "
                "the API server would drop. Running pods are not touched. Apply the definition of this release: %s",
                *(", ".join(missing[:_SHOWN]), more, REMEDY),
            )


def lacking(ours: Mapping[str, Any], served: Any, path: str = "status") -> Iterator[str]:
    """Yield the paths of the status fields that the API server would drop.

    `ours` is the schema of this release, and `served` is the schema that the API server serves.
    """
    served = served if isinstance(served, Mapping) else {}
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(ours.get("items"), Mapping):
        yield from lacking(ours["items"], served.get("items"), path)
    fields: Json = served.get("properties") or {}
    for name, schema in ours.get("properties", {}).items():
        below = f"{path}.{name}"
        if name in fields:
            yield from lacking(schema, fields[name], below)
        else:
            yield below
