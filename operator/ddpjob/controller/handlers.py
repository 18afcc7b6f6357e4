"""kopf's part: watches that say which job to look at. They decide nothing and touch nothing, so running one again does no harm.

Only `kopf.on.event` is used: timers, daemons and change handlers would put finalizers and annotations on the jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import kopf

from ddpjob.api.types import GROUP, PLURAL, VERSION
from ddpjob.controller.login import login
from ddpjob.controller.settings import Settings
from ddpjob.core.world import LABEL_JOB, LABEL_MANAGED, MANAGED_BY
from ddpjob.engine.ports import JobKey

Wake = Callable[[JobKey], None]

_OWNED = ("pods", "services", "configmaps")
SERVER_TIMEOUT = 300
CLIENT_TIMEOUT = 330
CONNECT_TIMEOUT = 10.0


class Patience:
    """Seconds between kopf's tries of a request, without an end: each iteration begins anew.

    With its own, finite ones, kopf ends the process when the API server answers with 5xx for a minute, as a control plane
    that is being upgraded does.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3), itertools.repeat(5))


def build_registry(wake: Wake) -> kopf.OperatorRegistry:
    """Handlers that call `wake` with the job an object belongs to."""
    registry = kopf.OperatorRegistry()

    async def job_changed(name: str, namespace: str | None, **_: Any) -> None:
        wake(JobKey(namespace or "default", name))

    async def owned_changed(namespace: str | None, labels: Any, **_: Any) -> None:
        job = labels.get(LABEL_JOB)
        if job:
            wake(JobKey(namespace or "default", job))

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, id="job", registry=registry)(job_changed)
    for kind in _OWNED:
        kopf.on.event("", "v1", kind, labels={LABEL_MANAGED: MANAGED_BY}, id=f"owned-{kind}", registry=registry)(owned_changed)
    return registry


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Server-side filters, so that other workloads' pods never reach the operator, and watches that notice a dead peer."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = bool(settings.namespaces)
    watching = chosen.watching
    watching.server_timeout, watching.client_timeout = SERVER_TIMEOUT, CLIENT_TIMEOUT
    chosen.networking.error_backoffs = Patience()
    watching.connect_timeout, watching.inactivity_timeout = CONNECT_TIMEOUT, 70.0
    for kind in _OWNED:
        watching.label_selectors["", "v1", kind] = f"{LABEL_MANAGED}={MANAGED_BY}"
    return chosen
