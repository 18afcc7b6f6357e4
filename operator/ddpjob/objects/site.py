"""Where pods run: what differs between Kubernetes and one machine in the pods that are built."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from ddpjob.api.types import DDPJob, JobStatus, Placement
from ddpjob.core.world import coordinator_pod_name, node_pod_name

COORDINATOR_HOSTNAME = "coordinator"
"""Of every coordinator pod in mode Fast."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The defaults are Kubernetes'. `operator_key` is the secret from which the jobs' tokens are made."""

    operator_key: bytes
    python: str = "python3"
    pod_files_path: str = "/opt/ddpjob"
    data_path: str | None = None
    """A folder instead of spec.storage.data's mount path; None: the mount path itself."""
    checkpoint_path: str | None = None
    checkpoints_shared: bool | None = None
    """None: by the kind of volume."""

    def coordinator_host(self, job: DDPJob, status: JobStatus) -> str:
        """A name that every pod of the job resolves. It carries the attempt: a name server may still know an old address.

        In mode Fast it is the same for every coordinator of the job: nodes outlive theirs and look for the next.
        """
        if job.spec.fast:
            return f"{COORDINATOR_HOSTNAME}.{job.name}"
        if job.spec.rendezvous.placement is Placement.MASTER:
            pod = node_pod_name(job, 0, status.slots[0].attempt)
        else:
            pod = coordinator_pod_name(job, status.rendezvous.generation)
        return f"{pod}.{job.name}"

    @property
    def key_mark(self) -> str:
        """Tells one operator key from another and nothing else of it."""
        return hmac.new(self.operator_key, b"mark", hashlib.sha256).hexdigest()[:6]

    def token(self, job: DDPJob) -> str:
        """The job's token: nothing is stored, the operator computes it again."""
        return hmac.new(self.operator_key, job.uid.encode(), hashlib.sha256).hexdigest()
