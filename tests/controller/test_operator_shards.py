"""Each shard has at most one acting replica at any time, replicas get equal shares, and no action
is repeated.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
from ddpjob.controller import operator_shards
from ddpjob.controller.kube.election import LEASE_SECONDS, RETRY_SECONDS, Lease, act_while_elected
from ddpjob.controller.operator_settings import Settings, SettingsError
from ddpjob.controller.operator_shards import PATIENCE, Shards, shard_of
from kubernetes.aio import client

from .api_server import ApiServer, Fault, RandomFaults
from .operators import MortalRest, Replicas
from .test_leader import add
from .virtual_loop import run
from .world import ReplicaTasks, api_server, on_server

SURE = 4 * LEASE_SECONDS
"""Seconds after which every shard has an acting replica again, and the shares are equal."""


class Dealt(ReplicaTasks):
    """Replicas that only take part in the election. `acting` contains the acting replicas by
    (shard, number of shards).
    """

    def __init__(self, server: ApiServer) -> None:
        super().__init__(server)
        self.acting: dict[tuple[int, int], str] = {}
        self.rests: dict[str, MortalRest] = {}
        self.ended: list[str] = []

    def start(self, name: str, count: int) -> None:
        self.tasks[name] = asyncio.create_task(self._replica(name, count))

    async def _replica(self, name: str, count: int) -> None:
        rest = MortalRest(client.ApiClient(configuration=client.Configuration(host=self.server.url)))
        self.rests[name] = rest
        try:
            async with asyncio.TaskGroup() as group:
                for shard, lease in enumerate(Shards(rest, "space", "operator", name, count).leases):
                    group.create_task(act_while_elected(lease, partial(self._act, name, shard, count)))
        finally:
            await rest.close()

    async def _act(self, name: str, shard: int, count: int) -> None:
        moment = f"{asyncio.get_running_loop().time():.3f} s"
        assert (shard, count) not in self.acting, (
            f"{moment}: {name} acts for shard {shard} in addition to {self.acting}"
        )
        assert {other for _, other in self.acting} <= {count}, (
            f"{moment}: {name} of {count} acts in addition to {self.acting}"
        )
        self.acting[shard, count] = name
        try:
            await asyncio.sleep(1e9)
        finally:
            del self.acting[shard, count]

    async def stop(self, name: str, *, crash: bool = False) -> None:
        self.rests[name].dead = crash
        await super().stop(name)

    def shares(self) -> list[int]:
        """Return the number of shards of each replica, in ascending order."""
        return sorted((dict.fromkeys(self.tasks, 0) | Counter(self.acting.values())).values())


async def deal(seed: int, minutes: float = 4.0) -> None:
    """Run two to four replicas and shards with random faults, kills and changes to the number of
    shards, and at the end without faults.
    """
    chance = random.Random(seed)
    random.seed(seed)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(api_server())
        dealt, loop = Dealt(server), asyncio.get_running_loop()
        server.faults = RandomFaults(chance, chance.choice((0.02, 0.1, 0.3)))
        count, names = chance.choice((2, 3, 4)), [f"r{n}" for n in range(chance.choice((2, 3, 4)))]
        for name in names:
            dealt.start(name, count)
        while loop.time() < minutes * 60:
            await asyncio.sleep(chance.uniform(1, 30))
            dealt.check()
            if chance.random() < 0.15:
                count = chance.choice((1, 2, 3))
                for name in names:  # a rolling update
                    await dealt.stop(name)
                    dealt.start(name, count)
                    await asyncio.sleep(chance.uniform(0, 10))
            elif chance.random() < 0.3:
                name = chance.choice(names)
                await dealt.stop(name, crash=chance.random() < 0.5)
                dealt.start(name, count)
        server.faults = lambda method, path: None
        await asyncio.sleep(SURE)
        dealt.check()
        assert set(dealt.acting) == {(shard, count) for shard in range(count)}
        shares = dealt.shares()
        assert shares[-1] - shares[0] <= 1, dealt.acting
        for name in list(dealt.tasks):
            await dealt.stop(name)


@pytest.mark.parametrize("seed", range(10))
def test_each_shard_has_at_most_one_replica_at_any_time(seed: int) -> None:
    run(deal(seed))


@on_server
async def test_three_replicas_get_one_shard_each_and_the_shard_of_a_dead_one_is_taken(server: ApiServer) -> None:
    dealt = Dealt(server)
    for name in ("a", "b", "c"):
        dealt.start(name, 3)
    await asyncio.sleep(RETRY_SECONDS * 2)
    assert dealt.shares() == [1, 1, 1]
    await dealt.stop("a", crash=True)
    await asyncio.sleep(LEASE_SECONDS + PATIENCE + 2 * RETRY_SECONDS)
    assert dealt.shares() == [1, 2]
    dealt.start("d", 3)
    await asyncio.sleep(SURE)
    assert dealt.shares() == [1, 1, 1]
    for name in list(dealt.tasks):
        await dealt.stop(name)


@on_server
async def test_a_single_replica_takes_all_shards_and_shares_them_with_a_second(server: ApiServer) -> None:
    dealt = Dealt(server)
    dealt.start("a", 4)
    await asyncio.sleep(PATIENCE * 4)
    assert dealt.shares() == [4]
    dealt.start("b", 4)
    await asyncio.sleep(SURE)
    assert dealt.shares() == [2, 2]
    found = [body["metadata"].get("annotations") for body in server.store.all("Lease")]
    assert not any(found), "no replica still requests a Lease"
    for name in list(dealt.tasks):
        await dealt.stop(name)


@pytest.mark.parametrize(("count", "seconds"), [(1, 1.5), (3, 1.5)])
@on_server
async def test_with_a_slow_api_server_every_shard_keeps_its_replica(
    server: ApiServer, count: int, seconds: float
) -> None:
    """Each request takes `seconds`, and taking a Lease needs four."""
    server.faults = lambda method, path: Fault("slow", seconds=seconds)
    dealt = Dealt(server)
    dealt.start("a", count)
    await asyncio.sleep(120)
    for _ in range(20):
        assert dealt.shares() == [count]
        await asyncio.sleep(3)
    dealt.check()
    await dealt.stop("a")


@on_server
async def test_a_lease_that_is_deleted_stays_with_its_replica(server: ApiServer) -> None:
    dealt = Dealt(server)
    dealt.start("a", 1)
    await asyncio.sleep(3)
    dealt.start("b", 1)
    await asyncio.sleep(3.1)
    for _ in range(3):
        server.store.delete("Lease", "operator")
        for _ in range(30):
            await asyncio.sleep(0.5)
            dealt.check()
            assert dealt.acting == {(0, 1): "a"}
    for name in ("a", "b"):
        await dealt.stop(name)


@on_server
async def test_a_holder_that_sees_another_in_its_lease_stops_immediately(server: ApiServer) -> None:
    dealt = Dealt(server)
    dealt.start("a", 1)
    await asyncio.sleep(3)
    lease = server.store.get("Lease", "operator")
    lease["spec"]["holderIdentity"] = "another"
    server.store.changed("Lease", lease)
    await asyncio.sleep(RETRY_SECONDS + 0.5)
    assert dealt.acting == {}
    await dealt.stop("a")


@on_server
async def test_a_replica_with_a_single_shard_ignores_a_request_to_hand_it_over(server: ApiServer) -> None:
    dealt = Dealt(server)
    dealt.start("a", 1)
    await asyncio.sleep(1)
    server.store.get("Lease", "operator")["metadata"]["annotations"] = {operator_shards.WANTED_BY: "b"}
    await asyncio.sleep(3 * RETRY_SECONDS)
    assert dealt.shares() == [1]
    assert not server.store.get("Lease", "operator")["metadata"].get("annotations")
    await dealt.stop("a")


def test_without_the_right_to_list_leases_only_a_single_shard_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forbidden(method: str, path: str) -> Fault | None:
        return Fault(403, reason="Forbidden") if method == "GET" and path.endswith("/leases") else None

    async def main() -> None:
        async with api_server() as server:
            dealt = Dealt(server)
            server.faults = forbidden
            dealt.start("a", 1)
            await asyncio.sleep(5)
            assert dealt.shares() == [1]
            await dealt.stop("a")
            dealt.start("b", 2)
            await asyncio.sleep(30)
            assert dealt.shares() == [0]
            await dealt.stop("b")

    run(main())
    assert "the Leases cannot be listed" in caplog.text


def test_nothing_is_done_twice_when_the_replica_of_one_of_three_shards_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The operators are complete. Each job loses a pod while its shard has no replica."""
    namespaces = tuple(f"team-{number}" for number in range(12))
    assert {shard_of(name, 3) for name in namespaces} == {0, 1, 2}

    async def main() -> None:
        async with api_server() as server:
            for name in namespaces:
                add(server, "job", namespace=name)
            replicas = Replicas(server, monkeypatch)
            for number in range(3):
                replicas.start(f"operator-{number}", namespaces=(), shards=3)
            await asyncio.sleep(10)
            assert sorted(replicas.acting.values()) == ["operator-0", "operator-1", "operator-2"]
            pods = [(body["metadata"]["namespace"], body["metadata"]["name"]) for body in server.store.all("Pod")]
            assert len(pods) == 3 * len(namespaces)

            await replicas.stop("operator-1", crash=True)
            for name in namespaces:
                server.store.delete("Pod", "job-0-0", namespace=name, grace=0)
            await asyncio.sleep(LEASE_SECONDS + PATIENCE + 10)
            replicas.check()
            assert sorted(Counter(replicas.acting.values()).values()) == [1, 2]
            for name in namespaces:
                own = {b["metadata"]["name"] for b in server.store.all("Pod") if b["metadata"]["namespace"] == name}
                assert own == {"job-0-1", "job-1-0", "job-coordinator-0"}
            created = Counter(path for method, path in server.acted if method == "POST" and path.endswith("/pods"))
            assert set(created.values()) == {4}, "three pods and a replacement for the lost one were created, once each"
            for name in list(replicas.tasks):
                await replicas.stop(name)

    run(main())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"SHARDS": "0", "LEASE_NAMESPACE": "space"}, "SHARDS=0: must be from 1 to 10"),
        ({"SHARDS": "3"}, "more than one shard needs Leases; set DDPJOB_OPERATOR_LEASE_NAMESPACE"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL='LOUD': must be DEBUG, INFO"),
    ],
)
def test_invalid_settings_of_shards_are_refused(given: dict[str, str], message: str) -> None:
    values = {"KEY": "k" * 16, **given}
    with pytest.raises(SettingsError, match=message):
        Settings.from_environment({f"DDPJOB_OPERATOR_{name}": value for name, value in values.items()})


def test_the_operators_key_may_consist_of_any_bytes() -> None:
    """`openssl rand 32` generates such keys. In the environment, bytes that are not UTF-8 appear as
    surrogates.
    """
    shown = {"DDPJOB_OPERATOR_KEY": os.fsdecode(b"\xff" * 32)}
    assert Settings.from_environment(shown).key == b"\xff" * 32


DEFECTS = {
    "a Lease that another holds is taken": (Lease, "is_held_by_another", lambda self, found: False),
    "Leases of a different number of shards": (Shards, "another_number_is_held", None),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_deliberate_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Shards) -> bool:
        return False

    owner, attribute, wrong = DEFECTS[name]
    monkeypatch.setattr(owner, attribute, wrong or never)
    with pytest.raises(AssertionError, match="acts"):
        for seed in range(10):
            run(deal(seed))
