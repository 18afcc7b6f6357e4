"""The headless service that gives the job's pods names, and the ConfigMap of the files that run in them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.world import LABEL_JOB, LABEL_MANAGED, LABEL_UID, MANAGED_BY

POD_FILES_FOLDER = Path(__file__).resolve().parent.parent / "podfiles"


def job_labels(job: DDPJob) -> dict[str, str]:
    """What every object of a job carries; the operator's watches select by it."""
    return {LABEL_MANAGED: MANAGED_BY, LABEL_JOB: job.name, LABEL_UID: job.uid}


def metadata(job: DDPJob, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> Json:
    """Of an object that belongs to the job and goes with it; `labels` beside those that all of them carry."""
    owners = [job.owner_reference]
    return {"name": name, "namespace": job.namespace, "labels": job_labels(job) | dict(labels), "ownerReferences": owners}


def build_service(job: DDPJob) -> Json:
    """Headless; names exist before pods are ready, since the rendezvous happens before that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_UID: job.uid},
            "ports": [
                {"name": "rendezvous", "port": job.spec.rendezvous.port},
                {"name": "coordinator", "port": job.spec.rendezvous.endpoint_port},
            ],
        },
    }


@cache
def pod_files() -> dict[str, str]:
    """File name to content of all that runs in job pods."""
    return {path.name: path.read_text() for path in sorted(POD_FILES_FOLDER.glob("*.py"))}


@cache
def _pod_files_hash() -> str:
    digest = hashlib.sha256()
    for name, content in pod_files().items():
        digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()[:8]


def pod_files_name(job: DDPJob) -> str:
    """Of this version's files; a running job keeps the ones it began with."""
    return f"{job.name}-podfiles-{_pod_files_hash()}"


def build_pod_files(job: DDPJob) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, pod_files_name(job)),
        "immutable": True,
        "data": pod_files(),
    }
