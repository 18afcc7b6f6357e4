"""`ddpjob top` without a job name. On a screen of any size, the running job is visible, and keys
scroll to all other jobs.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.job_list import JobList, fit, in_order
from ddpjob.cli.keys import decode
from ddpjob.local.paths import JobFolder
from ddpjob.local.record import held
from rich.text import Text

NOW = datetime(2026, 1, 2, tzinfo=UTC)
Json = dict[str, Any]


def job(name: str, phase: str, hour: int = 0, **progress: Any) -> Json:
    meta = {"name": name, "namespace": "ml", "uid": name, "creationTimestamp": f"2026-01-01T{hour:02}:00:00Z"}
    status = {"phase": phase, "progress": progress, "nodes": {"display": "2/2"}, "restarts": {"display": "0/10"}}
    return {"metadata": meta, "spec": {"image": "a", "script": "b.py", "nodes": 2}, "status": status}


def sixty(length: int = 41) -> list[Json]:
    """Return 44 failed and 16 interrupted jobs with long names, and a running one, which is the
    oldest of all.
    """
    states = ["Failed"] * 44 + ["Interrupted"] * 16
    old = [job(f"{'sweep-lr' + 'x' * length}"[: length - 3] + f"-{at:02}", state, 1) for at, state in enumerate(states)]
    figures = {"display": "epoch 9/120 7 %", "lossDisplay": "0.5955", "speedDisplay": "24,595/s"}
    return [*old, job("the-one", "Running", 0, **figures)]


def text(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 6), (20, 4)])
@pytest.mark.parametrize("unfolded", [False, True])
def test_a_list_of_sixty_jobs_fits_any_screen_and_shows_the_running_one_first(
    width: int, height: int, unfolded: bool
) -> None:
    jobs = JobList()
    jobs.unfolded = unfolded
    lines = text(jobs.frame(sixty(), NOW, width, height))
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert lines[2].startswith("the-one") and ("Running" in lines[2] or width < 40)
    assert lines[0].startswith("1 running, 44 failed,"[: width - 1])


def test_a_running_job_is_listed_above_newer_jobs_that_wait() -> None:
    waiting = [job(f"queued-{at:02}", "Queued" if at % 2 else "Pending", 1) for at in range(40)]
    lines = text(JobList().frame([job("the-one", "Running"), *waiting], NOW, 80, 24))
    assert lines[2].startswith("the-one") and lines[3].startswith("queued-")


def test_at_80_columns_a_jobs_figures_are_visible_and_at_200_all_columns() -> None:
    lines = text(JobList().frame(sixty(), NOW, 80, 24))
    for cell in ("the-one", "Running", "2/2", "epoch 9/120 7 %", "0.5955", "0/10"):
        assert cell in lines[2]
    assert "44 failed, 16 interrupted (press e to show)" in "\n".join(lines)
    wide = text(JobList().frame(sixty(), NOW, 200, 50))
    assert all(title in wide[1] for title in ("SPEED", "AGE", "DURATION", "REASON"))
    unfolded = JobList()
    unfolded.press("e")
    assert any("sweep-lr" in line and "…" in line for line in text(unfolded.frame(sixty(), NOW, 80, 24)))


def test_gpu_hours_are_summed_even_if_a_status_has_an_invalid_value() -> None:
    bodies = [job("a", "Running"), job("b", "Failed"), job("c", "Complete")]
    assert text(JobList().frame(bodies, NOW, 80, 24))[0] == "1 running, 1 failed, 1 complete"
    for body, seconds in zip(bodies, (3600, 36_000, "many"), strict=True):
        body["status"]["gpuSeconds"] = seconds
    assert text(JobList().frame(bodies, NOW, 80, 24))[0] == "1 running, 1 failed, 1 complete; 11.0 GPU hours"


def test_the_width_of_a_dropped_column_is_used_for_names() -> None:
    figures = {"display": "epoch 212/300 70 %", "lossDisplay": "0.5955", "speedDisplay": "24,595/s"}
    name = "a-name-of-twenty-3-char"
    lines = text(JobList().frame([job(name, "Restarting", **figures)], NOW, 80, 24))
    assert "LOSS" not in lines[1] and lines[2].startswith(f"{name}  Restarting")


def test_keys_move_the_selection_search_unfold_open_a_job_and_quit() -> None:
    jobs, bodies = JobList(), [job(f"j{at:02}", "Running", at % 24) for at in range(30)] + [job("old", "Failed")]
    assert "old" not in "".join(text(jobs.frame(bodies, NOW, 80, 10)))
    names = [body["metadata"]["name"] for body in in_order(bodies)]
    assert jobs.selected == names[0]
    for key, at in (("down", 1), ("j", 2), ("up", 1), ("page down", 7), ("end", 29), ("down", 29), ("home", 0)):
        jobs.press(key)
        assert (jobs.selected, key) == (names[at], key)
        shown = text(jobs.frame(bodies, NOW, 80, 10))
        assert any(line.startswith(names[at]) for line in shown), "the selected job is always on the screen"
    for key in "/ol":
        assert jobs.press(key) == ""
    jobs.press("enter")
    assert "1 failed (press e to show)" in "".join(text(jobs.frame(bodies, NOW, 80, 10))) and jobs.press("enter") == ""
    jobs.press("e")
    jobs.frame(bodies, NOW, 80, 10)
    assert (jobs.selected, jobs.press("enter"), jobs.press("q")) == ("old", "open", "quit")
    for key in ("/", "escape"):
        jobs.press(key)
    assert len(text(jobs.frame(bodies, NOW, 80, 50))) == 31 + 4


def test_an_empty_list_is_shown_and_a_name_cannot_control_the_terminal() -> None:
    assert "no jobs" in text(JobList().frame([], NOW, 80, 24))[0]
    assert fit([("NAME", "STATE"), ("a\x1b[31mb", "x")], 80)[1].startswith("a[31mb")


def test_keys_are_decoded_from_their_escape_sequences() -> None:
    pressed = b"\x1b[Aj\x1b[6~\x1b[1;5C\x1b\r/\x7f\xc3\xbc\x1bOB"
    assert list(decode(pressed)) == ["up", "j", "page down", "escape", "enter", "/", "backspace", "down"]


class Terminal:
    """`ddpjob top` in a real terminal of 80 x 24."""

    def __init__(self, runs: Path, *words: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**os.environ, "DDPJOB_RUNS": str(runs), "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddpjob.cli", *words], stdin=slave, stdout=slave, stderr=slave, env=env
        )
        os.close(slave)
        self.output = ""

    def until(self, what: str) -> list[str]:
        """Return the lines of the screen, once it contains the text."""
        end = time.monotonic() + 60
        while what not in "\n".join(self.screen()):
            assert time.monotonic() < end, self.output[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.output += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        return self.screen()

    def screen(self) -> list[str]:
        frame = self.output.rpartition("\x1b[H")[2]
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).replace("\r", "").split("\n")

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())


def test_in_a_terminal_keys_open_a_job_and_quit(tmp_path: Path) -> None:
    for body in sixty(20):
        folder = JobFolder(tmp_path / body["metadata"]["name"])
        folder.path.mkdir()
        record = {**body, "apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "local": {"run": "r", "pods": []}}
        folder.status.write_text(json.dumps(record))
    with held(JobFolder(tmp_path / "the-one")):
        terminal = Terminal(tmp_path, "--local", "top", "--interval=0.2")
        lines = terminal.until("press e to show")
        assert lines[2].startswith("the-one") and len(lines) <= 24 and max(map(len, lines)) <= 80
        terminal.press("e")
        assert any("sweep" in line for line in terminal.until("more jobs above or below"))
        terminal.press("\r")
        terminal.until("Esc back")
        terminal.press("\x1b")
        terminal.until("Enter open")
        terminal.press("q")
        assert terminal.process.wait(60) == 0
