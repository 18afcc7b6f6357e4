"""The operator learns of jobs only through kopf's watch, and must miss nothing, whatever happens to
the watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ddpjob.api.job import KIND
from ddpjob.api.job_spec import Json
from ddpjob.controller.caches import Caches, collection
from ddpjob.controller.job_cache import FEW, JOBS_PAGE, NAMES_SECONDS, SETTLE_SECONDS
from ddpjob.controller.kube.rest import Rest
from ddpjob.engine.ports import JobKey

from .api_server import ApiServer, Fault
from .virtual_loop import virtual
from .world import api_server, connected, followed


class Jobs:
    """The caches under test, on a server whose watches can be broken."""

    def __init__(self, server: ApiServer, rest: Rest) -> None:
        self.server = server
        self.woken: list[str] = []
        self.caches = Caches(rest, lambda key, urgent: self.woken.append(key.name), lambda hosts, changed: None)

    def add(self, name: str, **spec: Any) -> None:
        spec = {"image": "image", "script": "train.py", "gpusPerNode": 0, **spec}
        self.server.store.create(KIND, {"metadata": {"name": name, "uid": f"{name}-uid"}, "status": {}, "spec": spec})

    def change(self, name: str, **spec: Any) -> Json:
        body = self.server.store.get(KIND, name)
        body["metadata"]["generation"] += 1
        body["spec"] = {**body["spec"], **spec}
        self.server.store.changed(KIND, body)
        return self.server.store.get(KIND, name)

    def nodes(self, name: str) -> int | None:
        job = self.caches.job(JobKey("space", name))
        return job.spec.nodes if job else None

    def reads(self) -> list[str]:
        """Return the names of jobs that were read individually."""
        path = collection(KIND, "space") + "/"
        return [asked.removeprefix(path) for method, asked, _ in self.server.requests if asked.startswith(path)]

    def hide(self, hidden: Callable[[str], bool]) -> None:
        """Hide the events of these jobs from the watch."""
        self.server.drop_events = lambda kind, body: kind == KIND and hidden(body["metadata"]["name"])


@asynccontextmanager
async def jobs(*names: str) -> AsyncIterator[Jobs]:
    async with api_server() as server, connected(server) as rest:
        made = Jobs(server, rest)
        for name in names:
            made.add(name, nodes=2)
        async with followed(server, made.caches):
            yield made


@virtual
async def test_a_job_is_known_only_after_kopf_has_shown_it() -> None:
    async with jobs("known") as j:
        assert j.nodes("known") == 2
        j.hide(lambda name: True)
        j.add("new")
        j.change("known", nodes=3)
        await asyncio.sleep(2 * NAMES_SECONDS)
        assert (j.nodes("known"), j.nodes("new")) == (2, None)
        j.hide(lambda name: False)
        j.change("known", nodes=4)
        await asyncio.sleep(0.1)
        assert j.nodes("known") == 4


@virtual
async def test_each_changed_version_of_a_job_is_read_once_but_own_writes_are_not() -> None:
    async with jobs("job") as j:
        j.server.requests.clear()
        body = j.change("job", nodes=3)
        await asyncio.sleep(0.1)
        for event in (None, "ADDED", "MODIFIED"):
            j.caches.seen_by_kopf(event, body)
        await asyncio.sleep(0.1)
        assert j.reads() == ["job"]
        j.hide(lambda name: True)
        written = j.change("job", nodes=4)
        j.caches.take(KIND, written)
        j.caches.seen_by_kopf("MODIFIED", written)
        await asyncio.sleep(0.1)
        assert j.reads() == ["job"] and j.nodes("job") == 4


@virtual
async def test_many_changed_jobs_are_read_in_pages_and_few_individually() -> None:
    names = [f"job-{number}" for number in range(FEW + 1)]
    async with jobs(*names) as j:
        assert j.reads() == []
        assert sum(query.get("limit") == str(JOBS_PAGE) for _, _, query in j.server.requests) == 1
        j.server.requests.clear()
        for name in names[:FEW]:
            j.change(name, nodes=3)
        await asyncio.sleep(0.1)
        assert sorted(set(j.reads())) == sorted(names[:FEW])
        assert {j.nodes(name) for name in names} == {3, 2}


@virtual
async def test_a_deletion_that_kopf_missed_is_found_with_its_next_list() -> None:
    async with jobs("stays", "goes") as j:
        j.hide(lambda name: name == "goes")
        j.server.store.delete(KIND, "goes")
        await asyncio.sleep(1)
        assert j.nodes("goes") == 2
        j.server.compact()
        j.server.break_watches()
        await asyncio.sleep(5 + 2 * SETTLE_SECONDS)
        assert j.nodes("goes") is None and j.nodes("stays") == 2
        assert j.woken[-1] == "goes"


@virtual
async def test_the_unseen_deletion_of_the_last_job_is_found_within_a_minute() -> None:
    async with jobs("job") as j:
        j.hide(lambda name: True)
        j.server.store.delete(KIND, "job")
        await asyncio.sleep(NAMES_SECONDS + 1)
        assert j.nodes("job") is None


@virtual
async def test_a_job_deleted_while_it_is_being_read_stays_deleted() -> None:
    async with jobs("job") as j:
        j.server.faults = lambda method, path: Fault("slow", seconds=5.0) if path.endswith("/ddpjobs/job") else None
        body = j.change("job", nodes=3)
        await asyncio.sleep(0.1)
        j.caches.seen_by_kopf("DELETED", {"metadata": {**body["metadata"], "resourceVersion": str(10**6)}})
        await asyncio.sleep(10)
        assert j.nodes("job") is None


@virtual
async def test_a_slow_read_of_a_job_does_not_delay_other_jobs() -> None:
    async with jobs("slow", "quick") as j:
        j.server.faults = lambda method, path: Fault("hang") if path.endswith("/ddpjobs/slow") else None
        j.change("slow", nodes=3)
        await asyncio.sleep(0.1)
        j.change("quick", nodes=3)
        await asyncio.sleep(0.1)
        assert (j.nodes("slow"), j.nodes("quick")) == (2, 3)


@pytest.mark.parametrize("status", [403, 500, 503])
@virtual
async def test_a_failed_read_of_a_job_is_retried(status: int) -> None:
    async with jobs("job") as j:
        j.server.faults = lambda method, path: Fault(status) if path.endswith("/ddpjobs/job") else None
        j.change("job", nodes=3)
        await asyncio.sleep(20)
        assert j.nodes("job") == 2
        j.server.faults = lambda method, path: None
        await asyncio.sleep(10)
        assert j.nodes("job") == 3


@virtual
async def test_an_unreadable_job_does_not_delay_other_jobs() -> None:
    async with api_server() as server, connected(server) as rest:
        j = Jobs(server, rest)
        j.server.store.create(KIND, {"metadata": {"name": "odd", "uid": "odd"}, "status": {}, "spec": {"nodes": []}})
        j.add("job", nodes=2)
        async with asyncio.timeout(30), followed(server, j.caches):
            assert j.nodes("job") == 2 and j.caches.complete_in("space")
            j.server.requests.clear()
            await asyncio.sleep(10)
            assert j.reads() == [], "the unreadable job is not read again"


@virtual
async def test_an_error_that_ends_kopf_does_not_lose_events() -> None:
    async with jobs("job") as j:
        j.server.send_error(500, "InternalError")
        j.change("job", nodes=3)
        j.add("new")
        await asyncio.sleep(10)
        assert j.nodes("job") == 3 and j.nodes("new") is not None


@virtual
async def test_a_change_during_the_list_of_names_is_not_a_restored_backup() -> None:
    async with jobs("job") as j:
        j.server.faults = lambda method, path: Fault("late", seconds=5.0) if path.endswith("/ddpjobs") else None
        await asyncio.sleep(NAMES_SECONDS + 1)
        for number in range(60):
            j.change("job", nodes=3 + number % 2)
            j.add(f"new-{number}", nodes=2)
            await asyncio.sleep(1)
            assert j.nodes(f"new-{number}") == 2
        assert not j.caches.restored.is_set()


@virtual
async def test_a_job_created_again_during_a_read_is_not_lost() -> None:
    async with jobs("job") as j:
        body = j.change("job", nodes=3)
        await asyncio.sleep(1)
        j.server.faults = lambda method, path: Fault("late", seconds=5.0) if path.endswith("/ddpjobs/job") else None
        j.hide(lambda name: True)
        j.server.store.delete(KIND, "job")
        j.caches.seen_by_kopf("MODIFIED", {"metadata": {**body["metadata"], "resourceVersion": str(10**6)}})
        await asyncio.sleep(1)
        j.server.faults = lambda method, path: None
        j.add("job", nodes=7)
        again = j.server.store.get(KIND, "job")
        j.caches.seen_by_kopf("ADDED", {"metadata": {**again["metadata"], "resourceVersion": str(10**6 + 1)}})
        await asyncio.sleep(10)
        assert j.nodes("job") == 7


@virtual
async def test_a_late_response_to_a_write_brings_a_deleted_job_back_only_briefly() -> None:
    async with jobs("job") as j:
        known = j.caches.job(JobKey("space", "job"))
        assert known is not None
        with j.caches.writing(known):
            j.server.store.delete(KIND, "job")
            await asyncio.sleep(3)
            assert j.nodes("job") is None
            j.caches.take_job(known)
            assert j.nodes("job") == 2
        await asyncio.sleep(5)
        assert j.nodes("job") is None
