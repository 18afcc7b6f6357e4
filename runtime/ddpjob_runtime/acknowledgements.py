"""Asks the kernel whether a connection's peer has acknowledged all bytes that were sent to it.

A running host's kernel acknowledges bytes even while the receiving process is paused or gets no CPU
time. A host without power or network acknowledges nothing. Only Linux reports acknowledgements.
"""

from __future__ import annotations

import contextlib
import socket
import sys

_UNACKED = slice(24, 28)
"""The bytes of Linux's `struct tcp_info` that contain its `tcpi_unacked` field."""
_THIN_LINEAR_TIMEOUTS = 16
"""Linux's TCP_THIN_LINEAR_TIMEOUTS, for which Python has no constant."""


def shows_acknowledgements() -> bool:
    """Whether this system reports which bytes a connection's peer has acknowledged."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO")


def is_acknowledged(stream: socket.socket) -> bool:
    """Whether the peer's kernel has acknowledged all bytes that were sent to it.

    If the system does not report acknowledgements, the result is False. Raises OSError if this
    process has closed the connection.
    """
    if not shows_acknowledgements():
        return False
    info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[_UNACKED], sys.byteorder) == 0


def resend_often(stream: socket.socket) -> None:
    """Make the kernel resend unacknowledged bytes every 0.2 s, as long as there are only a few of
    them.

    By default, the kernel doubles the delay before each retry: 0.2, 0.4, 0.8 s and so on, so it
    resends after 0.2, 0.6 and 1.4 s. A link that was down for 0.7 s would then appear to be down
    for 1.4 s.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # Old kernels do not have this option.
            stream.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
