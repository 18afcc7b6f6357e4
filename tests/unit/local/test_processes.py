"""Processes are found by their environment, whatever they are doing."""

from __future__ import annotations

import os
import subprocess

import pytest
from ddpjob.local import processes

CHANGING = 'exec sh -c "$0" "$0"'
"""Becomes another program again and again: the kernel shows no environment in between."""


def test_a_process_that_is_just_becoming_another_program_is_found() -> None:
    """Overlooked, it outlived its container: what is killed is what one look has found."""
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


def test_a_process_without_any_environment_is_none_of_them() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        try:
            assert process.pid not in processes.find({"DDPJOB_UID": "any"})
        finally:
            process.kill()


def test_an_orphan_with_the_id_of_a_process_that_was_reaped_is_reaped_too() -> None:
    """Process ids come again: the orphan was taken for the owner's, whose poll() reaps nothing any more, for ever."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    orphan = os.spawnvp(os.P_NOWAIT, "true", ["true"])
    os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
    ended.pid = orphan
    processes.reap_orphans([ended])
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)
