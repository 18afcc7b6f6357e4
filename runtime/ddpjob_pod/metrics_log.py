"""Writes a run's measurements to metrics.jsonl, for `ddpjob plot` and the dashboard.

Each line is a JSON object with the event, its time and its numbers:

    {"event": "start", "time": 1764371000.5, "step": 0, "world": 4}
    {"event": "step", "time": 1764371002.1, "step": 10, "loss": 2.31}
    {"event": "eval", "time": 1764371009.9, "step": 100, "accuracy": 0.41}

The built-in trainer and `ddpjob_report` write the file. After a restart, they append a "start"
line, and log each repeated step a second time. In a job, a "start" line also has a `run` field with
the first characters of the job's UID, because a later job may continue in the same folder. Each
line is one write, so a writer that is killed loses only its last line.
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
        # Whether the file ends in an incomplete line, left by a writer that was killed.
        self._truncated = bool(content) and not content.endswith(b"\n")
        self._warned = False

    def write(self, event: str, /, **fields: Any) -> None:
        """Write one line with the event, the time and the given fields.

        Fields cannot override the event or the time. Infinite and undefined numbers become null,
        because JSON cannot represent them. If the disk is full, lines are lost but training
        continues. Only the first lost line causes a warning.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        if event == "start" and (uid := JobEnvironment.read().uid):
            finite["run"] = uid[:8]
        head = {"event": event, "time": wall_clock()}
        # The first `head` puts the event at the beginning of the line. The second `head` keeps
        # fields from overriding the event and the time.
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
