"""The output of a run without a terminal, and the panel on a terminal."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_status import JobStatus, Phase, Restart, Restarts
from ddpjob.cli.display import PlainLines, open_display, panel, recoveries
from ddpjob.core.decision import Event
from ddpjob.local.process_cluster import TimedEvent
from ddpjob.local.runner import Shown, ShownPod, new_body
from rich.console import Console

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PROGRESS: dict[str, object] = {
    "percent": 40,
    "display": "epoch 3/8 40 %",
    "lossDisplay": "0.25",
    "speedDisplay": "1,200/s",
    "eta": "12s",
}
PROGRESS |= {"metrics": {"accuracy": 0.9712}}


def shown(seconds: float = 0.0, events: tuple[TimedEvent, ...] = (), **status: object) -> Shown:
    job = DDPJob.read(new_body({"metadata": {"name": "j"}, "spec": {"image": "i", "script": "s", "nodes": 2}}, BEGAN))
    full = replace(JobStatus(phase=Phase.RUNNING, ready=2, start_time=BEGAN), **status)  # type: ignore[arg-type]
    pods = (ShownPod("j-0-0", "Running", Path("/r/j-0-0.log")), ShownPod("j-1-0", "Error (1)", Path("/r/j-1-0.log")))
    return Shown(job, full, pods, events, BEGAN + timedelta(seconds=seconds))


def test_changes_are_printed_at_most_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainLines()
    display.show(shown())
    display.show(shown(0.5, progress=PROGRESS))
    assert capsys.readouterr().out.splitlines() == ["Running    nodes 2/2"]
    display.show(shown(2.1, progress=PROGRESS))
    assert capsys.readouterr().out.splitlines() == [
        "Running    nodes 2/2  epoch 3/8 40 %  loss 0.25  eta 12s  1,200/s  accuracy 97.12%"
    ]
    display.show(shown(2.2, progress=PROGRESS, phase=Phase.COMPLETE))
    assert "Complete" in capsys.readouterr().out


def test_no_line_is_suppressed_if_the_clock_is_set_back(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainLines()
    display.show(shown())
    display.show(shown(-3600, progress=PROGRESS))
    assert "epoch 3/8" in capsys.readouterr().out


def test_events_and_recoveries_are_printed_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainLines()
    message = "rank 1 ended: ValueError\nTraceback\nValueError (counts against recovery.maxRestarts)"
    failed = TimedEvent(BEGAN, Event(True, "WorkerFailed", message))
    over = Restart(
        time=BEGAN,
        pod="j-1-0",
        reason="WorkerFailed",
        message="rank 1 ended: ValueError\nTraceback",
        counted=True,
        seconds=4.2,
        round=1,
    )
    known = replace(over, continued_from="memory", repeated_steps=1)
    for second, restart in enumerate((over, known, known)):
        counts = Restarts(counted=1, recent=(restart,))
        event = Event(False, "Recovered", "the first step was completed 4.2 s after j-1-0 broke the group; 1 step")
        events = (failed, TimedEvent(BEGAN, event))
        display.show(shown(second, events[: 1 + second], restarts=counts, progress=PROGRESS, round=1))
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("WorkerFailed: rank 1 ended: ValueError (counts against recovery.maxRestarts)") == 1
    assert [line for line in lines if "Recovered" in line] == [
        "Recovered in 4.2 s; 1 step repeated (from memory): rank 1 ended: ValueError"
    ]


def test_a_traceback_is_printed_immediately_and_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    display, trace = PlainLines(), '  File "train.py", line 3, in <module>\n    f()\nValueError: x'
    first = TimedEvent(BEGAN, Event(True, "WorkerFailed", f"rank 1 ended: ValueError: x (counts)\nTraceback\n{trace}"))
    last = TimedEvent(BEGAN, Event(True, "RestartBudgetSpent", f"WorkerFailed: rank 1 (2 failures)\n...\n{trace}"))
    display.show(shown(0, (first,)))
    assert '    File "train.py", line 3, in <module>' in capsys.readouterr().out.splitlines()
    display.show(shown(1, (first, first, last)))
    assert "train.py" not in capsys.readouterr().out


def test_no_recovery_is_reported_before_the_next_step() -> None:
    over = Restart(time=BEGAN, pod="j-1-0", reason="WorkerFailed", message="SyntaxError", counted=True, seconds=0.3)
    over = replace(over, continued_from="unknown")
    status = JobStatus(restarts=Restarts(counted=1, recent=(over,)))
    assert recoveries(status) == []
    assert len(recoveries(replace(status, progress=PROGRESS))) == 1
    instant = replace(status, progress=PROGRESS, restarts=Restarts(counted=1, recent=(replace(over, seconds=0.0),)))
    assert recoveries(instant)[0].startswith("Recovered in 0.0 s")


def test_the_panel_shows_state_progress_and_pods() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(panel(shown(75, progress=PROGRESS)))
    text = console.export_text()
    assert all(
        word in text
        for word in ("Running", "2/2", "1m15s", "epoch 3/8 40 %", "1,200/s", "97.12%", "j-1-0", "Error (1)")
    )


@pytest.mark.parametrize("phase", list(Phase))
def test_the_progress_bar_shows_epoch_and_nodes_completely_in_each_phase(phase: Phase) -> None:
    """Regression: words were cut from a padded line, so the epoch was missing during a restart and
    the nodes appeared twice.
    """
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(panel(shown(75, progress=PROGRESS, phase=phase)))
    text = console.export_text()
    assert all(text.count(word) == 1 for word in ("epoch 3/8 40 %", "loss 0.25", "nodes 2/2")), text


def test_at_80_columns_no_line_of_the_panel_wraps() -> None:
    """Regression: the epoch and each log path were wrapped."""
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    long = {**PROGRESS, "display": "epoch 119/120 99 %", "speedDisplay": "1,224,595/s", "lossDisplay": "0.0000125"}
    console.print(panel(shown(75, progress=long), console.width))
    lines = console.export_text().rstrip("\n").split("\n")
    assert len(lines) == 2 + 1 + 2 and all(len(line) <= 80 for line in lines)
    assert "epoch 119/120 99 %" in lines[1] and ".log" not in "".join(lines)


def test_a_file_gets_lines_without_cursor_movements_even_if_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter's kernel sets FORCE_COLOR, and the log of a submitted job grew by 70 MB a day."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert isinstance(open_display(), PlainLines)
