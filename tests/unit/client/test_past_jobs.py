"""`ddpjob dashboard FOLDER`: pages about past jobs, built from the records in their checkpoint
folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from pathlib import Path

import aiohttp
import pytest
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.backends.left_behind import LeftBehind, read_left_behind
from ddpjob.client.backends.past_jobs import PastJobs
from ddpjob.dashboard.fleet import Fleet
from ddpjob.dashboard.gate import FleetView, OneSession
from ddpjob.dashboard.web_server import serve
from ddpjob_runtime.protocol import LOGS_FOLDER, kept_log_name
from unit.client.test_left_behind import LINES, line


def left(folder: Path, lines: list[str], steps: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".ddpjob-rounds.jsonl").write_text("\n".join(lines))
    if steps:
        (folder / "run").mkdir()
        rows = [{"event": "step", "step": step, "loss": 1 / step, "time": step} for step in range(1, steps)]
        (folder / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


async def pages(folder: Path, *paths: str) -> list[str]:
    """Return the responses of a folder's dashboard."""
    backend = PastJobs(folder)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with Fleet(backend) as fleet:
        gate = OneSession(FleetView(fleet, backend.within, backend.where, past=True), "t")
        task = asyncio.create_task(serve(gate, host="127.0.0.1", port=0, started=port.set_result))
        found = []
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            for path in ("/?token=t", *paths):
                async with session.get(f"http://127.0.0.1:{await port}{path}") as answer:
                    found.append(await answer.text())
                    assert answer.status == 200, found[-1]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return found


def text(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


async def test_the_page_of_a_deleted_job_is_shown_from_its_folder(tmp_path: Path) -> None:
    left(tmp_path, LINES, steps=9)
    fleet, page, curves = await pages(tmp_path, "/jobs/ml/first", "/jobs/ml/first/curves")
    assert "first" in fleet and "Complete" in fleet and "WorkerFailed" not in text(fleet)
    words = text(page)
    for shown in ("WorkerFailed", "first-1-0", "ValueError: bug", "exit code 1", "2 consequences", "60.0 s",
                  "Nodes 3 Loss", "round 2: 3 nodes", "every node has finished",
                  "first is complete: it ran for 6m"):  # fmt: skip
        assert shown in words, shown
    for unknown in ("Counted", "GPUs per node", "Manifest", "Slots and pods", "Mode"):
        assert unknown not in words, unknown
    assert json.loads(curves)["curves"][0]["title"] == "loss"


async def test_a_folder_that_contains_folders_of_jobs_lists_all_of_them(tmp_path: Path) -> None:
    left(tmp_path / "one", LINES)
    left(tmp_path / "two", [line("round", 1, 1, world=2, job="second", uid="2")])
    left(tmp_path / "three", [line("round", 1, 1, world=2), line("end", 2, 1, ok=False, why="budget spent")])
    left(tmp_path / "hostile", [line("round", 1, 1, world=2, job="<script>alert(1)</script>")])
    (tmp_path / "other").mkdir()
    fleet, second = await pages(tmp_path, "/jobs/ml/second")
    assert "<script>alert" not in fleet and "4 " in text(fleet)
    assert fleet.count('href="/jobs/ml/first') == 2, "two folders with the same name are two jobs"
    assert "hostile" in fleet and "budget spent" in fleet
    assert "its end was not recorded" in text(second)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(Mistake, match=str(folder)):
            PastJobs(folder)


def test_later_changes_to_a_folder_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpjob.client.backends.past_jobs._LOOK_SECONDS", 0.01)
    left(tmp_path, LINES[:2])
    changes = PastJobs(tmp_path).changes(None)
    assert next(changes)[0]["status"]["phase"] == "Interrupted"
    (tmp_path / ".ddpjob-rounds.jsonl").write_text("\n".join(LINES) + "\n")
    assert next(changes)[0]["status"]["phase"] == "Complete"


async def test_jobs_with_the_same_name_in_two_namespaces_have_their_own_pages(tmp_path: Path) -> None:
    for namespace, world in (("ml", 2), ("vision", 5)):
        left(tmp_path / namespace, [line("round", 1, 1, world=world, namespace=namespace)])
    for page, world in zip(await pages(tmp_path, "/jobs/ml/first", "/jobs/vision/first"), (None, 2, 5), strict=True):
        assert world is None or f"round 1: {world} nodes" in text(page)


def test_among_many_folders_only_changed_ones_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        left(tmp_path / name, [line("round", 1, 1, world=2, job=name)], steps=9)
    archive, read = PastJobs(tmp_path), list[str]()

    def reading(folder: Path) -> LeftBehind:
        read.append(folder.name)
        return read_left_behind(folder)

    monkeypatch.setattr("ddpjob.client.backends.past_jobs.read_left_behind", reading)
    (tmp_path / "two" / ".ddpjob-rounds.jsonl").write_text(line("end", 2, 1, ok=True, why="over", job="two"))
    phases = {body["metadata"]["name"]: body["status"]["phase"] for body in archive.jobs()}
    assert (phases, read) == ({"one": "Interrupted", "two": "Complete"}, ["two"])
    assert archive.metrics("one").count("\n") == 7, "metrics are read on request and not kept"
    assert read == ["two", "one"]


def test_the_removal_of_a_known_job_is_reported_as_the_first_change(tmp_path: Path) -> None:
    left(tmp_path / "one", [line("round", 1, 1, world=2, job="one")])
    known = [{"metadata": {"name": name, "namespace": "ml"}} for name in ("one", "two")]
    changes = PastJobs(tmp_path).changes(None, seconds=9, known=known)
    assert next(changes) == (known[1], True)
    assert next(changes)[0]["metadata"]["name"] == "one"


def test_a_job_whose_folder_is_removed_disappears_from_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpjob.client.backends.past_jobs._LOOK_SECONDS", 0.01)
    for name in ("one", "two"):
        left(tmp_path / name, [line("round", 1, 1, world=2, job=name)])
    changes = PastJobs(tmp_path).changes(None, seconds=9)
    assert {next(changes)[0]["metadata"]["name"] for _ in range(2)} == {"one", "two"}
    shutil.rmtree(tmp_path / "two")
    gone, deleted = next(changes)
    assert (gone["metadata"]["name"], deleted) == ("two", True)


async def test_the_page_of_a_past_job_shows_its_kept_logs(tmp_path: Path) -> None:
    uid = read_left_behind(left(tmp_path, LINES)).uid
    logs = tmp_path / LOGS_FOLDER
    logs.mkdir()
    (logs / kept_log_name("first-1-0", uid)).write_text("line 1\n<b>\x1b[31mlast words\n")
    (logs / kept_log_name("first-1-<b>", uid)).touch()
    path = "/jobs/ml/first/log"
    _, page, lines, none = await pages(tmp_path, "/jobs/ml/first/logs", f"{path}?pod=first-1-0", f"{path}?pod=x-1-0")
    assert "<option selected>first-1-0</option>" in page and "<b>" not in page
    assert json.loads(lines.partition("data: ")[2].partition("\n")[0]) == ["line 1", "<b>last words"]
    assert "event: end" in lines and "event: end" in none and "last words" not in none
