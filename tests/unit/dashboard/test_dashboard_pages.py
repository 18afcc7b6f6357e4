"""The dashboard over HTTP with records of this machine's jobs: content of pages, authorization, and
hostile jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, format_time
from ddpjob.cli import dashboard_command
from ddpjob.client.backends.backend import LogOptions, Mistake, PodLine
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.logs.log_follower import LogFollower
from ddpjob.client.texts.job_text import restart_counts
from ddpjob.client.texts.metric_series import read_metrics
from ddpjob.dashboard import web_server
from ddpjob.dashboard.fleet import CurveSamples, Fleet, Goodput, fleet_row
from ddpjob.dashboard.gate import own_host
from ddpjob.dashboard.job_views import (
    Choice,
    listed,
    metrics_of,
    plain,
    reported_curves,
    timeline,
    trained_curves,
    with_code,
)
from ddpjob.local.paths import RUNS_VARIABLE, JobFolder
from ddpjob.local.record import held, write_record
from machine import slowness

from benchmarks.dashboard_views import record, runs, served

NOW = datetime(2026, 1, 2, tzinfo=UTC)
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def names(folder: Path) -> Iterator[list[str]]:
    with runs(folder, 30) as written:
        yield written


class Web:
    """A client that sends a browser's requests with the session's cookie."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address, self.session = address, session
        self.port = int(address.rpartition(":")[2])

    async def get(self, path: str, status: int = 200, **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.get(self.address + path, headers=named, allow_redirects=False) as answer:
            assert answer.status == status, (answer.status, await answer.text())
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            return await answer.text()


@contextlib.asynccontextmanager
async def opened(*, signed_in: bool = True) -> AsyncIterator[Web]:
    with Fleet(ProcessBackend()) as fleet:
        async with (
            served(fleet, "secret") as address,
            aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
        ):
            web = Web(address, session)
            if signed_in:
                await web.get("/?token=secret", 303)
            yield web


def text(page: str) -> str:
    """Return approximately the text that a reader sees."""
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


async def raw(web: Web, header: bytes, wanted: bytes) -> None:
    """Send a request with a header that normal clients do not send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % header)
    assert wanted in await reader.readline()
    writer.close()


async def soon(read: Any, wanted: Any) -> Any:
    """Repeat `read` until its result is `wanted`, so that pauses of the machine do not matter."""
    end = time.monotonic() + 20 * slowness()
    while not wanted(answer := await read()):
        assert time.monotonic() < end, answer
        await asyncio.sleep(0.05)
    return answer


async def test_the_list_shows_every_job_with_its_figures(names: list[str]) -> None:
    async with opened() as web:
        page = await web.get("/")
        assert all(f'href="/jobs/default/{name}"' in page for name in names)
        assert "Jobs 30" in text(page) and "GPUs idle" in page
        failed = next(name for name in names if record_of(name)["status"]["phase"] == "Failed")
        line = next(row for row in page.split("<tr ") if f"/{failed}" in row)
        assert "RestartBudgetSpent" in text(line) and record_of(failed)["status"]["restarts"]["display"] in text(line)


def record_of(name: str) -> dict[str, Any]:
    return record(int(name.rpartition("-")[2]), NOW)


async def test_the_list_can_be_filtered_and_sorted_and_invalid_queries_are_harmless(names: list[str]) -> None:
    async with opened() as web:
        page = await web.get("/?state=Failed&sort=name")
        shown = re.findall(r'href="/jobs/default/([^"]+)"', page)
        assert shown == sorted(name for name in names if record_of(name)["status"]["phase"] == "Failed")
        assert re.findall(r'href="/jobs/default/([^"]+)"', await web.get("/?q=RESNET50+0008")) == [
            "resnet50-imagenet-0008"
        ]
        assert "No job matches" in await web.get("/?q=nowhere")
        for query in (
            "page=99999999",
            "page=-1",
            "sort=evil",
            "state=evil",
            "q=%22%3E%3Cscript%3E",
            "dir=" + "x" * 500,
        ):
            assert "<script>" not in (await web.get(f"/?{query}")).replace("<script src", "")


async def test_a_jobs_page_shows_its_restarts_pods_events_and_manifest(names: list[str]) -> None:
    name = next(name for name in names if record_of(name)["status"]["restarts"]["total"] >= 3)
    restarts = record_of(name)["status"]["restarts"]["recent"]
    async with opened() as web:
        page = text(await web.get(f"/jobs/default/{name}"))
        for restart in restarts:
            assert restart["reason"] in page and restart["pod"] in page
        assert "ValueError: loss is NaN at step 4121" in page or all(r["reason"] != "WorkerFailed" for r in restarts)
        assert "script: train.py" in await web.get(f"/jobs/default/{name}/manifest")
        assert "managedFields" not in await web.get(f"/jobs/default/{name}/manifest")
        missing = f"no job {name} in namespace other; this dashboard shows "
        assert missing in text(await web.get(f"/jobs/other/{name}", 404))
        await web.get("/jobs/default/nobody", 404)
        for path in (
            "/jobs/default/..",
            "/jobs/default/%2e%2e%2fx",
            "/static/..%2fweb_server.py",
            "/static/x",
            "/nothing",
        ):
            await web.get(path, 404)


async def test_strings_in_a_job_are_escaped(folder: Path) -> None:
    body = record(4, datetime.now(UTC))  # with restarts
    name = body["metadata"]["name"]
    status = body["status"]
    status["progress"] |= {
        "display": EVIL,
        "lossDisplay": EVIL,
        "speedDisplay": EVIL,
        "eta": EVIL,
        "metrics": {EVIL: 1},
    }
    for part in (*status["conditions"], *status["restarts"]["recent"]):
        part |= {"reason": "Evil" + EVIL, "message": f"{EVIL}\n{EVIL}\x1b[31m"}
    body["spec"] |= {"args": [EVIL], "image": EVIL}
    run = JobFolder(folder / name).run("1")
    run.pods.mkdir(parents=True)
    body["local"] |= {"folder": str(run.path)}
    body["local"]["pods"] = [{"name": f"{name}-0-0", "role": EVIL, "state": EVIL}]
    happened = {"time": status["conditions"][0]["lastTransitionTime"], "warning": True, "reason": EVIL, "message": EVIL}
    run.events.write_text(json.dumps(happened) + "\n")
    write_record(JobFolder(folder / name), body)
    async with opened() as web:
        for path in ("/", f"/jobs/default/{name}", f"/jobs/default/{name}/manifest", f"/jobs/default/{name}/logs"):
            page = await web.get(path)
            assert "<img src=x" not in page and "<script>" not in page and "\x1b" not in page, path
        assert "&lt;img src=x" in page or "&lt;img src=x" in await web.get("/")


@pytest.mark.parametrize("before", [True, False])
async def test_a_restart_that_a_suspension_interrupted_is_not_shown_as_pending(before: bool, folder: Path) -> None:
    now = datetime.now(UTC)
    body = next(b for n in range(60) if (b := record(n, now))["status"].get("phase") == "Running")
    begin = DDPJob.read(body).status.start_time
    assert begin is not None
    at = begin - timedelta(minutes=1) if before else begin + (now - begin) / 2
    one = {"time": format_time(at), "pod": "a-0-0", "reason": "Evicted", "message": "", "counted": False, "round": 1}
    body["status"]["restarts"] = {"counted": 0, "uncounted": 1, "total": 1, "recent": [one]}
    name = body["metadata"]["name"]
    (folder / name).mkdir()
    write_record(JobFolder(folder / name), body)
    with held(JobFolder(folder / name)):  # this holds the lock, as the process that runs the job does
        async with opened() as web:
            page = text(await web.get(f"/jobs/default/{name}"))
        assert "Evicted" in page and ("not yet" in page) is not before


async def test_a_page_shows_steps_at_risk_and_repeated_steps_but_not_0_if_unknown(folder: Path) -> None:
    now = datetime.now(UTC)
    body = next(b for n in range(60) if (b := record(n, now))["status"].get("phase") == "Running")
    begin, name = format_time(now - timedelta(seconds=100)), body["metadata"]["name"]
    body["status"] |= {"startTime": begin, "round": 1, "trained": True}
    body["status"]["progress"]["stepsAtRisk"] = 4
    (folder / name).mkdir()

    async def page(**fields: Any) -> str:
        again = restart_of(body, time=format_time(now - timedelta(seconds=50)), **fields)
        body["status"]["restarts"] = {**again, "unknownRepeats": int(fields["continuedFrom"] != "memory")}
        body["status"]["restarts"]["repeatedSteps"] = fields.get("repeatedSteps", 0)
        write_record(JobFolder(folder / name), body)
        with held(JobFolder(folder / name)):
            async with opened() as web:
                return text(await web.get(f"/jobs/default/{name}"))

    known = await page(continuedFrom="memory", repeatedSteps=3, repeatedSeconds=5.0)
    assert "Steps at risk 4" in known and "Steps repeated 3" in known and "3 steps repeated (from memory)" in known
    assert re.search(r"Time with new steps 9\d % Steps", known)
    unknown = await page(continuedFrom="unknown")
    assert "Steps repeated unknown" in unknown and "Time with new steps at most" in unknown


async def test_gpu_hours_are_shown_only_if_the_job_has_any(folder: Path) -> None:
    body = next(b for n in range(60) if (b := record(n, datetime.now(UTC)))["status"].get("phase") == "Running")
    name = body["metadata"]["name"]
    (folder / name).mkdir()
    for seconds, shown in ((44_424, True), (0, False)):
        body["status"]["gpuSeconds"] = seconds
        write_record(JobFolder(folder / name), body)
        with held(JobFolder(folder / name)):
            async with opened() as web:
                pages = [text(await web.get(path)) for path in ("/?sort=gpu-hours&dir=desc", f"/jobs/default/{name}")]
        assert ["GPU hours 12.3" in page for page in pages] == [shown] * 2
        assert ["GPU hours" in page for page in pages] == [shown] * 2


async def test_the_page_of_a_finished_job_shows_the_restart_limit_that_applied(folder: Path) -> None:
    """Regression: kubectl's column showed 1/0, and the page showed the manifest's current limit."""
    body = next(b for n in range(60) if (b := record(n, NOW))["status"].get("phase") == "Failed")
    body["status"]["restarts"] = {"counted": 1, "total": 1, "max": 0, "display": "1/0"}
    body["spec"]["recovery"] = {"maxRestarts": 5}
    name = body["metadata"]["name"]
    (folder / name).mkdir()
    write_record(JobFolder(folder / name), body)
    async with opened() as web:
        page = text(await web.get(f"/jobs/default/{name}"))
        assert "Restarts 1/0" in page and "1/5" not in page
    assert restart_counts(DDPJob.read(body).status, 5) == "1 of 0 counted, 0 not counted"


async def test_a_message_that_consists_only_of_terminal_escapes_is_empty(folder: Path) -> None:
    body = record(0, datetime.now(UTC))
    run = JobFolder(folder / body["metadata"]["name"]).run("1")
    run.pods.mkdir(parents=True)
    body["local"]["folder"] = str(run.path)
    for condition in body["status"]["conditions"]:
        condition["message"] = "\x1b[31m"
    happened = {"time": "2026-01-01T00:00:00Z", "warning": True, "reason": "Odd", "message": "\x1b[0m"}
    run.events.write_text(json.dumps(happened) + "\n")
    write_record(JobFolder(folder / body["metadata"]["name"]), body)
    async with opened() as web:
        assert "Odd" in await web.get(f"/jobs/default/{body['metadata']['name']}")


async def test_an_unreadable_record_affects_only_its_own_job(names: list[str], folder: Path) -> None:
    body = record(1, datetime.now(UTC))
    for number, spec in enumerate(({}, {"nodes": "x" * 100_000}, {"image": 1, "nodes": []})):
        broken = {**body, "metadata": {"name": f"broken-{number}"}, "spec": spec, "status": {"phase": {"a": 1}}}
        (folder / f"broken-{number}").mkdir()
        write_record(JobFolder(folder / f"broken-{number}"), broken)
    (folder / "foreign").mkdir()
    (folder / "foreign" / "status.json").write_text("[1]")
    odd: tuple[dict[str, Any], ...] = (
        {"status": {"nodes": "x"}}, {"status": {"restarts": [1]}}, {"status": {"progress": {"metrics": [1]}}},
        {"metadata": {"creationTimestamp": 5}}, {"status": {"conditions": 5}},
    )  # fmt: skip
    for number, part in enumerate(odd):
        (folder / f"odd-{number}").mkdir()
        metadata = {"name": f"odd-{number}", **part.get("metadata", {})}
        write_record(JobFolder(folder / f"odd-{number}"), {**body, **part, "metadata": metadata})
    for name, part in {"words": {"status": "x"}, "empty": {"spec": None}, "list": {"spec": []}}.items():
        (folder / name).mkdir()
        write_record(JobFolder(folder / name), {**body, **part, "metadata": {"name": name}})
    async with opened() as web:
        page = await web.get("/")
        assert "Jobs 38" in text(page) and "Unreadable" in page and page.count("not a record of job") == 3
        (folder / "odd-9").mkdir()
        write_record(JobFolder(folder / "odd-9"), {**body, "metadata": {"name": "odd-9"}, "status": {"nodes": [1]}})
        await soon(lambda: web.get("/"), lambda page: "odd-9" in page)
        assert "cannot be read" in text(await web.get("/jobs/default/odd-3", 502))
        assert "cannot be read" in text(await web.get("/jobs/default/broken-1", 502))


async def test_requests_need_the_token_and_one_of_this_servers_host_names(names: list[str]) -> None:
    async with opened(signed_in=False) as web:
        for path in (
            "/",
            f"/jobs/default/{names[0]}",
            "/live",
            f"/jobs/default/{names[0]}/log",
            "/?token=wrong",
            "/?token=",
        ):
            said = await web.get(path, 401)
            assert names[0] not in said and "runs" not in said.replace("href", "")
        await raw(web, b"Cookie: ddpjob-dashboard-%d=\xff\xfe\r\n" % web.port, b" 401 ")
        assert "DDPJob" not in await web.get("/healthz")
        moved = "/?q=a"
        async with web.session.get(f"{web.address}{moved}&token=secret", allow_redirects=False) as answer:
            cookie = answer.headers["Set-Cookie"]
            assert answer.headers["Location"] == moved and "HttpOnly" in cookie and "SameSite=Lax" in cookie
        await web.get("/")
        await web.get("/", 421, Host="evil.example")
        await web.get("/healthz", 421, Host="127.0.0.1.evil.example:8300")
        await web.get("/live", 403, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")
        await web.get("/", 200, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
        for method in ("post", "put", "delete", "patch"):
            async with web.session.request(method, web.address + "/", data=b"x") as answer:
                assert answer.status == 405


def test_host_names_of_this_server_are_recognized() -> None:
    own = ("localhost:1", "127.0.0.1:8300", "[::1]:8300", "10.1.2.3")
    names = {"localhost", "gpu-1", ""}
    assert all(own_host(host, names) for host in (*own, "GPU-1:8300"))
    foreign = ("", "evil.example", "localhost.evil.example", "a@localhost", "127.0.0.1.x", "[")
    assert not any(own_host(host, names) for host in foreign)


async def events(answer: aiohttp.ClientResponse, wanted: bytes) -> str:
    """Read the stream up to a text."""
    said = b""
    async with asyncio.timeout(30 * slowness()):
        while wanted not in said:
            said += await answer.content.readany()
    return said.decode()


async def test_a_head_request_does_not_start_a_stream() -> None:
    """Regression: HEAD started the stream itself, with a body and without an end."""
    async with opened() as web:
        for path in ("/live", "/jobs/default/some/log"):
            async with web.session.head(web.address + path) as answer:
                assert answer.status == 405, path


async def test_a_change_of_a_job_is_sent_to_the_page_and_shown(names: list[str], folder: Path) -> None:
    name = next(name for name in names if record_of(name)["status"]["phase"] == "Running")
    place = JobFolder(folder / name)
    async with opened() as web, web.session.get(f"{web.address}/live?job=default/{name}") as live:
        await events(live, b"event: changed\n")
        body = json.loads(place.status.read_text())
        assert "epoch 77/99" not in await web.get(f"/jobs/default/{name}")
        body["status"]["progress"] |= {"display": "epoch 77/99", "step": 10**6, "loss": 7.5, "lossDisplay": "7.5"}
        write_record(place, body)
        await events(live, b"event: changed\n")
        assert "epoch 77/99" in await web.get(f"/jobs/default/{name}")
        curves = json.loads(await web.get(f"/jobs/default/{name}/curves"))["curves"]
        assert next(curve["y"] for curve in curves if curve["title"] == "loss")[-1] == 7.5
        place.status.unlink()
        await soon(lambda: web.get("/"), lambda page: f"/{name}" not in page)
        await web.get(f"/jobs/default/{name}", 404)


async def test_a_log_is_streamed_until_its_reader_disconnects(names: list[str], folder: Path) -> None:
    name = next(name for name in names if record_of(name)["status"]["phase"] == "Running")
    [pod, *_] = record_of(name)["local"]["pods"]
    log = JobFolder(folder / name).run("1").log(pod["name"], "trainer")
    others = set(threading.enumerate())

    async def readers() -> list[str]:
        return [each.name for each in set(threading.enumerate()) - others if each.name.startswith("log")]

    async with opened() as web:
        async with web.session.get(f"{web.address}/jobs/default/{name}/log?pod={pod['name']}") as answer:
            await events(answer, b"step 59")
            assert await readers()
            with log.open("a") as file:
                file.write(f"{EVIL}\x1b[31mred\x1b[0m{'x' * 9000}\n" + "old\r" * 9000 + "100%\r\n")
            said = await events(answer, b"100%")
            assert "\\u001b" not in said and "red" in said and "old" not in said and "x" * 4001 not in said
        await soon(readers, lambda left: not left)


async def test_the_stream_of_a_finished_jobs_log_ends(folder: Path) -> None:
    body = record(0, datetime.now(UTC))
    body["status"]["conditions"] = [c | {"type": "Complete", "status": "True"} for c in body["status"]["conditions"]]
    body["status"]["phase"] = "Complete"
    place = JobFolder(folder / body["metadata"]["name"])
    run = place.run("1")
    run.pods.mkdir(parents=True)
    body["local"]["folder"] = str(run.path)
    run.log(f"{place.name}-0-0", "trainer").write_text("".join(f"line {n}\n" for n in range(2000)))
    write_record(place, body)
    async with opened() as web, web.session.get(f"{web.address}/jobs/default/{place.name}/log") as answer:
        said = await events(answer, b"event: end")
        assert "line 1500" in said and "line 1999" in said and "line 1499" not in said


async def test_an_internal_error_ends_a_log_stream_and_is_shown_as_a_page(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault")

    name = next(name for name in names if record_of(name)["status"]["phase"] == "Running")
    monkeypatch.setattr(LogFollower, "lines", fail)
    monkeypatch.setattr(web_server, "slot_rows", fail)
    async with opened() as web:
        async with web.session.get(f"{web.address}/jobs/default/{name}/log") as answer:
            assert "-- the log cannot be read: RuntimeError: a fault" in await events(answer, b"event: end")
        assert "a fault" in text(await web.get(f"/jobs/default/{name}", 500))


async def test_the_combined_log_of_a_job_is_limited_to_a_few_slots(names: list[str], folder: Path) -> None:
    name = next(name for name in names if record_of(name)["status"]["phase"] == "Running")
    place, body = JobFolder(folder / name), record_of(name)
    run = place.run("1")
    for attempt in range(20):
        run.log(f"{name}-0-{attempt}", "trainer").write_text("")
    body["local"] |= {"folder": str(run.path), "pods": [{"name": f"{name}-0-20", "role": "node", "state": "Running"}]}
    write_record(place, body)
    async with opened() as web:
        assert 'log?pod="' in await web.get(f"/jobs/default/{name}/logs")
        body["local"]["pods"] = [{"name": f"{name}-{n}-20", "role": "node", "state": "Running"} for n in range(17)]
        body["status"]["round"] = 77
        write_record(place, body)
        page = await soon(lambda: web.get(f"/jobs/default/{name}/logs"), lambda page: f"{name}-16-20" in page)
        assert f'log?pod={name}-0-20"' in page
        assert "choose one to read its log" in text(await web.get(f"/jobs/default/{name}/log", 400))


async def test_the_number_of_streams_is_limited(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "STREAMS", 1)
    async with opened() as web:
        async with web.session.get(f"{web.address}/live"):
            await web.get("/live", 503)

        async def status() -> int:
            async with web.session.get(f"{web.address}/live") as answer:
                return answer.status

        await soon(status, lambda code: code == 200)


def test_an_outage_of_the_backend_is_shown_until_it_ends(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpjob.dashboard import fleet as module

    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    backend, answers = ProcessBackend(), threading.Event()

    def changes(name: str | None, seconds: float | None = None, known: Any = None) -> Iterator[Any]:
        raise Mistake("the API server does not answer")
        yield

    jobs = backend.jobs

    def read() -> Any:
        if started and not answers.is_set():
            raise Mistake("still away")
        return jobs()

    started: list[int] = []
    monkeypatch.setattr(backend, "jobs", read)
    monkeypatch.setattr(backend, "changes", changes)
    with Fleet(backend) as fleet:
        started.append(1)
        wait(lambda: "does not answer" in fleet.problem)
        monkeypatch.setattr(backend, "changes", ProcessBackend().changes)
        answers.set()
        wait(lambda: not fleet.problem)
        assert len(fleet.rows()) == 30


def test_a_job_deleted_before_the_first_list_disappears(
    names: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the deleted job stayed forever, because the first list that the page followed
    already lacked the job.
    """
    backend = ProcessBackend()
    follow = backend.changes

    def changes(*arguments: Any, **named: Any) -> Iterator[Any]:
        shutil.rmtree(folder / names[0])
        return follow(*arguments, **named)

    monkeypatch.setattr(backend, "changes", changes)
    with Fleet(backend) as fleet:
        wait(lambda: len(fleet.rows()) == 29)
        assert names[0] not in [row.name for row in fleet.rows()] and not fleet.problem


def wait(true: Any) -> None:
    end = threading.Event()
    for _ in range(int(2000 * slowness())):
        if true():
            return
        end.wait(0.01)
    raise AssertionError("the condition did not hold within 20 s")


# --- content of pages
# ---------------------------------------------------------------------------------------------


def test_a_list_with_several_pages_counts_all_jobs() -> None:
    rows = [fleet_row(record(number, NOW)) for number in range(250)]
    found = listed(rows, Choice(sort="name", page=9), NOW)
    assert found.pages == found.page == 3 and len(found.rows) == 50 and found.total == sum(found.states.values()) == 250
    assert found.active == sum(row.state not in ("Complete", "Failed") for row in rows)
    for sort in ("state", "progress", "restarts", "gpus", "gpu-hours", "runtime", "age", "namespace"):
        upward = listed(rows, Choice(sort=sort), NOW).rows
        assert len(upward) == 100 and upward[0] != listed(rows, Choice(sort=sort, descending=True), NOW).rows[0]
    held = next(row for row in rows if row.state == "Running")
    assert held.gpus == held.gpus_training == 8 * held.pods > 0


def test_the_spans_of_a_timeline_are_ordered_and_leave_no_gaps() -> None:
    for number in range(60):
        body = record(number, NOW)
        job = DDPJob.read({**body, "metadata": {**body["metadata"]}})
        drawn = timeline(job, body["status"]["phase"], NOW)
        if job.status.start_time is None:
            assert drawn is None
            continue
        assert drawn is not None
        at = 0.0
        for span in drawn.spans:
            assert span.begin == pytest.approx(at) and span.width > 0
            at = span.begin + span.width
        assert at == pytest.approx(1000)
        broken = sum(span.kind == "restart" for span in drawn.spans)
        # The failure that ends a job is the end of the timeline.
        listed_there = [r for r in job.status.restarts.recent if drawn.begin <= r.time < drawn.end]
        assert broken == len(listed_there)


def test_a_lost_spare_does_not_begin_a_round_in_the_timeline() -> None:
    """Regression: the continuing round was shown as a new one."""
    body = next(b for n in range(60) if (b := record(n, NOW))["status"].get("phase") == "Running")
    begin = DDPJob.read(body).status.start_time
    assert begin is not None
    ends = [
        {"time": format_time(begin + (NOW - begin) * part), "pod": f"a-{index}-0", "index": index, "reason": "Evicted"}
        | {"message": "", "counted": False, "seconds": 0.0, **rounds}
        for index, part, rounds in ((0, 0.3, {"round": 1}), (2, 0.6, {}))
    ]
    restarts = {"counted": 0, "uncounted": 2, "total": 2, "recent": ends}
    drawn = timeline(DDPJob.read(body | {"status": body["status"] | {"restarts": restarts}}), "Running", NOW)
    assert drawn is not None
    assert [span.title.partition(":")[0] for span in drawn.spans] == ["round 0", "round 1", "round 1"]


@pytest.mark.parametrize(
    ("ends", "lost"),
    [
        ([(100, 10, 1), (98, 1, 1)], 11),  # seen in a different order than they arrived in
        ([(100, 60, 1), (110, 0, 0)], 60),  # the group is down, and a spare is lost
        ([(100, None, 1), (200, 5, 2)], 105),
    ],
)
def test_a_timeline_counts_each_second_only_once(ends: list[tuple[int, float | None, int]], lost: float) -> None:
    """Regression: a job was in rounds for 101 % of its time, and without a group for -2 s."""
    body = next(b for n in range(60) if (b := record(n, NOW))["status"].get("phase") == "Running")
    begin = DDPJob.read(body).status.start_time
    assert begin is not None
    recent = [
        {"time": format_time(begin + timedelta(seconds=at)), "pod": "a-0-0", "index": 0, "reason": "Evicted"}
        | {"message": "", "counted": False, "round": number}
        | ({"seconds": seconds} if seconds is not None else {})
        for at, seconds, number in ends
    ]
    restarts = {"counted": 0, "uncounted": 2, "total": 2, "recent": recent}
    drawn = timeline(DDPJob.read(body | {"status": body["status"] | {"restarts": restarts}}), "Running", NOW)
    assert drawn is not None and drawn.lost == lost
    ends_at = 0.0
    for span in drawn.spans:
        assert span.begin == pytest.approx(ends_at)
        ends_at = span.begin + span.width
    assert ends_at == pytest.approx(1000)


def test_the_timeline_of_a_resumed_job_begins_with_its_current_round() -> None:
    """Some of the listed restarts are from before the job was resumed, and no later restart is
    missing.
    """
    body = next(b for n in range(60) if (b := record(n, NOW))["status"].get("phase") == "Running")
    begin = DDPJob.read(body).status.start_time
    assert begin is not None
    moments = [(begin - timedelta(minutes=5), 11), (begin + (NOW - begin) / 2, 12)]
    recent = [
        {"time": format_time(time), "pod": "a-0-0", "index": 0, "reason": "Evicted", "message": "", "counted": False}
        | {"seconds": 1.0, "round": number}
        for time, number in moments
    ]
    restarts = {"counted": 0, "uncounted": 12, "total": 12, "recent": recent}
    drawn = timeline(DDPJob.read(body | {"status": body["status"] | {"restarts": restarts}}), "Running", NOW)
    assert drawn is not None and drawn.useful is not None
    assert [span.title.partition(":")[0] for span in drawn.spans] == ["round 11", "Evicted", "round 12"]


def test_curves_keep_their_peaks_and_skip_invalid_numbers() -> None:
    lines = [
        {"event": "start", "step": 0},
        *({"event": "step", "step": n, "loss": 1.0, "round": 1} for n in range(9000)),
    ]
    lines += [
        {"event": "step", "step": 4567, "loss": 99.0},
        {"event": "start", "step": 8000},
        {"event": "step", "step": 8001, "loss": 2.0},
        {"event": "eval", "step": 9, "accuracy": 0.5},
    ]
    lines += [
        {"event": "step", "step": 9, "loss": 10**400},
        {"event": "step", "step": "x", "loss": 1},
        {"event": "step"},
    ]
    drawn = trained_curves(read_metrics("\n".join(map(json.dumps, lines)) + '\n{"cut'))
    assert [curve["title"] for curve in drawn["curves"]] == ["loss", "test accuracy"] and drawn["starts"] == [8000]
    assert drawn["repeated"] == [[8000, 8999]]
    loss = drawn["curves"][0]
    assert len(loss["x"]) <= 1205 and loss["x"] == sorted(loss["x"]) and max(filter(None, loss["y"])) == 99.0
    gaps = [(x, y) for x, y in zip(loss["x"], loss["y"], strict=True) if y in (None, 2.0)]
    assert gaps == [(8000.5, None), (8001, 2.0), (8001.5, None)], "no line crosses a restart"
    json.dumps(drawn, allow_nan=False)


def test_the_number_of_reported_samples_is_bounded() -> None:
    samples = CurveSamples()
    for step in range(5000):
        samples.add(
            {"progress": {"step": step, "loss": step if step % 2 else float("nan"), "samplesPerSecond": 10**400}}
        )
    samples.add({"progress": {"step": "x"}})
    assert len(samples.steps) == len(samples.losses) == len(samples.speeds) <= 512
    [curve] = reported_curves(samples, "samples/s")["curves"]
    assert curve["title"] == "loss" and curve["x"][-1] == 4999
    json.dumps(curve, allow_nan=False)


@pytest.mark.parametrize("restarts", [1, 100, 299, 301, 2000])
def test_a_curve_has_a_bounded_number_of_points_despite_many_restarts(restarts: int) -> None:
    lines = list[dict[str, Any]]()
    for start in range(restarts):
        lines.append({"event": "start", "step": 10 * start})
        lines += ({"event": "step", "step": 10 * start + n, "loss": float(n % 3)} for n in range(1, 11))
    [curve] = trained_curves(read_metrics("\n".join(map(json.dumps, lines))))["curves"]
    assert min(restarts, 300) <= len(curve["x"]) <= 1200 and curve["x"][-1] == 10 * restarts


def restart_of(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    known = {"time": format_time(NOW), "pod": "a-0-0", "reason": "OOMKilled", "message": "", "counted": True}
    return {"total": 1, "recent": [{**known, "round": 1, "seconds": 2.0, **fields}]}


def test_goodput_is_the_share_of_pod_time_spent_on_new_steps(names: list[str]) -> None:
    backend, now = ProcessBackend(), [100.0]
    fleet, body = Fleet(backend, clock=lambda: now[0]), record(0, NOW)
    assert fleet.goodput() == Goodput(None, 0.0, 0)

    def after(seconds: float, phase: str, present: int, ready: int, **more: Any) -> None:
        now[0] += seconds
        slots = [{"index": n, "state": "Running" if n < present else "Lost"} for n in range(5)]
        status = {**body["status"], "phase": phase, "slots": slots, "nodes": {"ready": ready, "display": ""}}
        fleet._keep({**body, "status": {**status, "restarts": {}, "trained": True, "round": 0, **more}}, backend)

    after(0, "Starting", 4, 0)
    after(10, "Running", 4, 4)
    after(70, "Restarting", 4, 3)
    now[0] += 20
    assert fleet.goodput() == Goodput(pytest.approx(0.7), 100.0, 0)
    again = restart_of(body, continuedFrom="memory", repeatedSteps=9)
    after(0, "Running", 4, 4, round=1, restarts=again)
    now[0] += 90  # the job repeats steps, which do not count as new
    assert fleet.goodput() == Goodput(pytest.approx(0.7 / 1.9), 190.0, 0)
    over = restart_of(body, continuedFrom="memory", repeatedSteps=9, repeatedSeconds=90.0)
    after(0, "Running", 4, 4, round=1, restarts={**over, "repeatedSeconds": 90.0})
    now[0] += 10
    assert fleet.goodput().share == pytest.approx(0.8 / 2)
    # All steps of the next repetition were taken between two reads, so their time is subtracted.
    after(0, "Running", 4, 4, round=1, restarts={**over, "repeatedSeconds": 95.0, "unknownRepeats": 1})
    assert fleet.goodput() == Goodput(pytest.approx(0.75 / 2), 200.0, 1)
    fleet._drop(("default", body["metadata"]["name"]))
    now[0] += 50
    assert fleet.goodput().share == pytest.approx(0.75 / 2), "a pod that is gone holds no GPUs"


def test_a_jobs_useful_time_begins_with_its_first_step() -> None:
    body = record(0, NOW)
    status = {"phase": "Running", "slots": [{"state": "Running", "node": "n"}] * 2, "nodes": {"ready": 2}}
    assert [fleet_row({**body, "status": {**status, "trained": t}}).pods_useful for t in (False, True)] == [0, 2]


@pytest.mark.parametrize(("seconds", "shown"), [(30.0, "30s"), (None, "")])
def test_repeated_steps_are_not_new_in_the_timeline(seconds: float | None, shown: str) -> None:
    body = next(b for n in range(60) if (b := record(n, NOW))["status"].get("phase") == "Running")
    begin = NOW - timedelta(seconds=100)
    fields = {"time": format_time(begin + timedelta(seconds=40)), "seconds": 10.0, "repeatedSteps": 9}
    again = restart_of(body, continuedFrom="memory", **fields, **({"repeatedSeconds": seconds} if seconds else {}))
    status = {**body["status"], "startTime": format_time(begin), "restarts": again}
    drawn = timeline(DDPJob.read(body | {"status": status}), "Running", NOW)
    assert drawn is not None and drawn.useful == pytest.approx(0.6 if seconds else 0.4)
    [repeat] = [span for span in drawn.spans if span.kind == "repeat"]
    assert repeat.title == f"9 steps repeated: {shown or '50s'}"


def test_only_placed_pods_hold_gpus_and_only_pods_that_take_steps_train() -> None:
    body = record(0, NOW)
    body["spec"] |= {"nodes": 3, "gpusPerNode": 8}
    slots = [{"state": "Created"}, {"state": "Created", "node": "n1"}, {"state": "Running", "node": "n2"}]

    def counts(reason: str) -> tuple[int, int]:
        running = {"type": "Running", "status": "True", "reason": reason, "message": ""}
        running["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        status = {"phase": "Running", "slots": slots, "nodes": {"ready": 1}, "conditions": [running]}
        row = fleet_row({**body, "status": status})
        return row.gpus, row.gpus_training

    assert counts("GroupRunsSmaller") == (16, 8)
    assert counts("StepOverdue") == (16, 0)


@pytest.mark.parametrize(("phase", "shown"), [("Running", "3h05m"), ("Suspended", ""), ("Queued", ""), ("Failed", "")])
def test_a_suspended_or_finished_job_has_no_time_left(phase: str, shown: str) -> None:
    status = {"phase": phase, "progress": {"step": 4, "eta": "3h05m"}}
    assert fleet_row({**record(0, NOW), "status": status}).eta == shown


def test_a_later_job_of_the_same_name_has_separate_curves(names: list[str]) -> None:
    backend = ProcessBackend()
    fleet, body = Fleet(backend), record(0, NOW)
    for step in (1, 2):
        fleet._keep({**body, "status": {**body["status"], "progress": {"step": step, "loss": 1.0}}}, backend)
    later = {**body, "metadata": {**body["metadata"], "creationTimestamp": "2026-02-01T00:00:00Z"}}
    fleet._keep({**later, "status": {**body["status"], "progress": {"step": 9, "loss": 1.0}}}, backend)
    assert list(fleet.samples(("default", body["metadata"]["name"])).steps) == [9]


def test_plain_text_responses_cannot_control_a_terminal() -> None:
    assert plain("a\x1b[1;31mred\x1b[0m\tb\r\n\x1b]0;title\x07c\x00\u202ed") == "ared\tb\ncd"


# --- logs -------------------------------------------------------------------------------------------------------


def test_the_end_of_a_large_log_is_read_without_its_beginning(names: list[str], folder: Path) -> None:
    name = names[0]
    log = JobFolder(folder / name).run("1").log(f"{name}-0-9", "trainer")
    log.write_bytes(b"".join(b"line %d %s\n" % (n, b"x" * (n % 300)) for n in range(20_000)) + b"no end")
    pod = PodLine(f"{name}-0-9", "node", 0, "Ended", ended=True)
    whole = log.read_bytes().splitlines(keepends=True)
    for tail in (0, 1, 2, 700, 19_999, 30_000):
        read = b"".join(ProcessBackend().log(pod, LogOptions(tail=tail)))
        assert read.splitlines(keepends=True) == (whole[-tail:] if tail else [])


def test_a_line_without_an_end_is_truncated() -> None:
    class Endless(ProcessBackend):
        def job(self, name: str) -> dict[str, Any]:
            return {"metadata": {"name": name}, "spec": {}, "status": {"phase": "Interrupted"}}

        def pods(self, name: str) -> list[PodLine]:
            return [PodLine("j-0-0", "node", 0, "Running")]

        def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
            for _ in range(80):
                yield b"x" * 65536
            yield b"\nnext"

    backend = Endless()
    for options, most in ((LogOptions(follow=True), 1 << 20), (LogOptions(follow=True, line_bytes=16_000), 16_000)):
        follower = LogFollower(backend, backend.job("j"), options)
        lines = [line.text for line in follower.lines()]
        assert len(lines) == 2 and len(lines[0]) == most and lines[1] == b"next"
        assert follower.notes == [f"pod j-0-0: lines longer than {most:,} bytes were truncated"]


def test_a_host_that_is_not_an_address_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Mistake, match=r"^--host a\.\.b: not a host name; write an address of this machine$"):
        dashboard_command.serve_dashboard(ProcessBackend(), "a..b", 0)

    async def unknown(*_: Any, **options: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(dashboard_command, "serve", unknown)
    with pytest.raises(Mistake, match=r"^--host away: Name or service not known; write an address of this machine$"):
        dashboard_command.serve_dashboard(ProcessBackend(), "away", 0)


def test_backticks_become_code_and_a_job_cannot_write_html_in_them() -> None:
    assert with_code("run `ddpjob why j` <b>") == "run <code>ddpjob why j</code> &lt;b&gt;"
    assert EVIL not in with_code(f"`{EVIL}`") and "<script" not in with_code(f"`{EVIL}`")


def test_an_accuracy_is_shown_in_percent_as_in_the_terminal() -> None:
    status = JobStatus.read({"progress": {"metrics": {"accuracy": 0.8291, "lr": 0.1, "top5": 0.9}}})
    assert metrics_of(status) == [("accuracy", "82.91%"), ("lr", "0.1"), ("top5", "0.9")]
