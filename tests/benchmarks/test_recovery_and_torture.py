"""The data on which the benchmarks base their results: step logs, and the replay that gives the
expected weights of a tortured job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ddpjob_pod.snapshot_store import SnapshotStore
from ddpjob_trainer.commands.check_ledger import read
from machine import slowness
from ranks import TINY, good, run, stop_at

from benchmarks.recovery import phases
from benchmarks.recovery.step_log import Incarnation, StepLog
from benchmarks.recovery.tables import CsvFile, Sample, markdown, read_csv
from benchmarks.torture.arena import Processes
from benchmarks.torture.replay import replay, segments
from benchmarks.torture.standstill import set_clock

ARGUMENTS = [*TINY, "train.threads=1", "optim.lr=0.05"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(max(folder.glob("step-*.pt")), weights_only=True)["model"]


def equal(one: Path, other: Path) -> bool:
    return all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_a_replay_is_bit_identical_to_a_job_that_changed_its_size(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for world, stop in ((2, 5), (1, 9)):
        assert {end.code for end in run(world, [*ARGUMENTS, f"checkpoint.dir={job}"], stop_at(stop))} == {75}
    good(2, [*ARGUMENTS, f"checkpoint.dir={job}"])
    (_, first), (_, second), _ = found = segments(read([job]))
    assert found == ((2, first), (1, second), (2, 16))
    assert equal(job, replay(tmp_path, found, ARGUMENTS))
    assert not equal(job, replay(tmp_path, ((2, 16),), ARGUMENTS)), (
        "the order of sums matters, which is the reason for the replay"
    )
    assert not equal(job, replay(tmp_path, ((2, first + 1), (1, second), (2, 16)), ARGUMENTS)), (
        "an additional step on two ranks is detected"
    )


def log_rows(folder: Path, incarnation: int, world: int, rank: int, times: list[float], first: int = 1) -> None:
    rows = [
        {"incarnation": incarnation, "world": world, "rank": rank, "node": f"n{rank}", "step": first + i, "t": t}
        for i, t in enumerate(times)
    ]
    (folder / f"steps-n{rank}-{incarnation}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_recovery_ends_with_the_first_step_of_all_ranks_of_a_new_incarnation(tmp_path: Path) -> None:
    log_rows(tmp_path, 1, 2, 0, [1.0, 2.0, 3.5])  # this rank continues after the kill at 3.0, so it is not a recovery
    log_rows(tmp_path, 1, 2, 1, [1.1, 2.1, 3.6])
    log_rows(tmp_path, 2, 2, 0, [5.0, 6.0], first=4)
    log = StepLog(tmp_path).refresh()
    assert log.first_after(3.0, 2) is None, "rank 1 has not completed a step yet"
    log_rows(tmp_path, 2, 2, 1, [5.5], first=4)
    assert (found := log.refresh().first_after(3.0, 2)) is not None and found.formed == 5.5
    assert log.first_after(3.0, 1) is None, "a different group size does not count"
    assert log.newest is log.incarnations[2] and log.incarnations[2].first == {0: 4, 1: 4}


def test_an_incomplete_line_is_read_later(tmp_path: Path) -> None:
    log_rows(tmp_path, 1, 1, 0, [1.0])
    path = tmp_path / "steps-n0-1.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    log = StepLog(tmp_path).refresh()
    path.write_text(whole + whole.replace("1.0", "2.0"))
    assert log.refresh().incarnations[1].steps == {0: [1.0, 2.0]}


def recovered(*moments: dict[str, float], first_steps: float = 9.0) -> Incarnation:
    found = Incarnation(len(moments))
    for rank, its in enumerate(moments):
        found.steps[rank], found.nodes[rank], found.moments[rank] = [first_steps], f"n{rank}", its
    return found


SURVIVOR = {"launcher": 1.0, "process": 6.1, "imported": 6.5, "device": 6.75, "formed": 8.0}
REPLACED = {"launcher": 3.5, "process": 6.0, "imported": 7.5, "device": 7.75, "formed": 8.25}


def test_the_phases_of_a_recovery_come_from_the_last_rank_and_add_up() -> None:
    found = phases.phases(recovered(SURVIVOR, REPLACED), 2.0, {"n1": 2.5}.get)
    assert found == {
        phases.CREATED: 0.5, phases.STARTED: 1.0, phases.LAUNCHER: 2.5, phases.WORKER: 1.5, phases.DEVICE: 0.25,
        phases.FORMED: 0.5, phases.STEP: 0.75,
    }  # fmt: skip
    assert sum(found.values()) == 9.0 - 2.0
    of_process = phases.phases(recovered(SURVIVOR, REPLACED), 2.0, {}.get)
    assert of_process[phases.STARTED] == 1.5 and sum(of_process.values()) == 7.0


def test_launcher_time_is_not_counted_if_no_node_is_new() -> None:
    found = phases.phases(recovered(SURVIVOR), 2.0, {}.get)
    wanted = {phases.ROUND: 4.1, phases.WORKER: 0.4, phases.DEVICE: 0.25, phases.FORMED: 1.25, phases.STEP: 1.0}
    assert found == pytest.approx(wanted)


def test_measurements_can_be_saved_loaded_and_drawn(tmp_path: Path) -> None:
    where = {phases.STARTED: 0.5, phases.STEP: 2.0}
    samples = [
        Sample("floor", "loopback", "nothing", 1, 1, 2.0, "torch imported", 0.5),
        Sample("fast-replaced", "loopback", "rank 0", 1, 1, 2.5, "recovered", 0.5, where),
        Sample("fast-replaced", "loopback", "other", 2, 1, None, "not within 60 s", 0.5),
    ]
    file = CsvFile(tmp_path / "recovery.csv")
    for sample in samples:
        file.add(sample)
    assert read_csv(tmp_path / "recovery.csv") == samples
    assert phases.main([str(tmp_path / "recovery.csv"), "-o", str(tmp_path / "phases.png")]) == 0
    assert (tmp_path / "phases.png").stat().st_size > 10_000
    floor, case = markdown(samples, {"fast-replaced": 3.5}).splitlines()[2:4]
    assert floor.split("|")[-2].strip() == "1.00" and case.split("|")[-2].strip() == "1.25"


@pytest.mark.parametrize(("begin", "end", "gap"), [(1.0, 3.0, 1.5), (2.5, 9.0, 6.5)])
def test_the_longest_gap_between_steps_of_any_rank_is_found(
    begin: float, end: float, gap: float, tmp_path: Path
) -> None:
    log_rows(tmp_path, 1, 2, 0, [1.0, 1.5, 2.0, 2.5, 3.0])
    log_rows(tmp_path, 1, 2, 1, [1.0, 2.5])
    assert StepLog(tmp_path).refresh().longest_gap(begin, end) == gap


def test_a_pods_clock_can_be_changed_while_its_processes_run(tmp_path: Path) -> None:
    pods = Processes(tmp_path)
    asks = "import time\nwhile input(): print(time.time(), time.time_ns() // 10**9, flush=True)"
    environment = {**os.environ, **pods.skewed(), "DDPJOB_POD": "job-0-0"}
    with subprocess.Popen(
        [sys.executable, "-c", asks], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout

        def behind() -> tuple[float, float]:
            process.stdin.write("?\n")
            process.stdin.flush()
            before = time.time()
            first, second = map(float, process.stdout.readline().split())
            return before - first, before - second

        slack = 5 * slowness()
        assert all(abs(seconds) < slack for seconds in behind())
        assert set_clock(tmp_path / "clocks" / "job-0-0", 10_000.0)
        assert all(abs(seconds - 10_000.0) < slack for seconds in behind())
        assert not set_clock(tmp_path / "clocks" / "job-1-0", 1.0), "none of the pod's processes has started"
        process.stdin.write("\n")


COPIES = """
import sys
from pathlib import Path
from ddpjob_pod.rank_snapshots import ALL, Moment, SnapshotStore
store = SnapshotStore(Path(sys.argv[1]))
for step in range(1, 201):
    writing = store.begin(ALL, 8)
    writing.data[:] = step.to_bytes(8, "little")
    writing.complete(Moment((0, 0), step))
    store.note_made(Moment((0, 0), step))
"""


@pytest.mark.parametrize("point", ["begin", "mark", "made", "none"])
def test_a_worker_dies_in_the_middle_of_a_snapshot_if_a_file_requests_it(point: str, tmp_path: Path) -> None:
    pods, folder = Processes(tmp_path, copies=True), tmp_path / "memory"
    folder.mkdir()
    order = tmp_path / "copies" / "job-0-0"
    order.write_text(point)
    environment = {**os.environ, **pods.skewed(), "DDPJOB_POD": "job-0-0"}
    ended = subprocess.run([sys.executable, "-c", COPIES, folder], env=environment, check=False)
    store = SnapshotStore(folder)
    held, made = store.held(), store.made
    if point == "none":
        assert pods.missed("other") == 0 and order.exists()
        assert ended.returncode == 0 and made == held[-1].moment
        assert pods.missed("job") == 1 and not order.exists()
        return
    assert ended.returncode == -signal.SIGKILL and pods.missed("job") == 0
    newest = held[-1] if held else None
    step = 0 if newest is None else newest.moment.step
    assert step < 200 and (made.step if made else 0) in (step - 1, step)
    assert newest is None or int.from_bytes(store.read(newest), "little") == step
