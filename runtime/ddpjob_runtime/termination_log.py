"""Writes a file that says why a container ends. Kubernetes copies the text to the pod's status."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime import protocol

MAX_BYTES = 4096


def write_termination_log(kind: str, message: str, traceback: str = "") -> None:
    """Write why the container is exiting, as a JSON object of at most 4096 bytes.

    If the message or the traceback is too long, its middle is left out.
    """
    named = JobEnvironment.read().termination_log
    path = Path(named or "/dev/termination-log")
    if not named and not path.exists():
        return  # This process does not run in a container.
    room = MAX_BYTES
    while True:
        text = json.dumps(
            {
                "kind": kind,
                "message": protocol.clip(message, room // 2),
                "traceback": protocol.clip(traceback, room // 2),
            }
        )
        if len(text.encode()) <= MAX_BYTES:
            break
        room = room * 3 // 4
    try:
        path.write_text(text)
    except OSError as error:
        # stderr may be a file on the same full disk, so this write may fail, too.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"ddpjob: cannot write {path}: {error}\n")
