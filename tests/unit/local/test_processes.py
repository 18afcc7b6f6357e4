"""Processes are found by their environment, even while they execute another program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddpjob.local import processes, watchdog

CHANGING = 'exec sh -c "$0" "$0"'
"""A program that re-executes itself continuously, so that the kernel sometimes shows no
environment.
"""


def test_a_process_that_is_executing_another_program_is_found() -> None:
    """Otherwise, the process would outlive its container, because only processes found in a single
    pass are killed.
    """
    mark = {"DDPJOB_UID": f"changing-{os.getpid()}"}
    started = [subprocess.Popen(["sh", "-c", CHANGING, CHANGING], env={**os.environ, **mark}) for _ in range(4)]
    try:
        for _ in range(30):
            found = set(processes.find(mark))
            assert {process.pid for process in started} <= found
        assert processes.end_all(mark) == []
        assert [process.wait(20) for process in started] == [-9] * 4
    finally:
        for process in started:
            process.kill()


def test_a_process_without_any_environment_is_not_found() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        try:
            assert process.pid not in processes.find({"DDPJOB_UID": "any"})
        finally:
            process.kill()


def test_an_orphan_that_reuses_the_id_of_a_reaped_process_is_reaped_too() -> None:
    """Process ids are reused. Regression: the orphan was taken for a child of the code that had
    owned the id, so nothing reaped it.
    """
    ended = subprocess.Popen(["true"])
    ended.wait()
    orphan = os.spawnvp(os.P_NOWAIT, "true", ["true"])
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    ended.pid = orphan
    processes.reap_orphans([ended])
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)


def test_the_watchdog_deletes_a_folder_with_links_but_not_their_targets(tmp_path: Path) -> None:
    memory, target = tmp_path / "memory", tmp_path / "target"
    for folder in (memory, target):
        folder.mkdir()
        (folder / "file").touch()
    (memory / "link").symlink_to(target)
    command = [sys.executable, "-I", "-S", watchdog.__file__, f"no-job-{os.getpid()}", str(memory)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    assert not memory.exists() and (target / "file").exists()
