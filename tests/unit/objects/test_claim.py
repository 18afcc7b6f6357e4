"""The claim that a job creates: its owner, when it is deleted, and which changes need a different
claim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, Slot
from ddpjob.controller.pod_views import read_claim
from ddpjob.core.world import ClaimView
from ddpjob.objects.claim import build_claim, template_mark
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import build_node

SPEC = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}


def making(uid: str = "uid", **template: Any) -> DDPJob:
    storage = {"checkpoints": {"claimTemplate": {"spec": SPEC, **template}, "subPath": "run"}}
    spec = {"image": "image", "script": "train.py", "storage": storage}
    return DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": uid}, "spec": spec})


def test_a_claim_is_kept_unless_the_job_says_otherwise() -> None:
    kept = build_claim(making())
    assert "ownerReferences" not in kept["metadata"]
    assert (kept["kind"], kept["metadata"]["name"], kept["spec"]) == ("PersistentVolumeClaim", "job-checkpoints", SPEC)
    assert build_claim(making(whenDeleted="Delete"))["metadata"]["ownerReferences"][0]["uid"] == "uid"


def test_the_operators_labels_take_precedence_over_those_of_the_claim_template() -> None:
    """This holds even if the CRD of a different release admitted such labels."""
    metadata = {"labels": {"team": "a", "ddpjob.io/job": "other"}, "annotations": {"ddpjob.io/claim-template": "x"}}
    job = making(metadata=metadata)
    made = read_claim(build_claim(job))
    assert build_claim(job)["metadata"]["labels"]["team"] == "a"
    assert made == ClaimView(
        name="job-checkpoints",
        access_modes=("ReadWriteMany",),
        made_by="uid",
        made_for="job",
        template=template_mark(job),
    )


def test_the_hash_changes_with_fields_that_need_a_different_claim() -> None:
    mark = template_mark(making())
    assert mark == template_mark(making(uid="later")) == template_mark(making(metadata={"labels": {"a": "b"}}))
    larger = {**SPEC, "resources": {"requests": {"storage": "2Gi"}}}
    assert len({mark, template_mark(making(spec=larger)), template_mark(making(whenDeleted="Delete"))}) == 3


@pytest.mark.parametrize(
    ("volume", "folder"),
    [
        ({"claimName": "c"}, "job"),
        ({"nfs": {"server": "s", "path": "/p"}}, "job"),
        ({"claimName": "c", "subPath": "first"}, "first"),
        ({"claimName": "c", "subPath": "a/./b"}, "a/b"),
        ({"claimName": "c", "subPath": "."}, None),
        ({"claimName": "c", "readOnly": True}, None),
        ({"hostPath": "/h"}, None),
        ({"claimTemplate": {"spec": SPEC}}, None),
    ],
)
def test_each_job_has_a_separate_folder_in_a_claim(volume: dict[str, Any], folder: str | None) -> None:
    """Regression: a second job silently continued the first one's training."""
    status = JobStatus(slots=(Slot(),), runtime="r")
    spec = {"image": "image", "script": "train.py", "storage": {"checkpoints": volume}}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": spec})
    job = replace(job, status=status)
    pod = build_node(job, status, Platform(operator_key=b"k"), 0, 0)["spec"]
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "ddpjob-checkpoints"]
    assert mount.get("subPath") == folder


def test_pods_mount_the_claim_that_the_job_created() -> None:
    status = JobStatus(slots=(Slot(),), runtime="r")
    pod = build_node(making(), status, Platform(operator_key=b"k"), 0, 0)["spec"]
    volume = next(v for v in pod["volumes"] if v["name"] == "ddpjob-checkpoints")
    assert volume["persistentVolumeClaim"] == {"claimName": "job-checkpoints", "readOnly": False}
    mount = next(m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "ddpjob-checkpoints")
    assert mount == {"name": "ddpjob-checkpoints", "mountPath": "/checkpoints", "subPath": "run"}
    shared = next(e for e in pod["containers"][0]["env"] if e["name"] == "DDPJOB_CHECKPOINT_SHARED")
    assert shared["value"] == "1"


def test_building_a_claim_without_a_template_is_an_error() -> None:
    job = making()
    bare = replace(job, spec=replace(job.spec, storage=replace(job.spec.storage, checkpoints=None)))
    with pytest.raises(ValueError, match="does not have a claimTemplate"):
        build_claim(bare)
    assert template_mark(bare) == ""
