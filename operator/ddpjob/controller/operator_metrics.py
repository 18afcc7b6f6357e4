"""The operator's own Prometheus metrics, and the port that serves all metrics.

Metrics of jobs are in `job_metrics`.
"""

from __future__ import annotations

import platform
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from ddpjob.controller.kube.request_metrics import API_REQUESTS as API_REQUESTS
from ddpjob.controller.kube.request_metrics import WATCH_ERRORS as WATCH_ERRORS
from ddpjob.missing_package import installed_version

RECONCILE_SECONDS = Histogram(
    "ddpjob_operator_reconcile_duration_seconds",
    "Duration of one reconcile, by result: done, conflict (another client wrote the status, so the reconcile is "
    "repeated), unavailable (the API server did not respond), left (the job belongs to another operator, the"
    " first lists are incomplete, or the Lease was lost), failed (a defect; the log has its traceback)",
    ["result"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
RESULTS = ("done", "conflict", "unavailable", "left", "failed")
for _result in RESULTS:
    RECONCILE_SECONDS.labels(_result)
SHARDS = Gauge("ddpjob_operator_shards", "Number of shards with which this replica was started")
LEADING = Gauge(
    "ddpjob_operator_leader", "Shards for which this replica acts; without sharding, 1 on the leader, else 0"
)
QUEUE_DEPTH = Gauge("ddpjob_operator_queue_depth", "Due jobs that are waiting for a worker")
QUEUE_AGE = Gauge("ddpjob_operator_queue_age_seconds", "Time for which the first due job has waited for a worker")
LONGEST_TURN = Gauge(
    "ddpjob_operator_longest_loop_turn_seconds",
    "Longest turn of the event loop within the last minute or two; a turn blocks everything else, such as the "
    "renewal of the Lease",
)
MISSING_FIELDS = Gauge(
    "ddpjob_operator_crd_missing_fields",
    "Status fields that the DDPJob definition in the cluster lacks; if above 0, the operator does not act on any job",
)
COORDINATORS = Gauge(
    "ddpjob_operator_coordinators",
    "Coordinators of running jobs, by whether they respond to the operator (reachable, unreachable)",
    ["state"],
)
NOTIFICATIONS = Counter(
    "ddpjob_operator_notifications",
    "Attempts to notify a receiver, by result: delivered, failed (to be retried or given up), given_up",
    ["result"],
)
for _result in ("delivered", "failed", "given_up"):
    NOTIFICATIONS.labels(_result)
BUILD_INFO = Gauge(
    "ddpjob_operator_build_info", "Always 1; the labels show the versions", ["version", "python_version"]
)


BUILD_INFO.labels(installed_version(), platform.python_version()).set(1)


# --- the event loop ---------------------------------------------------------------------------------------------

TURNS_SECONDS = 60.0
"""Minimum number of seconds for which a turn's duration is remembered. A duration is remembered for
at most twice this time."""


class TurnMeter(selectors.DefaultSelector):
    """The selector of an event loop, which also measures the loop's turns.

    A turn is the time that the loop spends between two calls to the selector.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._began: float | None = None
        """The time at which the current turn began. None while the loop waits for events."""
        self._kept = 0, 0.0, 0.0
        """The number of the current period of TURNS_SECONDS, the longest turn in this period, and
        the longest turn in the previous period.
        """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events.

        The call ends the loop's current turn, and its return begins the next turn.
        """
        if self._began is not None:
            now = self._clock()
            period, longest, before = self._at(now)
            self._kept = period, max(longest, now - self._began), before
            self._began = None
        try:
            return super().select(timeout)
        finally:
            self._began = self._clock()

    def longest(self) -> float:
        """Return the duration in seconds of the longest recent turn, including the current turn.

        This method can be called from any thread.
        """
        now, began = self._clock(), self._began
        _, longest, before = self._at(now)
        return max(longest, before, now - began if began is not None else 0.0)

    def _at(self, now: float) -> tuple[int, float, float]:
        period, (known, longest, before) = int(now // TURNS_SECONDS), self._kept
        if period == known:
            return known, longest, before
        return period, 0.0, longest if period == known + 1 else 0.0


# --- the port ---------------------------------------------------------------------------------------------------

CONNECTIONS = 16
"""Maximum number of clients that are served at the same time. The number is limited because anybody
on the network can connect. Additional clients are refused.
"""
PATIENCE = 10.0
"""Maximum time in seconds that a connected client may be silent."""
FRESH_SECONDS = 0.5
"""Minimum number of seconds for which the rendered metrics are reused."""
SHARE = 0.1
"""Maximum share of one CPU's time that is spent on rendering metrics. If there are many jobs,
rendering takes longer, so the text is also reused for longer."""


class Page:
    """A WSGI application that serves the text of all metrics.

    The text is kept for a short time, and serves all clients during this time.
    """

    def __init__(self, render: Callable[[], bytes] = generate_latest) -> None:
        self._render = render
        self._lock = threading.Lock()
        self._text, self._until = b"", 0.0

    def text(self) -> bytes:
        """Return the text of all metrics. Exceptions raised by collectors are propagated."""
        with self._lock:
            if time.monotonic() >= self._until:
                began = time.thread_time()
                self._text = self._render()
                self._until = time.monotonic() + max(FRESH_SECONDS, (time.thread_time() - began) / SHARE)
            return self._text

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve the text of the metrics for any path and any method."""
        text = self.text()
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
        return [text]


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves each connection in its own thread.

    There are at most CONNECTIONS threads, because each of them costs memory and time. The server
    responds even if the event loop hangs.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._free = threading.Semaphore(CONNECTIONS)
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, place = found[0]
        super().__init__((str(place[0]), address[1]), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread that serves a connection.

        This method runs in the thread that accepts connections, so it must not wait.
        """
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        # No thread was started, so no thread will release the semaphore.
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection. This method runs in the connection's own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors, such as a client that disconnects or stays silent."""


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because every scrape would add a line to the log."""


def serve(port: int, address: str, page: Page | None = None) -> MetricsServer:
    """Serve the metrics for Prometheus on this port, in threads.

    The server runs until its `shutdown` is called or the process ends.
    """
    server = make_server(address, port, page or Page(), MetricsServer, _Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
