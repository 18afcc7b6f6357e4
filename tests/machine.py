"""Facts about the machine that tests need: how busy it is, and which ports are free."""

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
    """Return the machine's load relative to its CPUs, at least 1. The tests' time limits are
    multiplied by it.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def free_port() -> int:
    """Return a free TCP port on the loopback, which no other process of these tests gets.

    If the system chose the ports, it might assign a port again once it is closed. Then members of
    one test could connect to another test's coordinator, which listens where theirs has just been
    killed. So the ports are below the system's range. Each pytest process has a range of its own,
    and uses its ports in turn.
    """
    while True:
        port = FIRST_PORT + next(_ports) % PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
