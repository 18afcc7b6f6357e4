"""Detects whether the kernel has killed processes because this container reached its
memory limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# The files of cgroup v2 and cgroup v1. Each file in FILES has a line "oom_kill N".
FILES = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def oom_kills() -> int:
    """Return how many of this container's processes the kernel has killed to free memory.

    If the number is unknown, return 0.
    """
    for text in _readable(FILES):
        for line in text.splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.strip().isdigit():
                return int(number)
    return 0


def limit() -> str:
    """Return the container's memory limit, such as "512 MiB"; empty if there is none."""
    for text in _readable(LIMITS):
        if text.strip().isdigit() and int(text) < 1 << 60:
            return f"{int(text) / (1 << 20):.0f} MiB"
    return ""


def _readable(paths: tuple[Path, ...]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text()
        except OSError:
            continue  # This file does not exist if the host uses the other version of cgroups.
