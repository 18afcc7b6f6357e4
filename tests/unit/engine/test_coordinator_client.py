"""The client for coordinators, with servers on loopback: its requests, and that no response can
raise an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from ddpjob.engine.coordinator_client import CoordinatorClient, Target, read_report
from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator.server import Server
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from machine import slowness

TOKEN = "the job's token"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
REPORT: dict[str, Any] = {
    "generation": 3,
    "state": "Running",
    "nodes": 2,
    "minNodes": 2,
    "backoff": [1, 60],
    "world": 2,
    "progress": {"step": 5},
}
Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def listening(handle: Handler, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Start a server that answers every request with this function, and yield host:port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        port = runner.addresses[0][1]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()


def proof_of(request: web.Request, content: bytes) -> dict[str, str]:
    """Return the header that proves that a response is from the job's coordinator. The request
    names no instance yet.
    """
    parts = "answer", "", request.headers[protocol.NONCE_HEADER], content
    return {protocol.PROOF_HEADER: protocol.seal(TOKEN, *parts)}


@asynccontextmanager
async def answering(answer: Any, status: int = 200) -> AsyncIterator[Target]:
    """Start a coordinator that knows the token and gives one response, as JSON or as text."""

    async def handle(request: web.Request) -> web.Response:
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        return web.Response(body=content, status=status, headers=proof_of(request, content))

    async with listening(handle) as endpoint:
        yield Target(endpoint, TOKEN)


@asynccontextmanager
async def coordinator(token: str = TOKEN, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, Server]]:
    """Start a real coordinator. Yields host:port."""
    server = Server(CoordinatorSettings(2, 2, 3), token, store_ready=True)
    listener = await asyncio.start_server(server.serve, host, 0, limit=protocol.MAX_LINE)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), server
    finally:
        listener.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use long timeouts, because coordinator and operator share this process, which may be slow on
    a busy machine.
    """
    for name in ("SECONDS", "CONNECT_SECONDS"):
        monkeypatch.setattr(f"ddpjob.engine.coordinator_client.{name}", 60.0)


@pytest.fixture
async def client() -> AsyncIterator[CoordinatorClient]:
    made = CoordinatorClient()
    yield made
    await made.close()


async def test_coordinator_and_operator_prove_to_each_other_that_they_know_the_token(
    client: CoordinatorClient,
) -> None:
    async with coordinator() as (endpoint, server):
        target = Target(endpoint, TOKEN)
        report = await client.report(target)
        assert report is not None and report.generation == 3
        await client.notify(target, "size", {"nodes": 5, "minNodes": 4})
        report = await client.report(target)
        assert report is not None and (report.nodes, report.min_nodes) == (5, 4)
        server.instance = "another start of the coordinator"
        assert await client.report(target) is not None


async def test_a_change_just_before_a_long_poll_begins_is_reported() -> None:
    """Otherwise, the long poll would be held until the next change."""
    server = Server(CoordinatorSettings(2, 2, 3), TOKEN, store_ready=True)
    waiting = asyncio.ensure_future(server.wait_for_change())
    server.coordinator.resize(5, 4)
    await asyncio.wait_for(waiting, 1)


async def test_messages_sent_at_the_same_time_all_arrive(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them are sent before the coordinator's instance is known."""
    async with coordinator() as (endpoint, server):
        target = Target(endpoint, TOKEN)
        sizes = client.notify(target, "size", {"nodes": 5, "minNodes": 4})
        patience = client.notify(target, "patience", {"hangAfter": 60, "backoff": [2, 30]})
        await asyncio.gather(sizes, patience, client.report(target))
        report = server.coordinator.report()
        assert (report.nodes, report.hang_after) == (5, 60) and caplog.messages == []


async def test_the_report_of_a_different_job_is_not_trusted(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The address was reassigned to a different pod. Its coordinator ignores this operator's
    messages, too.
    """
    async with coordinator("another job's token") as (endpoint, server):
        assert await client.report(Target(endpoint, TOKEN)) is None
        await client.notify(Target(endpoint, TOKEN), "stop", {"ok": False, "why": ""})
        assert server.coordinator.rounds.state == "Forming"
    assert "does not prove" in caplog.records[0].getMessage()


async def test_a_stranger_gets_neither_the_token_nor_a_reusable_proof(client: CoordinatorClient) -> None:
    heard: list[tuple[str, str, dict[str, str]]] = []

    async def handle(request: web.Request) -> web.Response:
        heard.append((request.method, request.path_qs, dict(request.headers)))
        return web.json_response(REPORT)

    async with listening(handle) as endpoint, coordinator() as (own, _):
        assert await client.report(Target(endpoint, TOKEN)) is None
        await client.notify(Target(endpoint, TOKEN), "stop", {"ok": False, "why": ""})
        assert TOKEN not in str(heard)
        async with client.session.get(f"http://{own}/status", headers=heard[0][2]) as answer:
            assert answer.status == 401, "the proof was made for another coordinator"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (REPORT, 503),
        ({"state": "Running"}, 200),
        ([], 200),
        ({"generation": "x"}, 200),
        (REPORT | {"recovery": 5}, 200),
        (REPORT | {"backoffUntil": "0001-01-01T00:00:00.000Z"}, 200),
        (REPORT | {"now": "9999-12-31T23:59:59.000Z", "backoffUntil": "0001-01-01T00:00:00.000Z"}, 200),
        (
            REPORT | {"incidents": [{"id": n, "time": "2026-01-01T00:00:00.000Z", "kind": "Hang"} for n in range(51)]},
            200,
        ),
        (json.dumps(REPORT | {"nodes": float("nan")}), 200),
        ("[" * 100_000, 200),
        ("9" * 5000, 200),
        (" " * protocol.MAX_REPORT + json.dumps(REPORT), 200),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_response_that_violates_the_protocol_is_refused(
    client: CoordinatorClient, answer: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering(answer, status) as target:
        assert await client.report(target) is None
    [record] = caplog.records
    assert len(record.getMessage()) <= 200 and "\n" not in record.getMessage()


async def test_a_compressed_response_is_not_decompressed(client: CoordinatorClient) -> None:
    """A few hundred kilobytes could become gigabytes."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept-Encoding"])
        body = gzip.compress(json.dumps(REPORT).encode())
        return web.Response(
            body=body, headers={"Content-Encoding": "gzip", **proof_of(request, json.dumps(REPORT).encode())}
        )

    async with listening(handle) as endpoint:
        assert await client.report(Target(endpoint, TOKEN)) is None
    assert asked == ["identity"]


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["flood", "drip"])
async def test_reading_an_endless_response_is_aborted(
    client: CoordinatorClient, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob.engine.coordinator_client.SECONDS", 0.5)
    sent = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await answer.write(b" " * (1 if pause else 65536))
                sent += 65536
                await asyncio.sleep(pause)
        return answer

    async with listening(handle) as endpoint:
        began = asyncio.get_running_loop().time()
        assert await client.report(Target(endpoint, TOKEN)) is None
        assert asyncio.get_running_loop().time() - began < 5 * slowness()
    assert sent < 20 * protocol.MAX_REPORT


@pytest.mark.parametrize("status", [302, 307])
async def test_redirects_are_not_followed(client: CoordinatorClient, status: int) -> None:
    seen: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response(REPORT)

    async with listening(elsewhere) as other:

        async def handle(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": f"http://{other}/metadata"})

        async with listening(handle) as endpoint:
            target = Target(endpoint, TOKEN)
            assert await client.report(target) is None
            await client.notify(target, "size", {})
    assert seen == []


async def test_a_refused_connection_to_a_coordinator_is_reported(client: CoordinatorClient) -> None:
    async with answering(REPORT) as target:
        pass
    assert await client.report(target) is None
    await client.notify(target, "size", {})


async def test_an_ipv6_address_is_written_in_brackets(client: CoordinatorClient) -> None:
    try:
        async with coordinator(host="::1") as (endpoint, _):
            assert await client.report(Target(endpoint, TOKEN)) is not None
    except OSError:
        pytest.skip("this machine has no IPv6")


async def test_a_refused_message_is_logged_as_a_short_warning(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering({"error": "nodes\n" * 1000}, 400) as target:
        await client.notify(target, "size", {})
    [record] = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING and "rejects size" in text and "400" in text
    assert len(text) <= 200 and "\n" not in text


async def test_a_client_that_was_never_used_can_be_closed() -> None:
    await CoordinatorClient().close()


# --- reading


def written(**changes: Any) -> bytes:
    return json.dumps(REPORT | changes).encode()


def test_times_by_the_coordinators_clock_are_converted() -> None:
    """The coordinator's clock is 40 s slow. An event that happened 2 s ago by its clock happened 2
    s ago by the operator's clock.
    """
    behind = NOW - timedelta(seconds=40)
    ago = protocol.iso(behind - timedelta(seconds=2))
    report = read_report(
        written(
            now=protocol.iso(behind),
            lost=[{"pod": "job-0-0", "since": ago}],
            incidents=[{"id": 1, "time": ago, "kind": "Hang"}],
            backoffUntil=protocol.iso(behind + timedelta(seconds=5)),
            recovery={"downSince": ago},
        ),
        NOW,
    )
    then = NOW - timedelta(seconds=2)
    assert (report.lost[0].since, report.incidents[0].time, report.recovery.down_since) == (then, then, then)
    assert report.backoff_until == NOW + timedelta(seconds=5)


def test_clock_differences_as_small_as_network_delays_are_ignored() -> None:
    """Otherwise the same times would differ a little in each report, and each would cause a write
    of the status.
    """
    since = protocol.iso(NOW - timedelta(seconds=9))
    for late in (0.0, 0.3, 0.9):
        now = protocol.iso(NOW - timedelta(seconds=late))
        report = read_report(written(now=now, lost=[{"pod": "p", "since": since}]), NOW)
        assert report.lost[0].since == NOW - timedelta(seconds=9)


def test_without_the_coordinators_clock_future_times_are_replaced_by_now() -> None:
    later = protocol.iso(NOW + timedelta(hours=1))
    report = read_report(written(lost=[{"pod": "p", "since": later}]), NOW)
    assert report.lost[0].since == NOW


def in_four_bytes(length: int) -> str:
    """Return a string that Python stores with four bytes per character."""
    return "x" * (length - 1) + "\N{GRINNING FACE}"


def costly_report(length: int) -> bytes:
    """Return the report of a job of one pod, with a string of this length in every string field."""
    text, time = in_four_bytes(length), protocol.iso(NOW)
    name = {"pod": text, "signal": text, "message": text, "traceback": text}
    figures = {f"{n}{in_four_bytes(90)}": in_four_bytes(100) for n in range(100)}
    return json.dumps(
        REPORT
        | {"members": [{"pod": text, "state": "Ready"} for _ in range(18)]}
        | {"lost": [{"pod": text, "since": time, "why": text} for _ in range(18)]}
        | {"notes": [{"pod": text, "kind": text, "why": text} for _ in range(18)]}
        | {"incidents": [{"id": n, "time": time, "kind": "Hang", **name} for n in range(50)]}
        | {"overdue": {"since": time, "where": text, "traceback": text, "activity": text}}
        | {"progress": figures | {"metrics": figures}, "order": text},
        ensure_ascii=False,
    ).encode()


@pytest.mark.parametrize("length", [50, 500, 1500, 3000, 30_000])
def test_a_report_of_one_pod_keeps_less_than_half_a_megabyte(length: int) -> None:
    """This holds for any size, although a single character beyond 16 bits makes Python store each
    with four bytes.
    """
    body = costly_report(length)
    gc.collect()
    tracemalloc.start()
    try:
        report = read_report(body, NOW, pods=1)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.incidents and kept < 500_000


def test_short_strings_keep_their_emoji_and_long_strings_their_length() -> None:
    incident = {"time": protocol.iso(NOW), "kind": "Hang", "message": "🤗 says no"}
    long = {"id": 2, **incident, "traceback": "🤗" * 2999 + "!"}
    [first, second] = read_report(written(incidents=[{"id": 1, **incident}, long]), NOW).incidents
    assert first.message == "🤗 says no"
    assert second.traceback == "\N{REPLACEMENT CHARACTER}" * 2999 + "!"


@pytest.mark.parametrize(("pods", "most"), [(1, 164_864), (2000, 2**20)])
async def test_the_size_limit_of_a_response_grows_with_the_number_of_pods(
    client: CoordinatorClient, pods: int, most: int
) -> None:
    text = json.dumps(REPORT)
    for spaces, is_read in ((most - len(text), True), (most - len(text) + 1, False)):
        async with answering(" " * spaces + text) as target:
            assert (await client.report(replace(target, pods=pods)) is not None) is is_read


def test_the_memory_of_a_report_is_bounded() -> None:
    incident = {"time": protocol.iso(NOW), "kind": "Hang", "message": "m" * 9999, "traceback": "t" * 99999}
    members = [{"pod": f"job-{n}-0", "state": "Ready"} for n in range(1124)]
    progress = {"step": 10**400, "loss": 1, "x" * 101: 1, "metrics": {f"m{n}": n for n in range(300)} | {"deep": [1]}}
    report = read_report(
        written(incidents=[{"id": n, **incident} for n in range(1, 21)], members=members, progress=progress),
        NOW,
        pods=1,
    )
    assert [i.id for i in report.incidents] == list(range(1, 21))
    assert sum(len(i.message) + len(i.traceback) for i in report.incidents) <= 70_000
    assert report.incidents[-1].traceback and len(report.members) <= 20
    assert set(report.progress) == {"loss", "metrics"} and len(report.progress["metrics"]) == 100
