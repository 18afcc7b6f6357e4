"""The operator's port to the store.

Like the Kubernetes implementation, it has caches, conflicts and lost responses, but no HTTP.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Container
from dataclasses import replace
from datetime import datetime
from typing import Any

from ddpjob.api.job import DDPJob, queue_labels, taken_class
from ddpjob.api.job_classes import JobClasses
from ddpjob.api.job_status import JobStatus
from ddpjob.controller.pod_views import read_claim, read_pod, read_workload
from ddpjob.core.decision import Event
from ddpjob.core.volumes import list_claims_to_read
from ddpjob.core.world import (
    LABEL_ROLE,
    LABEL_UID,
    ClaimView,
    HealthSignals,
    HostView,
    NotificationOutcome,
    PodView,
    Role,
    World,
    remembered,
)
from ddpjob.engine.coordinator_client import read_report
from ddpjob.engine.ports import Conflict, JobKey, NameTaken, Observation
from ddpjob.objects.claim import template_mark
from ddpjob.objects.isolation import policy_name
from ddpjob.objects.platform import Platform
from ddpjob.objects.pod_template import problems
from ddpjob.objects.service import runtime_name
from ddpjob_runtime.protocol import Report

from .clock import Clock
from .kubelet import Machines
from .network import Network
from .store import NAMESPACE, Json, Refusal, Store

LISTED_FOR = 30.0
"""Seconds after which a list is read again even if the watches work, as in the Kubernetes
implementation.
"""

DEPARTED_FOR = 10.0
"""Seconds for which the last state of a deleted pod is remembered."""


class Killed(BaseException):
    """The operator dies at this point."""


SIGNALS = HealthSignals(conditions=(("GpuUnhealthy", "True"),))


class MemoryCluster:
    """Implements `ddpjob.engine.ports.Cluster`. Every write passes through `_call`, where a test
    can kill the operator.
    """

    def __init__(self, clock: Clock, store: Store, machines: Machines, network: Network, chance: random.Random) -> None:
        self.clock, self.store, self.machines, self.network, self.random = clock, store, machines, network, chance
        self.platform = Platform(operator_key=b"key")
        self.is_sole = False
        """Whether the operator holds the namespace's Lease."""
        self.points = 0
        """Number of points so far. There is one before and one after every write."""
        self.is_repeated = False
        """Whether nothing has changed since the previous point, because one write directly follows
        another.
        """
        self.die_at: Container[int] = ()
        self.dead = False
        self.conflicts = 0
        """Number of the next status writes that conflict with a different writer."""
        self.knows_hosts = True
        self.serves_gangs = False
        self.serves_queues: bool | None = None
        self.lose_messages = self.repeat_messages = self.lose_reports = 0.0
        """Probabilities of faults."""
        self.delay_messages = 0.0
        self.received: list[Json] = []
        """Notifications that the receiver has received."""
        self.outcomes: dict[str, NotificationOutcome] = {}
        """Notifications as the running operator process knows them."""
        self.receiver_works = True
        self._token = ""
        """Name of the Secret that the running operator process has created or found."""
        self.classes = JobClasses()
        self.others_wait = False
        self.events: list[Event] = []
        self.writes = 0
        self.actions: list[str] = []
        """Actions of the current reconcile."""
        self.on_conflict: Callable[[], None] = lambda: None
        self._pods: tuple[PodView, ...] | None = None
        self._listed = 0.0
        self._job: DDPJob | None = None
        self._views: dict[str, tuple[str, PodView]] = {}
        self._hosts: dict[str, tuple[str, HostView]] = {}
        self._found: dict[str, HostView] = {}
        self._remembered: dict[str, HostView] | None = None
        self._departed: dict[str, tuple[float, PodView]] = {}
        store.watchers.append(self._watch)
        self._files: dict[str, str] = {}

    def changed(self) -> None:
        """Report a change through a watch, so that pods are listed again."""
        self._pods = None

    def restart(self) -> None:
        """Start a new operator process, without any state."""
        self.dead = False
        self._remembered = None
        self._departed.clear()
        self.outcomes.clear()
        self._token = ""
        self.changed()

    # --- reading

    def _watch(self, kind: str, what: str, body: Json) -> None:
        """Remember a deleted pod, because the event of its deletion shows its last state."""
        if kind == "Pod" and what == "DELETED":
            pod = read_pod(body)
            self._departed[pod.name] = self.clock.now, pod

    async def observe(self, key: JobKey) -> Observation | None:
        self.actions = []
        body = self.store.find("DDPJob", key.name)
        if body is None:
            return None
        job = self._read(body)
        wanted = job.status.runtime or runtime_name()
        endpoint = job.status.rendezvous.endpoint
        # As in the Kubernetes implementation, pods are listed before the coordinator is asked.
        pods = self._list()
        world = World(
            pods=pods,
            departed=tuple(pod for when, pod in self._departed.values() if self.clock.now - when < DEPARTED_FOR),
            has_service=self.store.find("Service", job.name) is not None,
            has_budget=self.store.find("PodDisruptionBudget", job.name) is not None,
            hosts=self._host_views() if self.knows_hosts else None,
            serves_gangs=self.serves_gangs,
            gangs={b["metadata"]["name"]: b["metadata"]["uid"] for b in self.store.all("PodGroup")},
            serves_queues=self.serves_queues,
            workloads=tuple(map(read_workload, self.store.all("Workload"))) if self.serves_queues else (),
            runtime=wanted if self.store.find("ConfigMap", wanted) is not None else "",
            runtime_offered=runtime_name(),
            policy=policy_name(job, self.platform),
            has_policy=self.store.find("NetworkPolicy", policy_name(job, self.platform)) is not None,
            key_mark=self.platform.key_mark,
            is_sole_operator=self.is_sole,
            has_token=self._token == self.platform.token_secret(job),
            receivers=frozenset({"team"}),
            offer=self.classes.offer(job),
            others_wait=self.others_wait,
            outcomes=dict(self.outcomes),
            claims=tuple(self._claim(name) for name in list_claims_to_read(job, pods)),
            claim_template=template_mark(job),
            report=self._report(endpoint) if endpoint else None,
            problems=problems(job.spec.pod_template)
            if job.status.template_hash.split("-")[0] != job.spec.template_hash
            else (),
        )
        return Observation(job, world)

    def _claim(self, name: str) -> ClaimView:
        found = self.store.find("PersistentVolumeClaim", name)
        return read_claim(found) if found is not None else ClaimView(name=name, exists=False)

    def _read(self, body: Json) -> DDPJob:
        """Return the job. Its spec is parsed once per generation and class, which saves a fifth of
        the time.
        """
        meta = body["metadata"]
        status = JobStatus.read(body.get("status") or {})
        known = self._job
        if known is None or known.generation != meta["generation"] or known.status.job_class != status.job_class:
            self._job = known = DDPJob.read(body)
        queue, priority = queue_labels(meta, taken_class(body["spec"], status))
        version = meta["resourceVersion"]
        return replace(known, status=status, resource_version=version, queue=queue, queue_priority=priority)

    def _list(self) -> tuple[PodView, ...]:
        if self._pods is None or self.clock.now - self._listed >= LISTED_FOR:
            self._pods = tuple(self._view(body) for body in self.store.all("Pod"))
            self._listed = self.clock.now
        return self._pods

    def _view(self, body: Json) -> PodView:
        uid, version = body["metadata"]["uid"], body["metadata"]["resourceVersion"]
        known = self._views.get(uid)
        if known is None or known[0] != version:
            known = self._views[uid] = version, read_pod(body)
        return known[1]

    def _host_views(self) -> dict[str, HostView]:
        found = {}
        for body in self.store.all("Node"):
            name, version = body["metadata"]["name"], body["metadata"]["resourceVersion"]
            known = self._hosts.get(name)
            if known is None or known[0] != version:
                known = self._hosts[name] = version, HostView.read(body, SIGNALS)
            found[name] = known[1]
        # The controller does the same, but is called with changes.
        if self._remembered is None or found != self._found:
            self._remembered, self._found = remembered(self._remembered, found, self.clock.moment()), found
        return self._remembered

    def _report(self, endpoint: str) -> Report | None:
        process = self.network.at(endpoint)
        if process is None or (self.lose_reports and self.random.random() < self.lose_reports):
            return None
        return read_report(process.status(), self.clock.moment())

    # --- writing

    def _call(self, what: str, act: Callable[[], Any]) -> Any:
        if self.dead:
            raise Killed
        self.is_repeated = bool(self.actions)
        self._point(f"before {what}")
        self.is_repeated = False
        self.network.say(f"operator: {what}")
        self.actions.append(what)
        result = act()
        self._point(f"after {what}")
        return result

    def _point(self, where: str) -> None:
        self.points += 1
        if self.points in self.die_at:
            self.dead = True
            self.network.say(f"the operator dies {where}")
            raise Killed(where)

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        if self.conflicts:
            self.conflicts -= 1
            self.on_conflict()
            raise Conflict
        self.writes += 1
        body = {"metadata": {"resourceVersion": job.resource_version}, "status": status}

        def act() -> Json:
            return self.store.replace_status("DDPJob", job.name, body)

        try:
            written = self._call("writes the status", act)
        except Refusal as refusal:
            raise Conflict from refusal
        return self._read(written)

    async def create(self, job: DDPJob, manifest: Json) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]

        def act() -> None:
            try:
                self.store.create(kind, manifest)
            except Refusal:
                found = self.store.get(kind, name)
                owners = [o["uid"] for o in found["metadata"].get("ownerReferences", ())]
                owners += [found["metadata"].get("labels", {}).get(LABEL_UID)] if "Claim" in kind else []
                if job.uid not in owners or "deletionTimestamp" in found["metadata"]:
                    raise NameTaken("an object with this name is still being removed") from None
            if kind == "Secret":
                self._token = name
            self.changed()

        self._call(f"creates {kind} {name}", act)

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        def act() -> None:
            with contextlib.suppress(Refusal):
                self.store.delete("Pod", name, uid, grace)
            self.changed()

        self._call(f"deletes {name} (grace {grace})", act)

    async def delete(self, job: DDPJob, kind: str, name: str, uid: str) -> None:
        def act() -> None:
            with contextlib.suppress(Refusal):
                self.store.delete(kind, name, uid)

        self._call(f"deletes {kind} {name}", act)

    async def change_workload(
        self, job: DDPJob, name: str, uid: str, change: Callable[[Json, datetime], Json | None]
    ) -> None:
        def act() -> None:
            found = self.store.find("Workload", name)
            changed = change(found, self.clock.moment()) if found and found["metadata"]["uid"] == uid else None
            if changed is not None:
                self.store.replace_status("Workload", name, changed)

        self._call(f"changes Workload {name}", act)

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        def act() -> None:
            with contextlib.suppress(Refusal):
                self.store.label("Pod", name, uid, {LABEL_ROLE: str(role)})
            self.changed()

        self._call(f"labels {name} {role}", act)

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        token, content = self.platform.token(job), json.dumps(body).encode()

        def deliver() -> None:
            process = self.network.at(endpoint)
            if process is not None:
                process.post(verb, token, content)

        def act() -> None:
            if self.random.random() < self.lose_messages:
                return
            deliver()
            if self.random.random() < self.repeat_messages:
                deliver()
            if self.random.random() < self.delay_messages:
                self.clock.later(self.random.uniform(0, 2), deliver)

        self._call(f"posts {verb} {body}", act)

    async def send_notification(self, job: DDPJob, id: str, receiver: str, body: Json) -> None:
        def act() -> None:
            if id not in self.outcomes:
                self.received.append(body)
                works = self.receiver_works
                self.outcomes[id] = NotificationOutcome(delivered=works, message="" if works else "HTTP 500")

        self._call(f"notifies {receiver} of {body['event']}", act)

    async def record(self, job: DDPJob, event: Event) -> None:
        self._call(f"event {event.reason}: {event.message.splitlines()[0]}", lambda: self.events.append(event))


KEY = JobKey(NAMESPACE, "job")
