"""The `--server` option of `ddpjob validate`, which asks the API server whether it accepts a job
and its pods.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpjob.api.job import PLURAL, DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus, Slot
from ddpjob.client.backends.api_server import ApiRefusal
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.controller.pod_views import read_claim
from ddpjob.core.volumes import FIELD, find_unusable_claim
from ddpjob.core.world import ClaimView, World
from ddpjob.objects.claim import build_claim, template_mark
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import as_non_root, build_coordinator, build_node
from ddpjob.objects.service import runtime_name

_APPLY = "application/apply-patch+yaml"
_EXISTS = 409


def server_problems(backend: ClusterBackend, manifest: Json) -> Iterator[str]:
    """Create a job and its pods in dry runs, and yield the API server's reasons for refusing them.

    In a dry run, the API server processes a request as usual, including admission, but does not
    store the object. Problems with the job's claims are also yielded.
    """
    try:
        stored = _dry_run_job(backend, manifest)
    except ApiRefusal as refusal:
        yield f"the job: {refusal}"
        return
    job = DDPJob.read(stored)
    status = JobStatus(runtime=runtime_name(), slots=(Slot(),) * job.spec.pods)
    platform = Platform(operator_key=b"a dry run")
    pods = [build_node(job, status, platform, 0, 0)]
    if job.spec.rendezvous.placement is Placement.DEDICATED:
        pods.append(build_coordinator(job, status, platform))
    if job.spec.class_name and job.status.job_class is None:
        # Do not check the pods, because only the operator knows which values the class adds to
        # them.
        pods = []
    for pod in pods:
        yield from _refused(backend, pod)
    yield from _claims(backend, job)


def _claims(backend: ClusterBackend, job: DDPJob) -> Iterator[str]:
    """Yield the problems with the job's claims.

    For example, a claim is missing or unusable, or the API server refuses a claim that the job
    would create.
    """
    for name in job.claims:
        found = backend.api.optional(backend.path("persistentvolumeclaims", name))
        if found is None and name == job.made_claim:
            try:
                backend.dry_run("persistentvolumeclaims", build_claim(job))
            except ApiRefusal as refusal:
                yield f"the job's claim {name} ({FIELD}): {refusal}"
        elif found is None:
            yield (
                f"spec.storage: there is no claim {name} in namespace {backend.namespace}, or you are not permitted to "
                "read it"
            )
        claim = read_claim(found) if found is not None else ClaimView(name=name, exists=name != job.made_claim)
        problem = find_unusable_claim(job, World(claims=(claim,), claim_template=template_mark(job)))
        if problem is not None:
            yield problem.message


def _dry_run_job(backend: ClusterBackend, manifest: Json) -> Json:
    """Apply the manifest as `kubectl apply --server-side --dry-run=server` does.

    If a job with this name exists, the manifest is checked as an update of this job.
    """
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
        # The API server checks the name of a pod last. If it refuses the pod only because a pod
        # with this name exists, it has accepted everything else.
        elif refusal.status != _EXISTS:
            yield f"the job's pod {name}: {refusal}"
