"""Waits until stdin closes, then kills a job's leftover processes and deletes its in-memory folder.

stdin closes when `ddpjob run` has exited or crashed.

    python3 -I -S watchdog.py UID FOLDER

The watchdog is started by its path instead of as a module, so that it does not import the package.
It has its own session, so it survives if the terminal is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

SECONDS = 20.0


def main() -> None:
    """Wait until stdin closes. Then kill the processes of the job, and delete FOLDER.

    Processes with DDPJOB_UID=UID in their environment are killed until none are left or SECONDS
    have passed. FOLDER is the in-memory folder with the latest training states.
    """
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
    _delete(sys.argv[2])


def _delete(folder: str) -> None:
    import shutil  # Imported here because the watchdog must start in milliseconds.

    shutil.rmtree(folder, ignore_errors=True)


def _marked(mark: bytes) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - without pathlib, it starts in milliseconds
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue  # The process has ended or belongs to another user.
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
