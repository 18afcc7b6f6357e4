"""How many files and connections a process may have open."""

from __future__ import annotations

import resource

OPEN_FILES = 65536


def raise_open_files() -> None:
    """Raise the soft limit as far as the hard one allows, up to OPEN_FILES, for this process and those it starts.

    Containers often begin with 1,024, while one store has a connection of each rank and of each node.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
