"""Reads key presses without waiting for Enter, if standard input is a terminal."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x7f": "backspace",
    b"\x08": "backspace",
}
_LONGEST = max(map(len, _SEQUENCES))


class PressedKeys:
    """A context manager for reading single keys from the terminal.

    On exit, the terminal's previous settings are restored.
    """

    def __init__(self) -> None:
        self._saved: list[Any] | None = None
        self._waiting = b""

    def __enter__(self) -> PressedKeys:
        if sys.stdin.isatty():
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def wait(self, seconds: float) -> list[str]:
        """Wait up to `seconds` for key presses, and return the pressed keys."""
        if self._saved is None:
            time.sleep(seconds)
            return []
        if select.select([sys.stdin], [], [], seconds)[0]:
            read = os.read(sys.stdin.fileno(), 1024)
            if not read:
                # The terminal is gone. select() would report it as ready again and again.
                self._saved = None
            return list(decode(read))
        return []


def decode(pressed: bytes) -> Iterator[str]:
    """Yield the keys in the bytes that a terminal has sent.

    A special key is yielded as its name, and any other key as its character. Unknown escape
    sequences are dropped.
    """
    while pressed:
        size = next((n for n in range(_LONGEST, 0, -1) if pressed[:n] in _SEQUENCES), 0)
        if size == 1 and pressed[:2] in (b"\x1b[", b"\x1bO"):
            end = next((at for at in range(2, len(pressed)) if 0x40 <= pressed[at] <= 0x7E), len(pressed))
            pressed = pressed[end + 1 :]
            continue
        if size:
            yield _SEQUENCES[pressed[:size]]
        elif (text := pressed[:1].decode("ascii", "ignore")) and text.isprintable():
            yield text
        pressed = pressed[size or 1 :]
