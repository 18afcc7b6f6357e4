"""A job and its pods as the operator builds them, for the tests in this folder."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.core.plan.slots import begin_generation
from ddpjob.core.view import View
from ddpjob.core.world import World
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import build_node

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLATFORM = Platform(operator_key=b"0123456789abcdef")


def job(**spec: Any) -> DDPJob:
    body = {"image": "image", "script": "train.py", "nodes": 2, **spec}
    read = DDPJob.read({"metadata": {"name": "job", "namespace": "space", "uid": "uid"}, "spec": body})
    return DDPJob(
        name=read.name,
        namespace=read.namespace,
        uid=read.uid,
        spec=read.spec,
        status=begin_generation(View(read, read.status, World(), NOW)),
    )


def node(index: int = 0, **spec: Any) -> Json:
    made = job(**spec)
    return build_node(made, made.status, PLATFORM, index, 0)


def container(pod: Json, name: str = "trainer") -> Json:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def environment(pod: Json) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container(pod)["env"]}
