"""Waits for a job to reach a state, and reports its progress while waiting."""

from __future__ import annotations

import time

from ddpjob.api.job_status import JobStatus, utc_now
from ddpjob.cli.output import format_rows
from ddpjob.cli.places import EXIT_NEGATIVE, EXIT_TIMEOUT
from ddpjob.cli.root import print_note, say
from ddpjob.client.backends.backend import ENDED, Backend
from ddpjob.client.texts.job_text import phase, restart_line, why

WAITING_SECONDS = 30.0
"""Seconds between two reports of the progress while a command waits for a job."""


def wait_for(backend: Backend, job: str, goal: str, seconds: float | None) -> int:
    """Wait until the job reaches the state `goal`, and return the exit code of `ddpjob wait`.

    Meanwhile, print new states and restarts to standard error, and the progress every
    WAITING_SECONDS.
    """
    state, shown, shown_at, widths = "", ("", 0), 0.0, list[int]()
    for body, gone in backend.changes(job, seconds):
        state = phase(body)
        if gone:
            print_note(f"{job} was deleted")
            return EXIT_NEGATIVE
        if state == goal or (goal == "end" and state == "Complete"):
            say(f"{job} is {state}", backend)
            return 0
        if state in ENDED:
            for line in why(body, (), utc_now()):
                print_note(line)
            return EXIT_NEGATIVE
        restarts = JobStatus.read(body.get("status") or {}).restarts
        if restarts.recent and restarts.total > shown[1]:
            print_note(restart_line(restarts.recent[-1], utc_now()))
        if (state, restarts.total) != shown or time.monotonic() - shown_at >= WAITING_SECONDS:
            lines = format_rows([body], utc_now(), widths=widths)
            for line in lines[bool(shown[0]) :]:
                print_note(line)
            shown, shown_at = (state, restarts.total), time.monotonic()
    print_note(f"{job} is still {state}")
    return EXIT_TIMEOUT
