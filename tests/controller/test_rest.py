"""The result of a request: the response, ApiError if the server refuses it, or Unavailable if it
may be retried.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ddpjob.controller.kube import rest as rest_module
from ddpjob.controller.kube.informer import Informer
from ddpjob.controller.kube.rest import REQUEST_SECONDS, ApiError, Rest
from ddpjob.engine.ports import Unavailable
from kubernetes.aio import client

from .api_server import ApiServer, Fault
from .virtual_loop import run, virtual
from .world import api_server, connected

NODES = "/api/v1/nodes"


async def asked(fault: Fault) -> Exception | dict[str, object]:
    """Return the result of a GET under a fault."""
    async with api_server() as server, connected(server) as rest:
        server.faults = lambda method, path: fault
        try:
            return await rest.request("GET", NODES)
        except (ApiError, Unavailable) as error:
            return error


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422])
def test_an_api_error_has_the_servers_status_reason_and_message(status: int) -> None:
    error = run(asked(Fault(status, reason="Because", message="of this")))
    assert isinstance(error, ApiError)
    assert (error.status, error.reason, error.message) == (status, "Because", "of this")


@pytest.mark.parametrize(("status", "header", "seconds"), [(429, "7", 7.0), (503, "", None), (500, "soon", None)])
def test_throttling_and_errors_of_the_server_can_be_retried(status: int, header: str, seconds: float | None) -> None:
    error = run(asked(Fault(status, {"Retry-After": header} if header else {})))
    assert isinstance(error, Unavailable)
    assert (error.status, error.retry_after) == (status, seconds)


def test_a_request_answered_by_a_html_page_can_be_retried() -> None:
    """A proxy may send such a page, for example to sign in."""
    error = run(asked(Fault("page")))
    assert isinstance(error, Unavailable)
    assert "<html>Please sign in</html>" in str(error)


@pytest.mark.parametrize("how", ["reset", "reset-after"])
def test_a_request_whose_connection_breaks_can_be_retried(how: str) -> None:
    error = run(asked(Fault(how)))
    assert isinstance(error, Unavailable)
    assert error.status is None


def test_a_request_without_a_response_times_out() -> None:
    async def main() -> float:
        before = asyncio.get_running_loop().time()
        error = await asked(Fault("hang"))
        assert isinstance(error, Unavailable) and str(error) == f"GET {NODES}: no response within 30 s"
        return asyncio.get_running_loop().time() - before

    assert run(main()) == pytest.approx(REQUEST_SECONDS, abs=1)


async def events(rest: Rest, version: int, silence: float = 75.0, seconds: int = 300) -> list[str]:
    """Return the events of a watch until it ends."""
    query = {"resourceVersion": str(version), "timeoutSeconds": str(seconds), "allowWatchBookmarks": "true"}
    return [event["type"] async for event in rest.watch(NODES, query, silence)]


def add(server: ApiServer, name: str) -> None:
    server.store.create("Node", {"metadata": {"name": name}}, "")


def test_a_watch_yields_changes_and_ends_when_the_server_ends_it() -> None:
    async def main() -> list[str]:
        async with api_server() as server, connected(server) as rest:
            before = server.store.version
            add(server, "a")
            asyncio.get_running_loop().call_later(10, add, server, "b")
            return await events(rest, before)

    assert run(main()) == ["ADDED", "ADDED", "BOOKMARK", "BOOKMARK", "BOOKMARK", "BOOKMARK"]


@virtual
async def test_a_watch_that_is_silent_for_too_long_is_closed() -> None:
    async with api_server() as server, connected(server) as rest:
        with pytest.raises(Unavailable):
            await events(rest, server.store.version, silence=50.0)
        assert asyncio.get_running_loop().time() < 60


@pytest.mark.parametrize("as_event", [False, True])
def test_an_expired_version_is_recognized_as_a_status_or_an_event(as_event: bool) -> None:
    async def main() -> list[str]:
        async with api_server() as server, connected(server) as rest:
            old = server.store.version
            add(server, "a")
            server.compact()
            server.gone_as_event = as_event
            return await events(rest, old)

    if as_event:
        assert run(main()) == ["ERROR"]
    else:
        with pytest.raises(ApiError) as caught:
            run(main())
        assert caught.value.status == 410


@virtual
async def test_a_watch_whose_connection_breaks_raises_unavailable() -> None:
    async with api_server() as server, connected(server) as rest:
        asyncio.get_running_loop().call_later(5, server.break_watches)
        with pytest.raises(Unavailable):
            await events(rest, server.store.version)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("depth", [100, 990, 2000, 10_000])
def test_a_very_deeply_nested_object_does_not_hide_other_objects_of_a_list(
    depth: int, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec of a podTemplate may be nested arbitrarily deep. `limited` simulates the C recursion
    limit of Python 3.12 and later.
    """
    loads, before = json.loads, sys.getrecursionlimit()

    def limited_loads(text: bytes) -> Any:
        if text.count(b"{") > 1000:
            raise RecursionError
        return loads(text)

    if limited:
        monkeypatch.setattr(json, "loads", limited_loads)
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    page = rest_module._parse(b'{"items": [{"metadata": {"name": "other"}}, {"spec": ' + deep + b"}]}")
    assert page["items"][0] == {"metadata": {"name": "other"}}
    assert sys.getrecursionlimit() == before


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b'{"text": "\\ud800"}', {"text": "\ud800"}),
        (b'{"items": null, "number": 9223372036854775807}', {"items": None, "number": 2**63 - 1}),
        (b"<html>", {}),
        (b'{"cut": ', {}),
        (b"[]", {}),
    ],
)
def test_any_response_is_read_as_an_object(text: bytes, read: dict[str, Any]) -> None:
    assert rest_module._parse(text) == read


@virtual
async def test_an_informer_survives_any_error() -> None:
    errors: list[Exception] = [RecursionError(), AttributeError(), RuntimeError(), KeyError()]

    class Broken:
        async def request(self, *_: Any, **__: Any) -> dict[str, Any]:
            if errors:
                raise errors.pop()
            return {"metadata": {"resourceVersion": "1"}, "items": []}

        async def watch(self, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
            await asyncio.sleep(1e9)
            yield {}

    informer = Informer[Any](Broken(), NODES, lambda body: body, lambda before, after: None)  # type: ignore[arg-type]
    following = asyncio.create_task(informer.run())
    async with asyncio.timeout(60):
        await informer.listed.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_requests_of_the_operator_are_recognizable_in_the_audit_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """managedFields identifies a manager by the part of the user agent before the slash."""
    sent: list[str] = []

    async def main() -> None:
        async with api_server() as server, connected(server) as rest:
            sent.append(rest.api.user_agent)

    run(main())
    assert sent == ["ddpjob-operator"]


def test_the_environment_is_read_only_once_and_not_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp reads the environment in a thread for each request. It also reads the user's
    ~/.netrc, whose passwords are not meant for the API server.
    """
    reads: list[str] = []
    monkeypatch.setattr("aiohttp.client.get_env_proxy_for_url", lambda url: reads.append("proxy"))
    monkeypatch.setattr("aiohttp.ClientSession._get_netrc_auth", lambda session, host: reads.append("netrc"))

    async def main() -> None:
        async with api_server() as server, connected(server) as rest:
            await rest.request("GET", NODES)

    run(main())
    assert reads == []


@pytest.mark.parametrize(
    ("bypass", "host", "proxy"),
    [
        ("", "api.example", "http://proxy:3128"),
        ("other,api.example", "api.example", None),
        ("10.0.0.0/8,.svc", "api.example", "http://proxy:3128"),
        ("10.0.0.0/8,.svc", "10.96.0.1", None),
        (".svc, fd00::/8", "[fd00::1]", None),
        ("10.0.0.0/8,fd00::/8,10.0.0.0/x", "192.168.0.1", "http://proxy:3128"),
    ],
)
def test_the_api_server_is_reached_through_the_proxy_in_the_environment(
    bypass: str, host: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_PROXY may contain networks, because in a cluster the API server is addressed by its
    Service's IP address.
    """
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", bypass)
    monkeypatch.setenv("no_proxy", bypass)

    async def main() -> None:
        rest = Rest.open(client.Configuration(host=f"https://{host}:6443"), connections=1)
        assert rest.api.configuration.proxy == proxy
        await rest.close()

    asyncio.run(main())


def test_without_credentials_the_operator_exits_with_one_line_that_names_them(tmp_path: Path) -> None:
    """A cluster's policy may give a pod no token."""
    service = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    given = {**os.environ, **service, "KUBECONFIG": str(tmp_path / "none"), "DDPJOB_OPERATOR_KEY": "k" * 16}
    command = [sys.executable, "-m", "ddpjob.controller"]
    ended = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("ddpjob-operator: cannot sign in")
    assert "Service token file does not exist." in said and "a kubeconfig is required (" in said


def test_events_that_arrive_together_do_not_block_the_event_loop() -> None:
    """This happens when a thousand pods die. The Lease must still be renewed."""
    many, read = 400, list[str]()

    class Backlog(Rest):
        def __init__(self) -> None:
            """Leave out the client, which is not needed."""

        async def request(self, *_: Any, **__: Any) -> Any:
            return {"metadata": {"resourceVersion": "1"}, "items": []}

        async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            for number in range(many):
                meta = {"name": f"node-{number}", "resourceVersion": str(number + 2)}
                yield {"type": "ADDED", "object": {"metadata": meta}}
            await asyncio.sleep(1e9)

    def read_slowly(body: Any) -> str:
        time.sleep(0.001)
        read.append(body["metadata"]["name"])
        return read[-1]

    async def main() -> int:
        turns = 0
        following = asyncio.create_task(Informer(Backlog(), NODES, read_slowly, lambda before, after: None).run())
        while len(read) < many:
            await asyncio.sleep(0)
            turns += 1
        following.cancel()
        return turns

    assert asyncio.run(main()) >= 10


@pytest.mark.parametrize(("optional", "level"), [(True, "INFO"), (False, "ERROR")])
def test_a_right_that_is_withheld_on_purpose_is_not_logged_as_an_error(
    optional: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The chart's queues.kueue=false withholds such a right. Other missing rights are logged as
    errors, for the person on call.
    """

    async def main() -> None:
        async with api_server() as server, connected(server) as rest:
            server.faults = lambda method, path: Fault(403, reason="Forbidden")
            informer = Informer(rest, NODES, lambda body: body, lambda before, after: None, optional=optional)
            following = asyncio.create_task(informer.run())
            await informer.answered.wait()
            following.cancel()
            assert informer.listed.is_set() == optional

    with caplog.at_level("INFO"):
        run(main())
    said = [record.levelname for record in caplog.records if "cannot be watched" in record.message]
    assert said == [level]
