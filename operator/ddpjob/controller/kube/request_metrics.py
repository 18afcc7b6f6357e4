"""What the operator's requests and watches count for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, disable_created_metrics

# Else each counter has a second series for its beginning.
disable_created_metrics()  # type: ignore[no-untyped-call]

API_REQUESTS = Counter(
    "ddpjob_operator_api_requests",
    "Requests to the API server, by verb (WATCH for watches) and HTTP status; none: there was no answer",
    ["verb", "code"],
)
WATCH_ERRORS = Counter(
    "ddpjob_operator_watch_errors",
    "Watches and lists that failed and were started again, by the collection's resource",
    ["resource"],
)
