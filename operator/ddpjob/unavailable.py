"""The error raised if the API server does not respond to a request."""

from __future__ import annotations


class Unavailable(Exception):
    """The API server is unreachable or overloaded, or the request timed out.

    The job is reconciled again later. `retry_after` (in seconds) and the HTTP `status` are set if
    the server sent them.
    """

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status
