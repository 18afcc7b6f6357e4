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
    """Make the controller measure time with the loop's clock instead of the machine's."""
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

    When such a watch is garbage-collected, its traceback is logged. If a test is parsing a program
    at that moment, the test fails on Python 3.11, because formatting a traceback calls ast.parse as
    well, and the two calls disturb each other.
    """
    yield
    gc.collect()
