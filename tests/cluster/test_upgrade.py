"""An upgrade to an invented next release, the rollback and a second upgrade, which must not affect
running jobs.

The next release is this checkout with a different protocol version and one more field of the
status. Once there is a release, its tag will replace this checkout. The operator's own decisions
about such jobs are tested in unit/core/test_upgraded_jobs.py, from a recorded status.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Jobs, Json, job, steps_job
from operator_process import CRD, OperatorProcess, install_crd
from testcluster import processes
from testcluster.cluster import Cluster

RUNNING = ("fast", "standard", "command")
GRACE = 5
SAID = "this operator does not act on any job, because the DDPJob definition (CRD) in the cluster lacks status.invented"
CHECKOUT = Path(__file__).parents[2]
NEXT_CRD = Path("charts", "ddpjob-operator", "crds", "ddpjobs.ddpjob.io.yaml")
FIELD = f"\n{' ' * 16}runtime: "


def next_release(folder: Path) -> None:
    """Write the operator, the runtime and the chart of a next release to `folder`."""
    for part in ("operator", "runtime", "charts"):
        shutil.copytree(CHECKOUT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    changed(folder / "runtime" / "ddpjob_runtime" / "protocol.py", "\nVERSION = ", "\nVERSION = 1 + ")
    changed(folder / NEXT_CRD, FIELD, f"\n{' ' * 16}invented: {{type: integer}}{FIELD}")


def changed(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} in {file}"
    file.write_text(text.replace(old, new))


class Releases:
    """Switches between this operator and the next one. The next one's CRD is kept, as
    docs/upgrade.md requires.
    """

    def __init__(self, cluster: Cluster, operator: OperatorProcess, folder: Path) -> None:
        self.cluster, self.operator, self.folder, self.installed = cluster, operator, folder, False

    def this(self) -> None:
        self.operator.kill()
        self.operator.start()

    def next(self) -> None:
        """Start the next operator before its CRD is installed, so that it must wait for the CRD."""
        self.operator.kill()
        self.operator.start(PYTHONPATH=os.pathsep.join(str(self.folder / part) for part in ("operator", "runtime")))
        if not self.installed:
            processes.wait_for("the operator to miss its CRD", lambda: SAID in self.operator.log.read_text())
            install_crd(self.cluster, self.folder / NEXT_CRD.parent)
            self.installed = True


@pytest.fixture
def releases(cluster: Cluster, operator: OperatorProcess, tmp_path: Path) -> Iterator[Releases]:
    if os.environ.get("DDPJOB_TEST_UPGRADE") != "1":
        pytest.skip("upgrades to an invented next release and back for three minutes: set DDPJOB_TEST_UPGRADE=1")
    next_release(tmp_path)
    made = Releases(cluster, operator, tmp_path)
    yield made
    install_crd(cluster, CRD)


def with_grace(manifest: Json) -> Json:
    manifest["spec"]["podTemplate"]["spec"]["terminationGracePeriodSeconds"] = GRACE
    return manifest


def test_running_jobs_survive_an_upgrade_and_a_rollback(releases: Releases, jobs: Jobs) -> None:
    releases.this()
    jobs.apply(with_grace(steps_job("fast", 100000, recovery={"mode": "Fast"})))
    jobs.apply(with_grace(steps_job("standard", 100000)))
    jobs.apply(with_grace(job("command", command=["sleep", "100000"])))
    jobs.apply(with_grace(steps_job("waiting", 20, runPolicy={"suspend": True})))
    for name in RUNNING:
        jobs.wait_phase(name, "Running")
    jobs.wait_phase("waiting", "Suspended")
    before = uids(jobs)
    assert len(before) == 9

    for release in (releases.next, releases.this, releases.next):
        steps = {name: jobs.step(name) for name in ("fast", "standard")}
        release()
        jobs.wait(f"steps after {release}", lambda s=steps: all(jobs.step(n) > s[n] for n in s))  # type: ignore[misc]
        assert uids(jobs) == before, "a pod was replaced"
        for name in RUNNING:
            status = jobs.status(name)
            assert (status["phase"], status["restarts"]["display"]) == ("Running", "0/10"), (name, status)

    assert jobs.status("waiting")["phase"] == "Suspended"
    jobs.kubectl("patch", "ddpjob", "waiting", "--type=merge", "--patch", '{"spec": {"runPolicy": {"suspend": false}}}')
    jobs.wait_phase("waiting", "Complete")
    for name in RUNNING:
        jobs.kill(f"{name}-1-0")
    for name in RUNNING:
        jobs.wait(f"another group of {name}", lambda n=name: f"{n}-1-1" in jobs.pods())  # type: ignore[misc]
        jobs.wait_phase(name, "Running")
        status = jobs.status(name)
        assert [(r["pod"], r["reason"], r["counted"]) for r in status["restarts"]["recent"]] == [
            (f"{name}-1-0", "Deleted", False)
        ]
    for name in ("fast", "standard"):
        jobs.wait(f"steps of {name} with the new runtime", lambda n=name: jobs.step(n) >= 3)  # type: ignore[misc]


def uids(jobs: Jobs) -> dict[str, str]:
    """Return the uids of all pods by name."""
    return {name: pod["metadata"]["uid"] for role in ("node", "coordinator") for name, pod in jobs.pods(role).items()}
