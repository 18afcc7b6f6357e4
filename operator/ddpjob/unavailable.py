"""The error of a request to an API server that is currently not responding."""

from __future__ import annotations


class Unavailable(Exception):
    """The API server is unreachable, is throttling or timed out.

    The job is reconciled again later. `retry_after` (in seconds) and the HTTP `status` are set if
    the server sent them.
    """

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status
