"""Outlives `ddpjob run` for a moment: when its standard input ends, however that came, it ends what the job has left.

    python3 -I -S guard.py UID

Run by path, in a session of its own, so that it is up at once and a killed terminal does not take it along.
"""

from __future__ import annotations

import os
import signal
import sys
import time

SECONDS = 20.0


def main() -> None:
    """Waits, then kills until nothing with DDPJOB_UID=UID in its environment is left."""
    mark = f"DDPJOB_UID={sys.argv[1]}".encode()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    deadline = time.monotonic() + SECONDS
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid)
        time.sleep(0.02)


def _marked(mark: bytes) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - no pathlib: it starts in a few milliseconds
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue  # ended by now, or another user's
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
