"""Keeps the objects of all jobs in caches that watches update, so that a reconcile sends no read
requests.

Reading everything from the API server would take about 240 requests per minute for each job.
Instead, one `Informer` per kind (and watched namespace) keeps the data that decisions need. No
requests are made while nothing changes.

- Views of objects are kept, not the objects themselves. A pod is kept as a `PodView`. Of services,
  ConfigMaps, policies and budgets, only the metadata is read. The cached spec of a finished job
  lacks the parts that pods are made from. This limits the operator's memory, because users choose
  how large their objects are.
- An object belongs to the job whose uid is in its labels or owner references. Names do not count.
  If a job is deleted and a new job has the same name, the new job does not own the old job's
  objects.
- A change wakes the job that it concerns. The wake-up is urgent if a user has changed the job, or
  if Kueue has changed a Workload. It is also urgent if a pod has ended, is about to end, or is
  gone. The operator's own writes do not wake jobs (`_writing`), because each status write would
  then cause another reconcile.
- A deleted pod's last state is kept for DEPARTED_FOR, because a later reconcile may need it to find
  out why the pod ended.

Example: a node is drained, and its pod is deleted before the job is reconciled.

    watch: pod train-1-0, disruption=EvictionByEvictionAPI   the job is woken, urgently
    watch: pod train-1-0 DELETED                             the pod moves to `departed` for 30 s
    reconcile: the pod is in `departed`, not in `pods`       the cause is Evicted, never counted

A leader lists everything after it has taken the Lease (`complete`), so its decisions are never
based on data older than its predecessor's writes.

See docs/decisions/0013.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from ddpjob_runtime.protocol import MAX_NAME

from ddpjob.api.job import GROUP, KIND, PLURAL, VERSION, DDPJob, queue_labels, taken_class
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import ConditionType, JobStatus
from ddpjob.controller.host_watch import Changed, HostWatch
from ddpjob.controller.job_cache import JobCache
from ddpjob.controller.kube.informer import Cache, Informer
from ddpjob.controller.kube.rest import Rest
from ddpjob.controller.pod_views import read_pod, read_workload
from ddpjob.core.status.scheduled import UNSCHEDULABLE
from ddpjob.core.world import LABEL_JOB, LABEL_MANAGED, LABEL_UID, MANAGED_BY, HealthSignals, PodView, WorkloadView
from ddpjob.engine.ports import JobKey
from ddpjob.objects.pod_group import API_VERSION as GANG_API
from ddpjob.objects.pod_group import KIND as GANG
from ddpjob.objects.pod_group import VOLCANO_API, kind_for
from ddpjob.objects.pod_group import VOLCANO_KIND as VOLCANO_GANG
from ddpjob.objects.workload import API_VERSION as WORKLOAD_API
from ddpjob.objects.workload import KIND as WORKLOAD

log = logging.getLogger("ddpjob.caches")
Wake = Callable[[JobKey, bool], None]
"""A function that takes the key of a job to reconcile, and whether the reconcile is urgent."""

DEPARTED_FOR = 30.0
"""Number of seconds to keep the last state of a deleted pod. A later reconcile may need this state
to find out why the pod ended.
"""
MOST_REFERENCES = 2000
"""Maximum number of owner references to read from one object. An object that many jobs share can
have about a thousand owners.
"""
_View = TypeVar("_View", PodView, WorkloadView)

_ROOTS = {
    KIND: (f"/apis/{GROUP}/{VERSION}", PLURAL),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    GANG: (f"/apis/{GANG_API}", "podgroups"),
    VOLCANO_GANG: (f"/apis/{VOLCANO_API}", "podgroups"),
    WORKLOAD: (f"/apis/{WORKLOAD_API}", "workloads"),
}

WATCHED = tuple(kind for kind in _ROOTS if kind not in ("Secret", "PersistentVolumeClaim"))
"""The kinds of objects that are watched. Secrets are missing, because the operator has no
permission to read them. Claims are missing too, because the operator reads a claim whenever it
needs one.
"""


def watches(namespaces: int) -> int:
    """Return how many watches are open if this number of namespaces is watched.

    With 0, all namespaces are watched together. Each watch has its own connection.
    """
    return len(WATCHED) * max(1, namespaces) + 1


def collection(kind: str, namespace: str) -> str:
    """Return the URL path for all objects of a kind in a namespace, or in all namespaces if
    `namespace` is empty.
    """
    root, plural = _ROOTS[kind]
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


@dataclass(frozen=True)
class Owned:
    """The name, the uid and the owners of an object.

    `jobs` and `job_uids` contain only owners that are DDPJobs. If no DDPJob owns the object, both
    are empty.
    """

    uid: str
    name: str
    jobs: tuple[JobKey, ...]
    job_uids: frozenset[str]
    owner_uids: frozenset[str] = frozenset()
    """UIDs of all owners, including those that are not jobs."""
    leaving: bool = False
    """Whether the deletion of the object has been requested."""


@dataclass(frozen=True)
class OwnedView(Generic[_View]):
    """A pod or a Workload, together with the job that its labels name."""

    job: JobKey
    job_uid: str
    view: _View


class Caches:
    """Holds one `Informer` for each kind and watched namespace, and one for all Kubernetes nodes.

    `namespaces` lists the watched namespaces. If it is empty, one `Informer` per kind watches all
    namespaces. Only objects in namespaces for which `keep` returns true are cached.

    If somebody other than the operator makes a change, `wake` is called with each job that the
    change affects. `on_job(before, after)` is called for every change to a job, including the
    operator's own changes.
    """

    def __init__(
        self,
        rest: Rest,
        wake: Wake,
        on_hosts: Changed,
        namespaces: Collection[str] = (),
        keep: Callable[[str], bool] = lambda namespace: True,
        on_job: Callable[[DDPJob | None, DDPJob | None], None] = lambda before, after: None,
        signals: HealthSignals | None = None,
    ) -> None:
        self._on_job = on_job
        self.restored = asyncio.Event()
        """Set when the jobs' resource versions have moved backwards, as after etcd was restored
        from a backup. In this case, kopf's watch receives no events.
        """
        self._wake, self._own_write = wake, False
        self.namespaces = tuple(filter(keep, namespaces)) if namespaces else ("",)
        self._pods: dict[tuple[str, str], dict[str, PodView]] = {}
        """Pods by namespace and job uid, and then by the pod's name."""
        self._departed: dict[tuple[str, str], dict[str, tuple[float, PodView]]] = {}
        """Deleted pods by namespace and job uid, and then by the pod's name. Each pod is stored
        with the time at which it disappeared, in monotonic seconds.
        """
        self._departures = deque[tuple[float, tuple[str, str], str]]()
        """The entries of `_departed`, in the order in which they were added. Each entry consists of
        the time, the namespace and job uid, and the pod's name."""
        self._workloads: dict[tuple[str, str], dict[str, WorkloadView]] = {}
        """Workloads by namespace and job uid, and then by the Workload's name."""
        self._gangs: dict[str, dict[str, str]] = {}
        """The PodGroups of each job, by the job's uid. The inner mapping is from a PodGroup's name
        to its uid.
        """
        ours = f"{LABEL_MANAGED}={MANAGED_BY}"
        more: dict[str, tuple[Callable[[Json], Any], Callable[[Any, Any], None], dict[str, Any]]] = {
            "Pod": (partial(_read_labelled, read_pod), self._pod_changed, {"selector": ours}),
        }
        for kind in ("Service", "ConfigMap", "PodDisruptionBudget"):
            more[kind] = _read_owned, self._owned_changed, {"selector": ours, "metadata_only": True}
        # The operator might lack the permission to list NetworkPolicies. In that case, jobs run
        # without them, as their Isolated condition shows.
        more["NetworkPolicy"] = _read_owned, self._owned_changed, {**more["Service"][2], "optional": True}
        # These kinds are optional, because most clusters do not serve them.
        for kind in (GANG, VOLCANO_GANG):
            more[kind] = _read_owned, self._gang_changed, {**more["Service"][2], "optional": True}
        # Workloads are optional, because most clusters do not have Kueue.
        workload = partial(_read_labelled, read_workload)
        more[WORKLOAD] = workload, self._workload_changed, {"selector": ours, "optional": True}
        assert {KIND, *more} == set(WATCHED)
        of_jobs = partial(collection, KIND)
        self._jobs = {
            namespace: JobCache(rest, of_jobs, namespace, self._read_job, self._job_changed, keep, self.restored)
            for namespace in self.namespaces
        }
        self._informers: dict[tuple[str, str], Informer[Any]] = {
            (kind, namespace): Informer(rest, collection(kind, namespace), read, changed, keep=keep, **options)
            for kind, (read, changed, options) in more.items()
            for namespace in self.namespaces
        }
        self.hosts = HostWatch(rest, on_hosts, signals)

    def _of(self, kind: str, namespace: str) -> Cache[Any]:
        if kind == KIND:
            return self._jobs_of(namespace)
        return self._informers.get((kind, namespace)) or self._informers[kind, ""]

    def _jobs_of(self, namespace: str) -> JobCache:
        return self._jobs.get(namespace) or self._jobs[""]

    def _all(self) -> tuple[Informer[Any] | JobCache, ...]:
        return *self._jobs.values(), *self._informers.values(), self.hosts

    async def run(self) -> None:
        """Run the watches until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in self._all():
                group.create_task(cache.run())

    @property
    def complete(self) -> bool:
        """Whether every collection was read or refused, and at least one namespace was read in
        full.

        The second condition does not apply if there are no namespaces to watch.
        """
        answered = all(cache.answered.is_set() for cache in self._all())
        return answered and (not self.namespaces or any(map(self.complete_in, self.namespaces)))

    async def answered(self) -> None:
        """Wait until every collection has been read or refused by the API server."""
        await asyncio.gather(*(cache.answered.wait() for cache in self._all()))

    def complete_in(self, namespace: str) -> bool:
        """Whether all objects in this namespace have been read, regardless of other namespaces."""
        return all(self._of(kind, namespace).listed.is_set() for kind in WATCHED)

    # --- what is known

    def job(self, key: JobKey) -> DDPJob | None:
        return self._jobs_of(key.namespace).get(key.namespace, key.name)

    def jobs_in(self, namespace: str) -> list[DDPJob]:
        """Return all jobs in a namespace."""
        return [job for job in self._jobs_of(namespace).views() if job.namespace == namespace]

    def others_wait(self, job: DDPJob) -> bool:
        """Whether another job is waiting for room in the cluster.

        If this job is fully scheduled, the other jobs are not searched, and the result is False.
        """
        own = job.status.condition(ConditionType.SCHEDULED)
        if own is None or own.status:
            return False
        views = (other for cache in self._jobs.values() for other in cache.views() if other.uid != job.uid)
        conditions = (other.status.condition(ConditionType.SCHEDULED) for other in views if not other.status.terminal)
        return any(c is not None and not c.status and c.reason == UNSCHEDULABLE for c in conditions)

    def jobs_of(self, namespace: str) -> Iterator[DDPJob]:
        """Yield the jobs in a namespace. Unlike `jobs_in`, this does not build a list."""
        return (job for job in self._jobs_of(namespace).views() if job.namespace == namespace)

    def pods(self, job: DDPJob) -> tuple[PodView, ...]:
        """Return the job's pods, sorted by name.

        If a user removes a pod's labels, the pod no longer belongs to the job. ReplicaSets treat
        their pods in the same way.
        """
        return tuple(pod for _, pod in sorted(self._pods.get((job.namespace, job.uid), {}).items()))

    def departed(self, job: DDPJob) -> tuple[PodView, ...]:
        """Return the job's recently deleted pods, each in its last known state."""
        known = self._departed.get((job.namespace, job.uid), {})
        return tuple(pod for gone, pod in known.values() if time.monotonic() - gone < DEPARTED_FOR)

    def pod(self, job: DDPJob, name: str) -> PodView | None:
        return self._pods.get((job.namespace, job.uid), {}).get(name)

    def owned(self, kind: str, job: DDPJob, name: str) -> Owned | None:
        """Return an object in the job's namespace, or None.

        The job must be one of the object's owners.
        """
        found = self.known(kind, job.namespace, name)
        return found if found is not None and job.uid in found.job_uids else None

    def known(self, kind: str, namespace: str, name: str) -> Owned | None:
        """Return the cached metadata of an object, or None if the object is not in the caches.

        Use this method only for kinds of which only the metadata is cached.
        """
        found: Owned | None = self._of(kind, namespace).get(namespace, name)
        return found

    def serves_gangs(self, job: DDPJob) -> bool:
        """Whether the API server serves the kind of PodGroup that the job's scheduler uses.

        If the operator is not permitted to read such PodGroups, the result is also False.
        """
        return self._of(kind_for(job), job.namespace).served

    def gangs(self, job: DDPJob) -> dict[str, str]:
        """Return the job's PodGroups as a mapping from name to uid.

        The uid is empty for a PodGroup that is being deleted.
        """
        return dict(self._gangs.get(job.uid, {}))

    def serves_queues(self, namespace: str) -> bool:
        """Whether the API server serves Kueue's Workloads and permits the operator to read them."""
        return self._of(WORKLOAD, namespace).served

    def workloads(self, job: DDPJob) -> tuple[WorkloadView, ...]:
        """Return the job's Workloads, sorted by name."""
        return tuple(workload for _, workload in sorted(self._workloads.get((job.namespace, job.uid), {}).items()))

    def jobs_on(self, hosts: frozenset[str]) -> set[JobKey]:
        """Return the jobs that have a pod on one of these hosts."""
        views = (v for (kind, _), informer in self._informers.items() if kind == "Pod" for v in informer.views())
        return {view.job for view in views if view.view.host in hosts}

    # --- what the operator writes or reads itself

    def take(self, kind: str, body: Json) -> None:
        """Put an object from an API server response into the cache.

        The job is not woken, because the operator already knows the object.
        """
        with self._writing():
            self._of(kind, body["metadata"]["namespace"]).take(body)

    def take_job(self, job: DDPJob) -> DDPJob:
        """Put a job into the cache as the API server has stored it.

        Return the cached job, which can be a later version.
        """
        kept = _kept(job)
        with self._writing():
            self._of(KIND, job.namespace).take_view((job.namespace, job.name), int(job.resource_version), kept)
        return kept

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._own_write = True
        try:
            yield
        finally:
            self._own_write = False

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """Remove an object that the API server has just reported as gone."""
        self._of(kind, namespace).forget(namespace, name)

    def seen_by_kopf(self, event: str | None, body: Json) -> None:
        """Process an event from kopf's watch, which is the only watch of jobs."""
        self._jobs_of(body["metadata"]["namespace"]).seen(event, body)

    def writing(self, job: DDPJob) -> AbstractContextManager[None]:
        """While the context is active, mark a job as being written by the operator."""
        return self._jobs_of(job.namespace).writing((job.namespace, job.name))

    # --- changes

    def _read_job(self, body: Json) -> DDPJob:
        """Read a job from an object.

        Reading the spec takes the most time, so the spec is read only if the job's generation or
        class has changed.
        """
        return _kept(self._read_changed(body))

    def _read_changed(self, body: Json) -> DDPJob:
        meta = body["metadata"]
        known = self.job(JobKey(meta["namespace"], meta["name"]))
        if known is None or (known.uid, known.generation) != (meta["uid"], meta.get("generation")):
            return DDPJob.read(body)
        status = JobStatus.read(body.get("status") or {})
        if status.job_class != known.status.job_class or known.status.terminal > status.terminal:
            return DDPJob.read(body)
        queue, queue_priority = queue_labels(meta, taken_class(body["spec"], status))
        return replace(
            known,
            status=status,
            resource_version=meta["resourceVersion"],
            deleting="deletionTimestamp" in meta,
            queue=queue,
            queue_priority=queue_priority,
        )

    def _job_changed(self, before: DDPJob | None, after: DDPJob | None) -> None:
        self._on_job(before, after)
        job = after or before
        assert job is not None
        same_spec = before is not None and after is not None and _asked(before) == _asked(after)
        self._woken(JobKey(job.namespace, job.name), urgent=not same_spec)

    def _pod_changed(self, before: OwnedView[PodView] | None, after: OwnedView[PodView] | None) -> None:
        _move(self._pods, before, after)
        if before is not None and after is None:
            self._depart(before)
        urgent = after is None or (before is not None and _end(before.view) != _end(after.view))
        for key in {one.job for one in (before, after) if one is not None}:
            self._woken(key, urgent=urgent)

    def _depart(self, pod: OwnedView[PodView]) -> None:
        now, job = time.monotonic(), (pod.job.namespace, pod.job_uid)
        self._departed.setdefault(job, {})[pod.view.name] = now, pod.view
        self._departures.append((now, job, pod.view.name))
        while self._departures and now - self._departures[0][0] >= DEPARTED_FOR:
            gone, job, name = self._departures.popleft()
            known = self._departed.get(job, {})
            if name in known and known[name][0] == gone:
                del known[name]
                if not known:
                    del self._departed[job]

    def _owned_changed(self, before: Owned | None, after: Owned | None) -> None:
        for job in (after or before or _NOBODY).jobs if before is None or after is None else ():
            self._woken(job, urgent=False)

    def _gang_changed(self, before: Owned | None, after: Owned | None) -> None:
        if before is not None:
            for uid in before.job_uids:
                names = self._gangs.get(uid, {})
                names.pop(before.name, None)
                if not names:
                    self._gangs.pop(uid, None)
        if after is not None:
            for uid in after.job_uids:
                self._gangs.setdefault(uid, {})[after.name] = "" if after.leaving else after.uid
        self._owned_changed(before, after)

    def _workload_changed(self, before: OwnedView[WorkloadView] | None, after: OwnedView[WorkloadView] | None) -> None:
        _move(self._workloads, before, after)
        for key in {one.job for one in (before, after) if one is not None}:
            self._woken(key, urgent=True)

    def _woken(self, key: JobKey, *, urgent: bool) -> None:
        if not self._own_write:
            self._wake(key, urgent)


def _kept(job: DDPJob) -> DDPJob:
    """Return the job in its cached form.

    A finished job creates no pods, so its cached spec lacks the fields that pods are made from.
    """
    if not job.status.terminal:
        return job
    return replace(job, spec=replace(job.spec, pod_template={}, env=(), args=()), written={})


_NOBODY = Owned("", "", (), frozenset())


def _move(
    found: dict[tuple[str, str], dict[str, _View]], before: OwnedView[_View] | None, after: OwnedView[_View] | None
) -> None:
    """Replace a pod or Workload with its next version in a mapping by job and name.

    `before` is None for a new object, and `after` is None for a deleted one.
    """
    if before is not None:
        job = before.job.namespace, before.job_uid
        del found[job][before.view.name]
        if not found[job]:
            del found[job]
    if after is not None:
        found.setdefault((after.job.namespace, after.job_uid), {})[after.view.name] = after.view


def _read_labelled(read: Callable[[Json], _View], body: Json) -> OwnedView[_View]:
    namespace, labels = body["metadata"]["namespace"], body["metadata"].get("labels") or {}
    lacking = [name for name in (LABEL_JOB, LABEL_UID) if name not in labels]
    if lacking:
        raise ValueError(f"the label {lacking[0]} is missing, so the object no longer belongs to a job")
    return OwnedView(JobKey(namespace, labels[LABEL_JOB]), labels[LABEL_UID], read(body))


def _asked(job: DDPJob) -> tuple[object, ...]:
    """Return everything about a job that users set.

    The result includes the labels for the queue, because changing a label does not change the job's
    generation.
    """
    return job.generation, job.queue, job.queue_priority


def _read_owned(body: Json) -> Owned:
    meta = body["metadata"]
    references = [o for o in meta.get("ownerReferences", ())[:MOST_REFERENCES] if len(o["name"]) <= MAX_NAME]
    owners = [o for o in references if o["kind"] == KIND]
    return Owned(
        meta["uid"],
        meta["name"],
        tuple(JobKey(meta["namespace"], o["name"]) for o in owners),
        frozenset(o["uid"] for o in owners),
        frozenset(o["uid"] for o in references),
        "deletionTimestamp" in meta,
    )


def _end(pod: PodView) -> tuple[object, ...]:
    """Return the parts of a pod that show whether it has ended or is about to end.

    A change to these parts is urgent.
    """
    return pod.ended, pod.deleted_at, pod.disruption
