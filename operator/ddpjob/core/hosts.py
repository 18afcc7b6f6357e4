"""What a pass knows of a Kubernetes node: whether the pods on it can be expected to live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpjob.api.types import parse_time

OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A node that exists. One whose object is deleted has no view."""

    name: str
    ready: bool
    """Whether its Ready condition is True. Unknown, which is what a node without a network becomes, is not ready."""
    since: datetime | None
    """When `ready` became what it is, by the API server's clock. None: the node has no Ready condition yet."""
    out_of_service: bool
    """Somebody has said by a taint that it is down for good: nothing on it runs any more."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> HostView:
        """Of a Node object. Raises KeyError for a body without a name, ValueError for a time that cannot be read."""
        conditions = (body.get("status") or {}).get("conditions") or ()
        ready: Mapping[str, Any] = next((c for c in conditions if c["type"] == "Ready"), {})
        taints = (body.get("spec") or {}).get("taints") or ()
        return cls(
            name=str(body["metadata"]["name"]),
            ready=ready.get("status") == "True",
            since=parse_time(ready.get("lastTransitionTime")),
            out_of_service=any(t["key"] == OUT_OF_SERVICE_TAINT for t in taints),
        )
