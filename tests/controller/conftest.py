from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from ddpjob.controller import host_watch, kubernetes_cluster, namespace_claims, operator_shards
from ddpjob.controller.kube import election

from .world import loop_moment


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure times in the controller with the loop's clock instead of the machine's."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    for module in (kubernetes_cluster, election):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "utc_now", loop_moment)
    monkeypatch.setattr(host_watch, "utc_now", loop_moment)
    monkeypatch.setattr(namespace_claims, "time", clock)
    monkeypatch.setattr(operator_shards, "time", clock)


@pytest.fixture(scope="module", autouse=True)
def nothing_to_collect_later() -> Iterator[None]:
    """Collect watches that ended with an error before the next test starts.

    They are reported with their traceback when they are collected. If a test parses a program at
    that moment, it fails on Python 3.11: the traceback is parsed too, and ast.parse counts both as
    one program.
    """
    yield
    gc.collect()
