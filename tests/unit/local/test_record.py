"""The lock of a job on this machine, and requests to its runner."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from ddpjob.local import record
from ddpjob.local.paths import JobFolder
from ddpjob.local.runner import prepare


def test_the_process_of_a_starting_run_is_known_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a second run would report no process, or a killed one, while the first run is still
    checking for pods.
    """
    folder = JobFolder(tmp_path)
    folder.lock.write_text("4711")

    def looks(folder: JobFolder) -> None:
        assert record.runner(folder) == os.getpid()

    monkeypatch.setattr(record, "_unlocked_runner", looks)
    with record.held(folder):
        assert record.runner(folder) == os.getpid()
    assert record.runner(folder) is None and folder.lock.read_text() == ""


def test_an_unreadable_request_does_not_end_the_training(tmp_path: Path) -> None:
    """The command may have given up and removed its request, `sudo` with a strict umask may have
    written it, or it may not be a request at all.
    """
    folder = JobFolder(tmp_path)
    folder.requests.mkdir()
    (folder.requests / "1-1.json").symlink_to("removed-while-it-was-listed")
    for name, text in (("1-2", ""), ("1-3", '{"verb": "scale"}'), ("1-4", "[1]")):
        (folder.requests / f"{name}.json").write_text(text)
    (folder.requests / "2-2.json").write_text('{"verb": "scale", "subject": "3"}')
    assert [(verb, subject) for _, verb, subject in record.requests(folder)] == [("scale", "3")]


def test_a_run_creates_the_folder_for_its_requests(tmp_path: Path) -> None:
    """Otherwise, the first command would create it, perhaps with `sudo`, and the run could not
    remove requests from it.
    """
    folder = JobFolder(tmp_path)
    for _ in range(2):
        prepare(folder, fresh=False, now=datetime.now(UTC))
        assert folder.requests.stat().st_uid == os.geteuid() and not any(folder.requests.iterdir())
        (folder.requests / "1-1.json").write_text("left by a run that was killed")


def test_files_are_written_in_utf_8_in_any_locale(tmp_path: Path) -> None:
    """Python reads the script of a submitted function as UTF-8."""
    code = (
        "from pathlib import Path; from ddpjob.local.record import write_atomically; "
        "write_atomically(Path('f'), 'gr\\u00fc\\u00dfe \\u2713')"
    )
    other = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code], env=other, cwd=tmp_path, check=True)
    assert (tmp_path / "f").read_text(encoding="utf-8") == "grüße ✓"
