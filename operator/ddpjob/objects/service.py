"""Builds the headless service that names a job's pods, and the ConfigMap with their runtime.

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
"""The package `ddpjob_runtime`; job pods run it by its path."""
SCRIPTS_PACKAGE = "ddpjob_report"
"""The package for training scripts, in the same folder. It needs `ddpjob_bucket` and `ddpjob_pod`.
"""


def job_labels(job: DDPJob) -> dict[str, str]:
    """Return the labels that all objects of a job have. The operator's watches select by them."""
    return {LABEL_MANAGED: MANAGED_BY, LABEL_JOB: job.name, LABEL_UID: job.uid}


def metadata(job: DDPJob, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> Json:
    """Build the metadata of an object that is deleted with the job.

    `labels` are added to the labels that all objects of the job have.
    """
    meta = {"name": name, "namespace": job.namespace, "labels": job_labels(job) | dict(labels)}
    return {**meta, "ownerReferences": [job.owner_reference]}


def make_object(api_version: str, kind: str, meta: Json, **parts: Any) -> Json:
    """Return an object with these parts, such as its spec."""
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **parts}


def build_service(job: DDPJob) -> Json:
    """Build the headless service.

    It publishes pods that are not ready yet, because the rendezvous happens before pods are ready.
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
    """Return the ConfigMap's keys (file names in the mount) and their contents.

    Keys cannot contain `/`, and a path for each of fifty keys would make up half of every pod's
    manifest. The packages are therefore in an archive, which Python runs and imports directly.
    Files that are run or found by their path are stored next to the archive.
    """
    files = {
        str(path.relative_to(RUNTIME_FOLDER.parent)): path.read_bytes()
        for package in ("ddpjob_bucket", "ddpjob_pod", SCRIPTS_PACKAGE, RUNTIME_FOLDER.name)
        for path in sorted(RUNTIME_FOLDER.with_name(package).rglob("*.py"))
    }
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name, content in {"__main__.py": files[f"{RUNTIME_FOLDER.name}/__main__.py"], **files}.items():
            # ZipInfo is dated 1980, so the bytes are always the same.
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
"""Number of digits of the digest in the name. The digest makes the content trusted: forging content
for a given name takes 2**64 attempts."""


def holds_runtime(config_map: Json) -> bool:
    """Whether pods of this version can mount an existing ConfigMap.

    Its content must match its name. A ConfigMap from a different version may have other files, and
    a ConfigMap that someone else created may have any content.
    """
    data = config_map.get("binaryData") or {}
    if config_map.get("immutable") is not True or config_map.get("data") or set(data) != set(_runtime_files()):
        return False
    named = str(config_map["metadata"]["name"]).rpartition("-")[2]
    return named == _digest({name: b64decode(content) for name, content in data.items()})


@cache
def runtime_name() -> str:
    """Return the name of the ConfigMap with this version's runtime.

    A running job keeps its original runtime as long as its pods can mount that ConfigMap.
    """
    return f"ddpjob-runtime-{_digest(_runtime_files())}"


@cache
def _runtime_data() -> dict[str, str]:
    return {name: b64encode(content).decode() for name, content in _runtime_files().items()}


def runtime_owner(job: DDPJob) -> Json:
    """Build a reference to the job as one of several owners.

    The object is deleted with its last owner.
    """
    return {**job.reference, "blockOwnerDeletion": False}


def runtime_jobs_name(runtime: str) -> str:
    """Return the name of the ConfigMap that links jobs to a runtime.

    The jobs that use the runtime own this ConfigMap, which in turn owns the runtime.
    """
    return f"{runtime}-jobs"


def build_runtime_jobs(job: DDPJob, owners: Iterable[Json]) -> Json:
    """Build an empty ConfigMap that is owned by the namespace's jobs and keeps their runtime alive.

    The runtime itself is too large to be rewritten whenever a job is created or deleted.
    """
    return _shared(job, runtime_jobs_name(runtime_name()), owners)


def build_runtime(job: DDPJob) -> Json:
    """Build the immutable ConfigMap with the runtime and its first owner.

    The pods of all jobs in the namespace mount it.
    """
    shared = _shared(job, runtime_name(), [runtime_owner(job)])
    return {**shared, "immutable": True, "binaryData": dict(_runtime_data())}


def _shared(job: DDPJob, name: str, owners: Iterable[Json]) -> Json:
    meta = {"name": name, "namespace": job.namespace, "labels": {LABEL_MANAGED: MANAGED_BY}}
    return make_object("v1", "ConfigMap", {**meta, "ownerReferences": list(owners)})
