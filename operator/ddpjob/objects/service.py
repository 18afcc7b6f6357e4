"""Builds the headless Service that gives pods their host names, and the ConfigMap with the runtime.

docs/decisions/0012 explains why the runtime is in a ConfigMap, and 0014 why each namespace has one.
"""

from __future__ import annotations

import hashlib
import io
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from ddpjob_runtime import protocol

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.world import LABEL_JOB, LABEL_MANAGED, LABEL_UID, MANAGED_BY

RUNTIME_FOLDER = Path(protocol.__file__).resolve().parent
"""Path of the `ddpjob_runtime` package. In a pod, the runtime's archive has the name of this
package."""
SCRIPTS_PACKAGE = "ddpjob_report"
"""Name of the package that training scripts import. The package is in the same folder as
`ddpjob_runtime`, and needs `ddpjob_bucket` and `ddpjob_pod`."""


def job_labels(job: DDPJob) -> dict[str, str]:
    """Return the labels by which the operator's watches select a job's objects."""
    return {LABEL_MANAGED: MANAGED_BY, LABEL_JOB: job.name, LABEL_UID: job.uid}


def metadata(job: DDPJob, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> Json:
    """Build the metadata for an object that Kubernetes deletes together with the job.

    `labels` are added to the labels that every object of the job has.
    """
    meta = {"name": name, "namespace": job.namespace, "labels": job_labels(job) | dict(labels)}
    return {**meta, "ownerReferences": [job.owner_reference]}


def make_object(api_version: str, kind: str, meta: Json, **parts: Any) -> Json:
    """Return a Kubernetes object that consists of this metadata and these parts, such as `spec`."""
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **parts}


def build_service(job: DDPJob) -> Json:
    """Build the headless Service that gives the job's pods their host names.

    The Service also publishes the addresses of pods that are not ready, because pods become ready
    only after the rendezvous.
    """
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {LABEL_UID: job.uid},
        "ports": [
            {"name": "rendezvous", "port": job.spec.rendezvous.port},
            {"name": "coordinator", "port": job.spec.rendezvous.endpoint_port},
        ],
    }
    return make_object("v1", "Service", metadata(job, job.name), spec=spec)


@cache
def _runtime_files() -> dict[str, bytes]:
    """Return the content of the runtime's ConfigMap by key.

    In a pod, each key becomes a file name.

    The runtime's packages are in one archive, which Python can run and import from. As separate
    entries, each of about fifty files would need a key, which cannot contain `/`. Each file would
    therefore also need a path in every pod's manifest, and these paths would make up half of the
    manifest. Files that are executed or found by their path have keys of their own instead.
    """
    files = {
        str(path.relative_to(RUNTIME_FOLDER.parent)): path.read_bytes()
        for package in ("ddpjob_bucket", "ddpjob_pod", SCRIPTS_PACKAGE, RUNTIME_FOLDER.name)
        for path in sorted(RUNTIME_FOLDER.with_name(package).rglob("*.py"))
    }
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name, content in {"__main__.py": files[f"{RUNTIME_FOLDER.name}/__main__.py"], **files}.items():
            # A ZipInfo always has the same date, so the bytes of the archive depend only on the
            # files.
            archive.writestr(ZipInfo(name), content, ZIP_DEFLATED)
    return {
        RUNTIME_FOLDER.name: packed.getvalue(),
        "ddpjob_worker.py": files[f"{RUNTIME_FOLDER.name}/worker.py"],
        f"{SCRIPTS_PACKAGE}.py": files[f"{RUNTIME_FOLDER.name}/report_of_archive.py"],
    }


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    return digest.hexdigest()[:DIGITS]


DIGITS = 16
"""Number of hexadecimal digits of the digest that is part of the ConfigMap's name. A ConfigMap with
matching content can be trusted, because forging such content takes about 2**64 attempts."""


def holds_runtime(config_map: Json) -> bool:
    """Whether the pods of this version of the operator can mount an existing ConfigMap.

    The ConfigMap must contain the files of this version's runtime, and its content must match the
    digest in its name. A ConfigMap from a different version may contain other files, and a
    ConfigMap that somebody else has created may contain anything.
    """
    data = config_map.get("binaryData") or {}
    if config_map.get("immutable") is not True or config_map.get("data") or set(data) != set(_runtime_files()):
        return False
    named = str(config_map["metadata"]["name"]).rpartition("-")[2]
    return named == _digest({name: b64decode(content) for name, content in data.items()})


@cache
def runtime_name() -> str:
    """Return the name of the ConfigMap that contains this version's runtime.

    A running job keeps the runtime with which it started, as long as its pods can mount that
    runtime's ConfigMap.
    """
    return f"ddpjob-runtime-{_digest(_runtime_files())}"


@cache
def _runtime_data() -> dict[str, str]:
    return {name: b64encode(content).decode() for name, content in _runtime_files().items()}


def runtime_owner(job: DDPJob) -> Json:
    """Build a reference that makes the job one of several owners of an object.

    Kubernetes deletes the object together with its last owner.
    """
    return {**job.reference, "blockOwnerDeletion": False}


def runtime_jobs_name(runtime: str) -> str:
    """Return the name of the empty ConfigMap that connects jobs with a runtime.

    The jobs that use the runtime own the empty ConfigMap, which owns the runtime's ConfigMap.
    """
    return f"{runtime}-jobs"


def build_runtime_jobs(job: DDPJob, owners: Iterable[Json]) -> Json:
    """Build the empty ConfigMap that keeps a namespace's runtime from being deleted.

    The jobs in the namespace own the empty ConfigMap. They do not own the runtime's ConfigMap
    directly, because the runtime is too large to be rewritten whenever a job is created or deleted.
    """
    return _shared(job, runtime_jobs_name(runtime_name()), owners)


def build_runtime(job: DDPJob) -> Json:
    """Build the immutable ConfigMap that contains the runtime, with this job as its owner.

    The pods of all jobs in the namespace mount this ConfigMap.
    """
    shared = _shared(job, runtime_name(), [runtime_owner(job)])
    return {**shared, "immutable": True, "binaryData": dict(_runtime_data())}


def _shared(job: DDPJob, name: str, owners: Iterable[Json]) -> Json:
    meta = {"name": name, "namespace": job.namespace, "labels": {LABEL_MANAGED: MANAGED_BY}}
    return make_object("v1", "ConfigMap", {**meta, "ownerReferences": list(owners)})
