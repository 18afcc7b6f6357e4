"""Fixtures of the cluster tests: one real cluster per run (per worker, under pytest-xdist), one
namespace per test.

Environment variables: DDPJOB_TEST_KUBECONFIG uses that existing cluster. DDPJOB_CLUSTER_NODES is
the number of nodes (2). DDPJOB_CLUSTER_KEEP=1 keeps the cluster for later runs. CI=true fails tests
whose requirements the machine lacks, instead of skipping them.
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
"""Timeout of a test with its fixtures, in seconds. The first test builds the cluster's programs and
images.
"""


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


def refuse(why: str) -> None:
    """Skip the test, or fail it if CI=true, because this machine cannot run it."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"CI=true, and this machine cannot run the test cluster: {why}", pytrace=False)
    pytest.skip(f"this machine cannot run the test cluster: {why}")


def _number_of_nodes() -> int:
    text = os.environ.get("DDPJOB_CLUSTER_NODES", "2")
    if not text.isdigit():
        raise ClusterError(f"DDPJOB_CLUSTER_NODES={text}: must be a number")
    return int(text)


def _settings() -> Settings:
    """Return the settings for this worker. Each worker of pytest-xdist has its own cluster, in
    consecutive slots.

    If no slot is requested, slots with clusters of other checkouts are skipped, so that two runs
    can share a machine.
    """
    settings = Settings()
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = replace(settings, slot=(settings.slot + worker) % SLOTS)
    if "DDPJOB_CLUSTER_SLOT" in os.environ:
        return own
    # The upper half is for additional clusters of tests (`other`).
    later = (replace(own, slot=slot) for slot in range(own.slot + workers, SLOTS // 2, workers))
    return next((free for free in (own, *later) if not Cluster(free).is_anothers()), own)


@pytest.fixture(scope="session")
def cluster_machine() -> Settings:
    """Return the settings of a machine that can run the cluster. On other machines the test is
    skipped, or fails if CI=true.
    """
    if borrowed.named():
        borrowed.skip("is about the cluster that the tests build")
    settings = _settings()
    if found := prerequisites.reasons(settings):
        refuse("; ".join(found))
    prerequisites.install()
    return settings


@pytest.fixture
def other(cluster_machine: Settings) -> Iterator[Cluster]:
    """Yield a second cluster, in a separate slot."""
    made = Cluster(replace(cluster_machine, slot=(cluster_machine.slot + SLOTS // 2) % SLOTS))
    if made.state() is not None:
        pytest.skip(f"a cluster is already up in slot {made.settings.slot}, which this test needs")
    yield made
    made.down()


def _join_users(settings: Settings) -> IO[str]:
    """Hold the shared lock of all test runs that use this cluster. The last run takes the cluster
    down.
    """
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
    """Yield the running cluster. It is taken down after the run, unless it was already up or
    DDPJOB_CLUSTER_KEEP=1.
    """
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
    """Yield `n3`, for tests that lose a node. Afterwards, `n3` is repaired and cordoned, so other
    tests see two nodes.
    """
    with more_nodes(cluster, 3):
        yield "n3"


@contextmanager
def more_nodes(cluster: Cluster, nodes: int) -> Iterator[None]:
    """Offer `nodes` schedulable nodes. Afterwards, the added ones are repaired and cordoned."""
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
    """Return a function for kubectl commands, such as `kubectl("get", "pods")`.

    It returns the output, and raises ClusterError if the command fails. `cluster.kubectl_json`
    parses the output.
    """
    return cluster.kubectl


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield a new namespace and remove it after the test. If the test failed, its contents are
    printed first.
    """
    name = f"{_slug(request.node.name)}-{secrets.token_hex(2)}"
    create_namespace(cluster, name)
    yield name
    report = request.node.stash.get(CALL_REPORT, None)
    if report is None or report.failed:
        print_namespace(cluster, name)
    remove_namespace(cluster, name)


def create_namespace(cluster: Cluster, name: str) -> None:
    """Create a namespace, and wait until pods can be created in it, which requires its default
    service account.
    """
    cluster.kubectl("create", "namespace", name)
    account = ("get", "serviceaccount", "default", "--namespace", name, "--ignore-not-found", "--output=name")
    processes.wait_for(
        f"the default service account of {name}", lambda: bool(cluster.kubectl(*account).strip()), timeout=30
    )


@contextmanager
def new_namespace(cluster: Cluster, purpose: str) -> Iterator[str]:
    """Yield a new namespace, whose name begins with `purpose`, and remove it afterwards."""
    name = f"{purpose}-{secrets.token_hex(2)}"
    create_namespace(cluster, name)
    yield name
    remove_namespace(cluster, name)


def remove_namespace(cluster: Cluster, name: str) -> None:
    """Delete a namespace and wait until its pods have ended. The last objects take a few seconds
    longer.
    """
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
    pods = ("pods", "--namespace", name)
    cluster.kubectl("delete", *pods, "--all", "--grace-period=1", "--wait=false", "--ignore-not-found")
    left = ("get", *pods, "--output=name")
    processes.wait_for(f"the end of the pods of {name}", lambda: not cluster.kubectl(*left).strip(), timeout=60)


def print_namespace(cluster: Cluster, name: str) -> None:
    """Print the objects, events, descriptions and logs of a namespace, for the report of a failed
    test.
    """
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
        print(error)  # missing logs or CRDs are part of the report and not a second failure


@pytest.fixture(scope="session")
def image_tools(request: pytest.FixtureRequest) -> Settings:
    """Return the settings of a machine that can also build images."""
    if borrowed.named():
        borrowed.skip("loads images into the nodes")
    cluster_machine: Settings = request.getfixturevalue("cluster_machine")
    if found := prerequisites.reasons(cluster_machine, images=True):
        refuse("; ".join(found))
    prerequisites.install(images=True)
    return cluster_machine


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster, image_tools: Settings) -> builder.Image:
    """Build the Dockerfile's target `operator` and load the image into all nodes. The result's
    `tag` is the image's name. Pods need `imagePullPolicy: Never`.
    """
    image = builder.build_image(image_tools, "operator", "ddpjob.test/operator:checkout")
    cluster.load_image(image)
    return image


@pytest.fixture(scope="session")
def python_overlay() -> Callable[..., dict[str, Any]]:
    """Return the function `python_overlay("trainer")`, whose result is merged into a pod template.
    It adds this machine's Python to the container.
    """
    return python_host.overlay
