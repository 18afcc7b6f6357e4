"""What tests must know of the machine they run on: how busy it is, and which ports are free."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = 750
FIRST_PORT = 10000 + PORTS * (_WORKER % 8)
_ports = itertools.count(random.SystemRandom().randrange(PORTS))


def slowness() -> float:
    """By how much this machine has more to do than it can: 1 or more. Time limits of the tests are in proportion."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on, and that no other process of these tests is given.

    What the system chooses is free for anybody as soon as it is closed: another test's members would greet a
    coordinator that listens where theirs has just been killed. Hence from below the ports that it chooses from, a
    part for each of pytest's processes, one after the other.
    """
    while True:
        port = FIRST_PORT + next(_ports) % PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
