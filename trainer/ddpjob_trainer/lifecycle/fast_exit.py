"""Ends a rank without unloading torch's modules one by one.

Unloading takes half a second, and several seconds on a busy machine. The other ranks and their
launchers would have to wait that long, because they form the next group only after this rank has
exited. No data is lost, because data that must be kept is flushed as soon as it is written.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_code = 1


def leave_fast() -> None:
    """Make the process end right after its last exit handler.

    The exit code is 1, unless `with_code` sets a different one.
    """
    atexit.register(_end)


def with_code(code: int) -> int:
    """Set the exit code for an orderly exit from this process, and return the code."""
    global _code
    _code = code
    return code


def end_with(parent: int, by: signal.Signals) -> bool:
    """Make the kernel send the signal `by` to this process when its parent exits (Linux only).

    Return False if the parent has already exited.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    return os.getppid() == parent


def _end() -> None:
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)
