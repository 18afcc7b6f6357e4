"""Builds a PersistentVolumeClaim from storage.checkpoints.claimTemplate, and hashes the
template.
"""

from __future__ import annotations

import hashlib
import json

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json, WhenDeleted
from ddpjob.core.world import ANNOTATION_TEMPLATE
from ddpjob.objects.service import job_labels, make_object


def template_mark(job: DDPJob) -> str:
    """Return a hash of `spec` and `whenDeleted` in the job's claimTemplate.

    The result is empty if the job has no claimTemplate. A job reuses an existing claim only if the
    claim was made from a template with the same hash.
    """
    template = job.spec.storage.claim_template
    if template is None:
        return ""
    text = json.dumps([template.when_deleted, template.spec], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_claim(job: DDPJob) -> Json:
    """Build the PersistentVolumeClaim that a job creates from its claimTemplate.

    If whenDeleted is Retain, the claim has no owner, because Kubernetes would delete the claim
    together with an owner. Raises ValueError for a job without a claimTemplate.
    """
    template = job.spec.storage.claim_template
    if template is None:
        raise ValueError(f"job {job.name} does not have a claimTemplate")
    metadata: Json = {
        "name": job.made_claim,
        "namespace": job.namespace,
        "labels": {**template.metadata.get("labels", {}), **job_labels(job)},
        "annotations": {**template.metadata.get("annotations", {}), ANNOTATION_TEMPLATE: template_mark(job)},
    }
    if template.when_deleted is WhenDeleted.DELETE:
        metadata["ownerReferences"] = [job.owner_reference]
    return make_object("v1", "PersistentVolumeClaim", metadata, spec=template.spec)
