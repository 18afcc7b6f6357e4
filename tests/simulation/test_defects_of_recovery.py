"""Proof that the tests of recovery can fail.

Each of them must fail with a deliberate defect and pass without it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from ddpjob.core import decide
from ddpjob.core.failures import liveness, merge_causes
from ddpjob.core.follow import recording, replacing
from ddpjob.core.plan import actions, slots
from ddpjob.core.status import describe

from . import test_counting_in_simulation as counting
from . import test_places_in_simulation as places
from . import test_recovery_in_simulation as recovery

Test = Callable[[], Awaitable[None]]

DEFECTS: dict[str, tuple[Any, str, Any, Test]] = {
    "a dropped slot's names are reused": (
        slots,
        "_unused",
        lambda status: 0,
        recovery.test_scaling_does_not_replace_pods_or_begin_a_generation,
    ),
    "every pod's end is a cause": (
        merge_causes,
        "_belongs",
        lambda *_: False,
        counting.test_two_pods_that_run_out_of_memory_together_count_as_one_failure,
    ),
    "a pod made after a break is its consequence": (
        merge_causes,
        "_belongs",
        lambda *_: True,
        counting.test_a_pod_that_fails_repeatedly_at_its_start_backs_off,
    ),
    "a lost pod gets its grace": (
        actions,
        "is_given_up",
        lambda *_: False,
        places.test_a_pod_that_terminates_on_a_dying_node_is_force_deleted,
    ),
    "a silent node counts as healthy": (
        liveness,
        "_host_lost",
        lambda *_: None,
        places.test_a_node_with_the_out_of_service_taint_is_lost_immediately,
    ),
    "a lost coordinator takes the group with it": (
        replacing,
        "plan_next_coordinator",
        lambda status: replace(status, round=status.round + 1, slots=()),
        recovery.test_in_mode_fast_no_step_is_lost_with_the_coordinator,
    ),
    "the report is trusted although its pods are gone": (
        describe,
        "count_training_nodes",
        lambda view: view.world.report.world if view.world.report else None,
        recovery.test_a_report_from_before_a_loss_is_not_trusted,
    ),
    "the size is never sent": (
        decide,
        "plan_notifications",
        lambda *_: (),
        recovery.test_the_size_is_sent_until_the_report_shows_it,
    ),
    "nothing waits": (
        replacing,
        "count_repetition",
        lambda *_: slots.Repeated(),
        counting.test_a_pod_that_fails_repeatedly_at_its_start_backs_off,
    ),
    "the budget stays spent": (
        decide,
        "_with_budget_restored",
        lambda view: (view.status, []),
        counting.test_healthy_training_restores_the_whole_budget,
    ),
    "labels stay": (
        actions,
        "_labels",
        lambda *_: [],
        recovery.test_after_a_spare_has_taken_over_the_replacement_is_the_new_spare,
    ),
    "bad nodes are not avoided": (
        recording,
        "find_avoided_nodes",
        lambda *_, **__: (),
        places.test_a_node_on_which_the_job_fails_repeatedly_is_avoided,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
async def test_a_deliberate_defect_of_recovery_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, wrong, check = DEFECTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        await check()
