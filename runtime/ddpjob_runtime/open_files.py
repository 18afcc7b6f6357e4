"""Raises the limit on open files and connections."""

from __future__ import annotations

import resource

OPEN_FILES = 65536


def raise_open_files() -> None:
    """Raise the limit on open files to OPEN_FILES, or to the hard limit if that is lower.

    The new limit applies to this process and its children. Containers often start with a soft limit
    of 1,024, which is too low for the store: every rank and every node has a connection to it.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
