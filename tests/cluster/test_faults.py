"""Faults of the control plane while jobs train.

These are the most revealing faults of `python -m benchmarks.faults`. Longer faults, such as silent
watches, are tested in virtual time (controller/test_leader.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from borrowed import named, require_python_host, skip
from testcluster.cluster import Cluster

from benchmarks.faults import faults
from benchmarks.faults.__main__ import once
from benchmarks.faults.faults import Fault
from benchmarks.faults.scene import Scene, scene

KILLS = 5


@pytest.fixture(scope="module")
def stage(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    if named():
        skip("kills the API server")
    require_python_host(cluster)
    folder: Path = tmp_path_factory.mktemp("faults")
    with scene(cluster, folder) as made:
        yield made
    if request.session.testsfailed:
        print((folder / "operator.log").read_text(errors="replace")[-20000:])


def test_the_operator_survives_an_api_server_that_loses_data_refuses_and_fails(stage: Scene) -> None:
    once(stage, Fault("compacted", 1, faults.compacted))
    once(stage, Fault("refused", 5, faults.refused))
    once(stage, Fault("errors", 0, faults.watch_errors))


def test_pods_that_a_policy_denies_are_created_when_the_policy_is_removed(stage: Scene) -> None:
    once(stage, Fault("denied", 3, faults.denied))


def test_a_namespace_is_deleted_with_its_jobs_even_if_the_operator_dies(stage: Scene) -> None:
    once(stage, Fault("namespace", 0, faults.namespace_deleted))
    once(stage, Fault("killed", 0, lambda s, seconds: faults.operator_killed(s, seconds, KILLS)))
