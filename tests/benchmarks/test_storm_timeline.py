"""benchmarks.scale records when each pod of the storm was lost and replaced."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from ddpjob.core.world import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_INDEX,
    LABEL_JOB,
    LABEL_ROLE,
    LABEL_UID,
)

from benchmarks.scale import timeline as timeline_module
from benchmarks.scale.hollow import Group, Hollow, Pod
from benchmarks.scale.timeline import Timeline, gap_table, write_timelines


class HandClock:
    """Monotonic time that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    made = HandClock()
    monkeypatch.setattr(timeline_module, "time", made)
    return made


def pod(index: int, attempt: int, job: str = "job", address: str = "") -> Pod:
    labels = {LABEL_JOB: job, LABEL_UID: "uid", LABEL_ROLE: "node", LABEL_GENERATION: "0"}
    labels |= {LABEL_INDEX: str(index), LABEL_ATTEMPT: str(attempt)}
    meta = {"namespace": "space", "name": f"{job}-{index}-{attempt}", "uid": f"{index}-{attempt}", "labels": labels}
    return Pod.read({"metadata": meta, "spec": {"containers": []}, "status": {"podIP": address}})


def write(hollow: Hollow, *attempts: int) -> None:
    """Show the watch of jobs a status with these attempts of the slots."""
    meta = {"namespace": "space", "name": "job", "uid": "uid"}
    hollow._read_job({"metadata": meta, "status": {"slots": [{"attempt": attempt} for attempt in attempts]}})


def storm(clock: HandClock) -> Hollow:
    """Return hollow kubelets whose watches have shown a storm of two pods and a third, older loss."""
    hollow = Hollow(None, "key", ["space"])  # type: ignore[arg-type]
    hollow.kubelets_run = False
    hollow.groups["uid"] = Group(name="job", nodes=3)
    hollow.timeline = Timeline([pod(0, 0).id, pod(1, 0).id])
    for index, gone in ((0, 1.0), (1, 2.0), (2, 2.0)):
        clock.now = gone
        hollow._pod_changed(pod(index, 0), None)
    clock.now = 4.0
    write(hollow, 1, 1, 1)
    clock.now = 5.0
    write(hollow, 1, 1, 1)
    for index in range(3):
        hollow._pod_changed(None, pod(index, 1))
    clock.now = 8.0
    hollow._pod_changed(pod(0, 1), pod(0, 1, address="127.0.0.1"))
    return hollow


def test_the_watches_mark_each_step_of_a_lost_pod_once(clock: HandClock, tmp_path: Path) -> None:
    hollow = storm(clock)
    assert [hollow.timeline.count(step) for step in ("gone", "planned", "replaced", "runs")] == [2, 2, 2, 1]
    assert hollow.timeline.last("gone") == 2.0
    assert hollow.groups["uid"].versions == 2
    file = tmp_path / "timeline.csv"
    write_timelines(file, {"operator": hollow.timeline})
    rows = list(csv.DictReader(file.open()))
    steps = {row["index"]: [row[step] for step in ("gone", "planned", "replaced", "runs")] for row in rows}
    assert steps == {"0": ["1.0000", "4.0000", "5.0000", "8.0000"], "1": ["2.0000", "4.0000", "5.0000", ""]}
    assert {(row["client"], row["namespace"], row["job"]) for row in rows} == {("operator", "space", "job")}


def test_the_table_has_percentiles_of_each_gap_for_both_clients(clock: HandClock) -> None:
    table = gap_table({"operator": storm(clock).timeline, "bare client": Timeline()}).splitlines()
    assert table[0].split(" | ")[1:4] == ["operator, p50", "operator, p90", "operator, max"]
    assert table[2] == "| deleted to gone | 1.00 | 2.00 | 2.00 | nan | nan | nan |"
    assert table[3] == "| gone to planned | 2.00 | 3.00 | 3.00 | nan | nan | nan |"
    assert table[-1] == "| replaced to runs | 3.00 | 3.00 | 3.00 | nan | nan | nan |"


def test_a_plan_that_is_shown_after_its_pod_is_a_gap_of_zero(clock: HandClock) -> None:
    seen = Timeline([("space", "job", 0)])
    seen.mark("replaced", ("space", "job", 0), 1)
    clock.now = 1.0
    seen.mark("planned", ("space", "job", 0), 1)
    assert seen.gaps("planned", "replaced") == [0.0]
