"""`ddpjob show`: the records that a job's pods leave in its checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.main import main
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.backends.left_behind import describe_left_behind, read_left_behind
from ddpjob.client.backends.past_jobs import PastJobs

BREAK = {
    "id": 1, "time": "2026-01-02T03:05:00.000Z", "kind": "WorkerFailed", "pod": "first-1-0", "rank": 3, "exitCode": 1,
    "message": "ValueError: bug\nmore", "traceback": "Traceback\n  line 7\nValueError: bug", "consequences": 2,
}  # fmt: skip


def line(event: str, minute: int, number: int, **more: Any) -> str:
    return json.dumps({
        "event": event, "time": f"2026-01-02T03:{minute:02}:00.000Z", "round": number, "incidents": [], "progress": {},
        "job": "first", "namespace": "ml", "uid": "u", "generation": "0", **more,
    })  # fmt: skip


LINES = [
    line("round", 1, 1, world=2, uid="earlier"),
    line("round", 3, 1, world=2),
    line("round", 6, 2, world=3, incidents=[BREAK]),
    line(
        "end", 9, 2, ok=True, why="every node has finished", progress={"step": 7, "loss": 0.25, "metrics": {"a\nb": 2}}
    ),
]


def test_the_rounds_of_a_job_their_causes_and_its_end_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".ddpjob-rounds.jsonl").write_text("\n".join(LINES))
    (tmp_path / "run").mkdir()
    steps = [{"event": "step", "step": step, "loss": 1 / step, "time": step} for step in range(1, 9)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Job:       ml/first\nState:     Complete: every node has finished\n")
    assert "2026-01-02T03:03:00Z to 2026-01-02T03:09:00Z, 6m" in out and "1 other job" in out
    assert "step 7" in out and "loss 0.25, a b 2" in out and "Rounds:    2, with 1 break\n" in out
    rest = out.partition("round 1 begins with 2 nodes\n")[2].splitlines()
    where = "pod first-1-0, rank 3, exit code 1, 2 consequences"
    assert rest[0] == f"2026-01-02T03:05:00Z  WorkerFailed ({where}): ValueError: bug"
    assert rest[1:4] == ["    | Traceback", "    |   line 7", "    | ValueError: bug"]
    assert rest[4].endswith("round 2 begins with 3 nodes") and rest[5].endswith("job ended: every node has finished")
    assert "now 0.125" in out


def started(minute: int, number: int, **start: Any) -> str:
    return line("start", minute, number, start={"source": "memory", "step": 90, **start})


def test_the_start_of_a_round_and_its_repeated_steps_are_shown(tmp_path: Path) -> None:
    (tmp_path / ".ddpjob-rounds.jsonl").write_text(
        "\n".join([
            LINES[1], started(3, 1, source="scratch", step=0), LINES[2], started(6, 2, made=93),
            started(7, 2, made=93, seconds=0.4), line("start", 7, 2, start={"step": "x"}), started(8, 5, made=99),
            line("round", 8, 3, world=3, incidents=[BREAK]), LINES[3],
        ])
    )  # fmt: skip
    found = read_left_behind(tmp_path)
    assert found.unread == 1 and [each.round for each in found.lines] == [1, 2, 3, 2]
    words = list(describe_left_behind(found))
    at = next(number for number, word in enumerate(words) if word.endswith("round 2 begins with 3 nodes"))
    assert words[at + 1] == "    continued after step 90: 3 steps repeated (from memory) in 0.4 s"
    assert sum("continued" in word for word in words) == 1, "the first round repeats no steps"
    [body] = PastJobs(tmp_path).jobs()
    counts = body["status"]["restarts"]
    assert (counts["repeatedSteps"], counts["repeatedSeconds"], counts["unknownRepeats"]) == (3, 0.4, 1)
    assert [(r["continuedFrom"], r.get("repeatedSteps")) for r in counts["recent"]] == [
        ("memory", 3),
        ("unknown", None),
    ]


def test_a_job_without_a_recorded_end_is_not_shown_as_finished(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()  # a folder of `ddpjob run`
    (tmp_path / "checkpoints" / ".ddpjob-rounds.jsonl.1").write_text(LINES[1] + "\n")
    (tmp_path / "checkpoints" / ".ddpjob-rounds.jsonl").write_text(LINES[2])
    words = list(describe_left_behind(read_left_behind(tmp_path)))
    assert "the end of the round was not recorded" in words[1] and not any("job ended:" in word for word in words)
    failed = line("end", 9, 2, ok=False, why="RestartBudgetSpent")
    (tmp_path / "checkpoints" / ".ddpjob-rounds.jsonl").write_text(failed)
    assert list(describe_left_behind(read_left_behind(tmp_path)))[1] == "State:     Stopped: RestartBudgetSpent"


@pytest.mark.parametrize(
    "evil",
    [
        '{"event": "round", "time": "2026', "[" * 100_000, "1", "[]", "\x00\xff", line("round", 6, 2),
        line("round", 6, 2, world=True, time=5), line("round", 6, 10**400, world=1),
        line("round", 6, 2, world=1, incidents=[{"id": 1}]), line("round", 6, 2, world=1, progress=[1]),
        line("round", 6, 2, world=1, incidents={}), line("other", 6, 2, world=1),
    ],
)  # fmt: skip
def test_an_unreadable_line_is_skipped(tmp_path: Path, evil: str) -> None:
    (tmp_path / ".ddpjob-rounds.jsonl").write_text("\n".join([LINES[1], evil, LINES[3]]))
    found = read_left_behind(tmp_path)
    assert len(found.lines) == 2 and found.unread == 1
    assert "Not read:  1 line" in list(describe_left_behind(found))


def test_the_records_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = {**BREAK, "message": "\x1b]0;owned\x07", "traceback": "\x1b[2J"}
    (tmp_path / ".ddpjob-rounds.jsonl").write_text(line("round", 6, 2, world=3, incidents=[evil], job="\x1b[2J"))
    assert main(["show", str(tmp_path)]) == 0 and "\x1b" not in capsys.readouterr().out


def test_a_folder_without_records_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert ".ddpjob-rounds.jsonl" in capsys.readouterr().err
    with pytest.raises(Mistake, match="no such folder"):
        read_left_behind(tmp_path / "nowhere")


def test_metrics_that_contain_no_step_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".ddpjob-rounds.jsonl").write_text("\n".join(LINES))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "start", "step": 0, "world": 2, "time": 1}\n')
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("\n\nfirst: its metrics contain no step\n") and not shown.err


def test_a_job_without_a_record_of_rounds_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "digits" / "checkpoints" / "run").mkdir(parents=True)  # a job of `ddpjob run`, and a `command`
    (tmp_path / "digits" / "checkpoints" / "run" / "metrics.jsonl").write_text('{"event": "step", "step": 1}\n')
    assert read_left_behind(tmp_path / "digits").name == "digits"


def test_the_last_progress_comes_from_the_last_coordinator_that_recorded_it(tmp_path: Path) -> None:
    lines = [line("round", 6, 2, world=3, progress={"step": 700, "loss": 0.5}),
             line("round", 9, 3, world=3, generation="1")]  # fmt: skip
    (tmp_path / ".ddpjob-rounds.jsonl").write_text("\n".join(lines))
    assert "Progress:  step 700, loss 0.5" in list(describe_left_behind(read_left_behind(tmp_path)))
    progress = PastJobs(tmp_path).job("first")["status"]["progress"]
    assert (progress["step"], progress["updatedAt"]) == (700, "2026-01-02T03:06:00Z")


def test_a_scripts_own_folder_with_the_name_of_the_records_is_tolerated(tmp_path: Path) -> None:
    (tmp_path / ".ddpjob-rounds.jsonl").write_text("\n".join(LINES))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-7.pt").touch()
    assert read_left_behind(tmp_path).name == "first"
