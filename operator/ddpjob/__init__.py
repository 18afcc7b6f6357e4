"""Everything outside a job's pods: API, operator, process backend and the `ddpjob` command.

Python programs use `from ddpjob import Client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpjob.client.backends.backend import Happened, Mistake, NoSuchJob, PodLine, Unreachable
    from ddpjob.client.job_client import Client, Job, JobFailed, Progress

__all__ = [
    "Client",
    "Happened",
    "Job",
    "JobFailed",
    "Mistake",
    "NoSuchJob",
    "PodLine",
    "Progress",
    "Unreachable",
]


def __getattr__(name: str) -> Any:
    """Import the client when one of its names is first used.

    The operator never uses these names, so it starts without importing the client.
    """
    if name in __all__:
        from ddpjob.client import job_client
        from ddpjob.client.backends import backend

        return getattr(job_client if hasattr(job_client, name) else backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
