"""The log that outlives the pods: a line in the checkpoint folder for each round, each break and
the job's end. Writing it never delays the group.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from coordinator_world import World, formed
from ddpjob_runtime import protocol
from ddpjob_runtime.launcher import round_log
from ddpjob_runtime.launcher.round_log import RoundLog


def records(world: World, pod: str) -> list[dict[str, Any]]:
    return [fields for verb, fields in world.heard[pod] if verb == "record"]


def test_rank_0_records_rounds_breaks_and_the_end() -> None:
    world, *members = formed(2)
    world.coordinator.report_progress({"step": 3, "loss": 0.5})
    world.fail(members[1], "ValueError: bug")
    world.pass_time(2)
    world.ready(*members)
    world.pass_time(5)
    world.join(*members)
    for member in members:
        world.coordinator.finished(member, world.round.number)
    first, second, end = records(world, "job-0-0")
    assert records(world, "job-1-0") == []
    assert (first["event"], first["round"], first["world"], first["incidents"]) == ("round", 1, 2, [])
    [broke] = second["incidents"]
    assert (broke["kind"], broke["pod"], broke["message"]) == ("WorkerFailed", "job-1-0", "ValueError: bug")
    assert broke["traceback"] == "Traceback ..." and second["progress"]["step"] == 3
    assert (end["event"], end["ok"], end["incidents"]) == ("end", True, [])
    assert world.verbs(members[0])[-2:] == ["record", "done"]


def test_rank_0_records_once_where_a_round_continued_and_which_steps_it_repeated() -> None:
    world, *members = formed(2)
    world.coordinator.report_progress({"step": 3})
    start = {"step": 90, "source": "memory", "made": 91}
    before = world.coordinator.report()
    for report in ({"start": start}, {"start": start, "step": 4}, {"start": {**start, "seconds": 0.4}}):
        world.coordinator.report_progress(report)
    world.coordinator.report_progress({"start": {**start, "made": 99}, "stepsAtRisk": 2})
    written = [each for each in records(world, "job-0-0") if each["event"] == "start"]
    assert [(each["round"], each["start"]) for each in written] == [(1, start), (1, {**start, "seconds": 0.4})]
    report = world.coordinator.report()
    assert protocol.progress_news(report.progress) - protocol.progress_news(before.progress) >= {"start.seconds"}
    world.fail(members[1], "ValueError: bug")
    world.pass_time(2)
    world.ready(*members)
    world.pass_time(5)
    assert not {"start", "stepsAtRisk"} & world.coordinator.report().progress.keys(), (
        "these fields belonged to the broken round"
    )


def test_another_member_writes_when_rank_0_is_lost() -> None:
    world, *members = formed(2)
    world.lose(members[0])
    world.pass_time(2)
    world.coordinator.stop(False, "RestartBudgetSpent")
    [end] = records(world, "job-1-0")
    assert (end["event"], end["ok"], end["why"]) == ("end", False, "RestartBudgetSpent")
    assert [incident["kind"] for incident in end["incidents"]] == ["PeerLost"]
    assert world.verbs(members[1])[-2:] == ["record", "stop"]


def test_no_line_of_the_round_log_exceeds_the_limit_of_a_connection() -> None:
    world, *members = formed(2)
    wide = "\N{GRINNING FACE}" * 100
    world.coordinator.report_progress({"metrics": {f"{number:03}{wide[3:]}": 1.0 for number in range(100)}})
    world.fail(members[1], "\N{GRINNING FACE}" * 4000)
    world.pass_time(2)
    world.coordinator.stop(False, "x" * 200_000)
    [_, end] = records(world, "job-0-0")
    assert len(protocol.encode("record", **end)) < protocol.MAX_LINE and len(end["incidents"]) == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"CHECKPOINT_DIR": str(tmp_path), "NAME": "first", "POD": "first-0-0"}.items():
        monkeypatch.setenv(f"DDPJOB_{name}", value)
    return tmp_path


def test_lines_are_appended_correctly_after_an_incomplete_line(folder: Path) -> None:
    path = folder / protocol.ROUNDS_FILE
    path.write_text('{"event": "rou')
    log = RoundLog()
    log.write({"t": "record", "event": "round", "round": 1})
    log.write({"t": "record", "event": "end", "round": 1})
    log.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[1:]] == ["round", "end"]
    assert json.loads(lines[1])["job"] == "first" and "t" not in json.loads(lines[1])


def test_the_size_of_the_round_log_is_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_log, "MAX_BYTES", 1000)
    log = RoundLog()
    for number in range(60):
        log.write({"event": "round", "round": number})
    log.close()
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [".ddpjob-rounds.jsonl", ".ddpjob-rounds.jsonl.1"]
    assert all(file.stat().st_size < 1200 for file in files) and '"round": 59' in files[0].read_text()


def test_a_missing_volume_is_not_created_and_a_hanging_volume_only_costs_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(folder / "unmounted"))
    log = RoundLog()
    log.write({"event": "round"})
    log.close()
    assert not (folder / "unmounted").exists()
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(folder))
    hanging = RoundLog()
    monkeypatch.setattr(hanging, "_append", lambda line: time.sleep(60))
    began = time.monotonic()
    for _ in range(200):
        hanging.write({"event": "round"})
    hanging.close()
    assert time.monotonic() - began < 10 and "a line is lost" in capsys.readouterr().err
