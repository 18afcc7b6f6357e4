"""The operator's metrics port: requests take only a limited share of the operator's time, however
many arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from ddpjob.controller import operator_metrics
from ddpjob.controller.operator_metrics import CONNECTIONS, TURNS_SECONDS, MetricsServer, Page, TurnMeter, serve


class Text:
    """A page of metrics whose rendering takes `seconds` of CPU time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.made = seconds, 0

    def __call__(self) -> bytes:
        self.made += 1
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return b"text %d\n" % self.made


@pytest.fixture
def served() -> Iterator[Callable[[Callable[[], bytes]], int]]:
    """Yield a function that serves a page of metrics and returns the port."""
    servers: list[MetricsServer] = []

    def start(text: Callable[[], bytes]) -> int:
        servers.append(serve(0, "127.0.0.1", Page(text)))
        return int(servers[0].server_port)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(port: int) -> tuple[int, str, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()


def test_metrics_are_rendered_once_for_all_requests_within_a_moment(
    served: Callable[[Callable[[], bytes]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_metrics, "SHARE", 0.001)
    text = Text(seconds=0.1)  # 100 seconds of pause
    port = served(text)
    for _ in range(30):
        assert ask(port) == (200, "text/plain; version=0.0.4; charset=utf-8", b"text 1\n")
    assert text.made == 1


def test_metrics_are_rendered_again_once_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_metrics, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(operator_metrics, "SHARE", 1e9)
    page = Page(Text())
    assert [page.text(), page.text()] == [b"text 1\n", b"text 2\n"]


def test_connections_above_a_limit_are_refused(
    served: Callable[[Callable[[], bytes]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_metrics._Handler, "timeout", 600.0)
    port, threads = served(Text()), threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(CONNECTIONS + 20)
        ]
        assert all(connection.recv(1) == b"" for connection in silent[CONNECTIONS:])
        assert threading.active_count() <= threads + CONNECTIONS
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask(port)[0] == 200, "the connections above the limit are closed"


def test_a_silent_connection_is_closed(
    served: Callable[[Callable[[], bytes]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_metrics._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", served(Text())), timeout=60) as connection:
        assert connection.recv(1) == b""


def test_the_longest_turn_of_an_event_loop_is_measured_and_then_forgotten() -> None:
    now = 600.0
    meter = TurnMeter(lambda: now)
    meter.select(0)
    now += 3.0
    assert meter.longest() == 3.0, "a turn that has not ended counts"
    meter.select(0)
    now += 0.5
    meter.select(0)
    assert meter.longest() == 3.0
    now += TURNS_SECONDS - 10
    meter.select(0)
    now += TURNS_SECONDS
    meter._began = None  # the loop waits for events
    assert meter.longest() == TURNS_SECONDS - 10
    now += TURNS_SECONDS
    assert meter.longest() == 0.0
    meter.close()


def test_the_turns_of_a_real_event_loop_are_measured() -> None:
    async def main() -> None:
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 (it blocks the loop)
        await asyncio.sleep(0)

    meter = TurnMeter()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(meter)) as runner:
        runner.run(main())
        assert meter.longest() >= 0.2
