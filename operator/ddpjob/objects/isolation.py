"""Builds the objects that isolate a job: a NetworkPolicy, and a Secret with the token for
its pods.
"""

from __future__ import annotations

import hashlib
import json

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.world import LABEL_ISOLATED, LABEL_UID
from ddpjob.objects.platform import Platform
from ddpjob.objects.service import make_object, metadata

TOKEN_KEY = "token"
"""The key under which the Secret stores the token."""


def build_token(job: DDPJob, platform: Platform) -> Json:
    """Build the Secret that contains the job's token.

    Users with Kubernetes' `view` role cannot read Secrets. The operator creates this Secret but
    never reads it, because the name of the Secret already determines its content.
    """
    data = {TOKEN_KEY: platform.token(job)}
    meta = metadata(job, platform.token_secret(job))
    return make_object("v1", "Secret", meta, type="Opaque", immutable=True, stringData=data)


def token_variable(job: DDPJob, platform: Platform) -> Json:
    """Build the environment variable DDPJOB_TOKEN for the job's containers."""
    secret = platform.token_secret(job)
    if not secret:
        return {"name": "DDPJOB_TOKEN", "value": platform.token(job)}
    return {"name": "DDPJOB_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": TOKEN_KEY}}}


def policy_name(job: DDPJob, platform: Platform) -> str:
    """Return the name of the job's NetworkPolicy, or an empty string if the job does not get one.

    The name contains a hash of the policy's content, which changes if the operator moves or if
    other peers may read metrics. The operator then creates a second policy and leaves the first in
    place, because it has no permission to delete policies. Until the job is deleted, the peers of
    the first policy therefore remain admitted.
    """
    if not job.spec.isolated or platform.operator_peer is None:
        return ""
    content = json.dumps(_policy(job, platform), sort_keys=True)
    return f"{job.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def build_policy(job: DDPJob, platform: Platform) -> Json:
    """Build the NetworkPolicy that limits the connections to the job's pods.

    The job's own pods may connect to all ports. The operator and the peers that read metrics may
    connect only to the coordinator's port.
    """
    meta = metadata(job, policy_name(job, platform))
    return make_object("networking.k8s.io/v1", "NetworkPolicy", meta, spec=_policy(job, platform))


def _policy(job: DDPJob, platform: Platform) -> Json:
    """Return the `spec` of the NetworkPolicy.

    A separate label selects the pods, because spec.network can change while a job is suspended.
    Such a change must apply only to pods created later.
    """
    own = {"matchLabels": {LABEL_UID: job.uid}}
    port = {"protocol": "TCP", "port": job.spec.rendezvous.endpoint_port}
    return {
        "podSelector": {"matchLabels": {**own["matchLabels"], LABEL_ISOLATED: "true"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            {"from": [platform.operator_peer, *platform.metrics_peers], "ports": [port]},
        ],
    }
