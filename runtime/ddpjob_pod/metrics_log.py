"""Writes a run's measurements to metrics.jsonl, for `ddpjob plot` and the dashboard.

Each line is a JSON object with the event, its time and its numbers:

    {"event": "start", "time": 1764371000.5, "step": 0, "world": 4}
    {"event": "step", "time": 1764371002.1, "step": 10, "loss": 2.31}
    {"event": "eval", "time": 1764371009.9, "step": 100, "accuracy": 0.41}

The built-in trainer and `ddpjob_report` write the file. After a restart, they append a "start" line
and then log the repeated steps again. In a job, a "start" line also has `run`, the first characters
of the job's UID, because a later job may continue in the same folder. A killed writer loses only
its last line, because each line is one write.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment

METRICS = "metrics.jsonl"


class MetricsLog:
    """Appends lines to FOLDER/metrics.jsonl.

    Attributes:
        incarnations: how many incarnations had written to the file before it was opened.
    """

    def __init__(self, folder: Path) -> None:
        """Open FOLDER/metrics.jsonl, or create it.

        Raises OSError if the file cannot be appended to, for example because a different user owns
        it.
        """
        self._path = folder / METRICS
        content = self._path.read_bytes() if self._path.exists() else b""
        self._file = self._path.open("ab", buffering=0)
        self.incarnations = content.count(b'{"event": "start"')
        # Whether the file ends in an incomplete line, which a killed writer has left.
        self._truncated = bool(content) and not content.endswith(b"\n")
        self._warned = False

    def write(self, event: str, /, **fields: Any) -> None:
        """Write one line with the event, the time and the given fields. Fields cannot override the
        event or the time.

        Numbers that are not finite become null, because JSON has no NaN. If the disk is full, lines
        are lost, with one warning, but training continues.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        if event == "start" and (uid := JobEnvironment.read().uid):
            finite["run"] = uid[:8]
        head = {"event": event, "time": wall_clock()}
        # `head` is included twice: at the beginning, so that the line begins with the event, and at
        # the end, so that fields cannot override the event and the time.
        line = json.dumps({**head, **finite, **head}) + "\n"
        left = (("\n" if self._truncated else "") + line).encode()
        try:
            while left:
                left = left[self._file.write(left) :]
            self._truncated = False
        except OSError as error:
            self._truncated = True
            if not self._warned:
                text = f"warning: cannot write to {self._path} ({error.strerror}), so lines are lost"
                print(text, file=sys.stderr, flush=True)
            self._warned = True


def wall_clock() -> float:
    """Return the current Unix time in seconds, rounded to milliseconds."""
    return round(time.time(), 3)
