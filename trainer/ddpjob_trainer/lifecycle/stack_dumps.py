"""Writes a rank's Python stacks when no step has begun for almost train.timeout_seconds.

faulthandler writes the stacks of all threads to rank-N.txt, and a thread copies this file to
stderr. faulthandler is written in C, so it works even if Python is blocked in a collective, or if a
thread never releases the GIL. Without a launcher, a signal also makes faulthandler write the main
thread's stack to the file (`ddpjob_pod.stack_signal`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO

from ddpjob_pod import stack_signal
from ddpjob_pod.job_environment import JobEnvironment

_POLL_SECONDS = 0.5
_SHARE_OF_TIMEOUT = 0.9


class StackDumps:
    """Writes the Python stacks of this process to a file when training seems to hang.

    The stacks are written when no step has begun for nearly `timeout_seconds`, shortly before the
    waiting collective fails.
    """

    def __init__(self, run_dir: Path, rank: int, timeout_seconds: float) -> None:
        self._limit = _SHARE_OF_TIMEOUT * timeout_seconds
        job = JobEnvironment.read()
        self._path = Path(job.checkpoint_dir or run_dir) / stack_signal.FOLDER / f"rank-{rank}.txt"
        self._by_signal = not job.stacks_dir
        self._rank = rank
        self._began = time.monotonic()
        self._closing = threading.Event()
        self._file: IO[bytes] | None = self._open()
        self._copied = self._size()
        if self._by_signal:
            signal.signal(stack_signal.SIGNAL, signal.SIG_IGN)  # `unregister` restores this handler.
            # Write only the main thread's stack. Other threads keep running while the handler reads
            # their frames, and reading them occasionally crashes a healthy process.
            faulthandler.register(stack_signal.SIGNAL, file=self._file or sys.stderr, all_threads=False)
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="stacks", daemon=True)
        self._thread.start()

    def alive(self) -> None:
        """Report that a step, or a round of an evaluation, has begun."""
        self._began = time.monotonic()

    def close(self) -> None:
        """Stop watching, and remove the file if it is empty.

        After this call, the signal is ignored, because it must not end a rank that is about to
        exit. Under a launcher, the signal still writes the stack.
        """
        self._closing.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._by_signal:
            faulthandler.unregister(stack_signal.SIGNAL)
        if self._file is not None:
            # Removing the folder fails if it contains another rank's stacks, or if the volume is
            # gone. This error must not hide the reason why training ends.
            with contextlib.suppress(OSError):
                empty = self._size() == 0
                self._file.close()
                if empty:
                    self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()

    def _open(self) -> IO[bytes] | None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("ab")
        except OSError as error:
            print(
                f"warning: stacks are written to stderr, because {self._path.parent} cannot be written"
                f" ({error.strerror})",
                file=sys.stderr,
                flush=True,
            )
            return None

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def _arm(self) -> None:
        """Let faulthandler write the stacks of all threads when the current step is overdue.

        Reading the frames of running threads can crash the process. This risk is acceptable,
        because the collective is about to fail anyway, and the stacks show where the threads are.
        """
        left = self._limit - (time.monotonic() - self._began)
        faulthandler.dump_traceback_later(max(0.1, left), file=self._file or sys.stderr)

    def _watch(self) -> None:
        armed_for, reported = self._began, False
        while not self._closing.wait(_POLL_SECONDS):
            if self._began != armed_for:
                armed_for, reported = self._began, False
                self._arm()
            elif not reported and time.monotonic() - armed_for > self._limit:
                reported = True
                where = f"see its stacks in {self._path}"
                print(f"rank {self._rank}: no step for {self._limit:.1f} s; {where}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                self._copy()
        with contextlib.suppress(OSError):
            self._copy()

    def _copy(self) -> None:
        if (size := self._size()) > self._copied:
            with self._path.open("rb") as file:
                file.seek(self._copied)
                text = file.read(size - self._copied).decode(errors="replace")
            self._copied = size
            print(
                f"stacks of rank {self._rank} (pid {os.getpid()}), also in {self._path}:\n{text}",
                file=sys.stderr,
                flush=True,
            )
