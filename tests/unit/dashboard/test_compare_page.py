"""The comparison of jobs in a real Chromium: jobs are selected by keyboard, pages may be narrow and
dark, and there are no errors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, browser_page
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.dashboard.fleet import Fleet
from ddpjob.local.paths import RUNS_VARIABLE, JobFolder
from ddpjob.local.record import write_record
from test_dashboard_in_browser import CONTRAST, OVERFLOW, UNNAMED

from benchmarks.dashboard_views import record, runs, served

pytestmark = pytest.mark.slow


def metrics(slope: float) -> Iterator[str]:
    """Yield the lines of a run that lost 13 seconds between its steps 120 and 101."""
    time = 1.76e9
    for start, end in ((0, 120), (100, 230)):
        yield json.dumps({"event": "start", "time": time, "step": start, "world": 4})
        for step in range(start + 1, end + 1):
            time += 0.5
            row = {"event": "step", "time": time, "step": step, "epoch": 1 + (step - 1) // 50}
            yield json.dumps({**row, "loss": 2.3 * math.exp(-step / slope) + 0.1, "samplesPerSecond": 900.0 + slope})
            if step % 50 == 0:
                yield json.dumps({"event": "eval", "time": time, "step": step, "accuracy": 1 - math.exp(-step / slope)})
        time += 13


def give_runs(root: Path) -> list[str]:
    """Write curves, arguments, code and packages for three jobs, and return the jobs' names."""
    bodies = [record(number, datetime.now(UTC)) for number in range(12)]
    found = [body for body in bodies if body["status"]["phase"] == "Complete"][:3]
    for number, body in enumerate(found):
        folder = JobFolder(root / body["metadata"]["name"])
        (folder.checkpoints / "run").mkdir(parents=True)
        (folder.checkpoints / "run" / "metrics.jsonl").write_text("\n".join(metrics(60.0 + 50 * number)) + "\n")
        body["spec"] |= {"args": ["--lr", str(0.1 * (number + 1)), "--seed=7"], "script": "train.py"}
        body["metadata"]["annotations"] = {"ddpjob.io/git-commit": f"{number}" * 40, "ddpjob.io/git-dirty": "true"}
        body["status"]["progress"]["environment"] = {"gpu": "NVIDIA H200", "packages": {"torch": f"2.{number}.0"}}
        write_record(folder, body)
    return [body["metadata"]["name"] for body in found]


@pytest.fixture
async def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Page, str, list[str]]]:
    """Yield a tab with the list of 12 jobs, the server's address, and the names of three jobs with
    curves.
    """
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    with runs(tmp_path, 12):
        names = give_runs(tmp_path)
        with Fleet(ProcessBackend()) as fleet:
            async with served(fleet, "secret") as address, browser_page() as tab:
                await tab.size(1280)
                await tab.open(f"{address}/?token=secret")
                yield tab, address, names
                assert not tab.problems, tab.problems


async def picture(tab: Page, name: str) -> None:
    """Save a screenshot for people to the folder in `DDPJOB_PICTURES`."""
    if folder := os.environ.get("DDPJOB_PICTURES"):
        Path(folder, f"{name}.png").write_bytes(await tab.picture(whole=True))  # noqa: ASYNC240


async def rows(tab: Page) -> dict[str, list[str]]:
    """Return the table of differences."""
    cells = "[...row.children].map((cell) => cell.textContent.trim())"
    found: list[Any] = await tab.js(
        f"[...document.querySelectorAll('#differences > .scroll tbody tr')].map((row) => {cells})"
    )
    return {label: values for label, *values in found}


async def test_jobs_can_be_selected_and_compared_in_a_browser(page: tuple[Page, str, list[str]]) -> None:
    tab, address, names = page

    # Three jobs are chosen in the list by keyboard, and stay chosen while the list is filtered.
    for name in names:
        await tab.js(f"document.querySelector('input[name=job][value=\"default/{name}\"]').focus()")
        await tab.key(" ", " ")
    await tab.until("document.querySelector('#compare button').textContent === 'Compare 3 jobs'")
    await picture(tab, "list")
    await tab.key("/", "/")
    await tab.type(names[0])
    await tab.until("document.querySelectorAll('tbody tr').length === 1")
    assert await tab.js("document.querySelector('tbody input').checked")
    await tab.js("window.left = true")
    await tab.js("document.querySelector('#compare button').focus()")
    await tab.key("Enter")
    await tab.until("!window.left && document.querySelectorAll('#charts canvas').length === 3")

    # Each chart shows every job. Only values that differ have rows.
    assert await tab.js("[...document.querySelectorAll('.chart h3 span')].map((title) => title.textContent)") == [
        *("loss", "test accuracy", "samples/s")
    ]
    values = await tab.js(
        "[...document.querySelectorAll('.chart')].map((box) => box.querySelector('.values').textContent)"
    )
    assert all(name in text for text in values for name in names) and f"{names[0]} 96.43%" in values[1], values
    found = await rows(tab)
    assert found["--lr"] == ["0.1", "0.2", "0.30000000000000004"] and "--seed" not in found
    assert found["git commit"][1] == "111111111111 with changes" and found["torch"] == ["2.0.0", "2.1.0", "2.2.0"]
    assert "--seed" in await tab.js("document.querySelector('#same').textContent")

    # The axis, the smoothing and the scale are kept in the address.
    ends = "document.querySelector('.chart [role=img]').getAttribute('aria-label')"
    assert "loss of 3 jobs" in await tab.js(ends)
    for name, value in (("by", "time"), ("smooth", "0.9"), ("log", "on")):
        field = f"document.getElementById('controls').elements.{name}"
        await tab.js(f"{field}.focus(), {field}.value = '{value}', {field}.dispatchEvent(new Event('change'))")
    await tab.until("document.querySelector('.chart h3').textContent.includes('logarithmic')")
    await tab.until("performance.getEntriesByType('resource').some((entry) => entry.name.includes('by=time'))")
    assert (await tab.js("location.search")).endswith("&by=time&smooth=0.9&log=on")
    await picture(tab, "compare-light")

    for scheme in ("light", "dark"):
        await tab.scheme(scheme)
        for width in (1280, 390):
            await tab.size(width)
            assert await tab.js(OVERFLOW) <= 0, (scheme, width)
            assert await tab.js(CONTRAST) == [] and await tab.js(UNNAMED) == [], (scheme, width)
            await tab.until(f"document.querySelector('.uplot').clientWidth < {width}")
            await picture(tab, f"compare-{scheme}-{width}")

    # Compare fewer jobs, one of which does not exist.
    await tab.open(f"{address}/compare?job=default/{names[0]}")
    assert "Choose 2 to 6 jobs" in await tab.js("document.querySelector('main').textContent")
    tab.problems.clear()
    await tab.open(f"{address}/compare?job=default/{names[0]}&job=default/nothere")
    assert "no job nothere" in await tab.js("document.querySelector('main').textContent")
    tab.problems.clear()  # the browser reports the 404 response
