"""Jobs that a tenant has made as large as the API server accepts must cost the operator little."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from ddpjob.api.job_spec import Json
from ddpjob.controller import kubernetes_cluster
from ddpjob.controller.caches import collection
from ddpjob.controller.kube import rest as rest_module
from ddpjob.controller.kube.informer import PAGE_BYTES, Informer
from ddpjob.core.world import LABEL_JOB
from ddpjob.engine.reconcile import reconcile

from .cluster_case import KEY, Case, case, in_case, seen
from .virtual_loop import run
from .world import api_server, connected, loop_moment

EMPTY: Json = {"spec": {"containers": [{} for _ in range(340_000)]}}
UNKNOWN: Json = {"spec": {f"{n:05}{''.join(random.Random(n).sample('eoinsrtacl', 7))}": 1 for n in range(50_000)}}
TEXT: Json = {"metadata": {"annotations": {f"a{n}": "x" * 200_000 for n in range(7)}}}


@pytest.mark.parametrize("template", [EMPTY, UNKNOWN, TEXT])
@in_case()
async def test_a_template_above_the_limit_fails_its_job_and_is_not_kept(c: Case, template: Json) -> None:
    c.add("huge", podTemplate=template)
    await seen()
    key = KEY._replace(name="huge")
    gc.collect()
    tracemalloc.start()
    c.cluster.caches.forget("DDPJob", *key)
    c.cluster.caches.take("DDPJob", json.loads(json.dumps(c.server.store.get("DDPJob", "huge"))))
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000
    for _ in range(3):
        await reconcile(c.cluster, key, loop_moment)
        await seen()
    status = c.server.store.get("DDPJob", "huge")["status"]
    [failed] = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert failed["reason"] == "InvalidPodTemplate"
    assert failed["message"].startswith("spec.podTemplate: more than 256 KiB of text or 5000 values")
    assert len(json.dumps(status)) < 2000
    assert not [pod for pod in c.server.store.all("Pod") if pod["metadata"]["labels"][LABEL_JOB] == "huge"]
    writes = [path for method, path in c.server.acted if method == "PUT" and "/huge/" in path]
    assert len(writes) == 1, "the status is written once, and the verdict is remembered"


@in_case()
async def test_a_job_whose_other_fields_are_too_large_also_fails(c: Case) -> None:
    c.add("wordy", args=["x" * 60_000] * 5)
    await seen()
    await reconcile(c.cluster, KEY._replace(name="wordy"), loop_moment)
    conditions = c.server.store.get("DDPJob", "wordy")["status"]["conditions"]
    [message] = [one["message"] for one in conditions if one["type"] == "Failed"]
    assert message.startswith("spec: more than 256 KiB of text")


def test_a_template_is_validated_once_and_a_large_one_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, in_threads = list[Json](), list[Json]()

    def searching(template: Json) -> tuple[str, ...]:
        searched.append(template)
        return ()

    async def to_thread(function: Callable[[Json], tuple[str, ...]], template: Json) -> tuple[str, ...]:
        in_threads.append(template)
        return function(template)

    async def main() -> None:
        async with case() as c:
            monkeypatch.setattr(kubernetes_cluster, "problems", searching)
            monkeypatch.setattr(kubernetes_cluster.asyncio, "to_thread", to_thread)
            large = {"spec": {"tolerations": [{"key": f"a{n}", "operator": "Exists"} for n in range(500)]}}
            small = {"spec": {"hostNetwork": True}}
            for name, template in (("large", large), ("small", small)):
                c.add(name, runPolicy={"suspend": True}, podTemplate=template)
                await seen()
                for _ in range(3):
                    await c.cluster.observe(KEY._replace(name=name))
            assert searched == [large, small]
            assert in_threads == [large]

    run(main())


@in_case()
async def test_the_pod_template_of_a_finished_job_is_not_kept_in_memory(c: Case) -> None:
    variables = [{"name": f"A{n}", "value": "x"} for n in range(500)]
    c.add("ended", podTemplate={"spec": {"hostNetwork": True}}, env=variables, args=["x"] * 500)
    await seen()
    key = KEY._replace(name="ended")
    await reconcile(c.cluster, key, loop_moment)
    before = c.cluster.caches.job(key)
    assert before is not None and len(before.spec.env) == 500
    c.finish("ended")
    await seen()
    after = c.cluster.caches.job(key)
    assert after is not None and after.status.terminal
    assert (after.spec.pod_template, after.spec.env, after.spec.args) == ({}, (), ())
    assert after.spec.template_hash == before.spec.template_hash


def test_pages_of_lists_are_limited_by_their_bytes() -> None:
    sizes: list[int] = []

    async def main() -> None:
        async with api_server() as server, connected(server) as rest:
            for n in range(12):
                note = {"note": "x" * (1_400_000 if n % 3 else 10)}
                server.store.create("DDPJob", {"metadata": {"name": f"j{n:02}", "annotations": note}, "spec": {}})
            loads = rest_module.loads

            def reading(text: bytes) -> Any:
                sizes.append(len(text))
                return loads(text)

            rest_module.loads = reading
            try:
                informer = Informer(rest, collection("DDPJob", ""), lambda body: body["metadata"]["name"], print)
                await informer.list()
            finally:
                rest_module.loads = loads
            assert sorted(informer.views()) == [f"j{n:02}" for n in range(12)]
            limits = [int(query["limit"]) for _, _, query in server.requests]
            assert limits[:5] == [500, 125, 31, 7, 1]
            assert 2 in limits[5:], "after a page of small objects, the next page may be larger again"

    run(main())
    assert max(sizes) < PAGE_BYTES
