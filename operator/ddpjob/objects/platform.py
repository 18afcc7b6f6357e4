"""Settings that differ between pods built for Kubernetes and pods built for a single machine."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, Placement
from ddpjob.api.job_status import JobStatus
from ddpjob.core.world import coordinator_pod_name, node_pod_name

COORDINATOR_HOSTNAME = "coordinator"
"""The hostname of every coordinator pod in Fast mode."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Settings that differ between a cluster and a single machine.

    The defaults are for Kubernetes. The tokens of all jobs are derived from `operator_key`, a
    secret.
    """

    operator_key: bytes
    python: str = "python3"
    runtime_path: str = "/opt/ddpjob"
    torchrun_python: str = "/opt/ddpjob/ddpjob_worker.py"
    """The program that torchrun in a `command` runs instead of Python to start its workers. This
    program is worker.py from the runtime."""
    data_path: str | None = None
    """Path of the training data. None means the mount path in spec.storage.data."""
    checkpoint_path: str | None = None
    """Path of the checkpoints. None means the mount path in spec.storage.checkpoints."""
    code_path: str | None = None
    """Path of the code from spec.code. None means CODE_FOLDER."""
    git_image: str = "docker.io/alpine/git:2.49.1"
    """The image of the init container that clones spec.code.git. The image must contain git and sh.
    """
    operator_peer: Json | None = None
    """A NetworkPolicy peer that matches the operator's own pods. If it is None, these pods are
    unknown and no NetworkPolicy is created."""
    metrics_peers: tuple[Json, ...] = ()
    """Additional NetworkPolicy peers that may connect to coordinators to read metrics."""
    coordinator_listens_on: str = ""
    """The address on which the coordinator and its store listen. If it is empty, the coordinator
    listens on all addresses of its pod, as the kubelet and `kubectl port-forward` require. The
    store then listens only on POD_IP, because the store has no authentication."""
    checkpoints_shared: bool | None = None
    """Whether all nodes see the same checkpoint files. None if the answer depends on the kind of
    volume."""

    def bucket_folder(self, job: DDPJob) -> str:
        """Return the path of the job's folder, relative to storage.checkpoints.url.

        No other existing job in this cluster uses this folder. A later job with the same name and
        namespace uses it again.
        """
        return f"{job.namespace}/{job.name}"

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the host name under which the job's pods reach its coordinator.

        In Standard mode, each generation has a new name, because a name server may still return the
        old address for an old name. In Fast mode, every coordinator of the job has the same name.
        If the coordinator is lost, the nodes stay and find the next coordinator by looking up this
        name.
        """
        if job.spec.fast:
            return f"{COORDINATOR_HOSTNAME}.{job.name}"
        if job.spec.rendezvous.placement is Placement.MASTER:
            return self.first_host(job, status)
        return f"{coordinator_pod_name(job, status.rendezvous.generation)}.{job.name}"

    def store_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the host name of the rendezvous store that torchrun gets as its endpoint."""
        return self.coordinator_host(job, status)

    def first_host(self, job: DDPJob, status: JobStatus) -> str:
        """Return the host name of the current generation's pod with index 0."""
        return f"{node_pod_name(job, 0, status.slots[0].attempt)}.{job.name}"

    @property
    def key_mark(self) -> str:
        """A short hash of the operator's key.

        The hash distinguishes keys without revealing anything about them.
        """
        return hmac.new(self.operator_key, b"mark", hashlib.sha256).hexdigest()[:6]

    @property
    def cluster(self) -> str:
        """A short hash of the operator's key.

        The hash differs between clusters. It therefore distinguishes this operator's jobs from jobs
        of the same name in other clusters.
        """
        return self.key_mark

    def token(self, job: DDPJob) -> str:
        """Return the token with which the job's pods authenticate themselves.

        The operator does not store the token, because it can be derived again from the operator's
        key.
        """
        return hmac.new(self.operator_key, job.uid.encode(), hashlib.sha256).hexdigest()

    def token_secret(self, job: DDPJob) -> str:
        """Return the name of the Secret with the job's token.

        The name depends on the job's UID and on the operator's key. Without the key, nobody can
        predict the name and create a Secret of that name in advance. A platform without such
        Secrets returns an empty name, and the job's processes get the token in their environment.
        """
        mark = hmac.new(self.operator_key, f"secret {job.uid}".encode(), hashlib.sha256).hexdigest()[:10]
        return f"{job.name}-token-{mark}"
