"""Implements `Cluster` on Kubernetes. Reads come from the caches, and only `apply`
requests writes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from http import HTTPStatus

from ddpjob_runtime.protocol import Report

from ddpjob.api.job import API_VERSION, KIND, DDPJob
from ddpjob.api.job_classes import JobClasses
from ddpjob.api.job_spec import Json, size_fault
from ddpjob.api.job_status import JobStatus, NotificationState, SlotState, utc_now
from ddpjob.api.schema import exceeds
from ddpjob.controller.caches import WATCHED, Caches, Owned, collection
from ddpjob.controller.host_watch import NODES
from ddpjob.controller.kube.rest import JSON, MERGE_PATCH, METADATA, STRATEGIC_MERGE_PATCH, ApiError, Rest
from ddpjob.controller.kube.workqueue import Turns
from ddpjob.controller.notifier import Notifier
from ddpjob.controller.pod_views import added, read_claim
from ddpjob.controller.report_watch import ReportWatch
from ddpjob.core.decision import BLOCKED_POLL, Event
from ddpjob.core.status.messages import event_text
from ddpjob.core.status.scheduled import DELETION_REFUSED
from ddpjob.core.volumes import find_folder_user, list_claims_to_read
from ddpjob.core.world import (
    LABEL_MANAGED,
    LABEL_ROLE,
    LABEL_UID,
    MANAGED_BY,
    ClaimView,
    HostView,
    PodView,
    Rejection,
    Role,
    WorkloadView,
    World,
)
from ddpjob.engine.coordinator_client import CoordinatorClient, target_of
from ddpjob.engine.ports import (
    Conflict,
    JobKey,
    NamespaceEnding,
    NameTaken,
    Observation,
    Refused,
    ReportPending,
    Unavailable,
)
from ddpjob.objects.claim import template_mark
from ddpjob.objects.isolation import policy_name
from ddpjob.objects.platform import Platform
from ddpjob.objects.pod_group import KIND as GANG
from ddpjob.objects.pod_group import VOLCANO_KIND as VOLCANO_GANG
from ddpjob.objects.pod_group import kind_of
from ddpjob.objects.pod_template import problems
from ddpjob.objects.service import (
    build_runtime_jobs,
    holds_runtime,
    make_object,
    runtime_jobs_name,
    runtime_name,
    runtime_owner,
)
from ddpjob.objects.workload import API_VERSION as WORKLOAD_API
from ddpjob.objects.workload import KIND as WORKLOAD

log = logging.getLogger("ddpjob.cluster")
NAMESPACE_RETRY = 5.0
REPORT_RETRY = 1.0
"""Delay in seconds before a job is reconciled again if the coordinator has not yet answered the
first request for its report. If the report arrives earlier, it wakes the job at once."""
CREATIONS = 16
"""Maximum number of concurrent requests to create objects, for all jobs together. The maximum
applies separately to ordinary and to slow requests (see `Turns`). It keeps a burst of new jobs from
monopolizing the API server.
"""
LONGEST_PAUSE = 60.0
"""Maximum delay in seconds before a refused request is sent again."""
_DELETION, _LABEL, _CHANGE = "delete", "label", "change"
FOUND_FOR = 30.0
"""Number of seconds to assume that an object exists after it was created or found, even if no watch
shows it.
"""
LOOK_AGAIN = 5.0
"""Number of seconds after which a Kubernetes node that seems lost is read again."""
_MOST_CHECKED = 5000
"""Maximum number of runtime ConfigMaps for which the result of the check is kept. Each namespace
with jobs has one or two runtime ConfigMaps. Users can delete them at any time, and the operator
then creates new ones, so without a maximum the number of results would grow.
"""
LARGE_TEMPLATE = 16 * 1024, 300
"""Limits on the number of characters and the number of values in a podTemplate. If one limit is
exceeded, the podTemplate is searched for faults in a thread, so that the search does not block the
event loop."""
MOST_OWNERS = 1000
"""Maximum number of jobs that are recorded as owners of a shared ConfigMap. An object with this
many owners will outlive all other jobs, so no more owners are added.
"""


@dataclass(frozen=True)
class _Pause:
    """A period in which a refused request is not sent again.

    It ends at `until`, in monotonic seconds.
    """

    until: float
    seconds: float
    generation: int
    living: int
    refusal: Refused | NameTaken

    def holds(self, now: float, generation: int, living: int) -> bool:
        """Return whether the refused request still has to wait.

        The wait ends early if a user has changed the job. It also ends early if fewer of the job's
        pods are alive than at the time of the refusal, because a pod that has ended can make room
        for the new object.
        """
        return now < self.until and generation == self.generation and living >= self.living


@dataclass
class _Shared:
    """The jobs that are waiting to become owners of a shared ConfigMap.

    The job that is writing the ConfigMap holds the `turn` lock. `waiting` maps the uid of each
    waiting job to the owner reference to add.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: dict[str, Json] = field(default_factory=dict)


class _Collected(NameTaken):
    """A shared ConfigMap in the caches no longer exists, or a new ConfigMap has replaced it."""


class KubernetesCluster:
    """Implements `ddpjob.engine.ports.Cluster` for every job.

    `creating` limits how many objects are created at the same time. `instance` is the name of this
    replica in events. `is_sole` returns whether this operator is the only one that acts in a
    namespace.
    """

    def __init__(
        self,
        rest: Rest,
        caches: Caches,
        coordinators: CoordinatorClient,
        platform: Platform,
        report_watch: ReportWatch,
        notifier: Notifier,
        classes: JobClasses,
        creating: Turns,
        instance: str,
        is_sole: Callable[[str], bool] = lambda namespace: False,
    ) -> None:
        self.rest, self.caches, self.coordinators, self.platform = rest, caches, coordinators, platform
        self.report_watch, self.notifier, self.classes = report_watch, notifier, classes
        self.creating, self.instance, self.is_sole = creating, instance, is_sole
        self._unsure: set[JobKey] = set()
        """Jobs whose cached status may be stale, because somebody else might have written it or
        because the operator got no response to its own write. Each of these jobs is read again
        before its next reconcile.
        """
        self._pauses: dict[JobKey, tuple[str, dict[str | tuple[str, str], _Pause]]] = {}
        """The uid and the pauses of each job. If creating an object was refused, the pause is
        stored under the object's kind and role. If changing an existing object was refused, the
        pause is stored under that object's uid and the kind of change."""
        self._tokens: dict[JobKey, str] = {}
        """The name of each job's token Secret, if that Secret is known to exist."""
        self._found: dict[JobKey, dict[tuple[str, str, str], float]] = {}
        """Objects of each job that are assumed to exist although no watch shows them, by the job's
        uid, the object's kind and the object's name. Each value is the time at which the assumption
        expires, in monotonic seconds.
        """
        self._faults: dict[JobKey, tuple[tuple[str, str], tuple[str, ...]]] = {}
        """The faults found in each job's podTemplate, stored with the job's uid and the hash of the
        searched template.
        """
        self._looked: dict[str, float] = {}
        """The time at which each Kubernetes node that seems lost was last read, by the Kubernetes
        node's name.
        """
        self._checked: dict[str, bool] = {}
        """Whether each runtime ConfigMap has the right content, by the ConfigMap's uid. The result
        stays valid, because a runtime ConfigMap is immutable."""
        self._shared: dict[tuple[str, str], _Shared] = {}
        """Shared ConfigMaps to which owners are being added, by namespace and name."""

    # --- reading

    async def observe(self, key: JobKey) -> Observation | None:
        if key in self._unsure and self.caches.job(key) is not None:
            await self._read_again(key)
        job = self.caches.job(key)
        if job is None:
            # Do not read the job from the API server. The role that permits reading might have been
            # deleted together with the job's namespace.
            self._unsure.discard(key)
            for known in (self._pauses, self._tokens, self._found, self._faults):
                known.pop(key, None)
            self._follow(key, None)
            self.notifier.outcomes(key, ())
            return None
        self._follow(key, job)
        pods = self.caches.pods(job)
        if job.status.terminal:
            return Observation(job, self._with_notifications(job, self._known_world(job, pods)))
        await self._look_at_lost(pod.host for pod in pods if not pod.ended)
        return Observation(job, self._with_notifications(job, await self._world(job, pods)))

    def _with_notifications(self, job: DDPJob, world: World) -> World:
        if job.spec.notify is None:
            return world
        key, receivers = JobKey(job.namespace, job.name), self.notifier.receivers
        pending = (n.id for n in job.status.notifications if n.state is NotificationState.PENDING)
        outcomes = self.notifier.outcomes(key, pending)
        usable = receivers.usable_in(job.namespace)
        return replace(world, receivers=usable, outcomes=outcomes, link=receivers.link_of(key))

    async def _read_again(self, key: JobKey) -> None:
        found = await self._find(KIND, *key)
        if found is not None:
            self.caches.take(KIND, found)
        else:
            self.caches.forget(KIND, *key)
        self._unsure.discard(key)

    async def _find(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self.rest.request("GET", _path(kind, namespace, name))
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None

    def _follow(self, key: JobKey, job: DDPJob | None) -> None:
        """Keep requesting reports from the job's coordinator while the coordinator is running."""
        rendezvous = job.status.rendezvous if job is not None and not job.status.terminal else None
        runs = rendezvous is not None and rendezvous.endpoint and rendezvous.state is SlotState.RUNNING
        self.report_watch.follow(
            key, target_of(job, self.platform, rendezvous.endpoint) if runs and job and rendezvous else None
        )

    def _report(self, key: JobKey) -> Report | None:
        if self.report_watch.is_asking(key):
            raise ReportPending(f"waiting for the first response from the coordinator of {key.name}", REPORT_RETRY)
        return self.report_watch.report(key)

    async def _look_at_lost(self, hosts: Iterable[str]) -> None:
        """Read each of these Kubernetes nodes that seems lost according to the caches.

        The watch can lag behind. Without this check, a late watch could make the operator replace
        pods that run on a healthy Kubernetes node.
        """
        known = self.caches.hosts.hosts
        if known is not None:
            lost = {host for host in hosts if host and (host not in known or not known[host].ready)}
            await asyncio.gather(*(self._look_at(host) for host in lost))

    async def _look_at(self, host: str) -> HostView | None:
        """Return a Kubernetes node, or None if it is gone.

        The returned state is at most LOOK_AGAIN seconds old.
        """
        now = time.monotonic()
        self._looked = {h: when for h, when in self._looked.items() if now - when < LOOK_AGAIN}
        if host in self._looked:
            return self.caches.hosts.get("", host)
        try:
            self.caches.hosts.take(await self.rest.request("GET", f"{NODES}/{host}"))
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                self.caches.hosts.gone(host)
            elif error.status != HTTPStatus.FORBIDDEN:
                raise
        self._looked[host] = now
        return self.caches.hosts.get("", host)

    def _known_world(self, job: DDPJob, pods: tuple[PodView, ...]) -> World:
        """Return the part of the world that is known without requests.

        For a finished job, this part is enough.
        """
        return World(
            pods=pods,
            deletion_refused=self._deletion_refused(job, pods),
            key_mark=self.platform.key_mark,
            is_sole_operator=self.is_sole(job.namespace),
            hosts=self.caches.hosts.hosts,
            gangs=self.caches.gangs(job),
            workloads=self.caches.workloads(job),
        )

    async def _world(self, job: DDPJob, pods: tuple[PodView, ...]) -> World:
        policy = policy_name(job, self.platform)
        claims = tuple([await self._claim(job.namespace, name) for name in list_claims_to_read(job, pods)])
        runtime = await self._runtime(job, job.status.runtime or runtime_name())
        workloads = tuple([await self._with_flavors(job, workload) for workload in self.caches.workloads(job)])
        faults = await self._template_faults(job)
        # The code below awaits nothing, so the caches do not change until the world is complete. A
        # later change to a host wakes the job again.
        return replace(
            self._known_world(job, pods),
            departed=self.caches.departed(job),
            has_service=self._has(job, "Service", job.name),
            has_budget=self._has(job, "PodDisruptionBudget", job.name),
            policy=policy,
            has_policy=self._has(job, "NetworkPolicy", policy),
            runtime=runtime,
            runtime_offered=runtime_name(),
            has_token=self._tokens.get(JobKey(job.namespace, job.name)) == self.platform.token_secret(job),
            serves_gangs=self.caches.serves_gangs(job),
            serves_queues=self.caches.serves_queues(job.namespace),
            workloads=workloads,
            report=self._report(JobKey(job.namespace, job.name)),
            report_refused=self.report_watch.refusal(JobKey(job.namespace, job.name)),
            report_seconds=self.report_watch.progress_seconds,
            claims=claims,
            folder_user=find_folder_user(job, self.caches.jobs_of(job.namespace)),
            claim_template=template_mark(job),
            offer=self.classes.offer(job),
            others_wait=self.caches.others_wait(job),
            problems=faults,
        )

    async def _template_faults(self, job: DDPJob) -> tuple[str, ...]:
        """Return the faults found in the job's podTemplate.

        The result is empty if the job already has pods made from this template. A template is
        searched only once. A large template is searched in a thread, so that the search does not
        block the event loop.
        """
        if job.oversized:
            return (size_fault(job.oversized),)
        if job.status.template_hash.split("-")[0] == job.spec.template_hash:
            return ()
        key, searched = JobKey(job.namespace, job.name), (job.uid, job.spec.template_hash)
        known = self._faults.get(key)
        if known is None or known[0] != searched:
            template = job.spec.pod_template
            large = exceeds(template, *LARGE_TEMPLATE)
            found = await asyncio.to_thread(problems, template) if large else problems(template)
            known = self._faults[key] = searched, found
        return known[1]

    def _has(self, job: DDPJob, kind: str, name: str) -> bool:
        return self.caches.owned(kind, job, name) is not None or self._is_found(job, kind, name)

    async def _with_flavors(self, job: DDPJob, workload: WorkloadView) -> WorkloadView:
        """Return an admitted Workload together with the pod fields that its ResourceFlavors add.

        The flavors are read only once per Workload, because the job's status stores these pod
        fields.
        """
        grant, known = workload.grant, job.status.queue
        if grant is None or workload.evicted:
            return workload
        if known is not None and known.uid == workload.uid:
            return replace(workload, grant=replace(grant, node=known.node, coordinator=known.coordinator))
        if known is not None and workload.uid in known.uids:
            return workload  # `status.queue.more` already has these fields.
        changes = [grant.node, grant.coordinator]
        for position, names in enumerate(workload.flavors):
            for name in names:
                try:
                    flavor = await self.rest.request("GET", f"{_KUEUE}/resourceflavors/{name}")
                except ApiError as error:
                    # Without the flavor's fields, the pods could run on machines that the quota
                    # does not cover.
                    why = f"the job is admitted, but the operator cannot read ResourceFlavor {name}: {error.message}"
                    return replace(workload, admitted=False, grant=None, message=why)
                spec = flavor.get("spec") or {}
                more = {"tolerations": spec.get("tolerations")}
                changes[position] = added(changes[position], more, spec.get("nodeLabels"))
        return replace(workload, grant=replace(grant, node=changes[0], coordinator=changes[1]))

    def _check_runtime(self, body: Json) -> None:
        """Record whether a runtime ConfigMap has the right content.

        If there are already _MOST_CHECKED records, the oldest records are dropped.
        """
        while len(self._checked) >= _MOST_CHECKED:
            del self._checked[next(iter(self._checked))]
        self._checked[body["metadata"]["uid"]] = holds_runtime(body)

    async def _runtime(self, job: DDPJob, name: str) -> str:
        """Return `name` if this ConfigMap exists and is usable; otherwise return an empty string.

        A usable ConfigMap has the right content and exists as long as the job needs it.
        """
        found, jobs = (self.caches.known("ConfigMap", job.namespace, n) for n in (name, runtime_jobs_name(name)))
        if found is None:
            return ""
        if jobs is None or jobs.uid not in found.owner_uids or not _stays_for(job, jobs):
            return ""
        if found.uid not in self._checked:
            body = await self._find("ConfigMap", job.namespace, name)
            if body is None:
                return ""
            self._check_runtime(body)
        return name if self._checked.get(found.uid) else ""

    async def _claim(self, namespace: str, name: str) -> ClaimView:
        found = await self._find("PersistentVolumeClaim", namespace, name)
        return read_claim(found) if found is not None else ClaimView(name=name, exists=False)

    # --- writing: called only by apply

    async def write_status(self, job: DDPJob, status: Json) -> DDPJob:
        meta = {"name": job.name, "namespace": job.namespace, "resourceVersion": job.resource_version}
        body = make_object(API_VERSION, KIND, meta, status=status)
        key, stored = JobKey(job.namespace, job.name), JobStatus.read(status)
        # The write succeeds only if the stored object still has the resource version of `job`. The
        # spec can be as large as 1.5 MB, so the response normally contains only metadata. If the
        # class in the status has changed, the full object is requested, because the class changes
        # the meaning of the spec.
        same_spec = stored.job_class == job.status.job_class
        accept = METADATA if same_spec else JSON
        self._unsure.add(key)
        with self.caches.writing(job):
            try:
                answer = await self._change("PUT", f"{_path(KIND, *key)}/status", body=body, accept=accept)
            except ApiError as error:
                if error.status in (404, 409):
                    raise Conflict from error
                if not Rejection(object=KIND, status=error.status, message=error.message).final:
                    raise Refused(error.status, error.message) from error
                raise  # The status is invalid, which is a bug in this program.
            self._unsure.discard(key)
            version = answer["metadata"]["resourceVersion"]
            written = replace(job, status=stored, resource_version=version) if same_spec else DDPJob.read(answer)
            result = self.caches.take_job(written)
        # Follow the coordinator as soon as it runs. The next reconcile would follow it too, but may
        # start much later.
        self._follow(key, result)
        return result

    async def _change(
        self,
        method: str,
        path: str,
        *,
        body: Json,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Json:
        """Send a change, and treat errors of admission webhooks specially.

        `Rest.request` defines all other errors.

        If an admission webhook fails or cannot be called, ApiError is raised instead of
        Unavailable. Such a failure can last a long time, and must not delay the job's other work.
        Any other response with status 500 comes from the API server itself.

        A webhook that denies the request can choose any status. If the webhook chose 404 or 409,
        the ApiError has status 403 instead. With the original status, callers would conclude from
        404 that the object is gone, and from 409 that the object has changed.
        """
        try:
            return await self.rest.request(
                method, path, query=query, body=body, content_type=content_type, accept=accept
            )
        except Unavailable as error:
            message = str(error).partition(": 500: ")[2]
            if error.status != HTTPStatus.INTERNAL_SERVER_ERROR or "webhook" not in message:
                raise
            raise ApiError(error.status, "InternalError", message) from error
        except ApiError as error:
            if error.status not in (404, 409) or not error.message.startswith("admission webhook"):
                raise
            raise ApiError(HTTPStatus.FORBIDDEN, "Forbidden", error.message) from error

    async def create(self, job: DDPJob, manifest: Json) -> None:
        kind, pauses = manifest["kind"], self._pauses_of(job)
        if kind == "Secret" and self._is_found(job, kind, manifest["metadata"]["name"]):
            # The Secret was just created again. The kubelet starts the waiting pod at its next
            # attempt.
            return
        user = manifest.get("spec", {}).get("securityContext", {}).get("runAsNonRoot")
        what = f"{kind} {manifest['metadata'].get('labels', {}).get(LABEL_ROLE)} {user}"
        before = pauses.get(what)
        if before is not None and self._holds(job, before):
            raise before.refusal
        try:
            if kind == WORKLOAD:
                manifest = await self._with_priority(manifest)
            if kind == "ConfigMap":
                await self._share_in_turn(job, manifest)
            else:
                async with self.creating.turn(job.namespace):
                    await self._create(job, manifest)
        except (Refused, NameTaken) as refusal:
            # If several creation requests are refused at the same time, they all extend the same
            # previous pause, so they count as one refusal.
            pauses[what] = self._pause(job, refusal, before)
            raise
        pauses.pop(what, None)

    def _pauses_of(self, job: DDPJob) -> dict[str | tuple[str, str], _Pause]:
        key = JobKey(job.namespace, job.name)
        uid, pauses = self._pauses.get(key, ("", {}))
        if uid != job.uid:  # The pauses belong to an earlier job with this name.
            pauses = {}
            self._pauses[key] = job.uid, pauses
        return pauses

    def _holds(self, job: DDPJob, pause: _Pause) -> bool:
        return pause.holds(time.monotonic(), job.generation, self._living(job))

    def _pause(self, job: DDPJob, refusal: Refused | NameTaken, before: _Pause | None) -> _Pause:
        """Return a pause twice as long as the previous pause `before`, up to a limit."""
        first, longest = (1.0, BLOCKED_POLL) if isinstance(refusal, NameTaken) else (BLOCKED_POLL, LONGEST_PAUSE)
        seconds = min(longest, 2 * before.seconds) if before is not None else first
        return _Pause(time.monotonic() + seconds, seconds, job.generation, self._living(job), refusal)

    async def _with_priority(self, manifest: Json) -> Json:
        """Return the Workload with its priority filled in.

        The priority is the value of the priority class that the Workload names. Raises Refused if
        the priority class cannot be read, for example because the class does not exist.
        """
        named = manifest["spec"].get("priorityClassRef")
        if named is None:
            return manifest
        plural = "workloadpriorityclasses" if named["kind"] == "WorkloadPriorityClass" else "priorityclasses"
        root = _KUEUE if plural == "workloadpriorityclasses" else "/apis/scheduling.k8s.io/v1"
        try:
            found = await self.rest.request("GET", f"{root}/{plural}/{named['name']}")
        except ApiError as error:
            raise Refused(error.status, f"{named['kind']} {named['name']}: {error.message}") from error
        return {**manifest, "spec": {**manifest["spec"], "priority": int(found.get("value") or 0)}}

    def _living(self, job: DDPJob) -> int:
        return sum(not pod.ended for pod in self.caches.pods(job))

    async def _create(self, job: DDPJob, manifest: Json) -> None:
        path = collection(kind_of(manifest), job.namespace)
        try:
            made = await self._change("POST", path, body=manifest, query={"fieldValidation": "Strict"})
        except ApiError as error:
            if manifest["kind"] == "Secret" and self._has_token(job, manifest, error):
                return
            if error.status == 409 and error.reason == "AlreadyExists":
                await self._own_or_taken(job, manifest)
            elif error.status == 403 and "being terminated" in error.message:
                raise NamespaceEnding(f"namespace {job.namespace} is being deleted", NAMESPACE_RETRY) from error
            elif error.status == 409:
                # Two concurrent requests have tried to update one ResourceQuota.
                raise Unavailable(str(error)) from error
            elif error.status == 404 and f'namespaces "{job.namespace}" not found' in error.message:
                # The namespace is gone, so the job is gone too or will be soon.
                raise Conflict from error
            elif error.status == 404 and manifest["kind"] in (GANG, WORKLOAD):
                raise Refused(
                    error.status, f"this cluster no longer serves {manifest['kind']}s: {error.message}"
                ) from error
            else:
                raise Refused(error.status, error.message) from error
        else:
            if manifest["kind"] == "Secret":
                self._take_token(job, manifest["metadata"]["name"])
            self._made(kind_of(manifest), made)

    def _has_token(self, job: DDPJob, secret: Json, error: ApiError) -> bool:
        """Whether the token Secret exists, although the API server has refused to create it.

        The operator has no permission to read Secrets, so it examines the error instead. The API
        server checks the ResourceQuota before the name. An exhausted quota therefore causes a
        refusal even if the Secret already exists.
        """
        key, name = JobKey(job.namespace, job.name), secret["metadata"]["name"]
        if error.status == 409 and error.reason == "AlreadyExists":
            self._take_token(job, name)  # The name shows that the Secret belongs to this job.
            return True
        if error.status != HTTPStatus.FORBIDDEN or "exceeded quota" not in error.message:
            return False
        if self._tokens.get(key) == name:
            # The Secret was known to exist, but a pod lacks it, so somebody has deleted it.
            return False
        same_key = job.status.template_hash.split("-")[1:2] == [self.platform.key_mark]
        generation = job.status.rendezvous.generation
        made_for = same_key and any(pod.generation == generation for pod in self.caches.pods(job))
        if made_for:
            self._tokens[key] = name
        return made_for

    def _take_token(self, job: DDPJob, name: str) -> None:
        key = JobKey(job.namespace, job.name)
        if self._tokens.get(key) == name:  # The Secret had been deleted and was created again.
            self._note_found(job, "Secret", name)
        self._tokens[key] = name

    def _note_found(self, job: DDPJob, kind: str, name: str) -> None:
        found = self._found.setdefault(JobKey(job.namespace, job.name), {})
        found[job.uid, kind, name] = time.monotonic() + FOUND_FOR

    def _is_found(self, job: DDPJob, kind: str, name: str) -> bool:
        found = self._found.get(JobKey(job.namespace, job.name), {})
        return time.monotonic() < found.get((job.uid, kind, name), 0.0)

    def _made(self, kind: str, body: Json) -> None:
        if kind == "ConfigMap":
            self._check_runtime(body)
        ours = body["metadata"].get("labels", {}).get(LABEL_MANAGED) == MANAGED_BY
        if ours and kind in WATCHED:
            self.caches.take(kind, body)

    async def _own_or_taken(self, job: DDPJob, manifest: Json) -> None:
        found = await self._find(kind_of(manifest), job.namespace, manifest["metadata"]["name"])
        if found is None:
            raise NameTaken("an object with this name existed a moment ago and is now gone")
        self._made(kind_of(manifest), found)
        if manifest["kind"] == "ConfigMap":
            return  # `_share` decides whether the ConfigMap can be used.
        labels = found["metadata"].get("labels", {})
        if manifest["kind"] == "PersistentVolumeClaim" and labels.get(LABEL_UID) == job.uid:
            # A claim that is meant to outlive the job has no owner reference. The label with the
            # job's UID is therefore enough to show that the claim belongs to this job.
            return
        owners = found["metadata"].get("ownerReferences", ())
        if any(o["kind"] == KIND and o["name"] == job.name for o in owners):
            if not any(o["uid"] == job.uid for o in owners):
                raise NameTaken(
                    "the object with this name belongs to an earlier job with the same name, and is still being removed"
                )
            if "deletionTimestamp" in found["metadata"]:
                raise NameTaken("an object with this name is still being removed")
            if labels.get(LABEL_MANAGED) != MANAGED_BY:
                # A user has removed the operator's label from the object, so no watch shows it.
                self._note_found(job, manifest["kind"], manifest["metadata"]["name"])
            return
        raise NameTaken(
            "an object with this name exists, but this job does not own it; delete the object, or choose a different "
            "name for the job"
        )

    async def _share_in_turn(self, job: DDPJob, manifest: Json) -> None:
        """Create a ConfigMap that all jobs in a namespace share, and make this job an owner.

        Concurrent writes for several jobs would conflict, so the jobs take turns. The job whose
        turn comes first adds all waiting jobs as owners.
        """
        key = job.namespace, manifest["metadata"]["name"]
        shared = self._shared.setdefault(key, _Shared())
        shared.waiting[job.uid] = runtime_owner(job)
        try:
            async with shared.turn, self.creating.turn(job.namespace):
                for left in reversed(range(3)):
                    try:
                        return await self._share(job, manifest, await self._become_owner(job, shared.waiting))
                    except _Collected:
                        # The ConfigMap was deleted together with the last job that owned it. The
                        # same can happen to a new ConfigMap, so there are up to three attempts.
                        if not left:
                            raise
        finally:
            del shared.waiting[job.uid]
            if not shared.waiting:
                self._shared.pop(key, None)

    async def _become_owner(self, job: DDPJob, waiting: Mapping[str, Json]) -> Json:
        """Make the job an owner of an empty ConfigMap, and return an owner reference to this
        ConfigMap.

        All jobs in the namespace that use the runtime own the empty ConfigMap, and the empty
        ConfigMap owns the runtime ConfigMap.
        """
        name = runtime_jobs_name(runtime_name())
        found = self.caches.known("ConfigMap", job.namespace, name)
        others = {**waiting, **self._next_owners(job, found)}
        owners = [runtime_owner(job), *(owner for uid, owner in others.items() if uid != job.uid)]
        found = await self._known_or_created(job, build_runtime_jobs(job, owners[:MOST_OWNERS]))
        if not _stays_for(job, found):
            await self._add_owners(job, name, found, owners[: MOST_OWNERS - len(found.job_uids)])
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": found.uid}

    async def _share(self, job: DDPJob, manifest: Json, owner: Json) -> None:
        name = manifest["metadata"]["name"]
        owned = {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}
        found = await self._known_or_created(job, owned)
        if found.uid not in self._checked:
            await self._own_or_taken(job, manifest)
        if not self._checked.get(found.uid):
            raise NameTaken(_NOT_THE_RUNTIME)
        if owner["uid"] not in found.owner_uids:
            await self._add_owners(job, name, found, [owner])

    async def _known_or_created(self, job: DDPJob, manifest: Json) -> Owned:
        name = manifest["metadata"]["name"]
        if self.caches.known("ConfigMap", job.namespace, name) is None:
            await self._create(job, manifest)
        found = self.caches.known("ConfigMap", job.namespace, name)
        # If the ConfigMap is still unknown, it lacks the operator's label, so no watch shows it.
        if found is None:
            raise NameTaken(_NOT_THE_RUNTIME)
        return found

    async def _add_owners(self, job: DDPJob, name: str, found: Owned, owners: Sequence[Json]) -> None:
        """Add owner references to a ConfigMap with a strategic merge patch.

        This kind of patch does not remove owners that somebody else adds at the same time.
        """
        body = {"metadata": {"uid": found.uid, "ownerReferences": owners}}
        path = _path("ConfigMap", job.namespace, name)
        try:
            patched = await self._change("PATCH", path, body=body, content_type=STRATEGIC_MERGE_PATCH, accept=METADATA)
        except ApiError as error:
            if error.status not in (404, 409):
                raise Refused(error.status, error.message) from error
            self.caches.forget("ConfigMap", job.namespace, name)
            raise _Collected("an object with this name existed a moment ago and is now gone") from error
        self.caches.take("ConfigMap", patched)

    def _next_owners(self, job: DDPJob, found: Owned | None) -> dict[str, Json]:
        """Return owner references to other jobs in the namespace that will use the same runtime.

        If these jobs are added now, one write replaces a separate write for each job.
        """
        name, jobs = runtime_name(), self.caches.jobs_in(job.namespace)
        known = found.job_uids if found is not None else frozenset[str]()
        new = (j for j in jobs if not (j.status.terminal or j.deleting or j.spec.run_policy.suspend))
        return {j.uid: runtime_owner(j) for j in new if j.uid not in known and j.status.runtime in ("", name)}

    async def delete_pod(self, job: DDPJob, name: str, uid: str, grace: int | None) -> None:
        known = self.caches.pod(job, name)
        if self._waits(job, uid, _DELETION):
            return
        if grace == 0 and known is not None and not await self._is_lost(known):
            if known.deleted_at is not None:
                return
            grace = None
        options = {"gracePeriodSeconds": grace} if grace is not None else {}
        answer, refusal = await self._try_to_delete(job, "Pod", f"pod {name}", name, uid, options)
        if refusal is not None:
            return
        meta = (answer or {}).get("metadata", {})
        if answer is not None and meta.get("deletionTimestamp") and meta.get("deletionGracePeriodSeconds"):
            self.caches.take("Pod", answer)
        elif (answer is None or meta.get("uid") == uid) and known is not None and known.uid == uid:
            # The pod is already gone. Either the pod never ran on a host, or the deletion did not
            # wait for the host to confirm it.
            self.caches.forget("Pod", job.namespace, name)

    def _waits(self, job: DDPJob, uid: str, what: str) -> bool:
        before = self._pauses_of(job).get((uid, what))
        return before is not None and self._holds(job, before)

    def _keep(self, job: DDPJob, of: str, uid: str, what: str, error: ApiError) -> None:
        """Record that the API server has refused a change to an existing object.

        The refused change does not delay other changes. It is tried again at growing intervals.
        """
        pauses = self._pauses_of(job)
        before = pauses.get((uid, what))
        if before is None:
            log.warning("%s/%s: the API server refuses to %s %s: %s", job.namespace, job.name, what, of, error)
        pauses[uid, what] = self._pause(job, Refused(error.status, f"{of}: {error.message}"), before)

    def _deletion_refused(self, job: DDPJob, pods: tuple[PodView, ...]) -> str:
        """Return why the API server refuses to delete one of the job's pods.

        The result is empty if no deletion was refused.
        """
        pauses = self._pauses_of(job)
        refusals = (pauses[pod.uid, _DELETION].refusal for pod in pods if (pod.uid, _DELETION) in pauses)
        return next((refusal.message for refusal in refusals if isinstance(refusal, Refused)), "")

    async def _is_lost(self, pod: PodView) -> bool:
        """Whether the operator may remove a pod before the pod's host confirms that the pod has
        ended.

        A host that is Ready will confirm the end, so its pods are not removed early.
        """
        if not pod.host or self.caches.hosts.hosts is None:
            return True
        host = await self._look_at(pod.host)
        return host is None or not host.ready

    async def delete(self, job: DDPJob, kind: str, name: str, uid: str) -> None:
        """Delete one of the job's objects, and record an event if the API server refuses.

        The event is needed because no condition in the job's status shows that the object still
        exists.
        """
        if self._waits(job, uid, _DELETION):
            return
        volcano = self.caches.known(VOLCANO_GANG, job.namespace, name) if kind == GANG else None
        served = VOLCANO_GANG if volcano is not None and volcano.uid == uid else kind
        options = {"propagationPolicy": "Background"}
        answer, refusal = await self._try_to_delete(job, served, f"{kind} {name}", name, uid, options)
        if refusal is not None:
            text = f"the API server refuses to delete {kind} {name}: {refusal.message}"
            event = Event(True, DELETION_REFUSED, event_text(text, "retried within a minute"), once=True)
            await self.record(job, event)
        elif kind != KIND and answer is not None and answer.get("kind") == kind:
            # The object still exists. Either the object has a finalizer, or one of the gang's pods
            # is still running.
            self.caches.take(served, answer)
        elif kind != KIND:
            self.caches.forget(served, job.namespace, name)

    async def change_workload(
        self, job: DDPJob, name: str, uid: str, change: Callable[[Json, datetime], Json | None]
    ) -> None:
        """Read a Workload, pass it to `change`, and write the result.

        If `change` returns None, write nothing.
        """
        path = _path(WORKLOAD, job.namespace, name)
        if self._waits(job, uid, _CHANGE):
            return
        try:
            found = await self.rest.request("GET", path)
            if found["metadata"]["uid"] != uid:
                return
            changed = change(found, utc_now())
            if changed is None:
                return
            self.caches.take(WORKLOAD, await self._change("PUT", f"{path}/status", body=changed))
            self._pauses_of(job).pop((uid, _CHANGE), None)
        except ApiError as error:
            if error.status == 409:
                raise Conflict from error
            if error.status != 404:
                # A refusal does not affect the job, because this status only informs Kueue.
                self._keep(job, f"Workload {name}", uid, _CHANGE, error)

    async def label_pod(self, job: DDPJob, name: str, uid: str, role: Role) -> None:
        """Label a pod with its role.

        The patch contains the pod's uid. The API server therefore rejects the patch if a different
        pod has this name by now.
        """
        body = {"metadata": {"uid": uid, "labels": {LABEL_ROLE: role}}}
        path = _path("Pod", job.namespace, name)
        if self._waits(job, uid, _LABEL):
            return
        try:
            self.caches.take("Pod", await self._change("PATCH", path, body=body, content_type=MERGE_PATCH))
        except ApiError as error:
            if error.status not in (404, 409):
                # The pod trains whether or not its label is correct.
                self._keep(job, f"pod {name}", uid, _LABEL, error)

    async def _try_to_delete(
        self, job: DDPJob, kind: str, of: str, name: str, uid: str, options: Json
    ) -> tuple[Json | None, ApiError | None]:
        """Try to delete an object.

        Return the response, and the error if the API server refuses. If the object is already gone,
        or if a different object has its name, the response is None. The wait before the next
        attempt grows with each refusal.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, **options}
        answer = None
        try:
            answer = await self._change("DELETE", _path(kind, job.namespace, name), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                self._keep(job, of, uid, _DELETION, error)
                return None, error
        self._pauses_of(job).pop((uid, _DELETION), None)
        return answer, None

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if endpoint:
            await self.coordinators.notify(target_of(job, self.platform, endpoint), verb, body)

    async def send_notification(self, job: DDPJob, id: str, receiver: str, body: Json) -> None:
        self.notifier.send(JobKey(job.namespace, job.name), id, receiver, body)

    async def record(self, job: DDPJob, event: Event) -> None:
        """Record an event for the job.

        If the API server does not accept the event, the operator only logs this, because the job's
        status contains the same facts.
        """
        now = utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        content = f"{job.uid} {event.reason} {event.message}"
        mark = hashlib.sha256(content.encode()).hexdigest() if event.once else uuid.uuid4().hex
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name}.{mark[:16]}", "namespace": job.namespace},
            "eventTime": now,
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "note": event.message.encode()[:1000].decode(errors="ignore"),
            "action": "Reconcile",
            "regarding": {**job.reference, "namespace": job.namespace},
            "reportingController": "ddpjob.io/operator",
            "reportingInstance": self.instance[:128],
        }
        try:
            await self._change("POST", f"/apis/events.k8s.io/v1/namespaces/{job.namespace}/events", body=body)
        except ApiError as error:
            if event.once and error.status == HTTPStatus.CONFLICT:
                return
            log.warning("%s/%s: the event %s could not be written: %s", job.namespace, job.name, event.reason, error)


def _stays_for(job: DDPJob, owned: Owned) -> bool:
    """Whether a shared ConfigMap will exist as long as the job needs it.

    This is true if the job is one of the ConfigMap's owners, or if the ConfigMap has the maximum
    number of owners.
    """
    return job.uid in owned.job_uids or len(owned.job_uids) >= MOST_OWNERS


_KUEUE = f"/apis/{WORKLOAD_API}"


def _path(kind: str, namespace: str, name: str) -> str:
    return f"{collection(kind, namespace)}/{name}"


_NOT_THE_RUNTIME = (
    "a ConfigMap with this name exists, but it was changed or was not created by the operator; delete it "
    "so that the operator creates it again"
)
