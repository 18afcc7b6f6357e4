"""The dashboard in a real Chromium: 1,000 jobs, narrow and wide pages, light and dark, keyboard
navigation, and live updates.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from chromium import Page, browser_page
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.dashboard import web_server
from ddpjob.dashboard.fleet import Fleet
from ddpjob.local.paths import RUNS_VARIABLE, JobFolder
from ddpjob.local.record import write_record

from benchmarks.dashboard_views import record, runs, served

pytestmark = pytest.mark.slow
JOBS = 1000
METRICS = "\n".join(
    json.dumps({"event": "step", "step": step, "loss": 10 / step, "samplesPerSecond": 100.0, "time": step, "lr": 0.1})
    for step in range(1, 500)
)


@pytest.fixture
async def page(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Page, str, Path]]:
    """Yield a tab with the list of `request.param` jobs, the server's address, and the folder of
    the runs.
    """
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    with runs(tmp_path, request.param), Fleet(ProcessBackend()) as fleet:
        async with served(fleet, "secret") as address, browser_page() as tab:
            await tab.size(1400)
            await tab.open(f"{address}/?token=secret")
            yield tab, address, tmp_path
            assert not tab.problems, tab.problems
            outside = [url for url in tab.requests if not url.startswith((address, "about:", "data:"))]
            assert not outside, "the pages must work without the internet"


OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
CONTRAST = """(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest("svg")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.add(`${node.className}: ${node.textContent.trim().slice(0, 40)}`);
  }
  return [...poor];
})()"""
BARS = """(() => {
  if (!document.querySelector(".timeline")) return [];
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number).slice(0, 3);
  const light = (colour) => rgb(colour).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const panel = light(getComputedStyle(document.querySelector(".panel")).backgroundColor);
  return [...document.querySelectorAll(".timeline rect")].filter((bar) => {
    const [a, b] = [light(getComputedStyle(bar).fill), panel].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 3;
  }).map((bar) => bar.getAttribute("class"));
})()"""
"""Parts of the timeline whose contrast with the panel is below 3:1, the WCAG minimum for
graphics.
"""
TALL = """[...document.querySelectorAll(".panel .scroll tr")].filter((row) => {
  const why = row.querySelector(".why");
  return why && (why.getBoundingClientRect().right > innerWidth || (!why.textContent.trim() && row.offsetHeight > 150));
}).length"""
"""Rows whose message is beyond the edge of a narrow screen, or which are tall without a message."""
SIDEWAYS = """[...document.querySelectorAll(".scroll")].filter(
  (region) => region.checkVisibility() && region.scrollWidth > region.clientWidth + 1
).map((region) => `${region.getAttribute("aria-label")}: ${region.scrollWidth - region.clientWidth}`)"""
"""Tables with a part, such as the message, beyond the edge. Some jobs have names of 40
characters.
"""
UNNAMED = """[...document.querySelectorAll("a, button, input, select, progress, [role=img], [role=region]")].filter(
  (node) => node.checkVisibility() && node.type !== "hidden"
  && !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length))
  .map((node) => node.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("page", [JOBS], indirect=True)
async def test_the_dashboards_pages_work_in_a_real_browser(page: tuple[Page, str, Path]) -> None:
    tab, address, folder = page
    bodies = [record(number, datetime.now(UTC)) for number in range(JOBS)]
    restarted = next(b for b in bodies if b["status"]["phase"] == "Running" and b["status"]["restarts"]["total"] > 2)
    name = restarted["metadata"]["name"]
    place = JobFolder(folder / name)
    (place.checkpoints / "run").mkdir(parents=True)
    (place.checkpoints / "run" / "metrics.jsonl").write_text(METRICS)

    # The list shows the number of all jobs and a hundred per page, and is filtered by keyboard
    # without loading another page.
    assert await tab.js("document.querySelector('.figures dd').textContent") == "1\u202f000"
    assert await tab.js("document.querySelectorAll('tbody tr').length") == 100
    await tab.until("document.getElementById('live').textContent === 'live'")
    await tab.key("Tab")
    assert await tab.js("document.activeElement.textContent") == "Skip to content"
    await tab.key("/", "/")
    assert await tab.js("document.activeElement.id") == "q"
    await tab.type(name)
    await tab.until("document.querySelectorAll('tbody tr').length === 1")
    assert await tab.js("document.activeElement.id") == "q" and name in await tab.js("location.search")

    # A change to the record appears without a reload, and the focus is kept.
    await tab.js(f"document.querySelector('a[href=\"/jobs/default/{name}\"]').focus()")
    body = json.loads(place.status.read_text())
    body["status"]["progress"] |= {"display": "epoch 77/99", "percent": 77}
    write_record(place, body)
    await tab.until("document.querySelector('tbody').textContent.includes('epoch 77/99')")
    assert await tab.js("document.activeElement.textContent") == name
    assert await tab.js("document.querySelector('tbody progress').value") == 77
    state = body["status"]["phase"]
    for phase in ("Suspended", state):
        body["status"]["phase"] = phase
        write_record(place, body)
        await tab.until(f"document.getElementById('changes').textContent === '{name} is {phase}'")

    # A job opens with Enter and shows uPlot's curves, rounds and restarts, then its log and its
    # manifest.
    await tab.key("Enter")
    await tab.until("document.querySelectorAll('#charts canvas').length === 3")
    assert await tab.js("document.querySelectorAll('svg.timeline rect.restart').length > 2")
    assert await tab.js(UNNAMED) == []
    views = ("/", f"/jobs/default/{name}", f"/jobs/default/{name}/logs", f"/jobs/default/{name}/manifest")
    for scheme in ("light", "dark"):
        await tab.scheme(scheme)
        for path in views:
            await tab.size(1400)
            await tab.open(address + path)
            assert await tab.js(CONTRAST) == [], (scheme, path)
            assert (
                await tab.js("document.querySelectorAll('main').length + document.querySelectorAll('h1').length") == 2
            )
            assert await tab.js(BARS) == [], (scheme, path)
            for width in (1400, 1280, 390, 360):
                await tab.size(width)
                assert await tab.js(OVERFLOW) <= 0, (path, width)
                assert await tab.js(SIDEWAYS) == [], (path, width)
                assert width >= 1280 or await tab.js(TALL) == 0, (path, width)
    await tab.size(1400)
    await tab.open(f"{address}{views[2]}")
    await tab.until("document.getElementById('log').textContent.includes('step 59')")
    log = place.run("1").log(body["local"]["pods"][0]["name"], "trainer")
    with log.open("a") as file:
        file.write("<b>the newest line</b>\n")
    await tab.until("document.getElementById('log').textContent.includes('<b>the newest line</b>')")
    assert not await tab.js("document.querySelector('#log b')")
    place.status.unlink()
    await tab.until("document.getElementById('live').textContent === 'deleted'")
    tab.problems[:] = [problem for problem in tab.problems if "404" not in problem]


@pytest.mark.parametrize("page", [1], indirect=True)
async def test_the_content_security_policy_of_the_pages_is_enforced(page: tuple[Page, str, Path]) -> None:
    """Without this test, a missing policy would go unnoticed, because no page injects a script."""
    tab, address, _ = page
    await tab.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.evil = 1\">')")
    await tab.js(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.evil = 2'}))"
    )
    await asyncio.sleep(0)
    assert not await tab.js("window.evil") and any("Content Security Policy" in said for said in tab.problems)
    refused = await tab.js("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => String(error))")
    assert "TypeError" in refused
    tab.problems.clear()
    async with aiohttp.ClientSession() as other, other.get(f"{address}/", headers={"Host": "evil.example"}) as answer:
        assert answer.status == 421


@pytest.mark.parametrize("page", [1], indirect=True)
async def test_pressing_the_button_reads_the_pods_only_once(
    page: tuple[Page, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tab, address, folder = page
    asked: list[str] = []

    def metrics(backend: ProcessBackend, name: str) -> str:
        asked.append(name)
        if len(asked) == 1:
            raise Mistake("no pod has it")
        return METRICS

    monkeypatch.setattr(web_server, "_CURVES_SECONDS", 0.0)
    monkeypatch.setattr(ProcessBackend, "local", False)
    monkeypatch.setattr(ProcessBackend, "metrics", metrics)
    [name] = [path.name for path in folder.iterdir()]
    await tab.open(f"{address}/jobs/default/{name}")
    button = "document.getElementById('curves-more')"
    refreshed = "Date.now = () => 1e15; document.dispatchEvent(new Event('ddpjob:refreshed'))"
    await tab.until(f"!{button}.hidden && !{button}.disabled")
    for presses, seen in ((1, "includes('no pod has it')"), (2, "includes('metrics.jsonl')")):
        await tab.js(f"{button}.click()")
        await tab.until(f"document.getElementById('curves-note').textContent.{seen} && !{button}.disabled")
        await tab.js(refreshed)
        await tab.js("fetch('/healthz').then(() => new Promise((done) => setTimeout(done, 300)))")
        assert len(asked) == presses and await tab.js(f"!{button}.hidden")
        assert await tab.js(f"document.getElementById('curves-note').textContent.{seen}")
    assert await tab.js("document.querySelectorAll('#charts canvas').length") == 3
