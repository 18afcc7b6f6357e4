"""Jobs with any spec that the API server accepts, and any status that another writer may have left.
No reconcile may raise an exception.

DDPJOB_GENERATED=20 tries 20 times as many jobs. A failure reports the number of its job, and
`Maker(NUMBER)` generates it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus
from ddpjob.api.reader import validate, with_defaults
from ddpjob.api.schema import schema_of, to_json_schema
from ddpjob.core.decide import decide
from ddpjob.core.decision import Creation, Decision
from ddpjob.core.world import World
from ddpjob.engine.apply import _manifest
from ddpjob.objects.platform import Platform
from ddpjob.objects.pod_template import problems
from generated import Maker
from jsonschema import Draft202012Validator

from .operator_port import MemoryCluster
from .simulated import Simulation

TIMES = int(os.environ.get("DDPJOB_GENERATED", "1"))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATUS = Draft202012Validator(to_json_schema(schema_of("status")))
LARGEST = 200_000
"""Maximum size of a status in bytes. The API server refuses 1.5 MB."""


class Offline:
    """The attributes of a cluster that `_manifest` reads."""

    platform = Platform(operator_key=b"key")


def small(manifest: Json) -> Json:
    """Scale the job down to a few nodes, so that a thousand jobs can be tried."""
    spec = manifest["spec"]
    for field, most in (("nodes", 3), ("spares", 2)):
        if isinstance(spec.get(field), int | float) and spec[field] > most:
            spec[field] = most
    return manifest


@contextmanager
def tried(number: int) -> Iterator[tuple[Json, Maker]]:
    """Yield a generated manifest. The block may raise only if the API server refuses the
    manifest.
    """
    maker = Maker(number)
    manifest = small(maker.manifest())
    try:
        yield manifest, maker
    except Exception as error:
        if not validate(manifest):
            raise AssertionError(f"Maker({number}): {error!r} after {json.dumps(manifest)[:2000]}") from error


def check(job: DDPJob, decision: Decision) -> None:
    """Check that every write is bounded and that the API server accepts it."""
    written = decision.status.write(job.spec)
    assert len(json.dumps(written, allow_nan=False)) < LARGEST
    wrong = [e.message for e in STATUS.iter_errors(written)]
    assert not wrong, wrong[:3]
    assert all(len(event.message.encode()) <= 1024 for event in decision.events)
    assert len(decision.actions) + len(decision.events) < 100
    ends = decision.status.terminal or job.spec.run_policy.suspend or job.spec.managed_elsewhere
    assert ends or decision.wake is not None, "the decision must name a time at which the job is reconciled again"
    assert JobStatus.read(written).write(job.spec) == written, "the status reads back as it was written"


@pytest.mark.parametrize("part", range(4))
def test_a_decision_raises_no_exception_for_any_spec_and_status(part: int) -> None:
    size, done = 100 * TIMES, 0
    for number in range(part * size, (part + 1) * size):
        with tried(number) as (manifest, maker):
            body = with_defaults(manifest)
            body["metadata"] |= {"namespace": "space", "uid": "uid"}
            job = DDPJob.read(body)
            faults = problems(job.spec.pod_template)
            for status in ({}, maker.status()):
                now = NOW
                job = replace(job, status=JobStatus.read(status))
                for _ in range(3):
                    world = World(runtime="r", runtime_offered="r", key_mark="k", problems=faults)
                    decision = decide(job, world, now)
                    check(job, decision)
                    creations = [a for a in decision.actions if isinstance(a, Creation) and now is NOW]
                    for creation in {type(a): a for a in creations}.values():  # one of each kind
                        json.dumps(_manifest(Offline(), job, decision.status, creation), allow_nan=False)  # type: ignore[arg-type]
                    job, now = replace(job, status=decision.status), now + timedelta(seconds=30)
            done += 1
    assert done > size / 4, "only few of these jobs may be refused"


class AnyPods(MemoryCluster):
    """A cluster whose pods have random contents. Only the operator's own containers and variables
    are kept.
    """

    async def create(self, job: DDPJob, manifest: Json) -> None:
        if manifest["kind"] == "Pod":
            spec = manifest["spec"]
            own = [c for c in spec["containers"] if c["name"] in ("trainer", "coordinator")]
            spec = {**spec, "containers": [{**c, "env": list(filter(_own, c["env"]))} for c in own]}
            manifest = {**manifest, "spec": spec}
        await super().create(job, manifest)


def _own(variable: Json) -> bool:
    return "valueFrom" not in variable or variable["name"] in ("DDPJOB_TOKEN", "POD_IP", "NODE_NAME")


class Generated(Simulation):
    """A simulation without invariants, because a forged status may claim anything."""

    cluster_class = AnyPods

    def __init__(self, manifest: Json) -> None:
        super().__init__({})
        self.invariants.after_reconcile = lambda: None  # type: ignore[method-assign]
        self.store.watchers.remove(self.invariants._observe)
        self.training.check = lambda current: None
        self.job_body["spec"] = with_defaults(manifest)["spec"]

    def forge(self, status: Json) -> None:
        """Write these fields of the status, like a different writer."""
        self.training.rounds.clear()
        self.job_body["status"] = {**self.status, **status}
        self.store.changed("DDPJob", self.job_body)


@pytest.mark.parametrize("part", range(2))
async def test_a_job_is_reconciled_with_any_status(part: int) -> None:
    size, reached = 60 * TIMES, dict[Any, int]()
    for number in range(part * size, (part + 1) * size):
        with tried(number) as (manifest, maker):
            s = Generated(manifest)
            for status in ({}, maker.status(), maker.status()):
                s.forge(status)
                for _ in range(4):
                    await s.one_pass()
                    s.advance(2)
            reached[s.phase] = reached.get(s.phase, 0) + 1
            if s.job is not None and not DDPJob.read(s.job).spec.managed_elsewhere:
                assert s.status["observedGeneration"] == 1
    assert reached.get("Running", 0) > size / 4, reached
