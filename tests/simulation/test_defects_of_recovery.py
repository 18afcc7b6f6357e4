"""The checks of recovery are shown to fail: each defect is put in on purpose, and a test that passes without it must not pass with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import test_recovery_in_simulation as recovery
from ddpjob.core import attribution, decide, describe, ensure, group, losses, slots

Test = Callable[[], Awaitable[None]]

DEFECTS: dict[str, tuple[Any, str, Any, Test]] = {
    "a dropped slot's names are used again": (slots, "_unused", lambda status: 0, recovery.test_scaling_keeps_the_pods_and_the_generation),
    "every pod's end is a cause": (attribution, "_belongs", lambda *_: False, recovery.test_two_pods_out_of_memory_count_once),
    "a pod made after a break is its consequence": (
        attribution, "_belongs", lambda *_: True, recovery.test_a_pod_that_fails_at_its_start_again_and_again_waits,
    ),
    "a lost pod gets its grace": (
        ensure, "given_up", lambda *_: False, recovery.test_a_pod_that_ends_on_a_node_that_dies_is_removed_by_force,
    ),
    "a silent node is believed to be well": (losses, "_node_lost", lambda *_: None, recovery.test_out_of_service_is_believed_at_once),
    "a lost coordinator takes the group with it": (
        group, "next_coordinator", lambda status: replace(status, round=status.round + 1, slots=()),
        recovery.test_a_lost_coordinator_costs_no_step_in_mode_fast,
    ),
    "the report is believed although its pods are gone": (
        describe, "_training", lambda job, status, world: world.report.world if world.report else None,
        recovery.test_a_report_from_before_a_loss_is_not_believed,
    ),
    "the size is never told": (decide, "tell", lambda *_: (), recovery.test_the_size_is_told_until_the_report_shows_it),
    "nothing waits": (group, "repeated", lambda *_: slots.Repeated(), recovery.test_a_pod_that_fails_at_its_start_again_and_again_waits),
    "the budget stays spent": (
        decide, "_with_budget_restored", lambda job, status, now: (status, []),
        recovery.test_the_budget_is_whole_again_after_healthy_training,
    ),
    "labels stay": (ensure, "_labels", lambda *_: [], recovery.test_a_spare_takes_over_and_the_replacement_is_the_new_spare),
    "bad nodes are not avoided": (group, "avoided", lambda *_: (), recovery.test_a_node_that_fails_the_job_again_and_again_is_avoided),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
async def test_a_deliberate_defect_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, wrong, check = DEFECTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        await check()
