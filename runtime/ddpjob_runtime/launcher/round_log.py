"""Writes the record of rounds into the checkpoint folder, where it outlives the job's pods."""

from __future__ import annotations

import json
import os
import queue
import threading
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.shutdown import log

MAX_BYTES = 4 << 20
"""Maximum size of the file in bytes. A full file is renamed to .ddpjob-rounds.jsonl.1, replacing
any earlier file of that name.
"""
_WAITING = 100
_CLOSE_SECONDS = 2.0
"""Maximum number of seconds for writing the remaining lines when the launcher ends. The limit
prevents an unresponsive volume from delaying the end of the pod.
"""


class RoundLog:
    """Appends lines to the record of rounds, in a separate thread.

    If the volume hangs or is full, lines are lost, but the launcher is not delayed.
    """

    def __init__(self) -> None:
        job = JobEnvironment.read()
        folder = job.checkpoint_dir
        self._path = Path(folder) / protocol.ROUNDS_FILE if folder else None
        names = {"job": job.name, "namespace": job.namespace, "uid": job.uid}
        self._identity = {**names, "generation": job.generation, "pod": job.pod}
        self._lines: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line for writing, and return immediately.

        The line also gets the names of the job and the pod.
        """
        if self._path is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ddpjob-rounds", daemon=True)
            self._thread.start()
        fields = {key: value for key, value in line.items() if key != "t"}
        self._put((json.dumps({**self._identity, **fields}) + "\n").encode())

    def close(self) -> None:
        """Write the remaining lines, but take at most two seconds."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _put(self, line: bytes | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            log(f"cannot write to {self._path}, so a line is lost")

    def _work(self) -> None:
        while True:
            line = self._lines.get()
            if line is None:
                return
            try:
                self._append(line)
            except OSError as error:
                log(f"cannot write to {self._path}: {error.strerror}; a line is lost")

    def _append(self, line: bytes) -> None:
        path = self._path
        if path is None or not path.parent.is_dir():
            # Do not create the folder. Without the volume, the folder would be on the host's own
            # disk.
            return
        with path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                # If the last line is incomplete, its writer was killed. Begin a new line in that
                # case.
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
        if size + len(line) > MAX_BYTES:
            path.replace(path.with_name(path.name + ".1"))
