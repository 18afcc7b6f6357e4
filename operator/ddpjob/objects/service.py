"""The headless service that gives the job's pods names, and the ConfigMap with the runtime that they run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ddpjob_runtime import protocol

from ddpjob.api.types import DDPJob, Json
from ddpjob.core.world import LABEL_JOB, LABEL_MANAGED, LABEL_UID, MANAGED_BY

RUNTIME_FOLDER = Path(protocol.__file__).resolve().parent
"""The package `ddpjob_runtime`; job pods run it by its path."""
SCRIPTS_PACKAGE = "ddpjob_report"
"""Beside it: what training scripts import."""


def job_labels(job: DDPJob) -> dict[str, str]:
    """Labels of every object of a job; the operator's watches select by them."""
    return {LABEL_MANAGED: MANAGED_BY, LABEL_JOB: job.name, LABEL_UID: job.uid}


def metadata(job: DDPJob, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> Json:
    """Metadata of an object that is deleted with the job; `labels` are added to those of all its objects."""
    owners = [job.owner_reference]
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": job_labels(job) | dict(labels),
        "ownerReferences": owners,
    }


def build_service(job: DDPJob) -> Json:
    """The headless service. It publishes pods that are not ready: the rendezvous happens before they are."""
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
def runtime_files() -> dict[str, str]:
    """Path below the mount to content of every file of the runtime, and of what training scripts may import."""
    folder = RUNTIME_FOLDER.parent
    paths = sorted(path for name in (SCRIPTS_PACKAGE, RUNTIME_FOLDER.name) for path in (folder / name).rglob("*.py"))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def runtime_key(path: str) -> str:
    """The ConfigMap's key of a file: keys cannot hold `/`."""
    return path.replace("/", ".")


def runtime_items() -> list[Json]:
    """The ConfigMap's keys and the paths at which pods mount them."""
    return [{"key": runtime_key(path), "path": path} for path in runtime_files()]


def _digest(contents: Mapping[str, str]) -> str:
    """Of a runtime with this version's files; `contents` by the ConfigMap's key."""
    digest = hashlib.sha256()
    for path in runtime_files():
        digest.update(f"{path}\0{contents[runtime_key(path)]}\0".encode())
    return digest.hexdigest()[:8]


def holds_runtime(config_map: Json) -> bool:
    """Whether an existing ConfigMap can be mounted by pods of this version, and holds what its name says.

    One of another version may have other files; one that somebody else made may have any content.
    """
    data = config_map.get("data") or {}
    if config_map.get("immutable") is not True or set(data) != {runtime_key(path) for path in runtime_files()}:
        return False
    return str(config_map["metadata"]["name"]).endswith(f"-{_digest(data)}")


@cache
def _runtime_data() -> dict[str, str]:
    return {runtime_key(path): content for path, content in runtime_files().items()}


@cache
def runtime_name() -> str:
    """The ConfigMap with this version's runtime. A running job keeps the one it began with while it can be mounted."""
    return f"ddpjob-runtime-{_digest(_runtime_data())}"


def runtime_owner(job: DDPJob) -> Json:
    """The job as one of several owners: the last one that is deleted takes the object with it."""
    return {key: value for key, value in job.owner_reference.items() if key != "controller"}


def build_runtime(job: DDPJob) -> Json:
    """The immutable ConfigMap that the pods of all jobs of the namespace mount, with its first owner."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": runtime_name(),
            "namespace": job.namespace,
            "labels": {LABEL_MANAGED: MANAGED_BY},
            "ownerReferences": [runtime_owner(job)],
        },
        "immutable": True,
        "data": dict(_runtime_data()),
    }
