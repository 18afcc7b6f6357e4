"""What differs between Kubernetes and one machine in the pods that are built."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import coordinator_pod_name, node_pod_name

COORDINATOR_HOSTNAME = "coordinator"
"""Hostname of every coordinator pod in mode Fast."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The defaults are Kubernetes'. `operator_key` is the secret that the jobs' tokens derive from."""

    operator_key: bytes
    python: str = "python3"
    runtime_path: str = "/opt/ddpjob"
    torchrun_python: str = "/opt/ddpjob/ddpjob_worker.py"
    """What torchrun in a `command` starts its workers with, in place of Python: the runtime's worker.py."""
    data_path: str | None = None
    """A folder instead of spec.storage.data's mount path; None: the mount path."""
    checkpoint_path: str | None = None
    """A folder instead of spec.storage.checkpoints' mount path; None: the mount path."""
    operator_peer: Json | None = None
    """The operator's pods, as the peer of a NetworkPolicy; None: they are not known, and no policy is made."""
    metrics_peers: tuple[Json, ...] = ()
    """Further peers that may reach the coordinators' port, for their metrics."""
    coordinator_listens_on: str = ""
    """The coordinator's address, and its store's. Empty: all of its pod's, as the kubelet and
    `kubectl port-forward` reach it, and POD_IP for the store, which has no authentication.
    """
    checkpoints_shared: bool | None = None
    """Whether all nodes see the same checkpoints; None: by the kind of volume."""

    def bucket_folder(self, job: DDPJob) -> str:
        """The job's own folder below storage.checkpoints.url: no other job of the cluster has it, a later one of the
        same name has.
        """
        return f"{job.namespace}/{job.name}"

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        """The coordinator's host name, which every pod of the job resolves.

        In mode Standard it changes with the generation: a name server may still return an old
        address. In mode Fast it is the same for every coordinator of the job: nodes outlive theirs
        and look up the next.
        """
        if job.spec.fast:
            return f"{COORDINATOR_HOSTNAME}.{job.name}"
        if job.spec.rendezvous.placement is Placement.MASTER:
            return self.first_host(job, status)
        return f"{coordinator_pod_name(job, status.rendezvous.generation)}.{job.name}"

    def store_host(self, job: DDPJob, status: JobStatus) -> str:
        """The host of the rendezvous store, as torchrun's endpoint names it."""
        return self.coordinator_host(job, status)

    def first_host(self, job: DDPJob, status: JobStatus) -> str:
        """The host name of index 0's pod in the present generation."""
        return f"{node_pod_name(job, 0, status.slots[0].attempt)}.{job.name}"

    @property
    def key_mark(self) -> str:
        """Distinguishes operator keys without revealing anything of them."""
        return hmac.new(self.operator_key, b"mark", hashlib.sha256).hexdigest()[:6]

    @property
    def cluster(self) -> str:
        """Distinguishes this operator's jobs from those of other clusters, which may have the same names."""
        return self.key_mark

    def token(self, job: DDPJob) -> str:
        """The token that the job's pods authenticate with. It is not stored: the operator derives it again."""
        return hmac.new(self.operator_key, job.uid.encode(), hashlib.sha256).hexdigest()

    def token_secret(self, job: DDPJob) -> str:
        """Name of the Secret with the job's token; it changes with the job's UID and with the operator's key.

        It derives from the key, so that nobody can create a Secret of this name in advance. Empty: the
        token is in the environment of the job's processes itself.
        """
        mark = hmac.new(self.operator_key, f"secret {job.uid}".encode(), hashlib.sha256).hexdigest()[:10]
        return f"{job.name}-token-{mark}"
