"""Measures how one team's large jobs and reports affect other teams.

One run has three parts, so that the machine's load is the same for all. First, the operator runs
alone. Then there are 100 jobs of the largest size that the API server stores. Finally, many
coordinators always send the largest report that the operator reads.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

from ddpjob.api.job_spec import Json
from ddpjob.controller.kube.rest import MERGE_PATCH
from ddpjob.engine.ports import Unavailable

from benchmarks.scale.hollow import LARGEST
from benchmarks.scale.measure import Usage
from benchmarks.scale.parts import PROBES, BenchmarkError, Parts, together

FIELDS = 50_000
"""Number of unknown fields in every second large job. Kubernetes stores each name again in
managedFields."""
EMPTY = 440_000
"""Number of empty mappings in the other large jobs. Each takes 3 bytes in JSON, but 72 in
Python."""
CHANGES = 10
LARGE = "large"
_METRIC = "ddpjob_operator_longest_loop_turn_seconds"


class HostileParts(Parts):
    """The parts of `python -m benchmarks.scale hostile`."""

    async def _own(self, usage: Usage) -> float:
        """Return the operator's CPU seconds, minus those that it would have used at rest.

        The API server may take minutes to store the jobs, during which the operator also does its
        ordinary work.
        """
        before = self.meter.read()
        await asyncio.sleep(self.options.settle)
        return usage.operator - (self.meter.read() - before).cores * usage.wall

    async def run(self) -> None:
        self.operator.start()
        await self._operator_acts()
        await self._beside("without hostile jobs")
        await self._large_jobs()
        await self._restarted()
        await self._large_reports()

    async def _beside(self, part: str) -> None:
        """Record what another team observes, and the operator's memory and longest turn."""
        before, waits = self.meter.read(), []
        for _ in range(2 * PROBES):
            waits.append(await self._probe())
            await asyncio.sleep(0.5)
        usage = self.meter.read() - before
        worst = f"worst {max(waits):.2f}; {usage}"
        self._note(
            part, "time until another team's job has its pods (median)", statistics.median(waits), "s", "<= 1", worst
        )
        self._note(part, "longest turn of the event loop", await self._longest_turn(), "s")
        self._note(part, "the operator's memory at its peak", self.operator.peak(), "MiB", "<= 400")

    async def _longest_turn(self) -> float:
        url = f"http://127.0.0.1:{self.operator.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(_METRIC)))

    async def _large_jobs(self) -> None:
        number, team = self.options.large, self.teams[0]
        part, before = f"{number} jobs of 1.4 MB", self.meter.read()
        self.jobs = await together((self._create_large(team, n) for n in range(number)), 2)
        await self._until("every large job has Failed", lambda: self._failed() >= self._created())
        usage = self.meter.read() - before
        body = await self.rest.request("GET", self._path(self.jobs[0]))
        [failed] = [one for one in body["status"]["conditions"] if one["type"] == "Failed"]
        if failed["reason"] != "InvalidPodTemplate":
            raise BenchmarkError(f"a large job has failed for a different reason: {failed}")
        each = await self._own(usage) / self._created()
        self._note(part, "CPU time of the operator per job", each, "s", "<= 0.2", usage)
        await self._beside(part)
        before = self.meter.read()
        for n in range(CHANGES):
            change = {"spec": {"runPolicy": {"suspend": True}}}  # Two templates together would be too large for etcd.
            with suppress(Unavailable):  # A busy API server may store the job after the client has given up.
                await self.rest.request("PATCH", self._path(self.jobs[n]), body=change, content_type=MERGE_PATCH)
        await asyncio.sleep(self.options.settle)
        usage = self.meter.read() - before
        each = await self._own(usage) / CHANGES
        self._note(part, "CPU time of the operator per change to a job", each, "s", "<= 0.2", usage)

    async def _create_large(self, team: str, number: int) -> str:
        """Create a large job. Retry as often as necessary, because a busy API server may take
        longer than a request's timeout.
        """
        template = _template(number)
        while True:
            try:
                return await self._create_job(team, 1, LARGE, podTemplate=template)
            except Unavailable:
                await asyncio.sleep(1)

    @staticmethod
    def _path(job: str) -> str:
        namespace, _, name = job.partition("/")
        return f"/apis/ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs/{name}"

    def _created(self) -> int:
        return sum(g.kind == LARGE for g in self.hollow.groups.values())

    def _failed(self) -> int:
        return sum(g.phase == "Failed" and g.kind == LARGE for g in self.hollow.groups.values())

    async def _restarted(self) -> None:
        """Restart the operator, which lists all the large jobs."""
        self.operator.kill()
        began = time.monotonic()
        self.operator.start()
        before = self.meter.read()
        part = f"restart with {len(self.jobs)} of them"
        await self._probe()
        self._note(part, "time until another team's new job has its pods", time.monotonic() - began, "s")
        await asyncio.sleep(self.options.settle)
        usage = self.meter.read() - before
        self._note(part, "the operator's CPU time", usage.operator, "s", "", usage)
        await self._beside(part)
        await self._sweep([self.teams[0]])

    async def _large_reports(self) -> None:
        number = self.options.reports
        self.operator.kill()
        self.operator.forget_peaks()
        self.operator.start()
        await together(self._create_job(self.teams[0], 1, LARGEST) for _ in range(number))
        await self._until("the coordinators of the largest reports run", lambda: self._reporting() >= number)
        await asyncio.sleep(self.options.settle)
        await self._beside(f"{number} largest reports")

    def _reporting(self) -> int:
        return sum(g.kind == LARGEST and g.phase == "Running" for g in self.hollow.groups.values())


def _template(number: int) -> Json:
    """Return a podTemplate that takes 1.4 MB in the API server."""
    if number % 2:
        return {"spec": {"extra": [{} for _ in range(EMPTY)]}}
    return {"spec": dict.fromkeys(_names(number), 1)}


def _names(seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    for n in range(FIELDS):
        yield f"{''.join(chance.sample('eoinsrta', 3))}{n:05}"
