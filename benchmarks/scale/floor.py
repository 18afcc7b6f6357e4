"""Measures the lower bound of the storm of losses: how fast the same number of pods can be replaced
through this machine's API server, without an operator.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Coroutine
from itertools import count
from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.rest import Rest
from ddpjob.controller.main import CONNECTIONS
from ddpjob.core.world import LABEL_ATTEMPT, LABEL_INDEX, LABEL_JOB, LABEL_MANAGED, LABEL_ROLE, Role
from ddpjob.engine.ports import Unavailable

from benchmarks.scale.hollow import Hollow, Pod

BARE = "bare"
"""Value of the manager label for pods without a job. The operator does not see these pods, and
hollow kubelets run them."""


class BareClient:
    """Creates pods, and recreates each pod once it is gone.

    `hollow` runs the pods managed by BARE.
    """

    def __init__(self, rest: Rest, hollow: Hollow) -> None:
        self.rest, self.hollow = rest, hollow
        self.seen: dict[tuple[str, str], float] = {}
        """When a watch showed each pod (monotonic seconds), by namespace and name."""
        self._manifests: dict[tuple[str, str], Json] = {}
        self._gate, self._numbers = asyncio.Semaphore(CONNECTIONS), count()
        self._work: set[asyncio.Task[None]] = set()
        hollow.on_pod = self._see

    async def create(self, manifest: Json, attempt: int = 0) -> tuple[str, str]:
        """Create a copy of a pod with a new name; return its namespace and name."""
        body = copy.deepcopy(manifest)
        meta = body["metadata"]
        meta["name"] = f"{BARE}-{next(self._numbers)}"
        # A server would be started for a coordinator's pod, so these pods have the node role.
        meta["labels"] = {**meta["labels"], LABEL_MANAGED: BARE, LABEL_ROLE: Role.NODE, LABEL_ATTEMPT: str(attempt)}
        key = meta["namespace"], meta["name"]
        self._manifests[key] = manifest
        labels = meta["labels"]
        async with self._gate:
            self.hollow.timeline.mark("planned", (key[0], labels[LABEL_JOB], int(labels.get(LABEL_INDEX, -1))), attempt)
            while True:
                try:
                    await self.rest.request("POST", f"/api/v1/namespaces/{key[0]}/pods", body=body)
                    return key
                except Unavailable:
                    await asyncio.sleep(0.1)

    def replace_from_now_on(self) -> None:
        """Recreate each pod when a watch shows that it is gone."""
        self.hollow.on_gone = lambda pod: self._begin(self.create(self._manifests[pod.namespace, pod.name], 1))

    def stop(self) -> None:
        self.hollow.on_gone = lambda pod: None

    def running(self) -> int:
        return sum(pod.runs for pod in self.hollow.pods.values())

    def _see(self, pod: Pod) -> None:
        self.seen[pod.namespace, pod.name] = time.monotonic()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
