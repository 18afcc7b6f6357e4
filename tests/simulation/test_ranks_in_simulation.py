"""Ranks by spec.rankOrder throughout a job: when the order arrives, and how the job behaves until
then.
"""

from __future__ import annotations

from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.engine.ports import Unavailable
from ddpjob_runtime.coordinator.formation import ORDER_SECONDS

from .operator_port import MemoryCluster
from .simulated import Simulation, conditions
from .store import Json

FAST: Json = {"recovery": {"mode": "Fast", "nodeLostAfterSeconds": 15}}
ORDERED: Json = {"nodes": 4, "rankOrder": ["block", "rack"]}
IN_ORDER, BY_INDEX = [0, 2, 1, 3], [0, 1, 2, 3]


class Racks(Simulation):
    """Index i runs on host i. Even hosts are in rack a, odd ones in rack b, all in one block."""

    def __init__(self, spec: Json, labels: bool = True, **more: Any) -> None:
        super().__init__(spec, steps=10**6, **more)
        self.machines.favourite = {index: f"n{index}" for index in range(8)}
        if labels:
            self.label()

    def label(self) -> None:
        for number, host in enumerate(self.machines.hosts.values()):
            self.machines.label(host, block="x", rack="ab"[number % 2])

    def ranks(self) -> list[int]:
        """Return the indices of the training nodes in rank order, as the coordinator reports
        them.
        """
        members = [m for m in self.report()["members"] if m["rank"] is not None]
        return [m["index"] for m in sorted(members, key=lambda m: m["rank"])]

    async def restart_workers(self) -> None:
        """Make a worker fail, each time in a different pod, and wait until the next round runs."""
        before = self.status["round"]
        assert self.worker_fails(f"job-{before % 2}-0")
        await self.until(lambda: self.status["round"] > before and self.phase == "Running")

    @property
    def shown(self) -> tuple[str, str]:
        found = conditions(self).get("RanksOrdered", {})
        return found.get("status", ""), found.get("reason", "")


@pytest.mark.parametrize("mode", [{}, FAST], ids=["Standard", "Fast"])
@pytest.mark.parametrize("placement", ["Dedicated", "Master"])
async def test_the_order_applies_to_the_first_round_and_the_next(mode: Json, placement: str) -> None:
    if mode and placement == "Master":
        pytest.skip("Fast has its coordinator in a pod of its own")
    s = await Racks({**ORDERED, **mode, "rendezvous": {"placement": placement}}).begun()
    assert s.ranks() == s.status["rankOrder"] == IN_ORDER and s.shown == ("True", "InOrder")
    took = s.now
    await s.restart_workers()
    assert s.ranks() == IN_ORDER and s.shown == ("True", "InOrder")
    plain = Racks({"nodes": 4, **mode, "rendezvous": {"placement": placement}})
    await plain.until_phase("Running")
    assert plain.ranks() == BY_INDEX and "rankOrder" not in plain.status and "RanksOrdered" not in conditions(plain)
    assert took <= plain.now + 3, "the order costs one or two reconciles"


async def test_labels_that_appear_later_order_only_the_next_round() -> None:
    s = await Racks(ORDERED, labels=False).begun()
    assert s.ranks() == BY_INDEX and s.shown == ("False", "LabelsMissing")
    assert s.now < ORDER_SECONDS, "the start does not wait for labels that are known to be missing"
    s.label()
    await s.until(lambda: s.shown == ("False", "NextRound"))
    assert s.status["round"] == 0
    await s.restart_workers()
    assert s.ranks() == IN_ORDER and s.shown == ("True", "InOrder")


async def test_the_rank_order_can_change_while_the_job_runs() -> None:
    s = await Racks({"nodes": 4}).begun()
    template, pods = s.status["templateHash"], set(s.pods)
    s.change_spec({"rankOrder": ["rack"]})
    await s.until(lambda: s.shown == ("False", "NextRound"))
    await s.restart_workers()
    assert s.ranks() == IN_ORDER and s.shown == ("True", "InOrder")
    s.change_spec({"rankOrder": ["block"]})
    await s.until(lambda: s.shown == ("False", "NextRound"))
    del s.spec["rankOrder"]
    s.change_spec({})
    await s.until(lambda: "RanksOrdered" not in conditions(s))
    assert s.ranks() == s.status["rankOrder"] == IN_ORDER, "the running round keeps its order"
    await s.restart_workers()
    assert s.ranks() == BY_INDEX and "rankOrder" not in s.status
    assert (s.status["templateHash"], set(s.pods)) == (template, pods)


@pytest.mark.parametrize("mode", [{}, FAST], ids=["Standard", "Fast"])
async def test_without_the_operator_the_first_round_trains_after_a_short_wait(mode: Json) -> None:
    s = Racks({**ORDERED, **mode})
    await s.until(lambda: len(s.pods) == 5)
    s.advance(ORDER_SECONDS + 20)
    assert s.report()["state"] == "Running" and s.ranks() == BY_INDEX
    await s.until(lambda: s.shown == ("False", "NextRound"))
    await s.restart_workers()
    assert s.ranks() == IN_ORDER


async def test_a_replacement_in_a_different_rack_gets_the_rank_of_its_place() -> None:
    s = await Racks({**ORDERED, **FAST}).begun()
    s.machines.favourite[1] = "n6"  # rack a
    s.force_delete("job-1-0")
    await s.until(lambda: s.status["round"] == 1 and s.phase == "Running")
    assert s.ranks() == [0, 1, 2, 3] and s.host_of("job-1-1").name == "n6" and s.shown == ("True", "InOrder")


async def test_a_spare_takes_over_without_waiting_for_an_order() -> None:
    s = Racks({**ORDERED, **FAST, "nodes": 3, "spares": 1})
    await s.until(lambda: s.phase == "Running" and s.status["nodes"]["display"] == "3/3 +1")
    assert s.ranks() == [0, 2, 1]
    s.force_delete("job-2-0")
    s.advance(2)  # The operator has nothing to send.
    assert s.report()["state"] == "Running" and s.ranks() == [0, 1, 3]


async def test_a_new_coordinator_adopts_the_round_and_receives_the_order_again() -> None:
    s = await Racks({**ORDERED, **FAST}).begun()
    s.force_delete("job-coordinator-0")
    coordinators = s.network.coordinators
    await s.until(lambda: any(c.attempt == 1 for c in coordinators) and s.report()["state"] == "Running")
    assert s.ranks() == IN_ORDER and s.status["round"] == 0
    await s.until(lambda: s.report()["order"] != "")
    await s.restart_workers()
    assert s.ranks() == IN_ORDER and s.shown == ("True", "InOrder")


class Deaf(MemoryCluster):
    """Drops the first rank orders on their way to the coordinator."""

    deaf = 3

    async def notify(self, job: DDPJob, endpoint: str, verb: str, body: Json) -> None:
        if verb == "order" and self.deaf > 0:
            self.deaf -= 1
            raise Unavailable("the operator's network is away")
        await super().notify(job, endpoint, verb, body)


class DeafRacks(Racks):
    cluster_class = Deaf


async def test_the_order_is_sent_until_it_has_arrived() -> None:
    s = await DeafRacks(ORDERED).begun()
    assert s.ranks() == IN_ORDER and s.cluster.deaf == 0  # type: ignore[attr-defined]
    for _ in range(10):
        await s.one_pass()
        assert not [action for action in s.cluster.actions if "order" in action]
        s.advance(1)


async def test_an_operator_without_the_right_to_read_nodes_reports_it_without_delay() -> None:
    s = Racks(ORDERED)
    s.cluster.knows_hosts = False
    await s.until_phase("Running")
    assert s.now < ORDER_SECONDS and s.ranks() == BY_INDEX and s.shown == ("False", "NodesUnknown")


@pytest.mark.parametrize("end", ["Suspended", "Complete"])
async def test_a_job_without_pods_has_no_condition_about_ranks(end: str) -> None:
    s = await Racks(ORDERED).begun()
    if end == "Suspended":
        s.change_spec({"runPolicy": {"suspend": True}})
    else:
        s.training.steps = s.training.made + 5
    await s.until_phase(end)
    assert "RanksOrdered" not in conditions(s)
