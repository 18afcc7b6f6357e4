"""The operator's view of Kubernetes nodes matches the cluster, even after gaps, expired versions
and errors in the watch.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from ddpjob.controller.host_watch import Hosts, HostWatch
from ddpjob.controller.kube.informer import REFUSED_SECONDS
from prometheus_client import REGISTRY

from .api_server import ApiServer, Fault, RandomFaults
from .virtual_loop import virtual
from .world import api_server, connected, on_server


class Reported:
    """Nodes as the watch has reported them."""

    def __init__(self) -> None:
        self.hosts: Hosts | None = None
        self.changed: list[frozenset[str]] = []

    def __call__(self, hosts: Hosts | None, changed: frozenset[str]) -> None:
        self.hosts = hosts
        self.changed.append(changed)

    def ready(self) -> dict[str, bool]:
        """Return the nodes by name."""
        return {name: host.ready for name, host in (self.hosts or {}).items() if not host.deleted}


def watch_errors() -> float:
    return REGISTRY.get_sample_value("ddpjob_operator_watch_errors_total", {"resource": "nodes"}) or 0.0


def add(server: ApiServer, name: str, ready: bool = True) -> None:
    """Add a node."""
    server.store.create("Node", {"metadata": {"name": name}, "spec": {}, "status": status(server, ready)}, "")


def status(server: ApiServer, ready: bool) -> dict[str, object]:
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": server.store.clock.stamp()}
    return {"conditions": [condition]}


def turn(server: ApiServer, name: str, ready: bool) -> None:
    """Set a node's readiness."""
    body = server.store.get("Node", name, "")
    body["status"] = status(server, ready)
    server.store.changed("Node", body)


def truth(server: ApiServer) -> dict[str, bool]:
    """Return the nodes as they are in the cluster."""
    return {b["metadata"]["name"]: b["status"]["conditions"][0]["status"] == "True" for b in server.store.all("Node")}


async def watching(server: ApiServer, reported: Reported, seconds: float = 0.0) -> asyncio.Task[None]:
    """Run a watch."""

    async def watch() -> None:
        async with connected(server) as rest:
            await HostWatch(rest, reported).run()

    task = asyncio.create_task(watch())
    await asyncio.sleep(seconds)
    return task


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@on_server
async def test_nodes_are_listed_in_pages_and_then_watched(server: ApiServer) -> None:
    for number in range(1203):
        add(server, f"n{number}")
    reported = Reported()
    task = await watching(server, reported, 1)
    assert len(reported.hosts or {}) == 1203
    assert sum("continue" in query for _, path, query in server.requests if path == "/api/v1/nodes") == 2
    turn(server, "n7", False)
    await asyncio.sleep(0.1)
    assert reported.changed[-1] == {"n7"}
    assert reported.ready()["n7"] is False
    server.store.delete("Node", "n8", namespace="")
    await asyncio.sleep(0.1)
    assert (reported.hosts or {})["n8"].deleted
    count = len(reported.changed)
    turn(server, "n9", True)  # a heartbeat
    body = server.store.get("Node", "n9", "")
    body["metadata"]["annotations"] = {"heartbeat": "1"}
    server.store.changed("Node", body)
    await asyncio.sleep(400)
    assert len(reported.changed) <= count + 1
    await ended(task)


@on_server
async def test_a_changed_label_is_reported(server: ApiServer) -> None:
    add(server, "a")
    add(server, "b")
    reported = Reported()
    task = await watching(server, reported, 1)
    body = server.store.get("Node", "b", "")
    for rack in ("r1", "r2"):
        body["metadata"]["labels"] = {"example.com/rack": rack}
        server.store.changed("Node", body)
        await asyncio.sleep(0.1)
        assert reported.changed[-1] == {"b"} and reported.hosts is not None
        assert reported.hosts["b"].labels == {"example.com/rack": rack}
    await ended(task)


@pytest.mark.parametrize("as_event", [False, True])
@on_server
async def test_changes_during_a_gap_of_the_watch_are_known_after_it(server: ApiServer, as_event: bool) -> None:
    add(server, "a")
    add(server, "b")
    server.gone_as_event = as_event
    reported = Reported()
    task = await watching(server, reported, 1)
    server.faults = lambda method, path: Fault(503)
    server.break_watches()
    server.store.delete("Node", "a", namespace="")
    turn(server, "b", False)
    server.compact()
    await asyncio.sleep(30)
    assert reported.ready() == {"a": True, "b": True}, "known nodes are kept while the server is unreachable"
    server.faults = lambda method, path: None
    await asyncio.sleep(5)
    assert reported.ready() == {"b": False}
    assert reported.changed[-1] == {"a", "b"}
    await ended(task)


@on_server
async def test_a_list_whose_continue_token_expires_is_restarted(server: ApiServer) -> None:
    for number in range(700):
        add(server, f"n{number}")
    reported, pages = Reported(), iter([None, Fault(410, reason="Expired"), None, None, None, None, None])
    server.faults = lambda method, path: next(pages, None)
    task = await watching(server, reported, 5)
    assert len(reported.hosts or {}) == 700
    await ended(task)


@on_server
async def test_nodes_that_may_not_be_read_are_unknown_and_the_request_is_retried(server: ApiServer) -> None:
    add(server, "a")
    server.faults = lambda method, path: Fault(403, reason="Forbidden")
    reported, errors = Reported(), watch_errors()
    task = await watching(server, reported, 60)
    assert reported.hosts is None
    assert len(server.requests) == 1, "there is no storm of requests"
    assert watch_errors() == errors, "the right may be withheld on purpose"
    server.faults = lambda method, path: None
    await asyncio.sleep(800)
    assert reported.ready() == {"a": True}
    server.faults = lambda method, path: Fault(403, reason="Forbidden")
    server.break_watches()
    await asyncio.sleep(REFUSED_SECONDS / 2)
    assert reported.ready() == {"a": True}, "an API server that starts may refuse for a moment"
    await asyncio.sleep(REFUSED_SECONDS)
    assert reported.hosts is None
    await ended(task)


@on_server
async def test_a_role_that_permits_lists_and_not_watches_causes_no_storm_of_lists(server: ApiServer) -> None:
    add(server, "a")
    server.faults = lambda method, path: Fault(403, reason="Forbidden") if "watch" in server.requests[-1][2] else None
    task = await watching(server, Reported(), 3000)
    assert len(server.requests) < 2 * REFUSED_SECONDS + 20
    await ended(task)


@on_server
async def test_a_watch_that_a_proxy_ends_at_once_is_not_repeated_without_a_pause(server: ApiServer) -> None:
    add(server, "a")
    reported, errors = Reported(), watch_errors()
    task = await watching(server, reported)
    server.faults = lambda method, path: Fault("empty") if "watch" in server.requests[-1][2] else None
    server.break_watches()
    server.requests.clear()
    await asyncio.sleep(10)
    assert len(server.requests) < 30 and watch_errors() > errors + 5
    await ended(task)


@pytest.mark.parametrize("seed", range(6))
@virtual
async def test_under_random_faults_the_watch_finally_matches_the_cluster(seed: int) -> None:
    chance = random.Random(seed)
    async with api_server() as server:
        for number in range(6):
            add(server, f"n{number}")
        server.faults = RandomFaults(chance, 0.4)
        reported = Reported()
        task = await watching(server, reported)
        for number in range(60):
            await asyncio.sleep(chance.expovariate(1 / 5))
            names = list(truth(server))
            name = chance.choice(names)
            what = chance.random()
            if what < 0.6:
                turn(server, name, chance.random() < 0.5)
            elif what < 0.7 and len(names) > 3:
                server.store.delete("Node", name, namespace="")
            elif what < 0.8:
                add(server, f"new{number}")
            elif what < 0.9:
                server.break_watches()
            else:
                server.compact()
                server.gone_as_event = chance.random() < 0.5
            assert not task.done(), task
        server.faults = lambda method, path: None
        await asyncio.sleep(120)
        assert reported.ready() == truth(server)
        await ended(task)
