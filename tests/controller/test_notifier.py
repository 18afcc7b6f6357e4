"""Notifications over HTTP: receivers that answer, hang, redirect or fail, and namespaces that flood
a receiver.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from ddpjob.controller import notifier as module
from ddpjob.controller.notifier import EVERYBODY, Notifier, Receivers
from ddpjob.controller.operator_settings import Settings, SettingsError
from ddpjob.core.world import NotificationOutcome
from ddpjob.engine.ports import JobKey

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JOB, OTHER = JobKey("vision", "job"), JobKey("speech", "job")
BODY = {"event": "Complete", "text": "done"}


class Web:
    """A server on this machine. `handlers` maps each path to its handler, and `got` contains the
    requests in order.
    """

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.got: list[tuple[str, str, Any]] = []
        self.url = ""
        self.arrived = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.got.append((request.path, request.headers.get("Idempotency-Key", ""), json.loads(await request.read())))
        self.arrived.set()
        return await self.handlers[request.path](request)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Web]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = site.name
        try:
            yield self
        finally:
            await runner.cleanup()

    def came(self, path: str) -> list[str]:
        return [key for where, key, _ in self.got if where == path]


class Scene:
    """A notifier whose receivers are paths of one server."""

    def __init__(self, server: Web, folder: Path, *names: str, **namespaces: tuple[str, ...]) -> None:
        for name in names:
            (folder / name).write_text(f"{server.url}/{name}\n")
        allowed = {name: namespaces.get(name, (EVERYBODY,)) for name in names}
        self.woken: list[JobKey] = []
        self._wake = asyncio.Event()
        self.notifier = Notifier(Receivers(allowed, folder), self._known)

    def _known(self, key: JobKey) -> None:
        self.woken.append(key)
        self._wake.set()

    async def outcome(self, key: JobKey, id: str) -> NotificationOutcome:
        while key not in self.woken:
            self._wake.clear()
            await self._wake.wait()
        return self.notifier.outcomes(key, [id])[id]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.001)


@pytest.fixture
async def server() -> AsyncIterator[Web]:
    async with Web().serve() as made:
        yield made


async def fine(request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok")


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def test_a_notification_is_posted_once_with_its_id_and_wakes_the_job(server: Web, tmp_path: Path) -> None:
    server.handlers["/team"] = fine
    scene = Scene(server, tmp_path, "team")
    for _ in range(3):
        scene.notifier.send(JOB, "id", "team", BODY)
    assert await scene.outcome(JOB, "id") == NotificationOutcome(delivered=True)
    scene.notifier.send(JOB, "id", "team", BODY)
    await asyncio.sleep(0.05)
    assert server.got == [("/team", '"id"', BODY)] and scene.woken == [JOB]
    await scene.notifier.close()


async def test_a_failing_receiver_is_retried_and_then_abandoned(server: Web, tmp_path: Path) -> None:
    async def errs(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="secret of the receiver")

    server.handlers["/team"] = errs
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    assert await scene.outcome(JOB, "id") == NotificationOutcome(delivered=False, message="HTTP 500 (10 attempts)")
    came = server.came("/team")  # on a busy machine, an attempt may time out before it arrives
    assert set(came) == {'"id"'} and 1 < len(came) <= module.TRIES, "each attempt has the same id"
    await scene.notifier.close()


async def test_a_receiver_that_recovers_gets_the_notification(server: Web, tmp_path: Path) -> None:
    async def heals(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if len(server.got) < 3 else 204)

    server.handlers["/team"] = heals
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    assert (await scene.outcome(JOB, "id")).delivered and len(server.got) == 3
    await scene.notifier.close()


async def test_a_receiver_may_request_a_pause_before_the_next_attempt_within_bounds(
    server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.3)

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429 if len(server.got) == 1 else 200, headers={"Retry-After": "999999"})

    server.handlers["/team"] = busy
    scene = Scene(server, tmp_path, "team")
    began = asyncio.get_running_loop().time()
    scene.notifier.send(JOB, "id", "team", BODY)
    assert (await scene.outcome(JOB, "id")).delivered
    assert asyncio.get_running_loop().time() - began >= 0.3
    await scene.notifier.close()


async def test_an_invalid_pause_requested_by_a_receiver_is_ignored(
    server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each attempt raised an exception and was not counted, so the attempts never
    ended.
    """
    monkeypatch.setattr(module, "TRIES", 1)

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "1234567890 seconds"})

    server.handlers["/team"] = busy
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    outcome = await asyncio.wait_for(scene.outcome(JOB, "id"), 10)
    assert not outcome.delivered and outcome.message == "HTTP 429 (1 attempts)"
    await scene.notifier.close()


async def test_a_redirect_is_not_followed(server: Web, tmp_path: Path) -> None:
    async def redirects(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{server.url}/metadata")

    server.handlers |= {"/team": redirects, "/metadata": fine}
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    outcome = await scene.outcome(JOB, "id")
    assert not outcome.delivered and "HTTP 307: redirects are not followed" in outcome.message
    assert not server.came("/metadata")
    await scene.notifier.close()


async def test_a_receiver_that_hangs_does_not_delay_other_receivers(
    server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.handlers |= {"/stuck": hangs, "/team": fine}
    scene = Scene(server, tmp_path, "stuck", "team")
    for number in range(20):
        scene.notifier.send(JOB, f"stuck-{number}", "stuck", BODY)
    await server.arrived.wait()
    scene.notifier.send(JOB, "id", "team", BODY)
    assert (await scene.outcome(JOB, "id")).delivered
    assert len(server.came("/stuck")) <= module.WORKERS
    await scene.notifier.close()


async def test_delivery_to_a_hanging_receiver_times_out(
    server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.1)
    monkeypatch.setattr(module, "TRIES", 2)
    server.handlers["/stuck"] = hangs
    scene = Scene(server, tmp_path, "stuck")
    scene.notifier.send(JOB, "id", "stuck", BODY)
    assert (await scene.outcome(JOB, "id")).message == "no response within 0.1 s (2 attempts)"
    await scene.notifier.close()


async def test_a_namespace_that_floods_a_receiver_leaves_workers_to_others(server: Web, tmp_path: Path) -> None:
    async def slow_for_vision(request: web.Request) -> web.StreamResponse:
        if "flood" in request.headers["Idempotency-Key"]:
            await asyncio.sleep(3600)
        return web.Response()

    server.handlers["/team"] = slow_for_vision
    scene = Scene(server, tmp_path, "team")
    for number in range(100):
        scene.notifier.send(JOB, f"flood-{number}", "team", BODY)
    await asyncio.sleep(0.1)
    scene.notifier.send(OTHER, "id", "team", BODY)
    assert (await scene.outcome(OTHER, "id")).delivered
    await scene.notifier.close()


async def test_the_body_of_a_response_is_not_read(server: Web, tmp_path: Path) -> None:
    async def floods(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 100_000)

    server.handlers["/team"] = floods
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    async with asyncio.timeout(module.SECONDS / 2):
        assert (await scene.outcome(JOB, "id")).delivered
    await scene.notifier.close()


@pytest.mark.parametrize(
    "url",
    ["", "file:///etc/passwd", "gopher://127.0.0.1/hidden", "https://", "http://127.0.0.1:1/hidden", "http://[/hidden"],
)
async def test_the_url_of_a_receiver_is_never_shown(
    url: str, server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TRIES", 1)
    scene = Scene(server, tmp_path, "team")
    (tmp_path / "team").write_text(url)
    with caplog.at_level(logging.DEBUG):
        scene.notifier.send(JOB, "id", "team", BODY)
        outcome = await scene.outcome(JOB, "id")
    assert not outcome.delivered
    for shown in (outcome.message, caplog.text):
        assert "hidden" not in shown and "passwd" not in shown and "127.0.0.1:1" not in shown
    await scene.notifier.close()


async def test_a_replaced_url_is_used_for_the_next_attempt(server: Web, tmp_path: Path) -> None:
    server.handlers["/new"] = fine

    async def gone(request: web.Request) -> web.StreamResponse:
        (tmp_path / "team").write_text(f"{server.url}/new")
        return web.Response(status=410)

    server.handlers["/team"] = gone
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    assert (await scene.outcome(JOB, "id")).delivered and server.came("/new") == ['"id"']
    await scene.notifier.close()


async def test_a_notification_whose_job_no_longer_waits_for_it_is_dropped(server: Web, tmp_path: Path) -> None:
    server.handlers["/team"] = fine
    scene = Scene(server, tmp_path, "team")
    scene.notifier.send(JOB, "id", "team", BODY)
    assert scene.notifier.outcomes(JOB, ()) == {}
    await asyncio.sleep(0.05)
    assert not server.got and not scene.notifier._sending
    await scene.notifier.close()


def test_a_namespace_may_use_only_the_receivers_that_name_it() -> None:
    receivers = Receivers({"team": ("vision",), "all": (EVERYBODY,), "nobody": ()})
    assert receivers.usable_in("vision") == {"team", "all"} and receivers.usable_in("speech") == {"all"}
    assert receivers.usable_in("visio") == {"all"}


KEY = {"DDPJOB_OPERATOR_KEY": "0123456789abcdef"}


def test_receivers_are_read_from_the_settings() -> None:
    given = {"RECEIVERS": '{"team": ["vision"]}', "RECEIVERS_FOLDER": "/receivers", "NOTIFY_LINK": "https://a/{job}"}
    settings = Settings.from_environment(KEY | {f"DDPJOB_OPERATOR_{name}": value for name, value in given.items()})
    assert settings.receivers == Receivers({"team": ("vision",)}, Path("/receivers"), "https://a/{job}")
    assert settings.receivers.link_of(JOB) == "https://a/job"
    assert Settings.from_environment(KEY).receivers.usable_in("vision") == frozenset()


@pytest.mark.parametrize(
    "wrong", ['{"../key": ["*"]}', '{"team": "vision"}', '{"team": [1]}', '["team"]', "{", '{"team": ["vision"]}']
)
def test_invalid_receivers_are_reported(wrong: str) -> None:
    with pytest.raises(SettingsError, match="DDPJOB_OPERATOR_RECEIVERS"):
        Settings.from_environment(KEY | {"DDPJOB_OPERATOR_RECEIVERS": wrong})
