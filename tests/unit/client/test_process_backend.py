"""`ProcessBackend`: what it reads from the records of this machine's jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ddpjob.client import process_backend
from ddpjob.client.process_backend import ProcessBackend
from ddpjob.local.paths import JobFolder, job_folder
from ddpjob.local.record import write_record

DONE = {
    "type": "Complete",
    "status": "True",
    "reason": "a",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def test_a_job_that_ends_while_it_is_read_was_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    record: dict[str, Any] = {"metadata": {"name": "j"}, "spec": {}, "status": {"phase": "Running"}, "local": {}}
    folder = job_folder("j")
    folder.path.mkdir()
    write_record(folder, record)
    backend = ProcessBackend()
    assert backend.job("j")["status"]["phase"] == "Interrupted"

    def ended(folder: JobFolder) -> None:
        write_record(folder, {**record, "status": {"phase": "Complete", "conditions": [DONE]}})

    monkeypatch.setattr(process_backend, "runner", ended)
    assert backend.job("j")["status"]["phase"] == "Complete"
