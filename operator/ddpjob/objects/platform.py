"""Differences between pods built for Kubernetes and for a single machine."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import coordinator_pod_name, node_pod_name

COORDINATOR_HOSTNAME = "coordinator"
"""Hostname of every coordinator pod in Fast mode."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Settings of the platform. The defaults are for Kubernetes.

    `operator_key` is the secret from which the jobs' tokens are derived.
    """

    operator_key: bytes
    python: str = "python3"
    runtime_path: str = "/opt/ddpjob"
    torchrun_python: str = "/opt/ddpjob/ddpjob_worker.py"
    """The file that torchrun in a `command` starts instead of Python for its workers: the runtime's
    worker.py."""
    data_path: str | None = None
    """A folder that replaces the mount path of spec.storage.data; None keeps the path."""
    checkpoint_path: str | None = None
    """A folder that replaces the mount path of spec.storage.checkpoints; None keeps the path."""
    code_path: str | None = None
    """A folder that replaces CODE_FOLDER for spec.code; None keeps CODE_FOLDER."""
    git_image: str = "docker.io/alpine/git:2.49.1"
    """The image with the git that clones spec.code.git. It also contains sh."""
    operator_peer: Json | None = None
    """The operator's pods as a NetworkPolicy peer. If None, they are unknown, and no policy
    is created."""
    metrics_peers: tuple[Json, ...] = ()
    """Other peers that are admitted to the coordinators' port, so that they can read metrics."""
    coordinator_listens_on: str = ""
    """The address that the coordinator and its store listen on. If empty, the coordinator listens
    on all of its pod's addresses, as the kubelet and `kubectl port-forward` require. The store has
    no authentication, so it then listens only on POD_IP."""
    checkpoints_shared: bool | None = None
    """Whether all nodes see the same checkpoints; None if this depends on the kind of volume."""

    def bucket_folder(self, job: DDPJob) -> str:
        """Return the job's own folder below storage.checkpoints.url.

        Of the cluster's other jobs, only later ones with the same name use this folder too.
        """
        return f"{job.namespace}/{job.name}"

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the coordinator's host name, which every pod of the job can resolve.

        In Standard mode it changes with the generation, because a name server may still return an
        old address. In Fast mode it is the same for every coordinator of the job, because nodes
        outlive their coordinator and look up the next one.
        """
        if job.spec.fast:
            return f"{COORDINATOR_HOSTNAME}.{job.name}"
        if job.spec.rendezvous.placement is Placement.MASTER:
            return self.first_host(job, status)
        return f"{coordinator_pod_name(job, status.rendezvous.generation)}.{job.name}"

    def store_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the host of the rendezvous store, as it appears in torchrun's endpoint."""
        return self.coordinator_host(job, status)

    def first_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the host name of index 0's pod in the current generation."""
        return f"{node_pod_name(job, 0, status.slots[0].attempt)}.{job.name}"

    @property
    def key_mark(self) -> str:
        """A short hash that distinguishes operator keys without revealing anything about them."""
        return hmac.new(self.operator_key, b"mark", hashlib.sha256).hexdigest()[:6]

    @property
    def cluster(self) -> str:
        """A short hash that distinguishes this operator's jobs from jobs with the same name in
        other clusters.
        """
        return self.key_mark

    def token(self, job: DDPJob) -> str:
        """Return the token that the job's pods authenticate with.

        It is not stored, because the operator can derive it again.
        """
        return hmac.new(self.operator_key, job.uid.encode(), hashlib.sha256).hexdigest()

    def token_secret(self, job: DDPJob) -> str:
        """Return the name of the Secret with the job's token.

        The name changes with the job's UID and the operator's key. It is derived from the key, so
        that nobody can create a Secret with this name in advance. If the name is empty, the token
        is in the environment of the job's processes instead.
        """
        mark = hmac.new(self.operator_key, f"secret {job.uid}".encode(), hashlib.sha256).hexdigest()[:10]
        return f"{job.name}-token-{mark}"
