"""Two operators with different keys act on the same job, because they may not hold Leases.

A key that a different operator has replaced does not return by itself, so the job restarts once
(`ddpjob.core.plan.slots.is_superseded`).
"""

from __future__ import annotations

from ddpjob.engine.reconcile import reconcile
from ddpjob.objects.platform import Platform

from .operator_port import KEY, MemoryCluster
from .simulated import Simulation


def second_operator(s: Simulation) -> MemoryCluster:
    """Return the port of a second operator with its own key."""
    made = MemoryCluster(s.clock, s.store, s.machines, s.network, s.random)
    made.platform = Platform(operator_key=b"a different key")
    return made


async def side_by_side(s: Simulation, other: MemoryCluster, seconds: int) -> None:
    """Let both operators reconcile once a second."""
    for _ in range(seconds):
        await s.one_pass()
        other.changed()
        await reconcile(other, KEY, s.clock.moment)
        s.advance(1)


def reasons(s: Simulation) -> list[tuple[str, bool]]:
    return [(str(r["reason"]), r["counted"]) for r in s.status["restarts"]["recent"]]


def key_of(s: Simulation) -> str:
    return str(s.status["templateHash"].split("-")[1])


async def test_a_second_operator_takes_over_a_running_job_only_once() -> None:
    s = await Simulation({}, steps=10**6).begun()
    other = second_operator(s)
    await side_by_side(s, other, 120)
    assert reasons(s) == [("KeyChanged", False)] and s.status["rendezvous"]["generation"] == 1
    assert key_of(s) == other.platform.key_mark and s.status["formerKeys"] == [s.cluster.platform.key_mark]
    assert s.phase == "Running" and s.training.last_step > s.now - 5
    kept = {(e.reason, e.message) for e in s.cluster.events if e.once}
    [(reason, message)] = kept  # The API server stores identical events only once.
    assert reason == "KeyChanged" and "leaves the job alone" in message and "ddpjob restart job" in message
    assert not s.invariants.violations


async def test_the_second_operator_replaces_a_lost_pod_and_the_first_does_not_interfere() -> None:
    s = await Simulation({}, steps=10**6).begun()
    other = second_operator(s)
    await side_by_side(s, other, 60)
    lost = next(p.name for p in s.nodes() if p.running)
    s.force_delete(lost)
    await side_by_side(s, other, 60)
    assert reasons(s)[-1] == ("Deleted", False) and s.status["rendezvous"]["generation"] == 1
    assert s.phase == "Running" and key_of(s) == other.platform.key_mark


async def test_two_operators_settle_on_a_new_job_and_it_completes() -> None:
    s = Simulation({}, steps=20)
    await side_by_side(s, second_operator(s), 120)
    assert s.phase == "Complete" and s.status["rendezvous"]["generation"] <= 1


async def test_a_restart_returns_the_job_to_the_first_operator_once_the_other_is_gone() -> None:
    s = await Simulation({}, steps=10**6).begun()
    other = second_operator(s)
    await side_by_side(s, other, 60)
    await s.passes(60)
    assert key_of(s) == other.platform.key_mark and s.status["rendezvous"]["generation"] == 1
    await s.suspended()
    await s.resumed()
    assert key_of(s) == s.cluster.platform.key_mark
    assert s.status["formerKeys"] == [other.platform.key_mark]
    lost = next(p.name for p in s.nodes() if p.running)
    s.force_delete(lost)
    await s.passes(60)
    assert s.phase == "Running" and reasons(s)[-1] == ("Deleted", False)


async def test_a_change_of_the_spec_is_handled_by_one_operator() -> None:
    s = await Simulation({}, steps=10**6).begun()
    other = second_operator(s)
    await side_by_side(s, other, 60)
    s.change_spec({"image": "a newer image"})
    await side_by_side(s, other, 60)
    assert [reason for reason, _ in reasons(s)] == ["KeyChanged", "SpecChanged"]
    assert s.phase == "Running" and s.status["rendezvous"]["generation"] == 2


async def test_the_holder_of_the_namespaces_lease_restores_its_former_key() -> None:
    """An administrator has restored the operator's Secret, and no other operator can act."""
    s = await Simulation({}, steps=10**6).begun()
    key = s.cluster.platform
    s.cluster.platform = Platform(operator_key=b"a different key")
    await s.passes(60)
    s.cluster.platform, s.cluster.is_sole = key, True
    await s.passes(60)
    assert [reason for reason, _ in reasons(s)] == ["KeyChanged", "KeyChanged"]
    assert s.phase == "Running" and key_of(s) == key.key_mark
