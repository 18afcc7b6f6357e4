"""Reruns a finished job with the same name and spec.

On this machine, the job's last manifest runs again in the background. A cluster cannot restart a
finished job, so the job is deleted and created again. Checkpoints on volumes and in buckets are
kept, and the new job resumes from them. A claim with whenDeleted: Delete is deleted together with
the job, so such a job is rerun only with `fresh`. The job's ConfigMaps with code are read first,
because they are also deleted together with the job. The API server must accept the new objects in a
dry run before the job is deleted.

On a cluster, `fresh` deletes no other checkpoints. The new job uses a different folder, which
cannot have been used before because its name contains part of the old job's UID.

    storage.checkpoints                      of the old job    of the new job
    {claimName: c}, nfs or hostPath          c: first          subPath: first-after-1c2d3e4f
    {claimName: c, subPath: first-after-…}                     subPath: first-after-5a6b7c8d
    {url: s3://b/f}                          s3://b/f          url: s3://b/f/after-1c2d3e4f
    {claimTemplate: {whenDeleted: Delete}}                     a new claim
    none: the folder is lost with its pod                      none

If the job's class or podTemplate sets the folder instead of storage.checkpoints, `fresh` is
refused.
"""

from __future__ import annotations

import posixpath
import re
import time
from http import HTTPStatus
from typing import Any

from ddpjob.api.job import PLURAL
from ddpjob.api.job_spec import Json, WhenDeleted
from ddpjob.api.reader import validate
from ddpjob.api.schema import default_of
from ddpjob.client.backends.api_server import ApiRefusal
from ddpjob.client.backends.backend import ENDED, Backend, Mistake, NoSuchJob
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.texts.job_text import phase

_GONE_SECONDS = 120.0
_FRESH = re.compile(r"[/-]after-[0-9a-f]{8}$")
_KEPT = ("labels", "annotations")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def rerun(backend: Backend, name: str, *, fresh: bool) -> str:
    """Rerun the job and return a message about what was done.

    Raises Mistake if the job has not finished.
    """
    body = backend.job(name)
    state = phase(body)
    if state not in ENDED:
        raise Mistake(f"{name} is {state} and has not ended; run `ddpjob restart {name}` to replace its pods")
    manifest = _manifest(body)
    if isinstance(backend, ProcessBackend):
        resumes = backend.resumes(name) and not fresh
        backend.create([manifest], fresh=fresh)
        return f"{name} started again (it was {state}); {where_it_begins(name, resumes)}"
    where = "it resumes from its last checkpoint, if it has one"
    if _deletes_checkpoints(body):
        if not fresh:
            raise Mistake(
                f"{name}: its checkpoints would be deleted with the job, because "
                f"storage.checkpoints.claimTemplate.whenDeleted is Delete; run `ddpjob rerun {name} --fresh` to delete "
                "them and start from scratch"
            )
        where = "it starts from scratch, because its checkpoints were deleted with the job (whenDeleted: Delete)"
    elif fresh:
        manifest, where = _in_a_new_folder(manifest, body["metadata"]["uid"])
    assert isinstance(backend, ClusterBackend)  # PastJobs is read-only.
    try:
        maps = [_manifest(found) for found in backend.code_of(body)]
        for plural, created in (*(("configmaps", each) for each in maps), (PLURAL, manifest)):
            _check_creation(backend, plural, created)
    except ApiRefusal as refusal:
        raise Mistake(f"{name} was neither deleted nor created again: {refusal}") from refusal
    backend.delete(name)
    _wait_until_gone(backend, name)
    backend.create([*maps, manifest])
    return f"{name} created again (it was {state}); {where}"


def _check_creation(backend: ClusterBackend, plural: str, manifest: Json) -> None:
    """Raise ApiRefusal if the API server would refuse the object for a reason other than its name.

    The API server checks the name last. The name is still in use, because the job still exists. An
    exceeded quota is ignored too, because deleting the job frees its share.
    """
    try:
        backend.dry_run(plural, manifest)
    except ApiRefusal as refusal:
        if refusal.status != HTTPStatus.CONFLICT and "exceeded quota" not in str(refusal):
            raise


def _deletes_checkpoints(body: Json) -> bool:
    """Whether the job's checkpoints are deleted together with the job."""
    template = _checkpoints(body).get("claimTemplate") or {}
    return template.get("whenDeleted") == WhenDeleted.DELETE


def _checkpoints(body: Json) -> Json:
    checkpoints: Json = ((body.get("spec") or {}).get("storage") or {}).get("checkpoints") or {}
    return checkpoints


def _in_a_new_folder(manifest: Json, uid: str) -> tuple[Json, str]:
    """Return the manifest with a new checkpoint folder, and a phrase about how the job starts.

    Raises Mistake if the folder cannot be changed in the job's own spec.
    """
    spec, name, after = manifest["spec"], manifest["metadata"]["name"], f"after-{uid[:8]}"
    storage = spec.get("storage") or {}
    checkpoints = storage.get("checkpoints")
    if checkpoints is None:
        path = default_of("spec.storage.checkpoints.mountPath")
        if spec.get("className") or any(mount.startswith(path) for mount in _mounts(spec)):
            raise Mistake(
                "--fresh: the checkpoint folder is set by the job's class or podTemplate, and not by "
                "storage.checkpoints; submit the job under a different name"
            )
        return manifest, "it starts from scratch, because its checkpoints were lost with its pods"
    if checkpoints.get("readOnly"):
        raise Mistake("--fresh: storage.checkpoints.readOnly is set, so the job writes no checkpoints; remove --fresh")
    if url := checkpoints.get("url"):
        field, value = "url", f"{_FRESH.sub('', url.rstrip('/')).rstrip('/')}/{after}"
    else:
        old = posixpath.normpath(checkpoints.get("subPath") or name)
        field, value = "subPath", f"{_FRESH.sub('', name if old == '.' else old)}-{after}"
    new = {**manifest, "spec": {**spec, "storage": {**storage, "checkpoints": {**checkpoints, field: value}}}}
    if faults := validate(new):
        raise Mistake("\n".join(f"--fresh: {fault}" for fault in faults))
    return new, f"it starts from scratch: storage.checkpoints.{field} is now {value}, and the old checkpoints are kept"


def _mounts(spec: Json) -> list[str]:
    pod = (spec.get("podTemplate") or {}).get("spec") or {}
    mounts = [mount for container in pod.get("containers") or () for mount in container.get("volumeMounts") or ()]
    return [str(mount.get("mountPath", "")) for mount in mounts]


def where_it_begins(name: str, resumes: bool) -> str:
    return f"it resumes from {name}/checkpoints (--fresh starts from scratch)" if resumes else "it starts from scratch"


def checkpoints_that_stay(body: Json) -> str:
    """Return a phrase that says where a deleted job's checkpoints are kept on a cluster.

    If the checkpoints are deleted, the phrase is empty.
    """
    volume = _checkpoints(body)
    if url := volume.get("url"):
        return f"the checkpoints in {url}"
    if claim := volume.get("claimName"):
        return f"the checkpoints in the claim {claim}"
    if volume.get("hostPath"):
        return f"the checkpoints in {volume['hostPath']} on the Kubernetes nodes"
    if nfs := volume.get("nfs"):
        return f"the checkpoints in {nfs['server']}:{nfs['path']}"
    return "the checkpoints in its claim" if volume.get("claimTemplate") and not _deletes_checkpoints(body) else ""


def _manifest(body: Json) -> Json:
    """Reduce an object to the manifest that a user would write for it.

    Fields that the API server, or the runner on this machine, has added are removed.
    """
    meta = body["metadata"]
    kept: dict[str, Any] = {key: dict(meta[key]) for key in _KEPT if meta.get(key)}
    kept.get("annotations", {}).pop(_LAST_APPLIED, None)
    added = ("metadata", "status", "local")
    return {
        **{key: value for key, value in body.items() if key not in added},
        "metadata": {"name": meta["name"], **{key: value for key, value in kept.items() if value}},
    }


def _wait_until_gone(backend: Backend, name: str) -> None:
    end = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < end:
        try:
            backend.job(name)
        except NoSuchJob:
            return
        time.sleep(0.5)
    raise Mistake(f"{name} was deleted but still exists; check its finalizers, and submit it again when it is gone")
