"""Fixtures of the cluster tests: one real cluster per run (per worker, under pytest-xdist), one namespace per test.

Environment: DDPJOB_TEST_KUBECONFIG (use that existing cluster), DDPJOB_CLUSTER_NODES (2), DDPJOB_CLUSTER_KEEP=1 (leave
the cluster up after the run; a later run uses it again), CI=true (what a machine lacks fails the tests instead of
skipping them).
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import borrowed
import pytest
from install_fixtures import installed_operator, release, trainer_image  # noqa: F401 (fixtures)
from job_fixtures import jobs, operator  # noqa: F401 (fixtures)
from testcluster import builder, prerequisites, processes, python_host
from testcluster.cluster import Cluster
from testcluster.settings import SLOTS, ClusterError, Settings, node_number

HERE = Path(__file__).parent
CALL_REPORT = pytest.StashKey[pytest.TestReport]()
LIMIT = 2700
"""Seconds for a test with its fixtures: the first one builds the cluster's programs and images."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[CALL_REPORT] = report
    return report


def _refuse(why: str) -> None:
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"CI=true, and this machine cannot run the test cluster: {why}", pytrace=False)
    pytest.skip(f"this machine cannot run the test cluster: {why}")


def _number_of_nodes() -> int:
    text = os.environ.get("DDPJOB_CLUSTER_NODES", "2")
    if not text.isdigit():
        raise ClusterError(f"DDPJOB_CLUSTER_NODES={text}: must be a number")
    return int(text)


def _settings() -> Settings:
    """Each worker of pytest-xdist has a cluster of its own, in the next slots.

    Where no slot was asked for, those of another checkout's clusters are left out: two runs on one machine get along.
    """
    settings = Settings()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = replace(settings, slot=(settings.slot + worker) % SLOTS)
    if "DDPJOB_CLUSTER_SLOT" in os.environ:
        return own
    # The upper half is for the clusters that tests have beside their own (`other`).
    later = (replace(own, slot=slot) for slot in range(own.slot + workers, SLOTS // 2, workers))
    return next((free for free in (own, *later) if not Cluster(free).is_anothers()), own)


@pytest.fixture(scope="session")
def cluster_machine() -> Settings:
    """The settings of a machine that can run the cluster; skips the test on any other, or fails it when CI=true."""
    if borrowed.named():
        borrowed.skip("is about the cluster that the tests build")
    settings = _settings()
    if found := prerequisites.reasons(settings):
        _refuse("; ".join(found))
    prerequisites.install()
    return settings


@pytest.fixture
def other(cluster_machine: Settings) -> Iterator[Cluster]:
    """A cluster in a slot of its own, beside the one that the other tests use."""
    made = Cluster(replace(cluster_machine, slot=(cluster_machine.slot + SLOTS // 2) % SLOTS))
    if made.state() is not None:
        pytest.skip(f"a cluster is up in slot {made.settings.slot}, which this test would use")
    yield made
    made.down()


def _join_users(settings: Settings) -> IO[str]:
    """Hold the shared lock of the test runs that use this cluster: the last one takes it down."""
    users = Path(f"{settings.lock}.users").open("a")  # noqa: SIM115 (held until the session ends)
    fcntl.flock(users, fcntl.LOCK_SH)
    return users


def _is_last_user(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The running cluster. It is taken down after the run, unless it was up before or DDPJOB_CLUSTER_KEEP=1."""
    if kubeconfig := borrowed.named():
        yield borrowed.BorrowedCluster.open(kubeconfig, tmp_path_factory.mktemp("tools"))
        return
    cluster_machine: Settings = request.getfixturevalue("cluster_machine")
    users = _join_users(cluster_machine)
    made = Cluster(cluster_machine)
    before = made.state()
    made.up(
        _number_of_nodes(), keep=before.keep if before is not None else os.environ.get("DDPJOB_CLUSTER_KEEP") == "1"
    )
    yield made
    state = made.state()
    if state is not None and not state.keep and _is_last_user(users):
        made.down()
    users.close()


@pytest.fixture
def third_node(cluster: Cluster) -> Iterator[str]:
    """`n3`, for tests that lose a node. Afterwards it is whole again and cordoned: other tests see two nodes."""
    with more_nodes(cluster, 3):
        yield "n3"


@contextmanager
def more_nodes(cluster: Cluster, nodes: int) -> Iterator[None]:
    """`nodes` nodes to schedule on. Afterwards those added are whole again, and cordoned."""
    cluster.up(nodes=nodes)
    lent = [f"n{number}" for number in range(3, nodes + 1)]
    cluster.kubectl("uncordon", *lent)
    yield
    for name in lent:
        cluster.heal(name)
    processes.wait_for(f"{', '.join(lent)} to be Ready again", lambda: set(lent) <= cluster.ready_nodes(), timeout=60)
    cluster.kubectl("cordon", *(name for name in lent if node_number(name) > _number_of_nodes()))


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Callable[..., str]:
    """`kubectl("get", "pods")`: what it prints; ClusterError when it fails. `cluster.kubectl_json` parses it."""
    return cluster.kubectl


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace. It is removed after the test; when the test has failed, all that is in it is printed first."""
    name = f"{_slug(request.node.name)}-{secrets.token_hex(2)}"
    create_namespace(cluster, name)
    yield name
    report = request.node.stash.get(CALL_REPORT, None)
    if report is None or report.failed:
        print_namespace(cluster, name)
    remove_namespace(cluster, name)


def create_namespace(cluster: Cluster, name: str) -> None:
    """A namespace in which pods can be created: they are refused before it has its default service account."""
    cluster.kubectl("create", "namespace", name)
    account = ("get", "serviceaccount", "default", "--namespace", name, "--ignore-not-found", "--output=name")
    processes.wait_for(
        f"the default service account of {name}", lambda: bool(cluster.kubectl(*account).strip()), timeout=30
    )


def remove_namespace(cluster: Cluster, name: str) -> None:
    """Delete a namespace and wait until its pods have ended, not until the last object is gone: seconds more."""
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
    pods = ("pods", "--namespace", name)
    cluster.kubectl("delete", *pods, "--all", "--grace-period=1", "--wait=false", "--ignore-not-found")
    left = ("get", *pods, "--output=name")
    processes.wait_for(f"the end of the pods of {name}", lambda: not cluster.kubectl(*left).strip(), timeout=60)


def print_namespace(cluster: Cluster, name: str) -> None:
    """Objects, events, descriptions and logs of a namespace, for the report of a failed test."""
    print(f"======== namespace {name}")
    for words in (
        ("get", "all,configmaps", "--output=wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("get", "ddpjobs", "--output=yaml"),
        ("describe", "pods"),
    ):
        _print(cluster, *words, "--namespace", name)
    for pod in cluster.kubectl_json("get", "pods", "--namespace", name)["items"]:
        _print(
            cluster, "logs", pod["metadata"]["name"], "--all-containers", "--prefix", "--tail=200", "--namespace", name
        )


def _print(cluster: Cluster, *words: str) -> None:
    print(f"---- kubectl {' '.join(words)}")
    try:
        print(cluster.kubectl(*words))
    except ClusterError as error:
        print(error)  # A pod without logs, a CRD that is not there: part of the report, not a second failure.


@pytest.fixture(scope="session")
def image_tools(request: pytest.FixtureRequest) -> Settings:
    """The settings of a machine that can build images too."""
    if borrowed.named():
        borrowed.skip("loads images into the nodes")
    cluster_machine: Settings = request.getfixturevalue("cluster_machine")
    if found := prerequisites.reasons(cluster_machine, images=True):
        _refuse("; ".join(found))
    prerequisites.install(images=True)
    return cluster_machine


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster, image_tools: Settings) -> builder.Image:
    """The Dockerfile's `operator`, in all nodes; its `tag` is the name. Never pulled: `imagePullPolicy: Never`."""
    image = builder.build_image(image_tools, "operator", "ddpjob.test/operator:checkout")
    cluster.load_image(image)
    return image


@pytest.fixture(scope="session")
def python_overlay() -> Callable[..., dict[str, Any]]:
    """`python_overlay("trainer")`: the part of a pod template that brings this machine's Python into its container."""
    return python_host.overlay
