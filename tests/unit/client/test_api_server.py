"""Truncated responses, and servers that are not API servers. The error is a single line, and
requests are retried if that may help.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import certifi
import pytest
import urllib3
from ddpjob.cli.main import main
from ddpjob.client.backends.api_server import AnswerTooLarge, ApiRefusal, ApiServer, BearerServer
from ddpjob.client.backends.backend import NoAnswer, Unreachable


def served(answer: bytes) -> int:
    """Return the port of a server that sends this response to one request, and closes the
    connection.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def opened(url: str, folder: Path) -> ApiServer:
    (folder / "config").write_text(
        f'{{"clusters": [{{"name": "c", "cluster": {{"server": "{url}"}}}}], "users": [{{"name": "u", "user": {{}}}}],'
        ' "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "current-context": "c"}'
    )
    return ApiServer.open(str(folder / "config"))


def test_the_users_commands_are_recognizable_in_the_audit_log(tmp_path: Path) -> None:
    """managedFields identifies a manager by the part of the user agent before the slash."""
    assert opened("http://127.0.0.1:1", tmp_path).client.user_agent == "ddpjob"


def test_a_context_that_does_not_exist_is_refused_with_the_known_contexts(tmp_path: Path) -> None:
    opened("http://127.0.0.1:1", tmp_path)
    with pytest.raises(Unreachable, match=r"^context=prod: not in the kubeconfig; choose one of its contexts: c$"):
        ApiServer.open(str(tmp_path / "config"), "prod")
    assert ApiServer.open(str(tmp_path / "config"), "c").context == "c"


@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
def test_a_truncated_response_is_treated_as_an_outage(status: str, tmp_path: Path) -> None:
    """This happens when the API server restarts. Regression: a traceback was shown, even by `wait`
    and `logs -f`, which retry.
    """
    cut = f'HTTP/1.1 {status}\r\nContent-Length: 1000\r\n\r\n{{"items": ['.encode()
    with pytest.raises(NoAnswer, match=r"\(context c\) does not answer: "):
        opened(f"http://127.0.0.1:{served(cut)}", tmp_path).request("GET", "/a")
    with pytest.raises(NoAnswer, match=r"127.0.0.1:\d+ does not answer: "):
        BearerServer(f"http://127.0.0.1:{served(cut)}", certifi.where(), "token").request("GET", "/a")


def test_a_forbidden_object_is_not_reported_as_missing(tmp_path: Path) -> None:
    """Regression: `ddpjob kill` reported a missing pod to a user who may not read pods."""
    body = b'{"kind": "Status", "status": "Failure", "reason": "R", "message": "m"}'

    def answered(status: str) -> ApiServer:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return opened(f"http://127.0.0.1:{served(head.encode() + body)}", tmp_path)

    assert answered("404 Not Found").existing("/a") is None
    with pytest.raises(ApiRefusal) as refused:
        answered("403 Forbidden").existing("/a")
    assert refused.value.denied


def test_a_truncated_refusal_of_a_log_is_reported(tmp_path: Path) -> None:
    cut = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 1000\r\n\r\nno"
    with pytest.raises(NoAnswer, match="does not answer: "):
        list(opened(f"http://127.0.0.1:{served(cut)}", tmp_path).stream("/a", {}))


def test_a_tls_error_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The official client raises a different exception for TLS errors. Regression: `ddpjob get`
    ended with a traceback.
    """
    opened(f"https://127.0.0.1:{served(b'HTTP/1.1 400 Bad Request')}", tmp_path)  # The server does not speak TLS.
    assert main(["--kubeconfig", str(tmp_path / "config"), "get"]) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert "(context c) does not answer: wrong version number" in line


def test_an_html_page_is_not_taken_for_an_empty_list_of_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page may be a proxy's login page, or from a different server at the address. Regression:
    `ddpjob get` reported no jobs.
    """
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
    for words in (["get"], ["get", "j"]):
        opened(f"http://127.0.0.1:{served(page)}", tmp_path)
        assert main(["--kubeconfig", str(tmp_path / "config"), *words]) == 3
        assert "(context c) does not seem to be an API server: its response is not a JSON" in capsys.readouterr().err


def test_a_json_error_that_is_not_a_status_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A load balancer in front of the API server may send it. Regression: `ddpjob get` ended with a
    traceback.
    """
    answer = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 13\r\n\r\n"no upstream"'
    opened(f"http://127.0.0.1:{served(answer)}", tmp_path)
    assert main(["--kubeconfig", str(tmp_path / "config"), "get"]) == 2
    assert '"no upstream"' in capsys.readouterr().err
    with pytest.raises(ApiRefusal, match="no upstream") as refusal:
        BearerServer(f"http://127.0.0.1:{served(answer)}", certifi.where(), "token").request("GET", "/a")
    assert refusal.value.passing


def test_a_json_list_is_not_taken_for_an_empty_list_of_jobs(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
    with pytest.raises(Unreachable, match="does not seem to be an API server: its response is not a JSON object"):
        opened(f"http://127.0.0.1:{served(answer)}", tmp_path).request("GET", "/a")


def silent() -> int:
    """Return the port of a server that begins each response and then falls silent."""
    listener, kept = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with listener:
            while True:
                kept.append(listener.accept()[0])
                kept[-1].recv(65536)
                kept[-1].sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\na\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.parametrize("viewer", [False, True])
def test_a_stream_ends_after_the_requested_time_without_data(viewer: bool, tmp_path: Path) -> None:
    """Regression: the limit was always 30 s with a viewer's token, so a quiet watch was restarted
    with a list of all jobs.
    """
    url = f"http://127.0.0.1:{silent()}"
    api = BearerServer(url, certifi.where(), "token") if viewer else opened(url, tmp_path)
    began = time.monotonic()
    assert list(api.stream("/a", {}, silence=0.2)) == [b"a\n"]
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("viewer", [False, True])
def test_a_dead_connection_is_noticed(viewer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens after a laptop has slept, or if its VPN is gone. Regression: `ddpjob logs -f`
    waited forever.
    """
    made: list[socket.socket] = []
    connect = urllib3.util.connection.create_connection
    monkeypatch.setattr(
        urllib3.util.connection,
        "create_connection",
        lambda *arguments, **named: made.append(connect(*arguments, **named)) or made[-1],
    )
    url = f"http://127.0.0.1:{silent()}"
    api = BearerServer(url, certifi.where(), "token") if viewer else opened(url, tmp_path)
    pieces = api.stream("/a", {})
    assert next(pieces) == b"a\n"
    [connection] = made
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    if all(hasattr(socket, name) for name in names):
        idle, each, times = (connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        assert idle + each * times <= 60


expiring: list[bool] = []
"""Whether the continue tokens of the next requests have expired, the next request last."""


@pytest.fixture
def large_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[int]]]:
    """Return (address, requested limits) of a server with 40 objects of 1,000 bytes. A dashboard
    reads at most 4,000 bytes per page.
    """
    monkeypatch.setattr("ddpjob.client.backends.api_server.LARGEST_ANSWER", 4000)
    monkeypatch.setattr("ddpjob.client.backends.api_server.LARGEST_PAGE_BYTES", 4000)
    monkeypatch.setattr(BearerServer, "largest_answer", 4000)
    asked: list[int] = []

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            begin, limit = int(query.get("continue", 0)), int(query["limit"])
            asked.append(limit)
            if expiring and expiring.pop() and begin:
                self.send_response(410)
                self.end_headers()
                self.wfile.write(b'{"reason": "Expired", "message": "too old"}')
                return
            end = min(40, begin + (limit or 40))
            meta = {"continue": str(end)} if end < 40 else {}
            body = json.dumps({"metadata": meta, "items": [{"n": n, "x": ["x" * 1000]} for n in range(begin, end)]})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()


def test_a_dashboard_reads_large_objects_in_small_pages(large_objects: tuple[str, list[int]]) -> None:
    url, asked = large_objects
    found = BearerServer(url, certifi.where(), "token").items("/a")
    assert (
        [one["n"] for one in found] == list(range(40)) and asked[:7] == [500, 125, 31, 7, 1, 2, 4] and len(asked) < 80
    )


def test_only_the_needed_fields_of_each_object_are_kept(large_objects: tuple[str, list[int]]) -> None:
    url, _ = large_objects
    alive: list[int] = []
    gc.collect()
    gc.freeze()  # This excludes objects of earlier tests, whose search for each object would take minutes.

    def shape(item: dict[str, Any]) -> dict[str, Any]:
        alive.append(sum("x" in one for one in gc.get_objects() if type(one) is dict and set(one) == {"n", "x"}))
        return {"n": item["n"]}

    found, _ = BearerServer(url, certifi.where(), "token").listing("/a", shape=shape)
    assert found == [{"n": n} for n in range(40)] and max(alive) <= 3


def test_a_dashboard_limits_the_total_size_of_one_jobs_objects(large_objects: tuple[str, list[int]]) -> None:
    """The owner of a job can create large pods and events in any number, while other users view the
    same dashboard.
    """
    url, asked = large_objects
    with pytest.raises(AnswerTooLarge, match="the objects of this job take up more than 8000 bytes"):
        BearerServer(url, certifi.where(), "token").items("/a", of_a_job=True)
    assert len(asked) < 30


def test_a_list_whose_continue_token_has_expired_is_read_again(
    large_objects: tuple[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Etcd forgets the version of a list after five minutes."""
    url, asked = large_objects
    monkeypatch.setattr("ddpjob.client.backends.api_server.LARGEST_PAGE", 30)
    expiring[:] = [True, False]
    assert [one["n"] for one in opened(url, tmp_path).items("/a")] == list(range(40)) and asked == [30, 30, 0]
    monkeypatch.setattr("ddpjob.client.backends.api_server.LARGEST_PAGE", 1)
    viewer = BearerServer(url, certifi.where(), "token")
    expiring[:] = [True, False]
    assert [one["n"] for one in viewer.items("/a")] == list(range(40))
    expiring[:] = [True] * 4
    with pytest.raises(ApiRefusal, match="too old"):
        viewer.items("/a")
    expiring.clear()


def test_a_users_own_process_reads_objects_of_any_size(large_objects: tuple[str, list[int]], tmp_path: Path) -> None:
    url, asked = large_objects
    assert len(opened(url, tmp_path).items("/a", of_a_job=True)) == 40 and asked == [500]
