"""If two releases of the operator watch one namespace, only one of them acts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from ddpjob.controller.main import OTHERS_SECONDS, Leader
from ddpjob.controller.namespace_claims import CLAIM_NAME, CLAIM_SECONDS, NamespaceClaims
from ddpjob.controller.operator_settings import Settings
from ddpjob.controller.served_schema import ServedSchema
from ddpjob.engine.coordinator_client import CoordinatorClient
from ddpjob.engine.ports import JobKey, Unavailable

from .api_server import ApiServer, Fault
from .virtual_loop import virtual
from .world import api_server, connected, followed

CLAIMS = "/apis/coordination.k8s.io/v1/namespaces/space/leases"


@virtual
async def test_one_of_two_releases_acts_and_the_other_takes_over_when_it_is_gone() -> None:
    async with api_server() as server, connected(server) as rest:
        first, second = NamespaceClaims(rest, "a/operator"), NamespaceClaims(rest, "b/operator")
        replica = NamespaceClaims(rest, "a/operator")
        for _ in range(200):
            assert await first.mine("space") and not await second.mine("space")
            await asyncio.sleep(10)
        assert first.is_sole("space") and not second.is_sole("space")
        assert await replica.mine("space"), "the release's other replica, after a failover"
        assert await second.mine("elsewhere") and not await first.mine("elsewhere")
        gone = asyncio.get_running_loop().time()
        async with asyncio.timeout(2 * CLAIM_SECONDS):
            while not await second.mine("space"):  # noqa: ASYNC110
                await asyncio.sleep(1)
        waited = asyncio.get_running_loop().time() - gone
        assert CLAIM_SECONDS - 30 <= waited <= CLAIM_SECONDS + 30
        assert not await NamespaceClaims(rest, "a/operator").mine("space")


@virtual
async def test_many_jobs_of_a_namespace_cause_one_request_for_its_claim() -> None:
    async with api_server() as server, connected(server) as rest:
        claims = NamespaceClaims(rest, "a/operator")
        assert all(await asyncio.gather(*(claims.mine("space") for _ in range(50))))
        assert [method for method, _, _ in server.requests] == ["GET", "POST"]


@virtual
async def test_unused_namespaces_are_forgotten() -> None:
    """If each run of a pipeline has its own namespace, an operator would otherwise remember them
    for months.
    """
    async with api_server() as server, connected(server) as rest:
        claims = NamespaceClaims(rest, "a/operator")
        for number in range(50):
            assert await claims.mine(f"run-{number}") and await claims.mine("space")
            await asyncio.sleep(CLAIM_SECONDS / 10)
        assert len(claims._namespaces) < 25


@virtual
async def test_without_the_right_to_hold_leases_the_operator_acts_without_them() -> None:
    async with api_server() as server, connected(server) as rest:
        claims = NamespaceClaims(rest, "a/operator")
        assert await claims.mine("space") and claims.is_sole("space")
        server.faults = lambda method, path: Fault(403, reason="Forbidden")
        await asyncio.sleep(CLAIM_SECONDS)
        assert await claims.mine("space") and not claims.is_sole("space"), "another operator may act as well"


@virtual
async def test_a_refusal_does_not_make_an_operator_act_where_another_one_does() -> None:
    """An API server that starts can refuse everything for a moment."""
    async with api_server() as server, connected(server) as rest:
        first, second = NamespaceClaims(rest, "a/operator"), NamespaceClaims(rest, "b/operator")
        assert await first.mine("space") and not await second.mine("space")
        server.faults = lambda method, path: Fault(403, reason="Forbidden")
        for _ in range(10):
            await asyncio.sleep(10)
            assert not await second.mine("space")


@virtual
async def test_claims_are_neither_abandoned_nor_taken_early_during_an_outage() -> None:
    async with api_server() as server, connected(server) as rest:
        held, new = NamespaceClaims(rest, "a/operator"), NamespaceClaims(rest, "a/operator")
        assert await held.mine("space")
        server.faults = lambda method, path: Fault(503, reason="ServiceUnavailable")
        with pytest.raises(Unavailable):
            await new.mine("space")
        await asyncio.sleep(CLAIM_SECONDS / 2)
        assert await held.mine("space")
        await asyncio.sleep(CLAIM_SECONDS)
        with pytest.raises(Unavailable):
            await held.mine("space")


@asynccontextmanager
async def left_alone() -> AsyncIterator[tuple[ApiServer, Leader]]:
    """Yield an API server with `job` in the namespace `space`, which another release has claimed,
    and this release's operator.
    """
    async with api_server() as server, connected(server) as rest:
        spec = {"image": "image", "script": "train.py", "gpusPerNode": 0}
        server.store.create("DDPJob", {"metadata": {"name": "job", "uid": "uid"}, "status": {}, "spec": spec})
        schema = ServedSchema(rest)
        await schema.look()
        settings = Settings(key=b"0123456789abcdef", lease_namespace="b")
        leader = Leader(settings, rest, CoordinatorClient(), 0, schema)
        async with followed(server, leader.caches):
            assert await NamespaceClaims(rest, "a/ddpjob-operator").mine("space")
            assert await leader.reconcile_one(JobKey("space", "job")) == OTHERS_SECONDS
            yield server, leader
        await leader.cluster.coordinators.close()


@virtual
async def test_the_operator_leaves_jobs_alone_in_a_namespace_that_another_has_claimed() -> None:
    async with left_alone() as (server, leader):
        assert {path for method, path in server.acted if method != "GET"} == {CLAIMS}
        assert not leader.accounts.jobs(), "the other operator counts and exports these jobs"
        server.store.delete("Lease", CLAIM_NAME)
        await asyncio.sleep(OTHERS_SECONDS)
        await leader.reconcile_one(JobKey("space", "job"))
        assert list(server.store.all("Pod"))
        assert [account.job.name for account in leader.accounts.jobs()] == ["job"]


@virtual
async def test_a_deleted_job_that_belonged_to_another_operator_is_forgotten() -> None:
    """Otherwise each job that ever existed in that namespace would be checked every few seconds,
    forever.
    """
    async with left_alone() as (server, leader):
        server.store.delete("DDPJob", "job")
        await asyncio.sleep(1)
        assert await leader.reconcile_one(JobKey("space", "job")) is None
