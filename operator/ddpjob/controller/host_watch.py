"""Watches Kubernetes nodes, and reports when one is deleted or its readiness, health or taints
change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from ddpjob.api.job_status import utc_now
from ddpjob.controller.kube.informer import Informer
from ddpjob.controller.kube.rest import ApiError, Rest
from ddpjob.core.world import HealthSignals, HostView, remembered

log = logging.getLogger("ddpjob.hosts")

Hosts = Mapping[str, HostView]
Changed = Callable[[Hosts | None, frozenset[str]], None]

NODES = "/api/v1/nodes"
_FORBIDDEN_RETRY = 600.0
"""Delay in seconds before the Kubernetes nodes are requested again if the operator was not
permitted to read them.
"""


class HostWatch(Informer[HostView]):
    """Keeps a `HostView` of every Kubernetes node.

    `on_hosts(hosts, changed)` is called when at least one view has changed. A Kubernetes node's
    heartbeat does not change its view. `hosts` is None before the first list, and whenever the
    operator is not permitted to list Kubernetes nodes.
    """

    def __init__(self, rest: Rest, on_hosts: Changed, signals: HealthSignals | None = None) -> None:
        super().__init__(rest, NODES, partial(HostView.read, signals=signals), self._changed)
        self.on_hosts = on_hosts
        self.hosts: Hosts | None = None
        """The views by name. Each change replaces the whole mapping, so a reconcile that holds the
        mapping sees a consistent state."""
        self._pending: set[str] = set()
        self._listing = False

    def _changed(self, before: HostView | None, after: HostView | None) -> None:
        known = after or before
        assert known is not None
        self._pending.add(known.name)
        if not self._listing:
            self._publish()

    async def list(self) -> None:
        """List the Kubernetes nodes, and call `on_hosts` once for all changes in the list.

        For example, 1,000 new Kubernetes nodes are reported in one call.
        """
        self._listing = True
        try:
            await super().list()
        finally:
            self._listing = False
        if self._pending or self.hosts is None:
            self._publish()

    def gone(self, name: str) -> None:
        """Record that the API server has no Kubernetes node with this name.

        Called for the Kubernetes node of a pod, even if the watch has never shown that Kubernetes
        node.
        """
        if self.hosts is not None and name not in self.hosts:
            self.hosts = {**self.hosts, name: HostView(name=name, ready=False, since=None, out_of_service=False)}
            self._publish()
        self.forget("", name)

    def _publish(self) -> None:
        changed = frozenset(self._pending)
        self._pending.clear()
        found = {host.name: host for host in self.views()}
        self.hosts = MappingProxyType(remembered(self.hosts, found, utc_now()))
        self.on_hosts(self.hosts, changed)

    def _forbidden(self, error: ApiError) -> float:
        if not self._logged_forbidden:
            self._logged_forbidden = True
            log.warning(
                "Kubernetes nodes are not watched, so the loss of one is detected only when its pods fall silent "
                "(%s). Use a ClusterRole to grant the operator get, list and watch on nodes",
                error,
            )
        # Without the permission, there is no list to wait for.
        self.listed.set()
        if self.hosts is not None:
            self.hosts = None
            self.on_hosts(None, frozenset())
        return _FORBIDDEN_RETRY
