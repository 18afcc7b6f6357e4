"""One replica acts at a time, whatever happens to requests for the Lease, and after a fault a
replica soon acts again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import AsyncExitStack

import pytest
from ddpjob.controller.kube import election
from ddpjob.controller.kube.election import (
    LEASE_SECONDS,
    RENEW_SECONDS,
    RETRY_SECONDS,
    Lease,
    act_while_elected,
)

from .api_server import ApiServer, Fault, RandomFaults
from .virtual_loop import run
from .world import ReplicaTasks, api_server, connected, on_server


class Candidates(ReplicaTasks):
    """Replicas of the operator that only take part in the election. `acting` contains the replicas
    that are acting.
    """

    def __init__(self, server: ApiServer) -> None:
        super().__init__(server)
        self.acting: set[str] = set()
        self.terms = 0
        self.idle_since = 0.0
        self.longest_idle = 0.0

    async def replica(self, name: str) -> None:
        """Run a replica's election forever. No fault of the API server ends it."""
        async with connected(self.server) as rest:
            await act_while_elected(Lease(rest, "space", "operator", name), lambda: self._act(name))

    async def _act(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.terms += 1
        self.longest_idle = (
            max(self.longest_idle, loop.time() - self.idle_since) if not self.acting else self.longest_idle
        )
        self.acting.add(name)
        assert self.acting == {name}, f"at {loop.time():.3f} s {self.acting} act at the same time"
        try:
            await asyncio.sleep(1e9)
        finally:
            self.acting.discard(name)
            self.idle_since = loop.time()

    def start(self, name: str) -> None:
        """Start the replica's process."""
        self.tasks[name] = asyncio.create_task(self.replica(name))


async def elect(seed: int, minutes: float = 4.0) -> Candidates:
    """Run two or three replicas under random faults, and then for a minute without faults."""
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(api_server())
        replicas = Candidates(server)
        server.faults = RandomFaults(chance, chance.choice((0.05, 0.3, 0.7)))
        names = ["a", "b", "c"][: chance.choice((2, 3))]
        for name in names:
            replicas.start(name)
        while asyncio.get_running_loop().time() < minutes * 60:
            await asyncio.sleep(chance.uniform(1, 20))
            replicas.check()
            if chance.random() < 0.1:
                name = chance.choice(names)
                await replicas.stop(name)
                replicas.start(name)
        server.faults = lambda method, path: None
        await asyncio.sleep(60)
        replicas.check()
        assert len(replicas.acting) == 1
        for name in list(replicas.tasks):
            await replicas.stop(name)
    return replicas


@pytest.mark.parametrize("seed", range(8))
def test_at_most_one_replica_acts_at_any_time(seed: int) -> None:
    run(elect(seed))


def test_a_replica_that_is_stopped_hands_the_lease_over_within_seconds() -> None:
    async def main() -> float:
        async with api_server() as server:
            replicas = Candidates(server)
            replicas.start("a")
            await asyncio.sleep(1)
            replicas.start("b")
            await asyncio.sleep(20)
            assert replicas.acting == {"a"}
            await replicas.stop("a")
            await asyncio.sleep(RETRY_SECONDS + 1)
            assert replicas.acting == {"b"}
            await replicas.stop("b")
            return replicas.longest_idle

    assert run(main()) <= RETRY_SECONDS + 0.1


@on_server
async def test_a_replica_that_dies_is_replaced_when_its_lease_expires(server: ApiServer) -> None:
    replicas = Candidates(server)
    server.faults = lambda method, path: None
    replicas.start("b")
    await asyncio.sleep(0.5)
    spec = server.store.get("Lease", "operator")["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("b", LEASE_SECONDS)
    server.faults = lambda method, path: Fault("reset")
    await asyncio.sleep(RENEW_SECONDS + RETRY_SECONDS + 0.5)
    assert not replicas.acting, "a replica that cannot renew its Lease stops before the Lease expires"
    server.faults = lambda method, path: None
    await asyncio.sleep(LEASE_SECONDS)
    assert replicas.acting == {"b"}
    await replicas.stop("b")


@pytest.mark.parametrize("fault", [Fault("hang"), Fault("reset"), Fault(503), Fault(401, reason="Unauthorized")])
def test_an_outage_of_the_api_server_for_a_minute_does_not_end_a_replica(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with api_server() as server:
            replicas = Candidates(server)
            replicas.start("a")
            await asyncio.sleep(5)
            server.faults = lambda method, path: fault
            await asyncio.sleep(LEASE_SECONDS)
            assert not replicas.acting
            await asyncio.sleep(60 - LEASE_SECONDS)
            replicas.check()
            server.faults = lambda method, path: None
            await asyncio.sleep(RENEW_SECONDS + RETRY_SECONDS)
            assert replicas.acting == {"a"}
            assert replicas.terms == 2
            await replicas.stop("a")

    run(main())
    assert caplog.messages and not [said for said in caplog.messages if said.rstrip().endswith(":")], (
        "each replica logs the reason"
    )


@pytest.mark.parametrize("seed", range(2))
@on_server
async def test_no_lease_is_lost_if_the_api_server_refuses_half_of_all_requests(server: ApiServer, seed: int) -> None:
    replicas, chance = Candidates(server), random.Random(seed)
    replicas.start("a")
    await asyncio.sleep(1)
    replicas.start("b")
    server.faults = lambda method, path: Fault(503) if chance.random() < 0.5 else None
    await asyncio.sleep(200)
    assert replicas.acting == {"a"}
    assert replicas.terms == 1
    await replicas.stop("a")
    await replicas.stop("b")


@on_server
async def test_a_renewal_keeps_fields_that_others_wrote_into_the_lease(server: ApiServer) -> None:
    replicas = Candidates(server)
    replicas.start("a")
    await asyncio.sleep(5)
    lease = server.store.get("Lease", "operator")
    lease["metadata"]["annotations"] = {"seen-by": "a person"}
    server.store.changed("Lease", lease)
    await asyncio.sleep(3 * RETRY_SECONDS)
    assert server.store.get("Lease", "operator")["metadata"]["annotations"] == {"seen-by": "a person"}
    server.store.delete("Lease", "operator")
    await asyncio.sleep(3 * RETRY_SECONDS)
    assert server.store.get("Lease", "operator")["spec"]["holderIdentity"] == "a"
    assert (replicas.acting, replicas.terms) == ({"a"}, 1)
    asked = [method for method, path, _ in server.requests[-20:] if path.endswith("/leases/operator")]
    assert set(asked[-2:]) == {"PUT"}, "a renewal does not read the Lease"
    await replicas.stop("a")


@on_server
async def test_a_renewal_whose_response_is_lost_does_not_lose_the_lease(server: ApiServer) -> None:
    replicas = Candidates(server)
    replicas.start("a")
    await asyncio.sleep(0.5)
    # The HTTP client repeats the PUT over a new connection, so it conflicts with its own first
    # write.
    lost = itertools.cycle([True, False, False])
    server.faults = lambda method, path: Fault("reset-after") if method == "PUT" and next(lost) else None
    await asyncio.sleep(120)
    assert replicas.acting == {"a"}
    assert replicas.terms == 1
    await replicas.stop("a")


DEFECTS = {
    "a Lease that another holds is taken": (Lease, "is_held_by_another", lambda self, found: False),
    "a holder that cannot renew continues to act": (election, "RENEW_SECONDS", 1000),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_deliberate_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong = DEFECTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError, match="act at the same time"):
        for seed in range(8):
            run(elect(seed))
