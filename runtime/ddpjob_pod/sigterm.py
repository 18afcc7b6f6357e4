"""Makes SIGTERM set a flag instead of ending the process. Other modules make the ranks agree on it.

Python runs a signal handler in the main thread only, and not while that thread is blocked in a
collective. A handler is enough for a script that checks the flag between its steps. The built-in
trainer, however, has to exit in time even if its peers no longer respond and its main thread is
blocked. So in the trainer, Python's C code writes the signal's number to the wake-up descriptor
immediately, and a thread reads that number.

A thread in sigwait would notice the signal just as soon, but SIGTERM would have to be blocked in
every other thread. Threads that torch, gloo and OpenMP started earlier would still receive SIGTERM,
and the process would end. Child processes, such as loaders and compilers, would inherit the signal
mask, so SIGTERM would not end them.

SIGTERM still ends a forked child, such as a loader, as multiprocessing expects.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from types import FrameType


class SigtermFlag:
    """Records whether this process has received SIGTERM, and calls a function when the signal
    arrives.
    """

    _newest: SigtermFlag | None = None
    """The flag that SIGTERM sets. If `listen` was called on several flags, only the last of them is
    set.
    """

    def __init__(self, heard: Callable[[], None]) -> None:
        """Create an unset flag.

        SIGTERM can set the flag only after `listen` has been called.

        `heard` is called when SIGTERM arrives. It runs in the signal handler or, after
        `listen(at_once=True)`, in a separate thread.
        """
        self._heard, self._in_thread = heard, False
        self.asked_at: float | None = None
        """When SIGTERM arrived, as a value of time.monotonic(); None if it has not arrived."""

    @property
    def is_listening(self) -> bool:
        """Whether SIGTERM still sets this flag.

        False once a framework has replaced the signal handler.
        """
        return signal.getsignal(signal.SIGTERM) == self._handle

    def listen(self, *, at_once: bool = False) -> None:
        """Let SIGTERM set this flag from now on. Must be called in the main thread.

        With `at_once`, SIGTERM sets the flag even while the main thread is blocked. The flag then
        takes over the process's wake-up descriptor, so nothing else in the process, such as
        asyncio, may use that descriptor.
        """
        self._in_thread, SigtermFlag._newest = at_once, self
        signal.signal(signal.SIGTERM, self._handle)
        _care_at_forks()
        if at_once:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), name="sigterm", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._in_thread and self.asked_at is None:
            self.asked_at = time.monotonic()
            self._heard()

    def _watch(self, reader: int) -> None:
        while signal.SIGTERM not in os.read(reader, 64):
            pass
        self.asked_at = time.monotonic()
        self._heard()

    def forget_in_child(self) -> None:
        """Let SIGTERM end this forked child process again, unless a framework handles the signal.

        The child has inherited its parent's pipe, and must not write the signal to that pipe.
        """
        if self._in_thread:
            signal.set_wakeup_fd(-1)
        if self.is_listening:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_forking = threading.local()


@cache
def _care_at_forks() -> None:
    """Register the functions that handle forks, once per process.

    If `_hold` were registered twice, its second call would save the signal mask that its first call
    had set, not the program's own mask.
    """
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_restore_in_child)


def _hold() -> None:
    """Block SIGTERM before a fork, until `_restore_in_child` has run in the child.

    A child that received SIGTERM before then would write to its parent's pipe.
    """
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release() -> None:
    """Restore the signal mask that `_hold` saved.

    The program may have blocked SIGTERM on purpose before the fork, and may rely on the child to
    unblock it.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    if SigtermFlag._newest is not None:
        SigtermFlag._newest.forget_in_child()
    _release()
