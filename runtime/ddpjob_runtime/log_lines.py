"""Writes log lines without blocking. Lines are lost if the disk is full or nobody reads the pipe.

A container's output is a pipe that the container runtime reads. If the host's log folder is full or
hangs, the container runtime stops reading, and the pipe fills up. Writing to a full pipe would
block the coordinator's event loop, or the one thread in which the launcher reads from the
coordinator. Making the pipe non-blocking is not an option, because the workers share the pipe and
expect blocking writes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from typing import TextIO

from ddpjob_runtime import protocol

PIECE = select.PIPE_BUF
"""Number of bytes that can be written to a pipe at once without blocking, if the pipe is writable.
"""
PATIENCE_SECONDS = 0.05
"""How many seconds to wait for a slow reader. There is no wait if the previous line was lost."""


class Log:
    """Writes lines to stderr or to `stream`. `who` names the program that logs."""

    def __init__(self, who: str, stream: TextIO | None = None) -> None:
        self._who, self._stream, self._lost = who, stream, 0

    def __call__(self, text: str) -> None:
        """Write one line with the time and the program's name, or lose it."""
        self.write(f"{protocol.log_line(protocol.time_of(time.time()), self._who, text)}\n")

    def write(self, line: str) -> None:
        """Write a line that is already complete, or lose it."""
        if self._lost:
            line = f"({self._lost} lines are missing here, because nothing read this log)\n{line}"
        data = line.encode(errors="backslashreplace")
        with contextlib.suppress(OSError, ValueError):  # Full disk or closed stream.
            stream = self._stream or sys.stderr
            stream.flush()
            try:
                descriptor = stream.fileno()
            except io.UnsupportedOperation:  # The stream belongs to a notebook or a test.
                stream.write(line)
                return
            pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
            wait = 0.0 if self._lost else PATIENCE_SECONDS
            self._lost = 0 if all(_write(descriptor, piece, wait) for piece in pieces) else self._lost + 1


def divert_loggers(log: Log) -> None:
    """Redirect to `log` the output that loggers would write to stderr.

    The thread that restarts workers calls torchrun's loggers, and that thread must not block.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [h for logger in loggers if isinstance(logger, logging.Logger) for h in logger.handlers]
    for handler in (*handlers, logging.lastResort):
        if handler is not None and getattr(handler, "stream", None) is sys.stderr:
            handler.emit = _Emit(handler, log)  # type: ignore[method-assign]


class _Emit:
    def __init__(self, handler: logging.Handler, log: Log) -> None:
        self._handler, self._log = handler, log

    def __call__(self, record: logging.LogRecord) -> None:
        try:
            self._log.write(self._handler.format(record) + "\n")
        except Exception:  # For example, the record's arguments do not match its format.
            self._handler.handleError(record)


def _write(descriptor: int, piece: bytes, wait: float) -> bool:
    """Write a piece of a line. Return False if the descriptor is not writable within `wait`
    seconds.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(wait * 1000)) and os.write(descriptor, piece) > 0
