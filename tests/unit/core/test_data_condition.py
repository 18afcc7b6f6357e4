"""The condition Running while pods fetch storage.data.url, based on their reports to the
coordinator.
"""

from __future__ import annotations

from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import Condition, ConditionType
from ddpjob.core.world import ContainerView
from ddpjob_runtime.protocol import DATA, DATA_WAITS, CoordinatorState, MemberState, Note
from worlds import COORDINATOR, job_of, pod, report, seen

BUCKET: Json = {"data": {"url": "s3://sets/a", "secretName": "keys"}}


def shown(*notes: Note, **spec: Any) -> Condition:
    job = job_of(2, storage=BUCKET, **spec)
    _, decision = seen(job, 5, (pod(0), pod(1), COORDINATOR), report(CoordinatorState.FORMING, notes=notes))
    found = decision.status.condition(ConditionType.RUNNING)
    assert found is not None
    return found


def test_the_progress_of_a_fetch_is_shown_without_hiding_other_problems() -> None:
    waits, fetches = Note("job-0-0", DATA, DATA_WAITS), Note("job-1-0", DATA, "fetching data 3.2 GiB of 40.0 GiB")
    found = shown(waits, fetches)
    assert found.reason == "GroupForming" and not found.status
    assert found.message.endswith("; pod job-1-0 (and 1 more pod): fetching data 3.2 GiB of 40.0 GiB")
    assert shown(waits).message.endswith(f"; pod job-0-0: {DATA_WAITS}")


def test_a_finished_fetch_is_not_shown_and_does_not_affect_the_fast_condition() -> None:
    done = Note("job-0-0", DATA, "")
    assert shown(done).message == shown().message
    job = job_of(2, storage=BUCKET, recovery={"mode": "Fast"})
    pods = (pod(0), pod(1), COORDINATOR)
    _, decision = seen(job, 5, pods, report(CoordinatorState.FORMING, MemberState.STARTING, notes=(done,)))
    assert decision.status.condition(ConditionType.FAST_RECOVERY) is None, "a pod may still have cold workers"
    _, decision = seen(job, 5, pods, report(CoordinatorState.RUNNING, MemberState.RUNNING, notes=(done,)))
    warm = decision.status.condition(ConditionType.FAST_RECOVERY)
    assert warm is not None and warm.status


def test_a_missing_data_secret_is_reported_with_its_field() -> None:
    waits = ContainerView(waiting_reason="CreateContainerConfigError", waiting_message='secret "keys" not found')
    _, decision = seen(job_of(2, storage=BUCKET), 5, (pod(0, waits, phase="Pending"), pod(1), COORDINATOR), None)
    found = decision.status.condition(ConditionType.RUNNING)
    assert found is not None and "spec.storage.data.secretName needs a Secret keys in namespace space" in found.message
