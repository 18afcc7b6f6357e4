"""PID 1 of a container: passes signals on to the launcher, buries orphans, ends with the launcher's exit code."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def become_init() -> None:
    """Fork. Returns in the child, which goes on as the launcher; the parent never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # none may be lost between fork and handler
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return  # it has just ended; the loop below sees it

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while True:
        pid, status = os.wait()
        if pid == child:
            sys.stderr.flush()
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
