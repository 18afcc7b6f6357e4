"""The error that is raised if the API server does not respond."""

from __future__ import annotations


class Unavailable(Exception):
    """The API server is unreachable or overloaded, or it did not respond in time.

    The job is reconciled again later. `retry_after` is the delay in seconds that the server
    requested, and `status` is the HTTP status of its response. Each is None if unknown.
    """

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status
