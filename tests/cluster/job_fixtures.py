"""Fixtures for tests of jobs: the operator as a process, and the jobs in the test's namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from borrowed import require_python_host
from jobs import Jobs
from operator_process import OperatorProcess, install_crd
from testcluster.cluster import Cluster


@pytest.fixture(scope="module")
def operator(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[OperatorProcess]:
    """Run the operator for the tests of one module, so that modules that install the chart have no
    second operator.
    """
    require_python_host(cluster)
    install_crd(cluster)
    log: Path = tmp_path_factory.mktemp("operator") / "operator.log"
    process = OperatorProcess(cluster, log)
    process.start()
    yield process
    process.kill()
    if request.session.testsfailed:
        print(f"---- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-200:]))


@pytest.fixture
def jobs(operator: OperatorProcess, cluster: Cluster, namespace: str) -> Jobs:
    if not operator.running():
        operator.start()
    return Jobs(cluster, namespace)
