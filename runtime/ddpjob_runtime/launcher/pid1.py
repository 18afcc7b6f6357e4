"""A container's PID 1: forwards signals to the launcher, reaps orphans, and keeps the log."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from ddpjob_runtime.launcher.keep_log import KeptLog

# Other signals are not forwarded, because some of them, such as SIGUSR1, would end the launcher.
# The kernel delivers a signal to PID 1 only if PID 1 has a handler for that signal.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def become_init(kept: KeptLog | None = None) -> None:
    """Fork this process. Return only in the child, which continues as the launcher.

    The parent remains PID 1. It passes on the child's output and adds that output to the log kept
    by `kept`. When the child has ended, the parent exits.
    """
    # Signals must not be lost between the fork and the installation of the handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    child = os.fork()
    if child == 0:
        if kept is not None:
            kept.divert()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return  # The child has just ended, and the loop below will notice.

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    if kept is not None:
        kept.begin()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while True:
        pid, status = os.wait()
        if pid == child:
            if kept is not None:
                kept.finish()
            sys.stderr.flush()
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
