"""The port of the operator's metrics: whoever asks, however often, costs the operator no more than a bounded share."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from ddpjob.controller import operator_metrics
from ddpjob.controller.operator_metrics import CONNECTIONS, MetricsServer, Page, serve


class Text:
    """A text that takes so much of a CPU's time to make."""

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
    """Serves a text and returns the port."""
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


def test_a_text_is_made_once_for_all_who_ask_within_a_moment(
    served: Callable[[Callable[[], bytes]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_metrics, "SHARE", 0.001)
    text = Text(seconds=0.1)  # 100 seconds to rest.
    port = served(text)
    for _ in range(30):
        assert ask(port) == (200, "text/plain; version=0.0.4; charset=utf-8", b"text 1\n")
    assert text.made == 1


def test_a_text_is_made_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_metrics, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(operator_metrics, "SHARE", 1e9)
    page = Page(Text())
    assert [page.text(), page.text()] == [b"text 1\n", b"text 2\n"]


def test_connections_beyond_a_number_are_refused(
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
    assert ask(port)[0] == 200, "they are gone"


def test_a_connection_that_is_silent_ends(
    served: Callable[[Callable[[], bytes]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_metrics._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", served(Text())), timeout=60) as connection:
        assert connection.recv(1) == b""
