"""Prometheus counters for the operator's requests and watches."""

from __future__ import annotations

from prometheus_client import Counter, disable_created_metrics

# Do not export a second series with each counter's creation time, as prometheus_client does by
# default.
disable_created_metrics()  # type: ignore[no-untyped-call]

API_REQUESTS = Counter(
    "ddpjob_operator_api_requests",
    "Requests to the API server, by verb (WATCH for watches) and HTTP status (none: no response)",
    ["verb", "code"],
)
WATCH_ERRORS = Counter(
    "ddpjob_operator_watch_errors",
    "Watches and lists that failed and were restarted, by the collection's resource",
    ["resource"],
)
