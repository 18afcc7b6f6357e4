"""The launcher's only exit path, which runs only once and records why the launcher ends.

Signals, the coordinator's `stop`, a lost coordinator and errors can all end the launcher, on
different threads and at the same time. The first caller decides the exit code, and all other
callers sleep. The steps have a fixed order: announce the departure, stop the workers, close the
connection to the coordinator, clean up, and write the termination log. If a step fails, the later
steps still run.

Example: SIGTERM arrives while a worker fails. The launcher sends `leaving`, gives the workers the
grace period, and exits with 143. The agent, which has seen the failure, blocks in `block_if_begun`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback as tracebacks
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ddpjob_runtime.log_lines import Log
from ddpjob_runtime.termination_log import write_termination_log

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


class Shutdown:
    """Ends this process.

    The first caller of `exit` decides the exit code. Later callers wait for the process to end.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.stop_workers: Callable[[float], None] = lambda grace: None
        self.close_client: Callable[[], None] = lambda: None
        self.clean_up: Callable[[], None] = lambda: None
        # Held while workers start, so that the shutdown also stops those workers.
        self.starting = threading.Lock()
        self._once = threading.Lock()
        self.begun = False

    def exit(
        self,
        code: int,
        kind: str,
        message: str,
        traceback: str = "",
        grace: float = 0.0,
        announce: Callable[[], None] | None = None,
    ) -> NoReturn:
        """Stop the workers, write the termination log, and exit with `code`.

        `announce` is called first. The workers then get SIGTERM, and SIGKILL after `grace` seconds.
        """
        if not self._once.acquire(blocking=False):
            wait_for_the_end()
        self.begun = True
        if announce is not None:
            _attempt(announce)
        log(f"exits with code {code} ({kind}): {message}" if code else "exits with code 0: every node has finished")
        with self.starting:
            _attempt(lambda: self.stop_workers(grace))
        _attempt(self.close_client)
        _attempt(self.clean_up)
        if code:
            _attempt(lambda: write_termination_log(kind, message, traceback))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)  # torch's threads need no shutdown, and must not change the exit code.

    def block_if_begun(self) -> None:
        """Block the calling thread until the process ends, if the shutdown has begun.

        The agent calls this method between its actions, so that it does nothing more once the
        shutdown has begun.
        """
        if self.begun:
            wait_for_the_end()


def _attempt(act: Callable[[], None]) -> None:
    """Run one step of the shutdown.

    If the step fails, log the error and return. The later steps must still run and end this
    process.
    """
    try:
        act()
    except Exception:
        log(f"an error occurred while this launcher was exiting:\n{tracebacks.format_exc()}")


def wait_for_the_end() -> NoReturn:
    """Sleep until another thread ends the process."""
    while True:
        time.sleep(60)


def watch_signals(on_signal: Callable[[signal.Signals], None]) -> None:
    """Call `on_signal` on a separate thread as soon as this process is asked to stop.

    Python runs ordinary handlers on the main thread, which may spend a minute in a blocking C++
    call to a store.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in ENDING_SIGNALS:
        signal.signal(number, ignore_signal)

    def watch() -> None:
        while True:
            for number in reader.recv(64):
                if number in ENDING_SIGNALS:
                    on_signal(signal.Signals(number))

    threading.Thread(target=watch, name="ddpjob-signals", daemon=True).start()
    watch_signals.keep = (reader, writer)  # type: ignore[attr-defined]


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignore a signal here, because the thread of `watch_signals` handles it."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


log = Log("ddpjob")
