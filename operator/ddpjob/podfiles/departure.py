"""The one way out of the launcher: once, from any thread, with the workers ended and the reason written down."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import wire

TERMINATION_BYTES = 4096
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


class Departure:
    """Ends this process. The first caller wins; others wait for the end."""

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.stop_workers: Callable[[float], None] = lambda grace: None
        self.close_link: Callable[[], None] = lambda: None
        self.starting = threading.Lock()  # held while workers are started, so that none is missed
        self._once = threading.Lock()
        self.leaving = False

    def leave(
        self, code: int, kind: str, message: str, traceback: str = "", grace: float = 0.0, announce: Callable[[], None] | None = None
    ) -> NoReturn:
        """End the workers (SIGTERM, `grace` seconds, SIGKILL), write the termination log, exit with `code`. Does not return."""
        if not self._once.acquire(blocking=False):
            wait_for_the_end()
        self.leaving = True
        if announce is not None:
            announce()
        say(f"ends with {code} ({kind}): {message}" if code else "ends with 0: every node has finished")
        with self.starting:
            self.stop_workers(grace)
        self.close_link()
        if code:
            write_termination_log(kind, message, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # torch's threads need no orderly end, and must not turn this code into another one

    def park_if_leaving(self) -> None:
        """Called by the agent between its acts: from now on the leaving thread has the word."""
        if self.leaving:
            wait_for_the_end()


def wait_for_the_end() -> NoReturn:
    """Sleep until another thread ends the process."""
    while True:
        time.sleep(60)


def watch_signals(on_signal: Callable[[signal.Signals], None]) -> None:
    """Call `on_signal` on a thread of its own as soon as the process is told to end, even while the main thread is blocked in C++ code.

    A Python handler would wait for the main thread, which may be in a store's blocking call for a minute.
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
    """The Python half of a signal: the watching thread does the work."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write_termination_log(kind: str, message: str, traceback: str = "") -> None:
    """The reason of the end, for the operator: a JSON object of at most 4096 bytes; a traceback loses its beginning first."""
    named = os.environ.get("DDPJOB_TERMINATION_LOG")
    path = Path(named or "/dev/termination-log")
    if not named and not path.exists():
        return  # not in a container
    room = TERMINATION_BYTES
    while True:
        text = json.dumps({"kind": kind, "message": wire.clip(message, room // 2), "traceback": wire.clip(traceback, room // 2)})
        if len(text.encode()) <= TERMINATION_BYTES:
            break
        room = room * 3 // 4
    try:
        path.write_text(text)
    except OSError as error:
        say(f"cannot write {path}: {error}")


def say(text: str) -> None:
    """One line of the launcher's log."""
    sys.stderr.write(f"{wire.iso(time.time())} ddpjob: {text}\n")
    sys.stderr.flush()
