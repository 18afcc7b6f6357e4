"""Simulates the kubelets of eight Kubernetes nodes on the real API server.

The simulation (`tests/simulation/kubelet.py`) decides how a kubelet starts and ends a pod and its
containers, and what the containers do. A coordinator's container runs the production coordinator,
whose HTTP port the operator reaches at a loopback address. A launcher's container sends the same
lines as a real one. kube-scheduler, kube-controller-manager and the operator are real. They bind
pods, notice silent nodes and delete objects. A simulated kubelet sees its pods through a watch,
renews its node's Lease, and writes and deletes like a real one.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.rest import MERGE_PATCH, ApiError, Rest
from ddpjob.engine.ports import Unavailable

from benchmarks.night.schedule import GPUS
from benchmarks.night.simulated import EPOCH_SECONDS, NOWHERE, Clock, Host, Machines, Network, Pod, listen
from benchmarks.night.training import Trainings

LEASE_SECONDS = 1.0
_NODES, _LEASES = "/api/v1/nodes", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti", "nvidia.com/gpu": str(GPUS)}


class WallClock(Clock):
    """The simulation's clock, which shows the time of day. The event loop makes scheduled calls."""

    @property
    def now(self) -> float:  # type: ignore[override]
        return time.time() - EPOCH_SECONDS

    @now.setter
    def now(self, value: float) -> None:
        pass

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, function)


@dataclass
class _ApiStore:
    """The simulated kubelets' store, which sends their writes to the API server."""

    clock: Clock
    write: Callable[[Json], None]
    delete: Callable[[Json], None]
    watchers: list[Callable[[str, str, Json], None]] = field(default_factory=list)
    secrets: dict[str, Json] = field(default_factory=dict)

    def get(self, kind: str, name: str) -> Json:
        """Return a Secret that was read before the container was started."""
        return self.secrets[name]

    def changed(self, kind: str, body: Json) -> None:
        self.write(body)

    def remove(self, kind: str, body: Json) -> None:
        self.delete(body)


class Kubelets(Machines):
    """The kubelets of all hosts, for the pods of one namespace."""

    def __init__(self, rest: Rest, namespace: str, network: Network, trainings: Trainings) -> None:
        store = _ApiStore(network.clock, self._send_status, self._confirm_end)
        super().__init__(store, network, trainings, random.Random(0), hosts=0)
        self.rest, self.namespace = rest, namespace
        self.saves = True
        self.address = lambda number: f"127.{10 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"
        self.on_pod = self._serve
        self.ready: set[str] = set()
        """Names of the nodes that are Ready according to the API server."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._servers: dict[str, asyncio.AbstractServer] = {}
        self._work: set[asyncio.Task[None]] = set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.result()  # An error goes to the event loop's handler.

    def close(self) -> None:
        for task in self._work:
            task.cancel()
        for server in self._servers.values():
            server.close()

    # ---- nodes

    async def register(self, name: str) -> None:
        """Register a node as its kubelet does."""
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        status = {"capacity": _CAPACITY, "allocatable": _CAPACITY, "conditions": [_ready()]}
        body = {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}
        await self.rest.request("POST", _NODES, body=body)
        lease = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _micro_time()}
        await self.rest.request("POST", _LEASES, body={"metadata": {"name": name}, "spec": lease})
        self.hosts[name] = Host(name, body)

    async def keep_alive(self, name: str) -> None:
        """Renew the node's Lease until cancelled. If necessary, report it as Ready again."""
        host = self.hosts[name]
        while True:
            try:
                if not host.silent:
                    body: Json = {"spec": {"renewTime": _micro_time()}}
                    await self._patch(f"{_LEASES}/{name}", body)
                if not host.silent and name not in self.ready:
                    await self._patch(f"{_NODES}/{name}/status", {"status": {"conditions": [_ready()]}})
            except Unavailable:
                pass  # The next renewal comes soon.
            await asyncio.sleep(LEASE_SECONDS)

    async def _patch(self, path: str, body: Json) -> None:
        await self.rest.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    def _is_ready(self, host: Host) -> bool:
        return host.name in self.ready

    def _say_ready(self, host: Host, ready: bool) -> None:
        """Do nothing, because `keep_alive` reports the readiness."""

    def bring_back(self, host: Host) -> None:
        """Restore the host's power or network, so that its kubelet catches up."""
        host.cut = False
        self.network.changed()
        for pod in [p for p in self.pods.values() if p.host is host]:
            if pod.removed:
                self._kill_if_reachable(pod)
                continue
            if pod.deleting:
                self._terminate_if_reachable(pod)
            self._write(pod)
            if pod.terminating and all(c.exit_code is not None for c in pod.containers.values()):
                self._forget(pod)

    # ---- pods

    def pod_changed(self, before: Json | None, after: Json | None) -> None:
        """Handle a change shown by the pod watch."""
        body = after or before
        assert body is not None
        self._observe("Pod", "DELETED" if after is None else "MODIFIED", body)

    def _observe(self, kind: str, what: str, body: Json) -> None:
        uid = body["metadata"]["uid"]
        pod = self.pods.get(uid)
        if what == "DELETED":
            if pod is not None:
                pod.removed = True
                self._kill_if_reachable(pod)
            if uid not in self.pods:
                self._close_port(uid)
            return
        body = dict(body)  # The simulated kubelet writes the pod's status into this copy.
        if pod is None:
            pod = self.pods[uid] = Pod(body, self.clock.now)
        pod.body = body
        if pod.host is NOWHERE and body["spec"].get("nodeName"):
            pod.host = self.hosts[body["spec"]["nodeName"]]
            self._spawn(self._begin(pod))
        if pod.deleting:
            self._terminate_if_reachable(pod)

    async def _begin(self, pod: Pod) -> None:
        """Read the Secrets of the pod's containers, and start them."""
        for container in pod.body["spec"]["containers"]:
            for entry in container.get("env", ()):
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                if reference is not None and not await self._read_secret(reference["name"]):
                    return  # Its job has been deleted.
        self.clock.later(self.network.draw("start"), lambda: self._start(pod))

    async def _read_secret(self, name: str) -> bool:
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{name}"
        found = await self._repeat("GET", path)
        if found is None:
            return False
        data = {key: base64.b64decode(value).decode() for key, value in found["data"].items()}
        self.store.secrets[name] = {"stringData": data}
        return True

    async def _repeat(self, method: str, path: str, **more: Any) -> Json | None:
        """Repeat a request until it succeeds. Return the response; None if the object is gone."""
        while True:
            try:
                return await self.rest.request(method, path, **more)
            except ApiError as error:
                if error.status in (404, 409):
                    return None
                raise
            except Unavailable:
                await asyncio.sleep(0.5)

    def _serve(self, pod: Pod) -> None:
        process = pod.coordinator
        if process is not None:

            async def serve() -> None:
                self._servers[pod.uid] = await listen(process, pod.address)

            self._spawn(serve())

    def _path(self, body: Json) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{body['metadata']['name']}"

    def _send_status(self, body: Json) -> None:
        status, uid = body["status"], body["metadata"]["uid"]
        images = {container["name"]: container["image"] for container in body["spec"]["containers"]}
        containers = [
            {**c, "image": images[c["name"]], "imageID": "", "restartCount": 0, "ready": "running" in c["state"]}
            for c in status["containerStatuses"]
        ]
        # Conditions are left out, because they belong to the scheduler and to programs that disrupt
        # the pod.
        sent = {"phase": status["phase"], "podIP": status["podIP"], "podIPs": [{"ip": status["podIP"]}]}
        patch = {"metadata": {"uid": uid}, "status": {**sent, "containerStatuses": containers}}

        async def send() -> None:
            async with self._locks[uid]:  # Writes stay in order.
                pod = self.pods.get(uid)
                if pod is None or not pod.host.silent:
                    await self._repeat("PATCH", f"{self._path(body)}/status", body=patch, content_type=MERGE_PATCH)

        self._spawn(send())

    def _confirm_end(self, body: Json) -> None:
        uid = body["metadata"]["uid"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}

        async def confirm() -> None:
            async with self._locks.pop(uid, asyncio.Lock()):
                pod = self.pods.get(uid)
                if pod is None or not pod.host.silent:
                    await self._repeat("DELETE", self._path(body), body=options)

        self._spawn(confirm())

    def _close_port(self, uid: str) -> None:
        if uid in self._servers:
            self._servers.pop(uid).close()


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _ready() -> Json:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    why = {"reason": "KubeletReady", "message": "", "lastHeartbeatTime": now, "lastTransitionTime": now}
    return {"type": "Ready", "status": "True", **why}
