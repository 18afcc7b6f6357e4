"""The Kubernetes implementation of the port: reads through a cache that watch events invalidate, writes for `apply`."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus

from ddpjob.api.types import API_VERSION, GROUP, KIND, PLURAL, VERSION, DDPJob, Json
from ddpjob.controller.coordinator import CoordinatorClient
from ddpjob.controller.hosts import Hosts
from ddpjob.controller.news import NewsWatch
from ddpjob.controller.rest import MERGE_PATCH, ApiError, Rest
from ddpjob.controller.views import read_claim, read_pod
from ddpjob.core.decision import Event
from ddpjob.core.world import LABEL_ROLE, LABEL_UID, ClaimView, PodView, Role, World
from ddpjob.engine.ports import Conflict, JobKey, NamespaceEnding, NameTaken, Observation, Refused, Unavailable
from ddpjob.engine.reconcile import utc_now
from ddpjob.objects.overlay import problems
from ddpjob.objects.service import pod_files_name
from ddpjob.objects.site import Site

log = logging.getLogger("ddpjob.cluster")
LISTED_FOR = 30.0
"""Seconds after which a list is made anew although no watch told of a change: a watch that reconnects may miss a deletion."""
NAMESPACE_RETRY = 5.0
_JOBS = f"/apis/{GROUP}/{VERSION}/namespaces/{{namespace}}/{PLURAL}"
_COLLECTIONS = {
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
}


@dataclass(frozen=True)
class Belongings:
    """What was listed of a job's objects."""

    uid: str
    pods: tuple[PodView, ...]
    services: frozenset[str]
    config_maps: frozenset[str]
    budgets: frozenset[str]
    listed: float


class KubernetesCluster:
    """See `ddpjob.engine.ports.Cluster`."""

    def __init__(self, rest: Rest, coordinators: CoordinatorClient, site: Site, instance: str | None = None) -> None:
        self.rest, self.coordinators, self.site = rest, coordinators, site
        self.instance = instance or socket.gethostname()
        self.news: NewsWatch | None = None
        """Set by who wants to be woken by the coordinators."""
        self.hosts: Hosts | None = None
        """The Kubernetes nodes; None while they are not known."""
        self._belongings: dict[JobKey, Belongings] = {}
        self._marks: dict[JobKey, int] = {}

    def changed(self, key: JobKey) -> None:
        """A watch tells that something of the job changed: the next pass lists anew."""
        self._marks[key] = self._marks.get(key, 0) + 1
        self._belongings.pop(key, None)

    def jobs_on(self, hosts: frozenset[str]) -> list[JobKey]:
        """Jobs that have a pod on one of these nodes, of those whose pods are listed; the others are about to be looked at."""
        return [key for key, found in self._belongings.items() if any(pod.node in hosts for pod in found.pods)]

    # --- reading

    async def observe(self, key: JobKey) -> Observation | None:
        try:
            body = await self.rest.request("GET", f"{_JOBS.format(namespace=key.namespace)}/{key.name}")
        except ApiError as error:
            if error.status != 404:
                raise
            self._belongings.pop(key, None)
            self._marks.pop(key, None)
            self._follow(key, "")
            return None
        job = DDPJob.read(body)
        self._follow(key, "" if job.status.terminal else job.status.rendezvous.endpoint)
        belongings = await self._list(key, job)
        return Observation(job, await self._world(job, belongings))

    def _follow(self, key: JobKey, endpoint: str) -> None:
        if self.news is not None:
            self.news.follow(key, endpoint)

    async def _list(self, key: JobKey, job: DDPJob) -> Belongings:
        known = self._belongings.get(key)
        if known is not None and known.uid == job.uid and time.monotonic() - known.listed < LISTED_FOR:
            return known
        mark = self._marks.get(key, 0)
        ours = f"{LABEL_UID}={job.uid}"
        # As with a ReplicaSet, a pod that somebody takes the labels off is let go.
        pods, services, config_maps, budgets = await asyncio.gather(
            self._items("Pod", key.namespace, f"{ours},{LABEL_ROLE} in ({','.join(Role)})"),
            self._items("Service", key.namespace, ours),
            self._items("ConfigMap", key.namespace, ours),
            self._items("PodDisruptionBudget", key.namespace, ours),
        )
        found = Belongings(
            uid=job.uid,
            pods=tuple(read_pod(p) for p in pods),
            services=_names(services),
            config_maps=_names(config_maps),
            budgets=_names(budgets),
            listed=time.monotonic(),
        )
        if self._marks.get(key, 0) == mark:
            self._belongings[key] = found
        return found

    async def _items(self, kind: str, namespace: str, selector: str) -> list[Json]:
        listed = await self.rest.request("GET", _COLLECTIONS[kind].format(namespace=namespace), query={"labelSelector": selector})
        items: list[Json] = listed["items"]
        return items

    async def _world(self, job: DDPJob, belongings: Belongings) -> World:
        endpoint = job.status.rendezvous.endpoint
        report = await self.coordinators.report(endpoint) if endpoint else None
        wanted = job.status.pod_files or pod_files_name(job)
        claims = () if job.status.terminal else await self._claims(job)
        # Nothing is awaited from here on: a node that changes later wakes the job again.
        return World(
            pods=belongings.pods,
            has_service=job.name in belongings.services,
            has_budget=job.name in belongings.budgets,
            pod_files=wanted if wanted in belongings.config_maps else "",
            pod_files_offered=pod_files_name(job),
            key_mark=self.site.key_mark,
            report=report,
            claims=claims,
            hosts=self.hosts,
            problems=problems(job.spec.pod_template) if job.status.template_hash.split("-")[0] != job.spec.template_hash else (),
        )

    async def _claims(self, job: DDPJob) -> tuple[ClaimView, ...]:
        """Looked at until the first pod is there; a claim's access modes do not change."""
        if not job.spec.storage.claims or job.status.active:
            return ()
        return tuple([await self._claim(job.namespace, name) for name in job.spec.storage.claims])

    async def _claim(self, namespace: str, name: str) -> ClaimView:
        try:
            return read_claim(await self.rest.request("GET", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            return ClaimView(name=name, exists=False)

    # --- writing: called by apply alone

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": job.name, "namespace": job.namespace, "resourceVersion": job.resource_version},
            "status": status,
        }
        path = f"{_JOBS.format(namespace=job.namespace)}/{job.name}/status"
        try:
            return DDPJob.read(await self.rest.request("PUT", path, body=body))
        except ApiError as error:
            if error.status in (404, 409):
                raise Conflict from error
            raise

    async def create(self, job: DDPJob, manifest: Json) -> None:
        collection = _COLLECTIONS[manifest["kind"]].format(namespace=job.namespace)
        try:
            await self.rest.request("POST", collection, body=manifest, query={"fieldValidation": "Strict"})
        except Unavailable as error:
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                # An admission webhook of the cluster that cannot be called, and the like: the user must see it.
                raise Refused(error.status, str(error)) from error
            raise
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                await self._own_or_taken(job, f"{collection}/{manifest['metadata']['name']}")
            elif error.status == 403 and "being terminated" in error.message:
                raise NamespaceEnding(f"namespace {job.namespace} is being deleted", NAMESPACE_RETRY) from error
            elif error.status == 409:
                # Two requests met at a ResourceQuota.
                raise Unavailable(str(error)) from error
            elif error.status == 404:
                # The namespace is gone: so is the job, or it will be.
                raise Conflict from error
            else:
                raise Refused(error.status, error.message) from error
        self.changed(JobKey(job.namespace, job.name))

    async def _own_or_taken(self, job: DDPJob, path: str) -> None:
        try:
            found = await self.rest.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                raise NameTaken("an object of this name was there a moment ago") from error
            raise
        owners = found["metadata"].get("ownerReferences", ())
        if any(o["kind"] == KIND and o["name"] == job.name for o in owners):
            if not any(o["uid"] == job.uid for o in owners):
                raise NameTaken("it belongs to an earlier job of this name and is still being removed")
            if "deletionTimestamp" in found["metadata"]:
                raise NameTaken("an object of this name is still being removed")
            return
        raise NameTaken("an object of this name is there and does not belong to this job: remove it, or give the job another name")

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        await self._delete(f"/api/v1/namespaces/{job.namespace}/pods/{name}", body)
        self.changed(JobKey(job.namespace, job.name))

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        """The uid in the patch makes the API server refuse a namesake."""
        body = {"metadata": {"uid": uid, "labels": {LABEL_ROLE: role}}}
        try:
            await self.rest.request("PATCH", f"/api/v1/namespaces/{job.namespace}/pods/{name}", body=body, content_type=MERGE_PATCH)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        self.changed(JobKey(job.namespace, job.name))

    async def delete_job(self, job: DDPJob) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": job.uid}, "propagationPolicy": "Background"}
        await self._delete(f"{_JOBS.format(namespace=job.namespace)}/{job.name}", body)

    async def _delete(self, path: str, body: Json) -> None:
        try:
            await self.rest.request("DELETE", path, body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def tell(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if endpoint:
            await self.coordinators.tell(endpoint, self.site.token(job), verb, body)

    async def record(self, job: DDPJob, event: Event) -> None:
        """An event that cannot be written is logged: it repeats what the status says."""
        now = utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name}.{uuid.uuid4().hex[:16]}", "namespace": job.namespace},
            "eventTime": now,
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "note": event.message.encode()[:1000].decode(errors="ignore"),
            "action": "Reconcile",
            "regarding": {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "namespace": job.namespace, "uid": job.uid},
            "reportingController": "ddpjob.io/operator",
            "reportingInstance": self.instance[:128],
        }
        try:
            await self.rest.request("POST", f"/apis/events.k8s.io/v1/namespaces/{job.namespace}/events", body=body)
        except ApiError as error:
            log.warning("%s/%s: event %s was not written: %s", job.namespace, job.name, event.reason, error)


def _names(items: list[Json]) -> frozenset[str]:
    return frozenset(item["metadata"]["name"] for item in items)
