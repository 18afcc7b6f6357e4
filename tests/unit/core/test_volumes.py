"""Which claims can serve a job, and which existing claims belong to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import ConditionType, JobStatus, Slot, SlotState
from ddpjob.core.status.conditions import with_condition
from ddpjob.core.volumes import (
    FIELD,
    find_folder_user,
    find_unusable_claim,
    has_claim,
    lacks_claim,
    list_claims_to_read,
)
from ddpjob.core.world import ClaimView, PodView, Role, World

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
OURS = ClaimView(
    name="job-checkpoints", access_modes=("ReadWriteMany",), made_by="uid", made_for="job", template="mark"
)
ABSENT = ClaimView(name="job-checkpoints", exists=False)


def job_with(*, trained: bool = False, claim_made: bool = False, **spec: Any) -> DDPJob:
    body = {"image": "image", "script": "train.py", "nodes": 2, **spec}
    job = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": body})
    return replace(job, status=replace(job.status, trained=trained, claim_made=claim_made))


def making(template: dict[str, Any] | None = None, **spec: Any) -> DDPJob:
    return job_with(storage={"checkpoints": {"claimTemplate": {"spec": SPEC, **(template or {})}}}, **spec)


def problem(claim: ClaimView, job: DDPJob | None = None) -> str:
    found = find_unusable_claim(job or making(), World(claims=(claim,), claim_template="mark"))
    return f"{found.reason}: {found.message}" if found else ""


def test_a_missing_claim_is_created_if_the_job_has_a_template() -> None:
    assert problem(ABSENT) == "" and lacks_claim(making(), World(claims=(ABSENT,)))
    named = job_with(storage={"checkpoints": {"claimName": "job-checkpoints"}})
    assert problem(ABSENT, named).startswith("ClaimNotFound") and not lacks_claim(named, World(claims=(ABSENT,)))
    assert not lacks_claim(making(), World()), "the claim is not checked while pods run"


def test_all_missing_claims_are_named_at_once() -> None:
    """Regression: the message named one claim, and promised that the job starts once it exists."""
    job = job_with(storage={"checkpoints": {"claimName": "saved"}, "data": {"claimName": "data"}})
    absent = [ClaimView(name=name, exists=False) for name in ("data", "saved")]
    both, one = (find_unusable_claim(job, World(claims=tuple(claims))) for claims in (absent, absent[:1]))
    assert both is not None and both.message.startswith(
        "spec.storage refers to the claims data, saved, which do not exist"
    )
    assert "create them; the job then" in both.message
    assert one is not None and "the claim data, which does not exist" in one.message


def test_a_claim_that_vanished_after_training_is_not_recreated() -> None:
    """Otherwise, training would silently start from scratch."""
    message = problem(ABSENT, making(trained=True, claim_made=True))
    assert message.startswith("ClaimNotFound") and FIELD in message and "claimName" in message
    assert problem(ABSENT, making(claim_made=True)) == "", "the claim was still empty"


def test_a_job_that_has_trained_elsewhere_may_get_its_first_claim() -> None:
    job = making(trained=True)
    assert problem(ABSENT, job) == "" and lacks_claim(job, World(claims=(ABSENT,)))
    mine, theirs = (replace(OURS, made_for=name) for name in ("job", "other"))
    assert [has_claim(job, World(claims=(c,), claim_template="mark")) for c in (ABSENT, mine, theirs)] == [
        False, True, False,
    ]  # fmt: skip


def test_the_claim_that_a_job_created_is_checked_whenever_a_pod_is_missing() -> None:
    running = (Slot(state=SlotState.RUNNING), Slot(state=SlotState.RUNNING))
    job = making(claim_made=True)
    job = replace(job, status=replace(job.status, active=2, slots=running))
    first = PodView(name="job-0-0", uid="1", role=Role.NODE, index=0, host="n1")
    second = replace(first, name="job-1-0", uid="2", index=1)
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert list_claims_to_read(job, (first, second)) == ()
    for missing in ((first,), (first, replace(second, host="")), (first, replace(second, deleted_at=moment))):
        assert list_claims_to_read(job, missing) == ("job-checkpoints",)
    done = replace(job.status, slots=(running[0], Slot(state=SlotState.SUCCEEDED)))
    assert list_claims_to_read(replace(job, status=done), (first,)) == ()
    unseen = replace(job, status=replace(job.status, claim_made=False))
    assert list_claims_to_read(unseen, (first, second)) == ("job-checkpoints",), "until the status records it"
    named = job_with(storage={"checkpoints": {"claimName": "a"}})
    assert list_claims_to_read(named, ()) == ("a",), "before the first pod"
    three = replace(named, spec=replace(named.spec, nodes=3), status=job.status)
    assert list_claims_to_read(three, (first, second)) == (), "the claim can serve two pods"


def test_a_claim_is_checked_when_a_job_grows_from_one_node() -> None:
    one = job_with(nodes=1, storage={"checkpoints": {"claimName": "a"}})
    one = replace(one, status=replace(one.status, active=1, slots=(Slot(state=SlotState.RUNNING),)))
    first = PodView(name="job-0-0", uid="1", role=Role.NODE, index=0, host="n1")
    assert list_claims_to_read(one, (first,)) == ()
    two = replace(one, spec=replace(one.spec, nodes=2))
    assert list_claims_to_read(two, (first,)) == ("a",), "before the second pod is created"
    planned = replace(two, status=replace(two.status, slots=(*two.status.slots, Slot(attempt=1))))
    assert list_claims_to_read(planned, (first,)) == ("a",), "and until the second pod is created"


def naming(
    name: str, *, begun: bool = False, created: int = 0, state: JobStatus | None = None, **volume: Any
) -> DDPJob:
    job = job_with(storage={"checkpoints": {"claimName": "c", **volume}})
    slots = (Slot(state=SlotState.RUNNING),) if begun else ()
    status = replace(state or job.status, slots=slots)
    return replace(job, name=name, uid=f"uid-{name}", status=status, created=NOW + timedelta(seconds=created))


def test_a_folder_belongs_to_the_job_that_first_used_it() -> None:
    """Regression: three jobs on one claim silently replaced each other's files."""
    first = naming("first", begun=True, created=9)
    assert find_folder_user(naming("second"), [first]) == "", "each job has its own folder"
    assert find_folder_user(naming("second", subPath="./first/"), [first]).startswith("first, which is ")
    assert find_folder_user(replace(first, name="again"), [naming("x", begun=True)]) == "", (
        "the job has begun to use the folder"
    )
    assert find_folder_user(naming("second", subPath="first", readOnly=True), [first]) == ""
    share = {"subPath": "first", "exclusive": False}
    assert find_folder_user(naming("second", **share), [first]), "the first job does not lose its folder"
    assert find_folder_user(naming("second", **share), [naming("first", begun=True, exclusive=False)]) == ""
    ended = with_condition(JobStatus(), ConditionType.COMPLETE, True, "Finished", "", NOW)
    assert find_folder_user(naming("second", subPath="first"), [naming("first", begun=True, state=ended)]) == ""
    suspended = with_condition(JobStatus(), ConditionType.SUSPENDED, True, "Suspended", "", NOW)
    assert find_folder_user(naming("second", subPath="first"), [naming("first", begun=True, state=suspended)])
    waited = naming("second", begun=True, state=suspended, subPath="first")  # The job is resumed now.
    waited = replace(waited, status=replace(waited.status, slots=(Slot(),)))
    assert find_folder_user(waited, [first]).startswith("first") and find_folder_user(first, [waited]) == ""


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"nfs": {"server": "s", "path": "/exp"}}, {"nfs": {"server": "s", "path": "//exp/./"}}),
        ({"hostPath": "/exp", "shared": True}, {"hostPath": "/exp/", "shared": True}),
        ({"claimName": "c", "subPath": "./same"}, {"claimName": "c", "subPath": "same/"}),
    ],
)
def test_spellings_of_one_path_are_one_folder(one: dict[str, Any], two: dict[str, Any]) -> None:
    first, second = (job_with(storage={"checkpoints": {"subPath": "x", **volume}}) for volume in (one, two))
    first, second = replace(first, uid="1", created=NOW), replace(second, uid="2", created=NOW)
    assert find_folder_user(second, [first])


@pytest.mark.parametrize(
    ("sub_path", "folder"), [(".ckpt", ".ckpt"), ("..a", "..a"), ("./a/", "a"), (".", ""), ("a/../b", "b")]
)
def test_a_sub_path_may_begin_with_a_dot(sub_path: str, folder: str) -> None:
    assert naming("a", subPath=sub_path).checkpoint_folder == folder


def test_the_older_of_two_jobs_that_start_at_the_same_time_gets_the_folder() -> None:
    one, two = (naming(name, subPath="same", created=n) for n, name in enumerate(("one", "two")))
    assert find_folder_user(one, [one, two]) == "" and find_folder_user(two, [one, two]).startswith("one")
    waits = with_condition(JobStatus(), ConditionType.SCHEDULED, False, "FolderTaken", "", NOW)
    waiting = naming("two", begun=True, state=waits, subPath="same", created=1)
    assert find_folder_user(waiting, [one]).startswith("one") and find_folder_user(one, [waiting]) == ""


def test_a_job_whose_folder_another_job_uses_gets_no_pods() -> None:
    found = find_unusable_claim(naming("second", subPath="first"), World(folder_user="first, which is Running"))
    assert found is not None and found.reason == "FolderTaken"
    assert found.message.startswith("folder first of claim c is in use by job first, which is Running; ")
    root = find_unusable_claim(naming("second", subPath="."), World(folder_user="first, which is Running"))
    assert root is not None and root.message.startswith("the root of claim c is in use")


def test_a_job_can_use_its_own_claim_and_one_that_an_earlier_job_kept() -> None:
    assert problem(OURS) == ""
    assert problem(replace(OURS, owners=("uid",)), making({"whenDeleted": "Delete"})) == ""
    assert problem(replace(OURS, made_by="earlier")) == "", "an earlier job with this name kept the claim"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"made_by": "", "made_for": ""}, "was not created by a job with this name"),
        ({"made_for": "other"}, "was not created by a job with this name"),
        (
            {"made_by": "earlier", "template": "another"},
            "kept from an earlier job with this name, and was created from a different",
        ),
        ({"template": "another"}, "created by this job from a different claimTemplate"),
        ({"made_by": "earlier", "owners": ("earlier",)}, "an earlier job"),
        ({"owners": ("x",)}, "will be deleted with its owner"),
        ({"owners": ("uid",)}, "to keep the claim, run kubectl patch pvc job-checkpoints --namespace space --patch '{"),
        ({"deleting": True}, "is being removed"),
    ],
)
def test_a_claim_owned_by_another_object_is_never_used(change: dict[str, Any], says: str) -> None:
    message = problem(replace(OURS, **change))
    assert message.startswith("ClaimTaken") and says in message and FIELD in message


def test_a_claim_that_would_be_deleted_with_the_job_is_used_only_if_the_spec_agrees() -> None:
    """The template may be removed and added again, while the owner reference stays."""
    for kind in ("checkpoints", "data"):
        named = job_with(storage={kind: {"claimName": "job-checkpoints"}})
        message = problem(replace(OURS, owners=("x", "uid")), named)
        patch = '{"metadata":{"ownerReferences":[{"$patch":"delete","uid":"uid"}]}}'
        assert message.startswith("ClaimTaken") and f"--patch '{patch}'" in message
        assert problem(OURS, named) == "" and problem(replace(OURS, owners=("x",)), named) == ""
        theirs = replace(OURS, made_by="", made_for="", template="", owners=("uid",))
        assert problem(theirs, named) == "", "a user has made the job the claim's owner"


def test_access_modes_are_checked_before_the_claim_is_created() -> None:
    single = {"spec": {**SPEC, "accessModes": ["ReadWriteOnce"]}}
    message = problem(ABSENT, making(single))
    assert message.startswith("VolumeSingleNode") and f"{FIELD}.spec.accessModes [ReadWriteMany]" in message
    assert problem(ABSENT, making(single, nodes=1)) == ""
    assert problem(ABSENT, making(single, scheduling={"onePodPerNode": False})) == ""
    only_pod = {"spec": {**SPEC, "accessModes": ["ReadWriteOncePod"]}}
    assert problem(ABSENT, making(only_pod, scheduling={"onePodPerNode": False})).startswith("VolumeSingleNode")


def test_claim_names_are_derived_from_the_job() -> None:
    assert making().claims == ("job-checkpoints",) and making().made_claim == "job-checkpoints"
    both = job_with(storage={"checkpoints": {"claimName": "a"}, "data": {"claimName": "a"}})
    assert both.claims == ("a",) and both.made_claim == ""
