"""The volume claim that a job creates is bound and written to. Then it is kept and reused, or
removed with the job. The tests also cover failures to create it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import FAST, Jobs, job, steps_job

FIELD = "spec.storage.checkpoints.claimTemplate"


@contextmanager
def volume(jobs: Jobs, name: str, folder: Path) -> Iterator[str]:
    """Create a PersistentVolume on this machine's disk. Its name is also the storage class of the
    claims, because there is no provisioner.
    """
    full = f"{jobs.namespace}-{name}"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": full,
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": str(folder)},
    }
    body = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": full}, "spec": spec}
    jobs.cluster.apply(body, namespace=jobs.namespace)
    try:
        yield full
    finally:
        jobs.cluster.kubectl("delete", "pv", full, "--wait=false", "--ignore-not-found")


def template(storage_class: str, mode: str = "ReadWriteMany", **more: object) -> dict[str, object]:
    spec = {"accessModes": [mode], "storageClassName": storage_class, "resources": {"requests": {"storage": "1Gi"}}}
    return {"checkpoints": {"claimTemplate": {"spec": spec, **more}}}


def claims(jobs: Jobs) -> dict[str, str]:
    """Return the names and uids of the claims."""
    listed = json.loads(jobs.kubectl("get", "pvc", "--output=json"))["items"]
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in listed}


def waits_with(jobs: Jobs, name: str, reason: str) -> None:
    jobs.wait("the condition", lambda: jobs.condition(name, "Scheduled").get("reason") == reason, timeout=20)


def finish(jobs: Jobs, name: str, storage: dict[str, object]) -> None:
    args = ["--config", "digits", "train.epochs=1", "checkpoint.every_steps=5"]
    jobs.apply(job(name, module="ddpjob_trainer", args=args, storage=storage))
    jobs.wait_phase(name, "Complete", timeout=150)


def test_a_kept_claim_has_the_checkpoints_for_the_next_job_with_the_same_name(jobs: Jobs, tmp_path: Path) -> None:
    with volume(jobs, "kept", tmp_path) as made:
        finish(jobs, "kept", template(made, metadata={"labels": {"team": "vision"}}))
        assert list(tmp_path.glob("step-*")), "both nodes have written to the volume"
        before = claims(jobs)
        assert set(before) == {"kept-checkpoints"}
        jobs.kubectl("delete", "ddpjob", "kept")
        jobs.wait("the removal of its pods", lambda: not jobs.pods(), timeout=60)
        assert claims(jobs) == before, "whenDeleted is Retain"
        finish(jobs, "kept", template(made))
        assert claims(jobs) == before, "the job uses the same claim"
        log = jobs.kubectl("logs", "kept-0-0", "--container=trainer")
        assert "nothing is left to train, because the checkpoint of step" in log, log[-2000:]
        jobs.kubectl("delete", "ddpjob", "kept")
        jobs.apply(steps_job("kept", 5, recovery=FAST, storage=template(made, whenDeleted="Delete")))
        waits_with(jobs, "kept", "ClaimTaken")
        assert "created from a different claimTemplate" in jobs.condition("kept", "Scheduled")["message"]
        jobs.kubectl("delete", "ddpjob", "kept")
        jobs.kubectl("delete", "pvc", "kept-checkpoints")


def test_a_claim_that_is_not_kept_is_deleted_with_its_job(jobs: Jobs, tmp_path: Path) -> None:
    with volume(jobs, "gone", tmp_path) as made:
        jobs.apply(steps_job("gone", 5, recovery=FAST, storage=template(made, whenDeleted="Delete")))
        jobs.wait_phase("gone", "Complete")
        assert set(claims(jobs)) == {"gone-checkpoints"}
        jobs.kubectl("delete", "ddpjob", "gone")
        jobs.wait("its removal", lambda: not claims(jobs), timeout=60)


def test_a_refused_claim_is_reported_by_a_condition_that_names_the_field(jobs: Jobs, tmp_path: Path) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "disk"}}
    jobs.cluster.apply({**quota, "spec": {"hard": {"requests.storage": "1Mi"}}}, namespace=jobs.namespace)
    with volume(jobs, "full", tmp_path) as made:
        jobs.wait("the quota", lambda: "used" in jobs.kubectl("get", "quota", "disk", "--output=yaml"), timeout=20)
        jobs.apply(steps_job("full", 5, recovery=FAST, storage=template(made)))
        waits_with(jobs, "full", "CreationRefused")
        message = jobs.condition("full", "Scheduled")["message"]
        assert f"({FIELD})" in message and "exceeded quota: disk" in message
        assert not jobs.pods() and not claims(jobs)
        jobs.kubectl("delete", "quota", "disk")
        jobs.wait_phase("full", "Complete", timeout=150)
        restarts = jobs.status("full")["restarts"]
        assert (restarts["counted"], restarts["uncounted"]) == (0, 0)
        jobs.apply(steps_job("one-node", 5, recovery=FAST, storage=template(made, "ReadWriteOnce")))
        waits_with(jobs, "one-node", "VolumeSingleNode")
        assert f"{FIELD}.spec.accessModes [ReadWriteMany]" in jobs.condition("one-node", "Scheduled")["message"]
        assert set(claims(jobs)) == {"full-checkpoints"}, "no unusable claim is created"


def test_a_claim_owned_by_another_object_is_not_used(jobs: Jobs) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
    theirs = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "mine-checkpoints"}}
    jobs.cluster.apply({**theirs, "spec": spec}, namespace=jobs.namespace)
    jobs.apply(steps_job("mine", 5, recovery=FAST, storage=template("any")))
    waits_with(jobs, "mine", "ClaimTaken")
    assert "was not created by a job with this name" in jobs.condition("mine", "Scheduled")["message"]
    assert not jobs.pods()
