"""Starts an ended job again, under the same name and with the same spec.

On this machine its last manifest runs again in the background. A cluster cannot start an ended job,
so the job is deleted and created again. Checkpoints on volumes and in buckets are kept, and the new
job resumes from them. The job's ConfigMaps with code are read first, because they are deleted with
it.
"""

from __future__ import annotations

import time
from typing import Any

from ddpjob.api.job_spec import Json, WhenDeleted
from ddpjob.client.backends.backend import ENDED, Backend, Mistake, NoSuchJob
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.texts.job_text import phase

_GONE_SECONDS = 120.0
_KEPT = ("labels", "annotations")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def rerun(backend: Backend, name: str, *, fresh: bool) -> str:
    """Start the job again and return what was done. Raises Mistake if it has not ended."""
    body = backend.job(name)
    state = phase(body)
    if state not in ENDED:
        raise Mistake(f"{name} is {state} and has not ended; `ddpjob restart {name}` replaces its pods")
    manifest = _manifest(body)
    if isinstance(backend, ProcessBackend):
        resumes = backend.resumes(name) and not fresh
        backend.create([manifest], fresh=fresh)
        return f"{name} started again (it was {state}); {where_it_begins(name, resumes)}"
    if fresh:
        raise Mistake(
            "--fresh: a cluster's checkpoints are on its volume or in its bucket; remove them there, or submit the job "
            "under a different name"
        )
    assert isinstance(backend, ClusterBackend)  # PastJobs is read-only.
    maps = [_manifest(found) for found in backend.code_of(body)]
    backend.delete(name)
    _wait_until_gone(backend, name)
    backend.create([*maps, manifest])
    return f"{name} created again (it was {state}); it resumes from its last checkpoint, if it has one"


def where_it_begins(name: str, resumes: bool) -> str:
    return f"it resumes from {name}/checkpoints (--fresh starts from scratch)" if resumes else "it starts from scratch"


def checkpoints_that_stay(body: Json) -> str:
    """Return where a deleted job's checkpoints stay on a cluster; empty if none stay."""
    storage = (body.get("spec") or {}).get("storage") or {}
    volume = storage.get("checkpoints") or {}
    template = volume.get("claimTemplate") or {}
    if url := volume.get("url"):
        return f"the checkpoints in {url}"
    if claim := volume.get("claimName"):
        return f"the checkpoints in the claim {claim}"
    if volume.get("hostPath"):
        return f"the checkpoints in {volume['hostPath']} of the Kubernetes nodes"
    stays = template and template.get("whenDeleted") != WhenDeleted.DELETE
    return "the checkpoints in its claim" if stays else ""


def _manifest(body: Json) -> Json:
    """Return an object as its user would write it, without fields of the server and the runner."""
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
