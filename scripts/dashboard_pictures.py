"""Takes docs/images/dashboard-job.png and dashboard-jobs.png in a real Chromium.

    python -m scripts.demo examples/digits.yaml
    PYTHONPATH=tests python -m scripts.dashboard_pictures runs

The first picture shows the job `digits` in the given folder of runs, and the second shows 1,000
generated jobs. Take both again whenever a page has changed, and look at them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

from chromium import Page, browser_page
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.dashboard.fleet import Fleet
from ddpjob.local.paths import RUNS_VARIABLE

from benchmarks.dashboard_views import runs, served

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHOWN = "/home/ada/runs"
"""The folder in the pages' header, instead of this machine's."""


async def take(page: Page, path: str, ready: str, name: str, *, whole: bool) -> None:
    """Save a picture of a page once the JavaScript expression `ready` is true."""
    with mock.patch.object(ProcessBackend, "where", SHOWN), Fleet(ProcessBackend()) as fleet:
        async with served(fleet, "token") as address:
            await page.open(f"{address}/?token=token")
            await page.open(f"{address}{path}")
            await page.until(ready)
            (IMAGES / name).write_bytes(await page.picture(whole=whole))


async def main(folder: str) -> None:
    """Take both pictures."""
    async with browser_page() as page:
        os.environ[RUNS_VARIABLE] = folder
        await page.size(1280, 900)
        drawn = "document.querySelectorAll('#charts canvas').length > 3"
        await take(page, "/jobs/default/digits", drawn, "dashboard-job.png", whole=True)
        with tempfile.TemporaryDirectory() as root, runs(Path(root), 1000):
            os.environ[RUNS_VARIABLE] = root
            live = "document.getElementById('live').textContent === 'live'"
            await page.size(1440, 900)
            await take(page, "/", live, "dashboard-jobs.png", whole=False)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
