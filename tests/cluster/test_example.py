"""The README's example as a user runs it: the operator from Helm, the real trainer image, and a pod
lost in the middle.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest
import yaml
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.errors import LedgerError
from install_fixtures import Release, restricted_namespace
from jobs import Jobs
from testcluster import builder, node
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT

pytestmark = pytest.mark.slow

EXAMPLE = CHECKOUT / "examples" / "digits.yaml"
COLUMNS = ["NAME", "STATE", "NODES", "PROGRESS", "LOSS", "SPEED", "RESTARTS", "AGE"]
PATIENCE = 600
"""Timeout in seconds for a third of a training run that takes 30 s on two idle cores."""


class RunFiles:
    """The files that pods write next to their checkpoints, read from the nodes' disks.

    They are opened as soon as they are found and kept open, so that they can be read after a pod's
    volume is gone.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.open: dict[Path, IO[str]] = {}
        self.stack = ExitStack()

    def find(self, jobs: Jobs) -> None:
        """Open the files of the current pods."""
        for pod in jobs.pods().values():
            if "nodeName" not in pod["spec"]:
                continue  # the pod is not scheduled yet
            kubelet = node.folder(self.cluster.settings, pod["spec"]["nodeName"]) / "kubelet"
            volume = (
                kubelet / "pods" / pod["metadata"]["uid"] / "volumes" / "kubernetes.io~empty-dir" / "ddpjob-checkpoints"
            )
            # glob would fail if the trainer removed a folder at the same moment
            for folder, _, names in os.walk(volume / "run"):
                for path in (Path(folder) / name for name in names if name.endswith(".jsonl")):
                    if path not in self.open:
                        self.open[path] = self.stack.enter_context(path.open())

    def copy(self, folder: Path) -> None:
        """Write all files below a folder."""
        for number, (path, file) in enumerate(self.open.items()):
            target = folder / str(number) / path.parent.name / path.name
            target.parent.mkdir(parents=True)
            file.seek(0)
            target.write_text(file.read())

    def reports(self) -> list[dict[str, float]]:
        """Return the trainer's measurements of its steps, from the logs of all pods."""
        found = []
        for path, file in self.open.items():
            if path.name == "metrics.jsonl":
                file.seek(0)
                found += [json.loads(line) for line in file.read().splitlines()]
        return [row for row in found if row["event"] == "step"]


@dataclass(frozen=True)
class Row:
    """A job as `kubectl get ddp` shows it."""

    state: str
    nodes: str
    epoch: int
    percent: int
    loss: str
    speed: float
    restarts: str


@dataclass
class Watch:
    """Reads `kubectl get ddp` repeatedly."""

    jobs: Jobs
    files: RunFiles
    rows: list[Row] = field(default_factory=list)

    def look(self) -> str:
        """Return the displayed state. Rows are kept from the first report of the training on;
        before that, only the number of steps is known.
        """
        self.files.find(self.jobs)
        header, line = self.jobs.kubectl("get", "ddp").splitlines()
        assert header.split() == COLUMNS
        cells = {name: line[header.index(name) :].split("   ")[0].strip() for name in COLUMNS}
        # There is a speed only after several reports.
        if cells["STATE"] == "Running" and cells["LOSS"] and cells["SPEED"]:
            epoch, percent = cells["PROGRESS"].removeprefix("epoch ").removesuffix(" %").split(" ")
            speed = float(cells["SPEED"].removesuffix("/s").replace(",", ""))
            self.rows.append(
                Row(
                    cells["STATE"],
                    cells["NODES"],
                    int(epoch.split("/")[0]),
                    int(percent),
                    cells["LOSS"],
                    speed,
                    cells["RESTARTS"],
                )
            )
        return cells["STATE"]

    def until(self, reached: Callable[[list[Row]], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not reached(self.rows):
            assert self.look() not in ("Complete", "Failed")
            assert time.monotonic() < end, self.jobs.kubectl("get", "ddp,pods", "--output=wide")
            time.sleep(0.5)


@pytest.fixture
def example(
    installed_operator: Release, trainer_image: builder.Image, cluster: Cluster, namespace: str
) -> Iterator[tuple[Jobs, RunFiles]]:
    """Apply the example with more epochs, because a pod must be lost after its progress has been
    displayed.
    """
    jobs, files = Jobs(cluster, namespace), RunFiles(cluster)
    assert trainer_image.tag in EXAMPLE.read_text()
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["args"].append("train.epochs=50")
    jobs.apply(manifest)
    with files.stack:
        yield jobs, files


def test_digits_train_on_two_nodes_despite_the_loss_of_a_pod(example: tuple[Jobs, RunFiles], tmp_path: Path) -> None:
    jobs, files = example
    watch = Watch(jobs, files)
    watch.until(lambda rows: bool(rows) and rows[-1].percent >= 10)
    pods = jobs.pods()
    assert sorted(pods) == ["digits-0-0", "digits-1-0"]
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == {"n1", "n2"}

    jobs.kill("digits-0-0")
    watch.until(lambda rows: rows[-1].restarts != rows[0].restarts and rows[-1].percent > rows[0].percent)
    assert sorted(jobs.pods()) == ["digits-0-1", "digits-1-0"]
    words = ("wait", "--for=condition=Complete", "ddp/digits", f"--timeout={PATIENCE}s", "--namespace", jobs.namespace)
    jobs.cluster.kubectl(*words, timeout=PATIENCE + 10)
    files.find(jobs)

    check_rows(watch.rows, files.reports())
    check_end(jobs)
    check_ledger(files, tmp_path)
    print(jobs.kubectl("describe", "ddp", "digits"))


def test_the_example_trains_in_a_restricted_namespace(
    installed_operator: Release, trainer_image: builder.Image, cluster: Cluster, namespace: str
) -> None:
    """The example is unchanged and has only the rights, the Secret and the security context that a
    restricted namespace allows.
    """
    jobs = Jobs(cluster, f"{namespace}-restricted")
    restricted_namespace(cluster, jobs.namespace)
    try:
        jobs.kubectl("apply", "--filename", str(EXAMPLE))
        jobs.wait_phase("digits", "Running", timeout=PATIENCE)
        for pod in [*jobs.pods().values(), *jobs.pods("coordinator").values()]:
            assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not jobs.condition("digits", "Isolated"), "the NetworkPolicy must not be refused"
        [policy] = cluster.kubectl_json("get", "networkpolicies", "--namespace", jobs.namespace)["items"]
        assert policy["metadata"]["name"].startswith("digits-")
    finally:
        cluster.kubectl("delete", "namespace", jobs.namespace, "--wait=false")


def check_rows(rows: list[Row], reports: list[dict[str, float]]) -> None:
    """Check that the rows before and after the loss of the pod show the trainer's measurements."""
    assert {row.nodes for row in rows} == {"2/2"}
    shown = [row.restarts for row in rows]
    before, after = rows[: shown.count("0/10")], rows[shown.count("0/10") :]
    assert {row.restarts for row in after} == {"0/10 +1"}, shown
    # Progress is written at most every 10 s, and an idle machine trains the example in less than 30
    # s.
    for part in (before, after):
        percents = [row.percent for row in part]
        assert percents and percents == sorted(percents), "progress never decreases"
    assert len({row.percent for row in rows}) > 1, "progress must be seen to grow"
    assert {(row.epoch, row.loss) for row in rows} <= {(report["epoch"], f"{report['loss']:.4g}") for report in reports}
    # The rows show a running mean of these.
    speeds = [report["samplesPerSecond"] for report in reports]
    assert all(min(speeds) - 1 <= row.speed <= max(speeds) + 1 for row in rows)


def check_end(jobs: Jobs) -> None:
    status = jobs.status("digits")
    assert status["phase"] == "Complete"
    assert status["progress"]["percent"] == 100
    assert status["progress"]["metrics"]["accuracy"] >= 0.97
    assert (status["restarts"]["counted"], status["restarts"]["uncounted"]) == (0, 1)
    # The group reports its end before its processes have ended, so wait for them.
    ended = {"digits-0-1": "Succeeded", "digits-1-0": "Succeeded"}
    jobs.wait(
        "both pods end well",
        lambda: {name: pod["status"]["phase"] for name, pod in jobs.pods().items()} == ended,
        timeout=60,
    )


def check_ledger(files: RunFiles, folder: Path) -> None:
    """Check that both incarnations together took every sample of every epoch once. Without one
    rank's file, the check must fail.
    """
    files.copy(folder)
    verdict = verify(read([folder]))
    assert len(verdict.incarnations) == 2
    assert verdict.incarnations[1].start > 0, "the second incarnation resumed from a checkpoint of the remaining pod"
    assert set(verdict.epochs.values()) == {verdict.size}
    next(folder.rglob("rank-1-*.jsonl")).unlink()
    with pytest.raises(LedgerError):
        verify(read([folder]))
