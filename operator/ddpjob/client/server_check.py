"""`ddpjob validate --server`: the API server's own verdict on a job, and on the pods that the operator would make."""

from __future__ import annotations

from collections.abc import Iterator

from ddpjob.api.types import PLURAL, POD_DEFAULTS, DDPJob, JobStatus, Json, Placement, Slot
from ddpjob.client.api_server import ApiRefusal
from ddpjob.client.cluster_backend import ClusterBackend
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import as_non_root, build_coordinator, build_node
from ddpjob.objects.service import runtime_name

_APPLY = "application/apply-patch+yaml"
_EXISTS = 409


def server_problems(backend: ClusterBackend, manifest: Json) -> Iterator[str]:
    """What the API server refuses in dry runs, admission included; nothing is stored."""
    try:
        stored = _dry_run_job(backend, manifest)
    except ApiRefusal as refusal:
        yield f"the job: {refusal}"
        return
    job = DDPJob.read(stored)
    status = JobStatus(pod_defaults=POD_DEFAULTS, runtime=runtime_name(), slots=(Slot(),) * job.spec.pods)
    platform = Platform(operator_key=b"a dry run")
    pods = [build_node(job, status, platform, 0, 0)]
    if job.spec.rendezvous.placement is Placement.DEDICATED:
        pods.append(build_coordinator(job, status, platform))
    for pod in pods:
        yield from _refused(backend, pod)
    for claim in job.spec.storage.claims:
        if backend.api.optional(backend.path("persistentvolumeclaims", claim)) is None:
            yield f"spec.storage: there is no claim {claim} in namespace {backend.namespace}, or you may not read it"


def _dry_run_job(backend: ClusterBackend, manifest: Json) -> Json:
    """As `kubectl apply --server-side --dry-run=server`: rules for updates apply where the job exists."""
    kept = {key: value for key, value in manifest.items() if key != "status"}
    path = backend.path(PLURAL, manifest["metadata"]["name"])
    query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "ddpjob", "force": "true"}
    stored = backend.api.request("PATCH", path, query=query, body=kept, content_type=_APPLY)
    stored["metadata"].setdefault("uid", "00000000-0000-0000-0000-000000000000")
    return stored


def _refused(backend: ClusterBackend, pod: Json) -> Iterator[str]:
    name = pod["metadata"]["name"]
    try:
        backend.dry_run("pods", pod)
    except ApiRefusal as refusal:
        other = as_non_root(pod) if "violates PodSecurity" in str(refusal) else None
        if other is not None and "runAsNonRoot" in str(refusal):
            yield from _refused(backend, other)
        elif refusal.status != _EXISTS:  # which is found after everything else
            yield f"its pod {name}: {refusal}"
