"""The lock of a job on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ddpjob.local import record
from ddpjob.local.paths import JobFolder


def test_a_run_that_begins_is_known_by_its_process_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run named no process, or that of an earlier run which was killed, while the first looked for pods."""
    folder = JobFolder(tmp_path)
    folder.lock.write_text("4711")

    def looks(folder: JobFolder) -> None:
        assert record.runner(folder) == os.getpid()

    monkeypatch.setattr(record, "_unlocked_runner", looks)
    with record.held(folder):
        assert record.runner(folder) == os.getpid()
    assert record.runner(folder) is None and folder.lock.read_text() == ""
