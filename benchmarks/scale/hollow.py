"""Hollow kubelets and coordinators, which write and respond like real ones but run nothing.

They see jobs and pods through watches, like any client. A coordinator listens on its own loopback
address and seals its responses. Its report depends on which of the job's pods run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.informer import Informer
from ddpjob.controller.kube.rest import MERGE_PATCH, ApiError, Rest
from ddpjob.core.world import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_MANAGED,
    LABEL_ROLE,
    LABEL_UID,
    MANAGED_BY,
    Role,
)
from ddpjob.engine.ports import Unavailable
from ddpjob.objects.platform import Platform
from ddpjob_runtime import protocol
from ddpjob_runtime.protocol import (
    CoordinatorState,
    Incident,
    IncidentKind,
    LostMember,
    Member,
    MemberState,
    Report,
)

from benchmarks.scale.timeline import Id, Timeline

PORT = 29400
"""The jobs' rendezvous port, which is the default port. Coordinators serve their reports on the
next port.
"""
ENDED = "ended"
"""First word of finished jobs' names. The program that creates these jobs also creates their
pods.
"""
STEPS_PER_SECOND = 2
AT_ONCE = 32
"""Maximum number of concurrent requests of all kubelets together."""
FLOOD = 20_000_000
"""Size in bytes of a flooding coordinator's response."""
HOSTILE = ("hangs", "floods", "redirects", "lies", "flaps")
"""First words of job names; the coordinators of these jobs misbehave in the named way."""
LARGEST = "largest"
"""First word for coordinators that always have news, in the largest report that the operator
reads."""


@dataclass(frozen=True)
class Pod:
    """The facts about a job's pod that the benchmark needs."""

    namespace: str
    name: str
    uid: str
    job: str
    job_uid: str
    role: Role
    index: int
    attempt: int
    generation: int
    containers: tuple[tuple[str, str], ...]
    """(name, image) of each container."""
    runs: bool

    @property
    def id(self) -> Id:
        return self.namespace, self.job, self.index

    @classmethod
    def read(cls, body: Json) -> Pod:
        meta, labels = body["metadata"], body["metadata"]["labels"]
        return cls(
            meta["namespace"], meta["name"], meta["uid"], labels[LABEL_JOB], labels[LABEL_UID],
            Role(labels[LABEL_ROLE]), int(labels.get(LABEL_INDEX, -1)), int(labels[LABEL_ATTEMPT]),
            int(labels[LABEL_GENERATION]), tuple((c["name"], c["image"]) for c in body["spec"]["containers"]),
            bool(body.get("status", {}).get("podIP")),
        )  # fmt: skip


@dataclass
class Group:
    """The coordinator and members of one job."""

    name: str = ""
    nodes: int = 0
    """The number of nodes; 0 until the job watch has shown it."""
    token: str = ""
    phase: str = ""
    versions: int = 0
    """How many versions of the job its watch has shown, which is one for each status write."""
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    lost: dict[int, LostMember] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    round: int = 0
    news: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kind(self) -> str:
        """The first word of the job's name, such as one of HOSTILE."""
        return self.name.partition("-")[0]

    @property
    def complete(self) -> bool:
        return 0 < self.nodes <= len(self.members)

    def change(self) -> None:
        self.news += 1
        self.changed.set()
        self.changed = asyncio.Event()

    def join(self, pod: Pod) -> None:
        """Let the pod's launcher join. The last launcher to join begins a round."""
        self.members[pod.name] = Member(pod.name, MemberState.RUNNING, pod.index, pod.attempt, pod.index, self.round)
        self.lost.pop(pod.index, None)
        if self.complete:
            self.round += 1
        self.change()

    def leave(self, name: str) -> None:
        """Close a member's connection. The first member to disconnect ends the round."""
        now = datetime.now(UTC)
        if self.complete:
            number = len(self.incidents) + 1
            self.incidents.append(Incident(number, now, IncidentKind.PEER_LOST, pod=name, message="gone"))
        member = self.members.pop(name)
        self.lost[member.index] = LostMember(name, now, member.index, "its connection has ended")
        self.change()

    def report(self) -> Report:
        broken = CoordinatorState.RESTARTING if self.incidents else CoordinatorState.FORMING
        return Report(
            generation=self.generation,
            state=CoordinatorState.RUNNING if self.complete else broken,
            nodes=self.nodes,
            min_nodes=self.nodes,
            backoff=(1.0, 60.0),
            now=datetime.now(UTC),
            news=self.news,
            world=self.nodes if self.complete else None,
            round=self.round,
            members=tuple(self.members.values()),
            lost=tuple(self.lost.values()),
            incidents=tuple(self.incidents),
            progress={"step": int(time.monotonic() * STEPS_PER_SECOND), "loss": 0.5} if self.round else {},
        )


class Hollow:
    """The kubelets and coordinators of all jobs in some namespaces.

    `managed_by` is the manager label of the pods that they see.
    """

    def __init__(self, rest: Rest, operator_key: str, namespaces: Iterable[str], managed_by: str = MANAGED_BY) -> None:
        self.rest, self._platform = rest, Platform(operator_key=operator_key.encode())
        self._namespaces = frozenset(namespaces)
        self.groups: dict[str, Group] = {}
        """The groups by the job's uid."""
        self.pods: dict[tuple[str, str], Pod] = {}
        self.on_pod: Callable[[Pod], None] = lambda pod: None
        """Called with each pod when a watch first shows it."""
        self.on_gone: Callable[[Pod], None] = lambda pod: None
        """Called with each pod when the watch shows that it is gone."""
        self.timeline = Timeline()
        """Receives the steps of lost pods."""
        self.kubelets_run = True
        """Whether kubelets run; otherwise pods remain as they were created."""
        self._servers: dict[str, asyncio.Server] = {}
        """The servers by the uid of the coordinator's pod."""
        self._numbers, self._gate = count(1), asyncio.Semaphore(AT_ONCE)
        self._work: set[asyncio.Task[None]] = set()
        ours = f"{LABEL_MANAGED}={managed_by}"
        self._watches = (
            Informer(rest, "/api/v1/pods", Pod.read, self._pod_changed, selector=ours),
            Informer(rest, "/apis/ddpjob.io/v1alpha1/ddpjobs", self._read_job, self._job_changed),
        )

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._watches:
                    group.create_task(watch.run())
        finally:
            for task in self._work:
                task.cancel()
            for server in self._servers.values():
                server.close()

    async def ready(self) -> None:
        """Wait until both watches have begun."""
        for watch in self._watches:
            await watch.listed.wait()

    # --- what the watches show

    def _read_job(self, body: Json) -> tuple[str, str]:
        uid, phase = body["metadata"]["uid"], body.get("status", {}).get("phase", "")
        group = self.groups.setdefault(uid, Group())
        if not group.nodes:
            job = DDPJob.read(body)
            group.name, group.nodes, group.token = job.name, job.spec.nodes, self._platform.token(job)
        namespace = body["metadata"]["namespace"]
        if namespace in self._namespaces:
            group.phase = phase
            group.versions += 1
            for index, slot in enumerate(body.get("status", {}).get("slots", ())):
                self.timeline.mark("planned", (namespace, group.name, index), slot.get("attempt", 0))
        return uid, phase

    def _job_changed(self, before: tuple[str, str] | None, after: tuple[str, str] | None) -> None:
        if after is None and before is not None:
            self.groups.pop(before[0], None)

    def _pod_changed(self, before: Pod | None, after: Pod | None) -> None:
        known = after or before
        if known is None or known.namespace not in self._namespaces:
            return
        if after is None:
            self._gone(known)
            return
        self.pods[after.namespace, after.name] = after
        if before is None:
            self.timeline.mark("replaced", after.id, after.attempt)
            self.on_pod(after)
        if after.runs:
            self.timeline.mark("runs", after.id, after.attempt)
        if self.kubelets_run and before is None and not after.runs and not after.job.startswith(ENDED):
            task = asyncio.create_task(self._start(after))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    def _gone(self, pod: Pod) -> None:
        self.pods.pop((pod.namespace, pod.name), None)
        self.timeline.mark("gone", pod.id, pod.attempt)
        if pod.uid in self._servers:
            self._servers.pop(pod.uid).close()
        group = self.groups.get(pod.job_uid)
        if group is not None and pod.name in group.members:
            group.leave(pod.name)
        self.on_gone(pod)

    # --- kubelets

    async def _start(self, pod: Pod) -> None:
        number = next(self._numbers)
        address = f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"
        group = self.groups.setdefault(pod.job_uid, Group())
        if pod.role is Role.COORDINATOR:
            await self._serve(pod, group, address)
        async with self._gate:
            if not await self._write_status(pod, address):
                return
        if (pod.namespace, pod.name) in self.pods and pod.role is not Role.COORDINATOR:
            group.join(pod)

    async def _write_status(self, pod: Pod, address: str) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        containers = [
            {
                "name": name,
                "image": image,
                "imageID": "",
                "restartCount": 0,
                "ready": True,
                "state": {"running": {"startedAt": now}},
            }
            for name, image in pod.containers
        ]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "containerStatuses": containers}
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        while True:
            try:
                await self.rest.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)
                return True
            except ApiError as error:
                if error.status == 404:
                    return False
                raise
            except Unavailable:
                await asyncio.sleep(0.5)

    # --- coordinators

    async def _serve(self, pod: Pod, group: Group, address: str) -> None:
        if group.generation != pod.generation:
            group.generation, group.members, group.lost = pod.generation, {}, {}

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _answer(group, reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):  # The benchmark ends.
                pass
            finally:
                writer.close()

        self._servers[pod.uid] = await asyncio.start_server(answer, address, PORT + 1)


async def _answer(group: Group, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Respond to one request, as the job's coordinator or as a hostile one."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    await reader.readexactly(int(headers.get("content-length", "0")))
    query = dict(pair.split("=") for pair in target.partition("?")[2].split("&") if pair)
    status, more = "200 OK", ""
    if group.kind == "hangs":
        await asyncio.sleep(120)
    elif group.kind in ("flaps", LARGEST):
        group.news += 1
    elif int(query.get("news", -1)) >= group.news:
        await _wait(group.changed, float(query.get("wait", 0)))
    body = json.dumps(group.report().write()).encode() if method == "GET" else b"{}"
    if group.kind == LARGEST and method == "GET":
        body = _largest(group.report().write(), protocol.largest_report(group.nodes))
    if group.kind == "floods":
        body = b"[" * FLOOD
    elif group.kind == "redirects":
        status, more = "302 Found", "Location: http://127.0.0.1:1/\r\n"
    proof = protocol.seal(group.token, "answer", "", headers.get(protocol.NONCE_HEADER.lower(), ""), body)
    if group.kind == "lies":
        proof = "0" * len(proof)
    lines = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}{protocol.PROOF_HEADER}: {proof}\r\n\r\n"
    writer.write(lines.encode() + body)
    await writer.drain()


def _largest(report: Json, limit: int) -> bytes:
    """Return a report with incidents, up to `limit` bytes of JSON.

    A non-ASCII character in each string makes Python use twice as many bytes as the string has in
    JSON.
    """
    text = "x" * 2990 + "\u4e2d"
    filled, size = {**report, "incidents": []}, len(json.dumps(report))
    for number in range(1, 51):
        incident = {"id": number, "time": report["now"], "kind": "PeerLost", "message": text, "traceback": text}
        size += len(json.dumps(incident, ensure_ascii=False).encode()) + 2
        if size > limit:
            break
        filled["incidents"].append(incident)
    return json.dumps(filled, ensure_ascii=False).encode()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def pods_of(hollow: Hollow, job: str) -> list[Pod]:
    """Return the pods of the job `namespace/name`."""
    namespace, name = job.split("/")
    return [pod for pod in hollow.pods.values() if (pod.namespace, pod.job) == (namespace, name)]
