"""The Python stacks of all threads of a rank, by faulthandler: at SIGUSR1, and when no step ends for nearly train.timeout_seconds.

faulthandler writes from C, also while Python is blocked in a collective or holds its lock for ever. It can write to one file only: that is
RUN/stacks/rank-N.txt, and a thread copies what comes there to stderr. A job's own hang watch uses another signal (SIGRTMIN + 7).
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

SIGNAL = signal.SIGUSR1
FOLDER = "stacks"
_LOOK_SECONDS = 0.5
_SHARE_OF_TIMEOUT = 0.9


class StackDumps:
    """Of this process. `limit`: seconds without a step after which stacks are written, before the collective that waits fails."""

    def __init__(self, run_dir: Path, rank: int, timeout_seconds: float) -> None:
        self._limit = _SHARE_OF_TIMEOUT * timeout_seconds
        self._path = run_dir / FOLDER / f"rank-{rank}.txt"
        self._rank = rank
        self._began = time.monotonic()
        self._closing = threading.Event()
        self._file: IO[bytes] | None = self._open()
        self._copied = self._size()
        faulthandler.register(SIGNAL, file=self._file or sys.stderr, all_threads=True)
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="stacks", daemon=True)
        self._thread.start()

    def alive(self) -> None:
        """A step, or a round of an evaluation, has begun."""
        self._began = time.monotonic()

    def close(self) -> None:
        """Watch no more. SIGUSR1 is ignored from now on: it must not end a rank that is about to leave."""
        self._closing.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.unregister(SIGNAL)
        if self._file is not None:
            # Another rank's stacks may be in the folder, or the volume be gone: that must not hide why training ends.
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
            print(f"warning: stacks go to stderr: {self._path.parent} cannot be written ({error.strerror})", file=sys.stderr, flush=True)
            return None

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def _arm(self) -> None:
        left = self._limit - (time.monotonic() - self._began)
        faulthandler.dump_traceback_later(max(0.1, left), file=self._file or sys.stderr)

    def _watch(self) -> None:
        armed_for, told = self._began, False
        while not self._closing.wait(_LOOK_SECONDS):
            if self._began != armed_for:
                armed_for, told = self._began, False
                self._arm()
            elif not told and time.monotonic() - armed_for > self._limit:
                told = True
                where = f"its stacks are in {self._path}"
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
            print(f"stacks of rank {self._rank} (pid {os.getpid()}), also in {self._path}:\n{text}", file=sys.stderr, flush=True)
