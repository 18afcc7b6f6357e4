"""Only the newest incarnation of a job may publish a checkpoint. An older one that is still running
exits with a special code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer.atomic_files import replacing
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.config.sections import CheckpointConfig
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import EXIT_CONFIGURATION, ConfigError, FencedError, FolderTakenError
from ddpjob_trainer.lifecycle import fence
from ddpjob_trainer.lifecycle.fence import EXIT_FENCED, Claim, agree_on_incarnation, round_from_env
from ddpjob_trainer.reporting.ledger import Ledger
from machine import slowness
from ranks import TINY, run, until


def incarnation(folder: Path, monkeypatch: pytest.MonkeyPatch, fence: str) -> CheckpointFolder:
    """Start an incarnation of the job with this DDPJOB_FENCE."""
    monkeypatch.setenv("DDPJOB_FENCE", fence)
    made = CheckpointFolder(CheckpointConfig(), folder, Group())
    made.claim(agree_on_incarnation(Group()))
    return made


def save(folder: CheckpointFolder, step: int) -> None:
    """Save a checkpoint and wait until it is on disk."""
    folder.save(lambda: {"step": step, "sampler": {"epoch": 0, "consumed": step}}, step)
    folder.finish()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("*.pt"))


@pytest.mark.parametrize(("old", "new"), [("0.9", "0.10"), ("9.3", "10.0"), ("1.7", "2.1")])
def test_generations_and_rounds_are_compared_as_numbers_and_not_as_strings(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = incarnation(tmp_path, monkeypatch, old)
    save(zombie, 1)
    newest = incarnation(tmp_path, monkeypatch, new)
    with pytest.raises(FencedError, match=r"this process \(generation .*\) stops writing"):
        save(zombie, 9)
    with pytest.raises(FencedError, match="was claimed on"):
        incarnation(tmp_path, monkeypatch, old)
    save(newest, 2)
    assert steps(tmp_path) == [1, 2]
    assert list(tmp_path.glob(".*.tmp")) == [], "files that were not published are removed"


def test_a_claim_that_an_older_incarnation_has_overwritten_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if both incarnations read the folder before either has written its claim."""
    newest = incarnation(tmp_path, monkeypatch, "0.5")
    claim = json.loads((tmp_path / "fence.json").read_text())
    (tmp_path / "fence.json").write_text(json.dumps(claim | {"round": 4, "incarnation": 1}))
    save(newest, 3)
    assert json.loads((tmp_path / "fence.json").read_text())["round"] == 5
    zombie = CheckpointFolder(CheckpointConfig(), tmp_path, Group())
    zombie._claim = Claim(0, 4, 1)
    with pytest.raises(FencedError):
        save(zombie, 9)


def test_the_round_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DDPJOB_FENCE", "DDPJOB_GENERATION", "DDPJOB_ROUND"):
        monkeypatch.delenv(name, raising=False)
    assert round_from_env() == (0, 0)
    monkeypatch.setenv("DDPJOB_GENERATION", "2")
    monkeypatch.setenv("DDPJOB_ROUND", "11")
    assert round_from_env() == (2, 11)
    for name in ("DDPJOB_ROUND", "DDPJOB_GENERATION"):
        monkeypatch.setenv(name, "1.5")
        with pytest.raises(ConfigError, match=rf"^{name}='1.5': must be a whole number"):
            round_from_env()
    monkeypatch.setenv("DDPJOB_FENCE", "3.4")
    assert round_from_env() == (3, 4)
    for wrong in ("3", "3.4.5", "a.b", "-1.2"):
        monkeypatch.setenv("DDPJOB_FENCE", wrong)
        with pytest.raises(ConfigError, match=r"must be GENERATION.ROUND"):
            round_from_env()


def trainer(folder: Path, out: str, *arguments: str, defect: str = "", **env: str) -> subprocess.Popen[bytes]:
    program = f"import sys, ddpjob_trainer.__main__ as m\n{defect}\nsys.exit(m.main())"
    command = [
        sys.executable,
        "-c",
        program,
        *TINY,
        f"checkpoint.dir={folder / 'shared'}",
        f"train.run_dir={folder / out}",
        *arguments,
    ]
    with (folder / f"{out}.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


CHECK_NOTHING = "from ddpjob_trainer.lifecycle.fence import Claim; Claim.check = lambda self, folder: None"


@pytest.mark.parametrize("defect", ["", CHECK_NOTHING], ids=["as-it-is", "defect-no-check"])
def test_a_frozen_process_that_wakes_up_after_its_successor_is_fenced(defect: str, tmp_path: Path) -> None:
    """A partitioned node returns and its process continues where it was frozen. Without the check,
    it would undo the final state of its successor.
    """
    log, shared = tmp_path / "zombie.txt", tmp_path / "shared"
    zombie = trainer(
        tmp_path, "zombie", "train.epochs=400", "checkpoint.every_steps=1", defect=defect, DDPJOB_FENCE="0.9"
    )
    try:
        until(lambda: zombie.poll() is not None or any(shared.glob("*.pt")))
        assert zombie.poll() is None, log.read_text()
        zombie.send_signal(signal.SIGSTOP)
        frozen_at = steps(shared)[-1]
        end = frozen_at // 8 + 2
        assert trainer(tmp_path, "new", f"train.epochs={end}", DDPJOB_FENCE="0.10").wait(60 * slowness()) == 0, (
            tmp_path / "new.txt"
        ).read_text()
        theirs = steps(shared)
        assert theirs[-1] == 8 * end
        zombie.send_signal(signal.SIGCONT)
        if defect:
            until(lambda: steps(shared)[-1] != theirs[-1])
            return
        assert zombie.wait(60 * slowness()) == EXIT_FENCED, log.read_text()
    finally:
        zombie.kill()
        zombie.wait()
    assert steps(shared) == theirs
    assert torch.load(shared / f"step-{theirs[-1]:09d}.pt", weights_only=True)["step"] == theirs[-1]
    last = log.read_text().splitlines()[-1]
    assert (
        last.startswith("error: checkpoint folder")
        and "generation 0, round 10" in last
        and "Traceback" not in log.read_text()
    )


def test_all_ranks_exit_as_fenced_when_the_writing_rank_is_fenced(tmp_path: Path) -> None:
    """Rank 0 notices this in a background thread. Rank 1 must not be reported as a separate
    failure.
    """

    def prepare(rank: int) -> None:
        write = Ledger.step

        def step_and_claim(self: Ledger, number: int, taken: Any) -> None:
            write(self, number, taken)
            if rank == 0 and number == 4:
                Claim(7, 0, 99).take(tmp_path)

        Ledger.step = step_and_claim  # type: ignore[method-assign]

    ends = run(2, [*TINY, "train.epochs=50", "checkpoint.every_steps=2", f"checkpoint.dir={tmp_path}"], prepare=prepare)
    assert all(end.error.startswith("FencedError: ") for end in ends), ends
    assert "(generation 7, round 0)" in ends[0].error and "see its message for the reason" in ends[1].error
    assert max(steps(tmp_path), default=0) <= 4  # no checkpoint at all if the first one was still being written


def test_an_incarnation_older_than_the_folders_owner_exits_as_fenced(tmp_path: Path) -> None:
    assert trainer(tmp_path, "first", "train.epochs=1", DDPJOB_FENCE="1.0").wait(60 * slowness()) == 0
    late = trainer(tmp_path, "late", "train.epochs=9", DDPJOB_FENCE="0.77")
    assert late.wait(60 * slowness()) == EXIT_FENCED, (tmp_path / "late.txt").read_text()
    assert "was claimed on" in (tmp_path / "late.txt").read_text()


# ---- one job at a time


def job(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, uid: str, fence: str = "0.1", cluster: str = "here"
) -> CheckpointFolder:
    """Claim the folder for the first pod of a job."""
    identity = {"NAMESPACE": "team", "NAME": name, "UID": uid, "POD": f"{name}-0-0", "CLUSTER": cluster}
    for key, value in identity.items():
        monkeypatch.setenv(f"DDPJOB_{key}", value)
    monkeypatch.setenv("DDPJOB_FENCE", fence)
    made = CheckpointFolder(CheckpointConfig(), folder, Group())
    made.claim(Claim(*round_from_env(), incarnation=hash((uid, fence)), job=uid))
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(fence, "WATCH_SECONDS", 2.0)


def died(folder: CheckpointFolder) -> None:
    """Simulate the sudden death of the owner's process."""
    folder._ownership._ended.set()


@pytest.mark.usefixtures("quick")
def test_an_owner_that_could_not_read_its_file_for_a_moment_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(monkeypatch, tmp_path, "a", "uid-a")
    read, failures = fence.Owner.read, [None] * 3  # an OSError of a network file system
    monkeypatch.setattr(fence.Owner, "read", lambda path: failures.pop() if failures else read(path))
    until = time.monotonic() + 20
    while failures and time.monotonic() < until:
        time.sleep(0.05)
    assert not failures
    with pytest.raises(FolderTakenError):
        job(monkeypatch, tmp_path, "b", "uid-b")


@pytest.mark.usefixtures("quick")
def test_a_second_job_is_refused_without_affecting_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job(monkeypatch, tmp_path, "a", "uid-a")
    (tmp_path / ".step-000000005.pt.1.tmp").write_text("being written")
    for _ in range(2):
        with pytest.raises(FolderTakenError, match=r"in use by job team/a \(pod a-0-0\).*storage.checkpoints.subPath"):
            job(monkeypatch, tmp_path, "b", "uid-b")
    assert (tmp_path / ".step-000000005.pt.1.tmp").exists()
    save(first, 1)
    assert steps(tmp_path) == [1]


@pytest.mark.usefixtures("quick")
def test_the_same_job_reclaims_its_folder_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "WATCH_SECONDS", 60.0)
    job(monkeypatch, tmp_path, "a", "uid-a", "0.1")
    save(job(monkeypatch, tmp_path, "a", "uid-a", "0.2"), 1)
    save(job(monkeypatch, tmp_path, "a", "uid-a", "1.1"), 2)
    save(job(monkeypatch, tmp_path, "a", "created-again", "0.1"), 3)
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.usefixtures("quick")
def test_jobs_with_the_same_name_on_two_clusters_do_not_take_over_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(monkeypatch, tmp_path, "a", "uid-a", cluster="one")
    with pytest.raises(FolderTakenError, match=r"in use by job team/a \(pod a-0-0\) on another cluster or machine"):
        job(monkeypatch, tmp_path, "a", "uid-b", cluster="two")
    save(first, 1)
    died(first)
    save(job(monkeypatch, tmp_path, "a", "uid-b", cluster="two"), 2)
    assert steps(tmp_path) == [1, 2]


def test_the_ranks_wait_for_a_rank_that_watches_longer_than_a_collectives_timeout(tmp_path: Path) -> None:
    """Watching takes 30 s in production, regardless of train.timeout_seconds. Here the times are 6
    s and 3 s.
    """
    former = {"job": "uid-b", "namespace": "team", "name": "b", "pod": "b-0-0", "ended": False, "cluster": ""}
    tmp_path.joinpath("owner.json").write_text(json.dumps(former))

    def prepare(rank: int) -> None:
        fence.WATCH_SECONDS = 6.0

    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}", "train.timeout_seconds=3"]
    assert [end.code for end in run(2, arguments, prepare)] == [0, 0]
    assert json.loads((tmp_path / "owner.json").read_text())["ended"] is True


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["completed", "died"])
def test_another_job_continues_when_the_first_has_ended(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(monkeypatch, tmp_path, "a", "uid-a")
    save(first, 1)
    if how == "completed":
        monkeypatch.setattr(fence, "WATCH_SECONDS", 60.0)
        first.release()
    else:
        died(first)
    second = job(monkeypatch, tmp_path, "b", "uid-b")
    save(second, 2)
    with pytest.raises(FolderTakenError, match="in use by job team/b"):
        job(monkeypatch, tmp_path, "a", "uid-a", "0.2")
    with pytest.raises(FencedError):
        save(first, 3)
    first.release()
    with pytest.raises(FolderTakenError, match="in use by job team/b"):
        job(monkeypatch, tmp_path, "c", "uid-c")


def test_a_refused_job_is_not_retried_and_a_completed_run_releases_the_folder(
    tmp_path: Path,
) -> None:
    names = {"DDPJOB_NAMESPACE": "team", "DDPJOB_NAME": "a", "DDPJOB_UID": "uid-a", "DDPJOB_POD": "a-0-0"}
    first = trainer(tmp_path, "first", "train.epochs=100000", **names)
    try:
        until(lambda: (tmp_path / "shared" / "owner.json").exists() or first.poll() is not None)
        reason = tmp_path / "reason.json"
        other = {**names, "DDPJOB_NAME": "b", "DDPJOB_UID": "uid-b", "TORCHELASTIC_ERROR_FILE": str(reason)}
        assert trainer(tmp_path, "second", **other).wait(90 * slowness()) == EXIT_CONFIGURATION
        assert "is in use by job team/a (pod a-0-0)" in json.loads(reason.read_text())["message"]["message"]
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    assert trainer(tmp_path, "again", **names).wait(90 * slowness()) == 0
    assert json.loads((tmp_path / "shared" / "owner.json").read_text())["ended"] is True


def test_temporary_files_of_two_pods_with_equal_process_ids_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for pod in ("a-0-0", "a-1-0"):
        monkeypatch.setenv("DDPJOB_POD", pod)
        with replacing(tmp_path / "best.json") as file:
            names.add(Path(str(file.name)).name)
    assert names == {f".best.json.{pod}.{os.getpid()}.tmp" for pod in ("a-0-0", "a-1-0")}
