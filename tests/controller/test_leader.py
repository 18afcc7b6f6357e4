"""A leader's term under faults of the API server: what it reads and requests, and the order of its
work.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from ddpjob.api.schema import schema_of
from ddpjob.controller import main as operator_main
from ddpjob.controller.caches import collection
from ddpjob.controller.job_cache import NAMES_SECONDS
from ddpjob.controller.kube.election import LEASE_SECONDS, Lease
from ddpjob.controller.kube.rest import Rest
from ddpjob.controller.main import Operator
from ddpjob.controller.operator_settings import Settings
from ddpjob.controller.served_schema import INDEX
from ddpjob.engine import reconcile as reconcile_module
from ddpjob.engine.coordinator_client import CoordinatorClient
from ddpjob.engine.ports import Cluster, JobKey
from kubernetes.aio import client
from prometheus_client import REGISTRY as metrics_registry

from .api_server import ApiServer, Fault, RandomFaults
from .virtual_loop import run, virtual
from .world import api_server, connected, kopf_of, loop_moment, on_server

SETTINGS = {"key": b"0123456789abcdef", "health_port": 0, "metrics_port": 0}


def add(
    server: ApiServer, name: str, namespace: str = "space", ended: bool = False, nodes: int = 2, note: str = ""
) -> None:
    """Create a job. A finished job consists only of its object."""
    moment = server.store.clock.stamp()
    complete = {"type": "Complete", "status": "True", "reason": "Finished", "message": "", "lastTransitionTime": moment}
    status = {
        "conditions": [complete],
        "completionTime": moment,
        "phase": "Complete",
        "observedGeneration": 1,
        "rendezvous": {"endpoint": "127.0.0.1:9", "generation": 0},
    }
    server.store.create(
        "DDPJob",
        {
            "metadata": {"name": name, "uid": f"{namespace}-{name}", "annotations": {"note": note}},
            "spec": {"image": "image", "script": "train.py", "nodes": nodes, "gpusPerNode": 0},
            "status": status if ended else {},
        },
        namespace,
    )


class Watched:
    """An operator under test. `reconciled` lists the jobs that it has reconciled, in order."""

    def __init__(self, server: ApiServer, operator: Operator) -> None:
        self.server, self.operator = server, operator
        self.reconciled: list[str] = []

    def pods(self) -> int:
        return len(list(self.server.store.all("Pod")))

    def asked(self) -> list[tuple[str, str]]:
        """Return the requests except watches, the Lease and the published schema."""
        asked = [(m, p) for m, p, q in self.server.requests if "watch" not in q and "leases" not in p]
        return [(m, p) for m, p in asked if not p.startswith(INDEX)]


@asynccontextmanager
async def running(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, lease: bool = True, **settings: Any
) -> AsyncIterator[Watched]:
    monkeypatch.setattr(operator_main, "follow_jobs", kopf_of(server))
    async with connected(server) as rest, connected(server) as alone:
        coordinators = CoordinatorClient()
        held = [Lease(alone, "space", "ddpjob-operator", "operator-0")] if lease else []
        watched = Watched(server, Operator(Settings(**SETTINGS | settings), rest, held, coordinators))

        async def reconcile(cluster: Cluster, key: JobKey, outcome: Any) -> float | None:
            watched.reconciled.append(key.name)
            return await reconcile_module.reconcile(cluster, key, loop_moment, outcome)

        monkeypatch.setattr(operator_main, "reconcile", reconcile)
        task = asyncio.create_task(watched.operator.act_when_elected())
        try:
            yield watched
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinators.close()


@on_server
async def test_after_a_restart_a_running_job_comes_before_a_thousand_finished_ones(
    server: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(1000):
        add(server, f"ended-{number}", namespace=f"team-{number % 7}", ended=True)
    add(server, "living")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(20)
        assert o.reconciled[0] == "living"
        assert o.pods() == 3
        ended = [name for name in o.reconciled if name.startswith("ended")]
        assert sorted(ended) == sorted(set(ended)) and len(ended) == 1000, "once each"
        assert sum(q.get("limit") == "100" for _, _, q in server.requests) == 11, "pages of a hundred"
        others = [(m, p) for m, p in o.asked() if "ended" in p or "team-" in p]
        assert others == [], "a finished job costs no requests except the read of its object"


@on_server
async def test_after_a_restart_a_job_that_lacks_a_pod_comes_before_healthy_jobs(
    server: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(20):
        add(server, f"job-{number:02}")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(5)
        assert o.pods() == 60
    for body in server.store.all("DDPJob"):
        runs = {"type": "Running", "status": "True", "reason": "GroupRuns", "message": ""}
        runs["lastTransitionTime"] = server.store.clock.stamp()
        body["status"] = {**body["status"], "conditions": [runs], "phase": "Running"}
        server.store.changed("DDPJob", body)
    server.store.delete("Pod", "job-19-0-0")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(5)
        assert o.reconciled[0] == "job-19"
        assert len(set(o.reconciled)) == 20
        assert server.store.find("Pod", "job-19-0-1") is not None


@on_server
async def test_nothing_is_listed_or_read_while_nothing_changes(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        add(server, f"job-{number}")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(60)  # After 30 s, the status reports that no scheduler handles the pods.
        assert o.pods() == 30
        server.requests.clear()
        o.reconciled.clear()
        await asyncio.sleep(240)
        assert 10 * 20 <= len(o.reconciled) <= 10 * 25, (
            "every ten seconds, because no coordinator is silent and news would wake the job"
        )
        assert set(o.asked()) == {("GET", collection("DDPJob", ""))} and len(o.asked()) == 4, "names"


@on_server
async def test_many_events_of_a_job_cause_only_one_reconcile(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(server, "job")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(10)
        pod = server.store.get("Pod", "job-0-0")
        o.reconciled.clear()
        for number in range(200):
            pod["status"] = {"phase": "Pending", "message": str(number)}
            server.store.changed("Pod", pod)
            await asyncio.sleep(0.05)
        assert len(o.reconciled) <= 13
        pod["status"] = {"phase": "Failed"}
        server.store.changed("Pod", pod)
        before = len(o.reconciled)
        await asyncio.sleep(0.05)
        assert len(o.reconciled) > before, "the end of a pod is handled immediately"


@pytest.mark.parametrize("as_event", [False, True])
@pytest.mark.parametrize(
    ("fault", "seconds"),
    [(Fault(503), 60), (Fault("hang"), 60), (Fault("reset"), 60), (Fault(200), 60), (Fault(200), 6), (Fault(503), 6)],
)
@on_server
async def test_deletions_during_an_outage_of_the_api_server_are_known_after_it(
    server: ApiServer, fault: Fault, seconds: int, as_event: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of a minute, the Lease is lost. After one of six seconds, the term
    continues.
    """
    add(server, "job")
    add(server, "deleted")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(10)
        assert o.pods() == 6
        server.gone_as_event = as_event
        server.faults = lambda method, path: fault
        server.break_watches()
        await asyncio.sleep(seconds / 2)
        for kind, name in (("DDPJob", "deleted"), ("Pod", "job-0-0"), ("Service", "job")):
            server.store.delete(kind, name)
        server.compact()
        await asyncio.sleep(seconds / 2)
        server.faults = lambda method, path: None
        await asyncio.sleep(2 * LEASE_SECONDS + 30)
        names = {body["metadata"]["name"] for body in server.store.all("Pod")}
        assert names == {"job-0-1", "job-1-0", "job-coordinator-0"}
        assert server.store.find("Service", "job") is not None
        assert o.operator.leaders[0].caches.job(JobKey("space", "deleted")) is None


@on_server
async def test_after_etcd_is_restored_from_a_backup_everything_is_read_again(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's versions go back. The API server sends nothing on a watch from a later version
    until the store has caught up.
    """
    add(server, "job")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(10)
        backup = server.store.backup()
        server.store.version += 10_000
        add(server, "later")
        for kind, name in (("Pod", "job-0-0"), ("DDPJob", "job"), ("Service", "job")):
            server.store.changed(kind, server.store.get(kind, name))
        await asyncio.sleep(10)
        assert o.pods() == 6
        server.restore(backup)
        server.store.delete("Pod", "job-0-0", grace=0)
        await asyncio.sleep(10)
        names = {body["metadata"]["name"] for body in server.store.all("Pod")}
        assert names == {"job-0-1", "job-1-0", "job-coordinator-0"}
        await asyncio.sleep(NAMES_SECONDS)
        assert o.operator.leaders[0].caches.job(JobKey("space", "later")) is None
        add(server, "new")
        await asyncio.sleep(10)
        assert "new" in o.reconciled, "kopf has restarted its watch"
        server.requests.clear()
        await asyncio.sleep(60)
        assert len(o.asked()) < 10, "nothing is retried repeatedly"


@on_server
async def test_an_error_in_a_watch_does_not_end_the_operator(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(server, "job")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(10)
        for _ in range(3):
            server.send_error(500, "InternalError")
            server.store.delete("Pod", next(server.store.all("Pod"))["metadata"]["name"])
            await asyncio.sleep(10)
        assert o.pods() == 3
        assert o.operator.ready


@pytest.mark.parametrize("seed", range(4))
@on_server
async def test_all_pods_are_created_even_if_a_third_of_all_requests_fail(
    server: ApiServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        add(server, f"job-{number}")
    kinds = [Fault(500), Fault(503), Fault(429, {"Retry-After": "1"}, reason="TooManyRequests")]
    chance = random.Random(seed)
    server.faults = lambda method, path: chance.choice(kinds) if chance.random() < 1 / 3 else None
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(240)
        names = sorted(body["metadata"]["name"] for body in server.store.all("Pod"))
        assert names == sorted(f"job-{n}-{slot}" for n in range(5) for slot in ("0-0", "1-0", "coordinator-0"))
        server.faults = RandomFaults(chance, 0.3)
        await asyncio.sleep(120)
        server.faults = lambda method, path: None
        await asyncio.sleep(60)
        assert o.pods() == 15


@on_server
async def test_the_lease_is_kept_through_a_burst_of_slow_creations(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        add(server, f"big-{number}", namespace=f"team-{number}", nodes=64)
    slow = Fault("slow", seconds=1.5)
    server.faults = lambda method, path: slow if "leases" not in path else None
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(90)
        assert o.pods() == 8 * 65
        transitions = server.store.get("Lease", "ddpjob-operator")["spec"]["leaseTransitions"]
        assert transitions == 1


def test_without_leader_election_the_operator_becomes_ready_after_an_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with api_server() as server:
            add(server, "job")
            server.faults = lambda method, path: Fault(503) if path.endswith("/pods") else None
            async with running(server, monkeypatch, lease=False) as o:
                await asyncio.sleep(60)
                assert not o.operator.ready and o.pods() == 0, (
                    "the operator decides nothing before it has read the pods"
                )
                server.faults = lambda method, path: None
                await asyncio.sleep(5)
                assert o.operator.ready and o.pods() == 3

    run(main())


@on_server
async def test_only_watched_namespaces_are_read(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace in ("a", "b", "c"):
        add(server, "job", namespace=namespace)
    async with running(server, monkeypatch, lease=False, namespaces=("a", "b")) as o:
        await asyncio.sleep(10)
        assert {body["metadata"]["namespace"] for body in server.store.all("Pod")} == {"a", "b"}
        assert not [path for _, path, _ in server.requests if path in ("/api/v1/pods", "/api/v1/services")]
        assert o.operator.ready


@pytest.mark.parametrize("unreadable", ["", "/pods", "/networkpolicies"])
@on_server
async def test_a_watched_namespace_that_may_not_be_read_does_not_delay_others(
    server: ApiServer, unreadable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's Role is deleted together with the namespace."""
    for namespace in ("a", "gone"):
        add(server, "job", namespace=namespace)
    denied = True

    def faults(method: str, path: str) -> Fault | None:
        may_not = denied and method == "GET" and "/namespaces/gone/" in path and path.endswith(unreadable)
        return Fault(403, reason="Forbidden") if may_not else None

    server.faults = faults
    async with running(server, monkeypatch, lease=False, namespaces=("a", "gone")) as o:
        await asyncio.sleep(10)
        expected = {"a"} if unreadable != "/networkpolicies" else {"a", "gone"}
        assert {body["metadata"]["namespace"] for body in server.store.all("Pod")} == expected
        assert o.operator.ready
        denied = False
        await asyncio.sleep(10)
        assert {body["metadata"]["namespace"] for body in server.store.all("Pod")} == {"a", "gone"}


@virtual
async def test_the_operator_follows_objects_as_large_as_the_api_server_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with api_server() as server, running(server, monkeypatch, lease=False) as o:
        await asyncio.sleep(2)
        add(server, "large", note="x" * 1_500_000)
        add(server, "small")
        await asyncio.sleep(5)
        assert {"large", "small"} <= set(o.reconciled)
        lists = [path for _, path in o.asked() if path.endswith("/ddpjobs")]
        assert len(lists) == 2, "only kopf's list and the list of names, because the watch has shown the objects"


@on_server
async def test_watches_of_many_namespaces_leave_connections_for_requests(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"team-{number}" for number in range(12))
    for namespace in names:
        add(server, "job", namespace=namespace)

    async def connect(connections: int = 64) -> Rest:
        configuration = client.Configuration(host=server.url)
        configuration.connection_pool_maxsize = connections
        return Rest(client.ApiClient(configuration=configuration))

    monkeypatch.setattr(Rest, "connect", connect)
    monkeypatch.setattr(operator_main, "follow_jobs", kopf_of(server))
    task = asyncio.create_task(operator_main.run(Settings(**SETTINGS, namespaces=names)))
    try:
        await asyncio.sleep(20)
        assert {body["metadata"]["namespace"] for body in server.store.all("Pod")} == set(names)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_there_are_metrics_of_jobs_requests_and_outages_of_the_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def value(name: str, **labels: str) -> float:
        return metrics_registry.get_sample_value(name, labels) or 0.0

    async def main() -> None:
        async with api_server() as server:
            add(server, "job")
            add(server, "ended", ended=True)
            reconciles = "ddpjob_operator_reconcile_duration_seconds_count"
            before = {word: value(reconciles, result=word) for word in ("done", "unavailable")}
            created = value("ddpjob_jobs_created_total")
            refused = value("ddpjob_operator_api_requests_total", verb="POST", code="503")
            server.faults = lambda method, path: Fault(503) if method == "POST" and path.endswith("/pods") else None
            async with running(server, monkeypatch, lease=False):
                await asyncio.sleep(10)
                assert value(reconciles, result="unavailable") > before["unavailable"]
                assert value("ddpjob_operator_api_requests_total", verb="POST", code="503") > refused
                assert value("ddpjob_jobs", phase="Complete") == value("ddpjob_jobs", phase="Pending") == 1
                assert value("ddpjob_operator_leader") == 1
                assert value("ddpjob_jobs_created_total") == created + 1, "not the job that had finished before"
                assert value("ddpjob_job_phase", namespace="space", job_name="job", phase="Pending") == 1
                assert value("ddpjob_operator_coordinators", state="unreachable") == 0
                server.faults = lambda method, path: None
                await asyncio.sleep(10)
                assert value(reconciles, result="done") > before["done"]
            assert value("ddpjob_operator_leader") == value("ddpjob_jobs", phase="Complete") == 0

    run(main())


def without(*fields: str) -> dict[str, Any]:
    """Return the status schema of a CRD that lacks these fields."""
    schema = deepcopy(schema_of("status"))
    for field in fields:
        *above, name = field.split(".")
        inside = schema
        for step in above:
            inside = inside["properties"][step]
            inside = inside.get("items", inside)
        del inside["properties"][name]
    return schema


@on_server
async def test_an_operator_that_is_newer_than_the_crd_does_nothing_and_reports_it(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(server, "job")
    server.status_schema = without("runtime", "slots.lostSince")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(130)
        assert (o.reconciled, server.acted, o.operator.ready) == ([], [], False), "not even the Lease is taken"
        assert o.operator.schema.missing == ("status.runtime", "status.slots.lostSince")
        assert metrics_registry.get_sample_value("ddpjob_operator_crd_missing_fields") == 2
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert len(errors) == 3, "each minute"
        assert "lacks status.runtime, status.slots.lostSince" in errors[0] and "kubectl apply" in errors[0]
        assert "charts/ddpjob-operator/crds" in errors[0]
        server.status_schema = schema_of("status")
        await asyncio.sleep(20)
        assert o.pods() == 3 and o.operator.ready
        assert metrics_registry.get_sample_value("ddpjob_operator_crd_missing_fields") == 0

        server.status_schema = without("runtime")
        await asyncio.sleep(70)
        before = len(o.reconciled)
        add(server, "later")
        await asyncio.sleep(30)
        assert (len(o.reconciled), o.operator.ready) == (before, False), "the CRD was replaced by an older one"
        server.status_schema = schema_of("status")
        await asyncio.sleep(20)
        assert o.pods() == 6 and o.operator.ready


@on_server
async def test_a_later_crd_with_the_required_fields_is_accepted(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(server, "job")
    server.status_schema = deepcopy(schema_of("status"))
    server.status_schema["properties"]["fromTheFuture"] = {"type": "string"}
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(20)
        assert o.pods() == 3 and o.operator.ready


@pytest.mark.parametrize("how", [403, 404, 503, "hang", "reset"])
@on_server
async def test_an_operator_that_cannot_read_the_schema_works_without_it(
    server: ApiServer, how: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(server, "job")
    server.faults = lambda method, path: Fault(how) if path.startswith(INDEX) else None
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(80)
        assert o.pods() == 3 and o.operator.ready


@on_server
async def test_without_the_crd_the_operator_waits_for_it(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.status_schema = None
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(30)
        assert not o.operator.ready
        server.status_schema = schema_of("status")
        add(server, "job")
        await asyncio.sleep(20)
        assert o.pods() == 3 and o.operator.ready


@on_server
async def test_a_crd_that_is_served_but_not_listed_does_not_stop_the_operator(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a CRD that is installed later, because a proxy may hide it from the index
    forever.
    """
    server.status_schema, server.is_published = None, False
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(60)
        assert o.operator.schema.missing == ("status",) and not o.operator.ready
        server.status_schema = schema_of("status")
        add(server, "job")
        await asyncio.sleep(60)
        assert o.pods() == 3 and o.operator.ready


@on_server
async def test_a_crd_known_to_be_too_old_stays_refused_if_the_index_loses_it(
    server: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add(server, "job")
    server.status_schema = without("runtime")
    async with running(server, monkeypatch) as o:
        await asyncio.sleep(10)
        server.is_published = False
        await asyncio.sleep(120)
        assert o.operator.schema.missing == ("status.runtime",) and (o.pods(), o.operator.ready) == (0, False)


async def test_readiness_follows_the_operator_and_the_liveness_probe_succeeds() -> None:
    operator = SimpleNamespace(ready=False, schema=SimpleNamespace(missing=()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with (
        operator_main.serve_probes(operator, "127.0.0.1", port),  # type: ignore[arg-type]
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        statuses = []
        for ready in (False, True):
            operator.ready = ready
            for path in ("/healthz", "/readyz"):
                async with session.get(path) as answer:
                    statuses.append(answer.status)
        assert statuses == [200, 503, 200, 200]


def test_a_reconcile_cancelled_at_the_end_of_a_term_does_not_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alert reports failed reconciles as a defect of the operator."""

    def count(result: str) -> float:
        name = "ddpjob_operator_reconcile_duration_seconds_count"
        return metrics_registry.get_sample_value(name, {"result": result}) or 0.0

    async def main() -> None:
        begun = asyncio.Event()

        async def never_ends(*_: object, **__: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with api_server() as server:
            async with running(server, monkeypatch):
                monkeypatch.setattr(operator_main, "reconcile", never_ends)
                add(server, "job")
                await begun.wait()
                failed, left = count("failed"), count("left")
            assert (count("failed"), count("left")) == (failed, left + 1)

    run(main())
