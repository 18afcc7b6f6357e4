"""Whether the kernel has ended processes of this container because of its memory limit."""

from __future__ import annotations

from pathlib import Path

# cgroup v2 and v1: a line "oom_kill N".
FILES = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def oom_kills() -> int:
    """How many processes of this container the kernel has killed for memory so far; 0 where it does not tell."""
    for path in FILES:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.strip().isdigit():
                return int(number)
    return 0


def limit() -> str:
    """The container's memory limit, for people; empty where there is none."""
    for path in LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return f"{int(text) / (1 << 20):.0f} MiB"
    return ""
