"""Writes a rank's Python stack at a signal, even while it is blocked in C++ or keeps Python's lock.

faulthandler writes from C, and to one file only. Under a job's launcher the file is
DDPJOB_STACKS_DIR/RANK.txt, from which the launcher collects the stacks of a hang and `ddpjob
stacks` reads. `worker.py` registers it before the script runs. A rank that a torchrun of the
job's `command` has started does not run `worker.py`, and registers it here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import IO

from ddpjob_pod.job_environment import JobEnvironment

# Neither Python nor torch nor a batch system uses it. macOS has no such signals.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
FOLDER = "stacks"
"""Folder in which stacks are kept: of the checkpoint folder in a job, otherwise of a run."""


def register(own: IO[bytes] | None) -> None:
    """Have SIGNAL write the main thread's stack; outside of a job to `own` (None: to stderr)."""
    file = _of_launcher()
    if file is None:
        signal.signal(SIGNAL, signal.SIG_IGN)  # The handler that `unregister` restores.
    # Other threads keep running while the handler reads, and reading their frames occasionally
    # crashes a healthy process.
    faulthandler.register(SIGNAL, file=file or own or sys.stderr, all_threads=False)


def unregister() -> None:
    """Ignore the signal from now on, because it must not end a rank that is about to leave.

    Under a launcher the stack is written until the process ends.
    """
    if not JobEnvironment.read().stacks_dir:
        faulthandler.unregister(SIGNAL)


def _of_launcher() -> IO[bytes] | None:
    folder = JobEnvironment.read().stacks_dir
    if folder:
        with contextlib.suppress(OSError):
            return (Path(folder) / f"{os.environ.get('RANK', '0')}.txt").open("ab")
    return None
