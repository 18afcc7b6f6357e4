"""The dashboard of a cluster: viewers see only objects that the API server lets their own tokens
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import certifi
import pytest
from aiohttp import web
from ddpjob.dashboard import viewers
from ddpjob.dashboard.gate import FleetView
from ddpjob.dashboard.viewers import Viewers
from ddpjob.dashboard.web_server import serve
from machine import slowness

from benchmarks.dashboard_views import record

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ROOT = "/apis/ddpjob.io/v1alpha1"


class Rbac:
    """An API server with a set of tokens, and the namespaces that each of them may list (`*` means
    all). It serves jobs, pods and events.
    """

    def __init__(self) -> None:
        self.rights: dict[str, set[str]] = {}
        self.jobs: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        """(token, path) of every request."""
        self.withheld: set[str] = set()
        """Kinds that no token may read."""
        self.news = asyncio.Event()

    def add(self, namespace: str, number: int, name: str) -> None:
        body = record(number, NOW)
        body.pop("local")
        body["metadata"] |= {"namespace": namespace, "name": name, "resourceVersion": str(len(self.jobs) + 1)}
        self.jobs.append(body)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked.append((token, request.path))
        if token not in self.rights:
            return self.refuse(401, "Unauthorized")
        if request.path.endswith("/selfsubjectreviews"):
            assert request.method == "POST"
            name = f"user-of-{token}"
            if token.startswith("account."):
                name = f"system:service{token.replace('.', ':')}"
            return web.json_response({"status": {"userInfo": {"username": name}}})
        found = re.fullmatch(
            r"(?:/apis/ddpjob\.io/v1alpha1|/api/v1)(?:/namespaces/([^/]+))?/([^/]+)(?:/(.+))?", request.path
        )
        if found is None or request.method != "GET":
            return self.refuse(404, "the server could not find the requested resource")
        namespace, plural, name = found.groups()
        if not {"*", namespace} & self.rights[token] or plural in self.withheld:
            return self.refuse(403, f'{plural} is forbidden: User "user-of-{token}" cannot list in {namespace or "*"}')
        jobs = [job for job in self.jobs if namespace in (None, job["metadata"]["namespace"])]
        if plural != "ddpjobs":
            return web.json_response({"metadata": {}, "items": []})
        if name:
            one = next((job for job in jobs if job["metadata"]["name"] == name), None)
            return web.json_response(one) if one else self.refuse(404, f'ddpjobs "{name}" not found')
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": jobs})
        stream = web.StreamResponse()
        await stream.prepare(request)
        await self.news.wait()
        return stream

    @staticmethod
    def refuse(status: int, message: str) -> web.Response:
        return web.json_response({"kind": "Status", "message": message}, status=status)


@contextlib.asynccontextmanager
async def started(app: Any) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Rbac, str]]:
    rbac = Rbac()
    rbac.rights = {"admin": {"*"}, "ann": {"team-a"}, "bob": {"team-b"}, "nobody": set()}
    for number, (namespace, name) in enumerate((("team-a", "alpha"), ("team-b", "beta"), ("team-c", "gamma"))):
        rbac.add(namespace, number, name)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", rbac.answer)
    async with started(app) as url:
        yield rbac, url


class Visitor:
    """A browser that does not follow redirects."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address, self.session = address, session

    async def ask(self, path: str, token: str = "", *, method: str = "GET", **rest: Any) -> tuple[int, str]:
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **rest.pop("headers", {})}
        async with self.session.request(
            method, self.address + path, headers=headers, allow_redirects=False, **rest
        ) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["Cache-Control"] == "no-store"
            return answer.status, await answer.text()

    async def sign_in(self, token: str, namespaces: str = "", **headers: str) -> tuple[int, str]:
        form = {"token": token, "namespaces": namespaces}
        return await self.ask("/sign-in", method="POST", data=form, headers={"Origin": self.address, **headers})


@contextlib.asynccontextmanager
async def opened(url: str, *namespaces: str, names: tuple[str, ...] = ()) -> AsyncIterator[tuple[Visitor, Viewers]]:
    gate = Viewers(url, "", names, namespaces)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(gate, host="127.0.0.1", port=0, started=port.set_result))
    try:
        address = f"http://127.0.0.1:{await port}"
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            yield Visitor(address, session), gate
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_end(stream: aiohttp.ClientResponse) -> None:
    async with asyncio.timeout(30 * slowness()):
        while await stream.content.readany():
            pass


async def test_two_viewers_see_different_namespaces(cluster: tuple[Rbac, str]) -> None:
    rbac, url = cluster
    async with opened(url, "team-a", "team-b") as (visitor, _):
        for token, seen, unseen in (("ann", "alpha", "beta"), ("bob", "beta", "alpha"), ("ann", "alpha", "beta")):
            status, page = await visitor.ask("/", token)
            assert status == 200 and seen in page and unseen not in page and "gamma" not in page
            assert f"user-of-{token}" in page
        status, page = await visitor.ask("/", "admin")
        assert all(name in page for name in ("alpha", "beta", "gamma")) and "all namespaces" in page
    assert {token for token, _ in rbac.asked} == {"ann", "bob", "admin"}, "no request is sent without a viewer's token"


async def test_each_row_names_its_namespace_if_there_are_several_namespaces(cluster: tuple[Rbac, str]) -> None:
    """Regression: the column was missing if a filter or a page contained only the jobs of one
    namespace.
    """
    rbac, url = cluster
    rbac.rights["ann"] = {"team-a", "team-b"}
    async with opened(url, "team-a", "team-b") as (visitor, _):
        for path in ("/", "/?q=alpha", "/?q=beta"):
            assert "<td>team-" in (await visitor.ask(path, "ann"))[1], path
        assert "<td>team-" not in (await visitor.ask("/", "bob"))[1], "a single namespace is named in the page's head"


async def test_without_a_token_no_page_is_served(cluster: tuple[Rbac, str]) -> None:
    rbac, url = cluster
    async with opened(url, "team-a") as (visitor, _):
        await visitor.ask("/", "ann")
        for path in ("/", "/jobs/team-a/alpha", "/jobs/team-a/alpha/logs", "/jobs/team-a/alpha/log", "/live",
                     "/jobs/team-a/alpha/manifest", "/jobs/team-a/alpha/curves"):  # fmt: skip
            status, page = await visitor.ask(path)
            assert status == 401 and "alpha" not in page.replace(path, "") and "team-a" not in page, path
        assert not any(path.endswith("/alpha") for _, path in rbac.asked)
        for wrong in ("made-up", "x" * 100):
            assert (await visitor.ask("/", wrong))[0] == 401
        async with visitor.session.get(visitor.address + "/", headers={"Authorization": "Basic YTpi"}) as answer:
            assert answer.status == 401
        assert (await visitor.ask("/healthz"))[0] == 200
        status, page = await visitor.ask("/", "nobody")
        assert status == 403 and "user-of-nobody is not permitted to list DDPJobs" in page and "alpha" not in page


async def test_pages_read_by_one_viewer_are_not_served_to_another(cluster: tuple[Rbac, str]) -> None:
    rbac, url = cluster
    async with opened(url, "team-a", "team-b") as (visitor, _):
        for path in ("/jobs/team-a/alpha", "/jobs/team-a/alpha/manifest", "/jobs/team-a/alpha/curves"):
            assert (await visitor.ask(path, "ann"))[0] == 200
            status, page = await visitor.ask(path, "bob")
            assert status == 404 and "GPU" not in page, "neither the page nor the data read for it"
        rbac.rights["carl"] = {"team-a"}
        before = len(rbac.asked)
        assert (await visitor.ask("/jobs/team-a/alpha", "carl"))[0] == 200
        assert all(token == "carl" for token, _ in rbac.asked[before:])
        assert any(path.endswith("/ddpjobs/alpha") for _, path in rbac.asked[before:]), (
            "carl's own token has read this page"
        )


async def test_a_page_is_no_longer_served_when_its_viewers_rights_end(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rbac, url = cluster
    monkeypatch.setattr(viewers, "TRUST_SECONDS", 0.0)
    async with opened(url, "team-a", "team-b") as (visitor, gate):
        rbac.rights["ann"] = {"team-a", "team-b"}
        assert "beta" in (await visitor.ask("/", "ann"))[1]
        rbac.rights["ann"] = {"team-a"}
        status, page = await visitor.ask("/", "ann")
        assert status == 200 and "alpha" in page and "beta" not in page
        rbac.rights["ann"] = set()
        assert (await visitor.ask("/", "ann"))[0] == 403
        del rbac.rights["ann"]
        assert (await visitor.ask("/", "ann"))[0] == 401
        assert not gate._views


async def test_a_stream_ends_when_its_token_expires(cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rbac, url = cluster
    monkeypatch.setattr(viewers, "TRUST_SECONDS", 0.1)
    async with opened(url, "team-a") as (visitor, _):
        headers = {"Authorization": "Bearer ann"}
        async with visitor.session.get(visitor.address + "/live", headers=headers) as live:
            assert b"changed" in await live.content.readany()
            del rbac.rights["ann"]
            await until_end(live)


async def test_an_error_while_checking_one_token_does_not_stop_the_checks(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: streams kept revoked tokens for as long as their pages were open."""
    rbac, url = cluster
    monkeypatch.setattr(viewers, "TRUST_SECONDS", 0.1)
    async with opened(url, "team-a") as (visitor, gate):
        judged, faults = gate._again, [KeyError("no such thing")]

        async def again(*arguments: Any) -> None:
            if faults:
                raise faults.pop()
            await judged(*arguments)

        async with visitor.session.get(visitor.address + "/live", headers={"Authorization": "Bearer ann"}) as live:
            assert b"changed" in await live.content.readany()
            monkeypatch.setattr(gate, "_again", again)
            del rbac.rights["ann"]
            await until_end(live)
        assert not faults


async def test_a_viewer_can_sign_in_and_out(cluster: tuple[Rbac, str]) -> None:
    _, url = cluster
    async with opened(url) as (visitor, gate):
        status, page = await visitor.sign_in("made-up")
        assert status == 401 and "does not accept" in page
        assert (await visitor.sign_in("a b"))[0] == 400 and (await visitor.sign_in(""))[0] == 400
        assert (await visitor.sign_in("ann", "Team_A"))[0] == 400
        assert (await visitor.sign_in("ann", "team-a, team-b"))[0] == 303
        cookies = {cookie.key: cookie for cookie in visitor.session.cookie_jar}
        (session,) = [cookie for name, cookie in cookies.items() if name != "ddpjob-namespaces"]
        assert session["httponly"] and session["samesite"] == "Lax" and "ann" not in session.value
        status, page = await visitor.ask("/")
        assert status == 200 and "alpha" in page and "beta" not in page and "Sign out" in page
        assert (await visitor.ask("/sign-out", method="POST", headers={"Origin": visitor.address}))[0] == 303
        assert (await visitor.ask("/"))[0] == 401 and not gate._views and not gate._sessions


async def test_a_pasted_token_is_forgotten_after_a_time_limit(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: if a user did not return, the token stayed in memory until the server ended."""
    _, url = cluster
    monkeypatch.setattr(viewers, "TRUST_SECONDS", 0.05)
    async with opened(url, "team-a") as (visitor, gate):
        assert (await visitor.sign_in("ann"))[0] == 303
        async with visitor.session.get(visitor.address + "/live") as live:
            assert b"changed" in await live.content.readany()
            assert gate._sessions and gate._views
            monkeypatch.setattr(viewers, "SESSION_SECONDS", 0.0)
            await until_end(live)
        assert not gate._sessions and not gate._views


async def test_no_data_is_kept_about_a_token_that_is_no_longer_used(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy sends a new token every few minutes. Regression: a lock was kept for each token, so
    the memory grew.
    """
    _, url = cluster
    monkeypatch.setattr(viewers, "TRUST_SECONDS", 0.05)
    async with opened(url, "team-a") as (visitor, gate):
        async with visitor.session.get(visitor.address + "/live", headers={"Authorization": "Bearer ann"}) as live:
            assert b"changed" in await live.content.readany()
        monkeypatch.setattr(viewers, "IDLE_SECONDS", 0.0)
        for _ in range(int(200 * slowness())):
            if not gate._views:
                break
            await asyncio.sleep(0.05)
        assert not gate._views and not gate._locks


async def test_another_website_can_neither_sign_in_nor_read_pages(cluster: tuple[Rbac, str]) -> None:
    _, url = cluster
    async with opened(url, "team-a") as (visitor, gate):
        evil = {"Origin": "https://evil.example"}
        assert (await visitor.sign_in("ann", **evil))[0] == 403
        assert (await visitor.sign_in("ann", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}))[
            0
        ] == 403
        assert (await visitor.ask("/sign-in", method="POST", data={"token": "ann"}))[0] == 403, (
            "a request without an Origin header is refused"
        )
        assert not gate._sessions
        assert (await visitor.sign_in("ann"))[0] == 303
        assert (await visitor.ask("/sign-out", method="POST", headers=evil))[0] == 403
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        assert (await visitor.ask("/jobs/team-a/alpha/curves", headers=headers))[0] == 403
        assert (await visitor.ask("/", headers={"Host": "evil.example"}))[0] == 421


async def test_a_token_is_accepted_only_over_https_or_loopback(cluster: tuple[Rbac, str]) -> None:
    rbac, url = cluster
    async with opened(url, "team-a", names=("jobs.example.com",)) as (visitor, _):
        for headers in (
            {"Host": "10.1.2.3:8300"}, {"Host": "jobs.example.com"},
            {"Host": "jobs.example.com", "X-Forwarded-Proto": "http"},
            {"Host": "10.1.2.3", "X-Forwarded-Proto": "https"},
        ):  # fmt: skip
            status, page = await visitor.ask("/", "ann", headers=headers)
            assert status == 403 and "encrypted" in page, headers
        assert not rbac.asked
        proxied = {"Host": "jobs.example.com", "X-Forwarded-Proto": "https"}
        assert (await visitor.ask("/", "ann", headers=proxied))[0] == 200
        form = {"token": "ann", "namespaces": ""}
        origin = {**proxied, "Origin": "https://jobs.example.com"}
        async with visitor.session.post(
            visitor.address + "/sign-in", data=form, headers=origin, allow_redirects=False
        ) as answer:
            (cookie,) = [value for value in answer.headers.getall("Set-Cookie") if "__Host-ddpjob=" in value]
            assert "Secure" in cookie and "HttpOnly" in cookie and "Path=/" in cookie


async def test_one_users_many_tokens_do_not_displace_other_users_sessions(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = cluster
    monkeypatch.setattr(viewers, "MOST_VIEWS", 5)
    async with opened(url, "team-a", "team-b") as (visitor, gate):
        await visitor.ask("/", "bob")
        for number in range(8):
            path = f"/?q={number}"
            assert (await visitor.ask(path, "ann", headers={"Cookie": f"ddpjob-namespaces=team-a.x{number}"}))[0] == 200
        users = [opened.view.user for opened in gate._views.values()]
        assert sorted(users) == ["user-of-ann"] * viewers.MOST_OF_A_USER + ["user-of-bob"]


@pytest.mark.parametrize("namespaces", [1, 8])
async def test_a_tenants_many_service_accounts_do_not_displace_other_users(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch, namespaces: int
) -> None:
    """Each of them has a stream open, in one namespace or in several. They do not lock out other
    users either.
    """
    rbac, url = cluster
    monkeypatch.setattr(viewers, "MOST_VIEWS", 32)
    accounts = [f"account.evil-{number % namespaces}.a{number}" for number in range(64)]
    rbac.rights |= {account: {"team-a"} for account in accounts}
    async with opened(url, "team-a", "team-b") as (visitor, gate):
        await visitor.ask("/", "bob")
        for account in accounts:
            assert (await visitor.ask("/", account))[0] in (200, 503)
            for one in gate._views.values():
                one.view.streams = 1
        users = [opened.view.user for opened in gate._views.values()]
        assert "user-of-bob" in users and len(users) <= 1 + namespaces * viewers.MOST_OF_A_NAMESPACE
        for newcomer in ("ann", "admin"):
            assert (await visitor.ask("/", newcomer))[0] == 200
        users = [opened.view.user for opened in gate._views.values()]
        assert {"user-of-ann", "user-of-bob", "user-of-admin"} <= set(users) and len(users) <= 32


async def test_a_namespaces_service_accounts_do_not_displace_other_sessions(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rbac, url = cluster
    monkeypatch.setattr(viewers, "MOST_SESSIONS", 20)
    accounts = [f"account.evil.a{number}" for number in range(30)]
    rbac.rights |= {account: {"team-a"} for account in accounts}
    async with opened(url, "team-a", "team-b") as (visitor, gate):
        for token in ("bob", *accounts):
            assert (await visitor.sign_in(token))[0] == 303
        users = [session.user for session in gate._sessions.values()]
        assert "user-of-bob" in users and len(users) == 1 + viewers.MOST_OF_A_NAMESPACE


async def test_objects_that_a_viewer_may_not_read_are_not_reported_as_missing(cluster: tuple[Rbac, str]) -> None:
    rbac, url = cluster
    async with opened(url, "team-a") as (visitor, _):
        _, page = await visitor.ask("/jobs/team-a/alpha", "ann")
        assert "no pod" in page and "No events. A cluster keeps them for an hour." in page
    rbac.withheld = {"pods", "events"}
    async with opened(url, "team-a") as (visitor, _):
        _, page = await visitor.ask("/jobs/team-a/alpha", "ann")
        assert "Not shown: pods: " in page and "Not shown: events: " in page
        assert "no pod" not in page and "None; a cluster" not in page and ">Not shown.<" in page


async def test_a_page_asks_to_sign_in_again_if_its_session_was_closed(
    cluster: tuple[Rbac, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user signed out in a different window. Regression: an internal error was shown."""
    admit = Viewers.admit

    async def leave_immediately(gate: Viewers, request: web.Request) -> FleetView:
        view = await admit(gate, request)
        view.close()
        return view

    monkeypatch.setattr(Viewers, "admit", leave_immediately)
    async with opened(cluster[1], "team-a") as (visitor, _):
        status, page = await visitor.ask("/jobs/team-a/alpha", "ann")
        assert status == 401 and "Open the page again" in page


async def test_the_dashboard_runs_no_command_in_a_pod(cluster: tuple[Rbac, str]) -> None:
    rbac, url = cluster
    async with opened(url, "team-a") as (visitor, _):
        status, curves = await visitor.ask("/jobs/team-a/alpha/curves?pods=1", "ann")
        assert status == 200 and json.loads(curves)["more"] is False
        status, page = await visitor.ask("/jobs/team-a/alpha/logs?gone=1&pod=alpha-0-7", "ann")
        assert status == 200 and "Look for logs" not in page and "alpha-0-7" not in page
        assert not any("exec" in path for _, path in rbac.asked)


async def test_a_cluster_that_does_not_respond_is_reported(cluster: tuple[Rbac, str]) -> None:
    async with opened("http://127.0.0.1:9") as (visitor, gate):
        status, page = await visitor.ask("/", "ann")
        assert status == 502 and "does not answer" in page and "alpha" not in page and not gate._views


@pytest.mark.parametrize("port", ["99999", "x"])
def test_an_invalid_port_is_reported_in_one_line(port: str) -> None:
    """Regression: the dashboard listened on port 34463, which is 99999 modulo 65536."""
    given = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "1", "DDPJOB_DASHBOARD_CA": certifi.where()}
    environment = {**os.environ, **given, "DDPJOB_DASHBOARD_PORT": port}
    ran = subprocess.run(
        [sys.executable, "-m", "ddpjob.dashboard"], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    [line] = ran.stderr.splitlines()
    assert line.startswith("ddpjob.dashboard: DDPJOB_DASHBOARD_PORT is '") and "must be a port number" in line
