"""The headless service that gives the job's pods names, and the ConfigMap of the files that run in them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.world import LABEL_JOB, LABEL_MANAGED, LABEL_UID, MANAGED_BY

POD_FILES_FOLDER = Path(__file__).resolve().parent.parent / "podfiles"


def job_labels(job: DDPJob) -> dict[str, str]:
    """What every object of a job carries; the operator's watches select by it."""
    return {LABEL_MANAGED: MANAGED_BY, LABEL_JOB: job.name, LABEL_UID: job.uid}


def build_service(job: DDPJob) -> Json:
    """Headless; names exist before pods are ready, since the rendezvous happens before that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            "labels": job_labels(job),
            "ownerReferences": [job.owner_reference],
        },
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
        "metadata": {
            "name": pod_files_name(job),
            "namespace": job.namespace,
            "labels": job_labels(job),
            "ownerReferences": [job.owner_reference],
        },
        "immutable": True,
        "data": pod_files(),
    }
