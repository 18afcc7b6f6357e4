"""Changes the spec of a job, and restarts a job by replacing all of its pods.

To replace the pods, `restart` suspends the job, waits until its pods have stopped, and resumes it.

The caller waits, because a job has no field that means "restart". If the wait is interrupted, the
job stays suspended, and the error contains the command that resumes it.
"""

from __future__ import annotations

import sys
import time

from ddpjob.api.job_spec import Json
from ddpjob.client.backends.backend import ENDED, FINISHED, Backend, Mistake, NoSuchJob, OutagePatience
from ddpjob.client.texts.job_text import phase


def change(backend: Backend, name: str, spec: Json) -> None:
    """Merge `spec` into the spec of a job.

    Raises Mistake if the job has finished, because the change would have no effect.
    """
    state = phase(backend.job(name))
    if state in FINISHED:
        raise Mistake(f"{name} is {state} and cannot be changed; run `ddpjob rerun {name}` to start it again")
    backend.patch(name, spec)


class _Ended(Mistake):
    """The job ended before it could be suspended."""


def restart(backend: Backend, job: str, timeout: float) -> None:
    """Replace the job's pods.

    Raises Mistake, for example if the pods do not stop within `timeout` seconds.
    """
    backend.pods(job)  # If the user is not permitted to list pods, fail before anything is changed.
    change(backend, job, {"runPolicy": {"suspend": True}})
    try:
        _wait_until_suspended(backend, job, timeout)
        change(backend, job, {"runPolicy": {"suspend": False}})
    except (_Ended, NoSuchJob):
        raise
    except Mistake as mistake:
        mistake.args = (f"{mistake}\n{_left(job)}",)
        raise
    except KeyboardInterrupt:
        print(_left(job), file=sys.stderr)
        raise


def _left(job: str) -> str:
    return f"{job} is suspended; run `ddpjob resume {job}` to continue it"


def _wait_until_suspended(backend: Backend, job: str, timeout: float) -> None:
    """Wait until the job is suspended and its pods have stopped. Raises Mistake."""
    end, patience = time.monotonic() + timeout, OutagePatience()
    while True:
        try:
            state = phase(backend.job(job))
            if state in ENDED:
                raise _Ended(f"{job} is {state}; it was not restarted")
            if state == "Suspended" and all(pod.ended for pod in backend.pods(job)):
                return
            patience.answered()
        except Mistake as mistake:
            patience.tolerate(mistake)
        if time.monotonic() > end:
            raise Mistake(f"{job}: its pods did not stop within {timeout} s; run `ddpjob describe {job}` to see why")
        time.sleep(0.3)
