"""What tests must know of the machine they run on: how busy it is, and which ports are free."""

from __future__ import annotations

import os
import socket


def slowness() -> float:
    """By how much this machine has more to do than it can: 1 or more. Time limits of the tests are in proportion."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
