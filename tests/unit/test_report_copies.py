"""`ddpjob_report.copy_checkpoint` and `restore_checkpoint`: copies are complete or absent, the same
on all ranks, and finished before the script exits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddpjob_report
import pytest
from ddpjob_bucket import Bucket, BucketError, Stored, patience
from ddpjob_report import copies, link, resume
from ddpjob_runtime import protocol
from machine import slowness


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Set the environment of a job whose bucket has no copies yet."""
    monkeypatch.setattr(copies, "_CopyState", type("_CopyState", (), dict(vars(copies._CopyState))))
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path / "pod"))
    (tmp_path / "pod").mkdir()
    yield


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    pytest.importorskip("obstore", reason="pip install obstore")
    url = f"file://{tmp_path / 'store'}"
    monkeypatch.setenv("DDPJOB_CHECKPOINT_URL", url)
    start(monkeypatch, 0)
    return Bucket.open(url)


def start(monkeypatch: pytest.MonkeyPatch, number: int, generation: int = 0) -> None:
    """Restart the group, in this process."""
    monkeypatch.setenv("DDPJOB_UID", "uid")
    monkeypatch.setenv("DDPJOB_FENCE", f"{generation}.{number}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
    copies._CopyState.bucket = copies._CopyState.uploads = copies._CopyState.restored = None


def on_another_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(folder))
    return folder


def saved(folder: Path, text: str) -> Path:
    """Save as a script does: write under a temporary name, then rename."""
    path = folder / "snapshot.pt"
    (folder / "snapshot.new").write_text(text)
    (folder / "snapshot.new").replace(path)
    return path


@pytest.mark.usefixtures("bucket")
def test_a_forked_process_cannot_copy_checkpoints_and_does_not_wait_forever(tmp_path: Path) -> None:
    assert ddpjob_report.restore_checkpoint() is None
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "weights"), step=10)
        except BucketError as error:
            os._exit(7 if "cannot be used in a forked process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_copy_is_found_by_a_pod_on_another_node(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert ddpjob_report.restore_checkpoint() is None
    snapshot = saved(tmp_path / "pod", "weights of 10")
    ddpjob_report.copy_checkpoint(snapshot, step=10, wait=True)
    assert [entry.step for entry in bucket.entries()] == [10]
    assert sorted(path.name for path in (tmp_path / "pod").iterdir()) == ["snapshot.pt"]
    start(monkeypatch, 1)
    there = on_another_node(monkeypatch, tmp_path, "there")
    assert ddpjob_report.restore_checkpoint() == there / "snapshot.pt"
    assert (there / "snapshot.pt").read_text() == "weights of 10"


def test_a_folder_of_files_is_restored_unchanged(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "pod" / "checkpoint-20"
    files = {"model.safetensors": b"m" * 3_000_000, "global_step20/zero_0.pt": b"z", "empty": b"", "epoch=0.ckpt": b"e"}
    for name, content in files.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    ddpjob_report.copy_checkpoint(checkpoint, 20, wait=True)
    start(monkeypatch, 1)
    there = on_another_node(monkeypatch, tmp_path, "there")
    (there / "checkpoint-20").mkdir()
    (there / "checkpoint-20" / "of another start").write_text("goes")
    found = ddpjob_report.restore_checkpoint()
    assert found == there / "checkpoint-20"
    assert {str(p.relative_to(found)): p.read_bytes() for p in found.rglob("*") if p.is_file()} == files


@pytest.mark.slow
def test_a_folder_with_parts_of_all_ranks_is_copied_if_rank_0_has_all_of_them(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "pod" / "step-20"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"weights": torch.arange(9.0), "step": 20}, checkpoint_id=folder, no_dist=True)
    ddpjob_report.copy_checkpoint(folder, 20, wait=True)
    start(monkeypatch, 1)
    on_another_node(monkeypatch, tmp_path, "there")
    found = ddpjob_report.restore_checkpoint()
    assert found is not None
    state = {"weights": torch.zeros(9), "step": 0}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=found, no_dist=True)
    assert torch.equal(state["weights"], torch.arange(9.0)) and state["step"] == 20
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 1 parts, such as __0_0.distcp. Other nodes wrote these parts"):
        ddpjob_report.copy_checkpoint(folder, 21, wait=True)
    (folder / ".metadata").write_bytes(b"of something else")
    ddpjob_report.copy_checkpoint(folder, 22, wait=True)
    assert [entry.step for entry in bucket.entries()] == [22, 20]


def test_files_replaced_or_removed_after_the_call_are_copied_unchanged(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held, publish = threading.Event(), Bucket.publish
    monkeypatch.setattr(Bucket, "publish", lambda *a: (held.wait(30), publish(*a))[1])
    ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "first"), 1)
    saved(tmp_path / "pod", "second").unlink()
    held.set()
    assert copies.finish(30)
    start(monkeypatch, 1)
    found = ddpjob_report.restore_checkpoint()
    assert found is not None and found.read_text() == "first"


def test_a_script_may_change_its_folder_while_a_copy_is_made(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, publish = threading.Event(), Bucket.publish

    def slow(*arguments: Any) -> Stored:
        assert begun.wait(60)
        return publish(*arguments)

    monkeypatch.setattr(Bucket, "publish", slow)
    saved(tmp_path / "pod", "weights")
    monkeypatch.chdir(tmp_path / "pod")
    ddpjob_report.copy_checkpoint("snapshot.pt", 10)
    monkeypatch.chdir(tmp_path)
    begun.set()
    assert copies.finish(60) and [entry.step for entry in bucket.entries()] == [10]
    assert [path.name for path in (tmp_path / "pod").iterdir()] == ["snapshot.pt"]


def test_a_file_modified_during_its_copy_does_not_become_a_checkpoint(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import ddpjob_bucket.stored as module

    path, digest = tmp_path / "pod" / "snapshot.pt", module.sha256_of
    path.write_text("first")

    def overwritten(file: Path) -> str:
        found = digest(file)
        path.write_text("second, in place")
        return found

    monkeypatch.setattr(module, "sha256_of", overwritten)
    ddpjob_report.copy_checkpoint(path, 1)
    deadline = time.monotonic() + 20 * slowness()
    while not copies._CopyState.uploads.failures and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bucket.entries() == []
    copies._CopyState.uploads.close()
    assert "changed while it was being copied" in capfd.readouterr().err


@pytest.mark.slow
def test_all_ranks_get_the_same_copy_even_if_an_old_upload_completes_meanwhile(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "10"), 10, wait=True)
    old = copies._CopyState.bucket
    assert old is not None
    start(monkeypatch, 1)
    first = on_another_node(monkeypatch, tmp_path, "first")
    assert ddpjob_report.restore_checkpoint() == first / "snapshot.pt"
    old.publish(saved(tmp_path / "pod", "11"), 11)  # the lost pod is not dead yet
    start(monkeypatch, 1)
    second = on_another_node(monkeypatch, tmp_path, "second")
    assert ddpjob_report.restore_checkpoint() == second / "snapshot.pt"
    assert (first / "snapshot.pt").read_text() == (second / "snapshot.pt").read_text() == "10"
    start(monkeypatch, 2)
    found = ddpjob_report.restore_checkpoint()
    assert found is not None and found.read_text() == "11", "it will be the newest copy at the next start"
    start(monkeypatch, 1)
    with pytest.raises(BucketError, match="a newer attempt of this job"):
        ddpjob_report.restore_checkpoint()


def test_ranks_that_start_at_the_same_time_choose_the_same_copy(bucket: Bucket) -> None:
    bucket.take_term()
    ranks = [Bucket.open(bucket.url) for _ in range(8)]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda one=one: found.append(one.join("uid", (0, 3, 3)))) for one in ranks]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert found == [None] * 8 and len({one.term for one in ranks}) == 1


def test_the_ranks_of_a_node_fetch_a_copy_only_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "10"), 10, wait=True)
    there = on_another_node(monkeypatch, tmp_path, "there")
    fetched, fetch = [], Bucket.fetch
    monkeypatch.setattr(Bucket, "fetch", lambda *a: (fetched.append(1), fetch(*a))[1])
    for _ in range(3):
        start(monkeypatch, 1)
        assert ddpjob_report.restore_checkpoint() == there / "snapshot.pt"
    assert len(fetched) == 1
    (there / "snapshot.pt").write_text("of a later step, that nobody copied")
    start(monkeypatch, 1)
    found = ddpjob_report.restore_checkpoint()
    assert found is not None and found.read_text() == "10"


def test_a_folder_without_locks_is_reported(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "10"), 10, wait=True)
    start(monkeypatch, 1)
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(OSError, match=r"must be on a file system that supports locks.*pod/\.ddpjob-fetch\.lock"):
        ddpjob_report.restore_checkpoint()


def without_locks(file: object, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_partial_download_before_a_kill_is_removed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a group that restarts repeatedly would fill the pod's disk."""
    ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "10"), 10, wait=True)
    there = on_another_node(monkeypatch, tmp_path, "there")
    (there / ".snapshot.pt.17.fetch.tmp").write_text("1")
    (there / ".checkpoint-5.18.fetch.tmp").mkdir()
    (there / ".checkpoint-5.18.fetch.tmp" / "model").write_text("5")
    (there / ".snapshot.pt.19.old.tmp").write_text("9")
    start(monkeypatch, 1)
    assert ddpjob_report.restore_checkpoint() == there / "snapshot.pt"
    assert not list(there.glob("*.tmp")) and not list(there.glob(".*.tmp"))


def test_a_damaged_copy_is_reported_with_the_objects_to_delete(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: the damaged copy was downloaded five times, and the job could not start."""
    for step in (10, 20):
        ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", f"weights of {step}"), step, wait=True)
    [data] = (tmp_path / "store").glob("data/*-000000020-*/snapshot.pt")
    data.write_text("damaged")
    start(monkeypatch, 1)
    on_another_node(monkeypatch, tmp_path, "there")
    monkeypatch.setattr(patience, "FIRST_PAUSE", 600.0)
    with pytest.raises(BucketError, match=r"differs .*; to .* delete file:///.*/complete/000000001-000000020.json$"):
        ddpjob_report.restore_checkpoint()
    (tmp_path / "store" / "complete" / "000000001-000000020.json").unlink()
    start(monkeypatch, 2)
    found = ddpjob_report.restore_checkpoint()
    assert found is not None and found.read_text() == "weights of 10"


def test_a_start_in_an_unknown_round_reports_the_invalid_variable(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wrong in (("FENCE", "3"), ("FENCE", "3.4.5"), ("GENERATION", "one")):
        start(monkeypatch, 1)
        monkeypatch.delenv("DDPJOB_FENCE")
        monkeypatch.setenv(f"DDPJOB_{name}", wrong)
        with pytest.raises(BucketError, match=f"DDPJOB_{name}='{wrong}'.*: must be "):
            ddpjob_report.restore_checkpoint()


def test_only_the_newest_copies_are_kept_in_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    for step in range(1, 7):
        ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", str(step)), step, keep=2, wait=True)
    assert [entry.step for entry in bucket.entries()] == [6, 5]


def test_figures_about_copies_are_sent_together_with_the_scripts_figures(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(link, "post", sent.append)
    before = time.time()
    ddpjob_report.report(step=1)
    assert sent == [{"step": 1}]
    ddpjob_report.copy_checkpoint(saved(tmp_path / "pod", "5"), 5, wait=True)
    ddpjob_report.report(step=6, loss=0.5)
    for metrics in (sent[1]["metrics"], sent[2]["metrics"]):
        assert metrics["copyStep"] == 5 and metrics["copyBehind"] == 0
        assert int(before) <= metrics["copyTime"] <= time.time() + 1


def test_without_a_bucket_the_checkpoint_stays_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ddpjob_report.restore_checkpoint() is None
    path = saved(tmp_path / "pod", "1")
    ddpjob_report.copy_checkpoint(path, 1)
    assert ddpjob_report.restore_checkpoint() == path
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "0")
    monkeypatch.setenv("DDPJOB_NODES", "2")
    assert ddpjob_report.restore_checkpoint() is None, "the other nodes do not see it"
    monkeypatch.delenv("DDPJOB_CHECKPOINT_SHARED")
    path.unlink()
    assert ddpjob_report.restore_checkpoint() is None


def test_an_unreadable_note_about_a_checkpoint_does_not_cause_a_start_from_scratch(tmp_path: Path) -> None:
    """Regression: every rank treated the note as missing, and the script overwrote its
    checkpoint.
    """
    path = saved(tmp_path / "pod", "1")
    ddpjob_report.copy_checkpoint(path, 1)
    note = tmp_path / "pod" / copies.RECORD
    assert note.stat().st_mode & 0o777 == 0o666 & ~umask(), "users who may read the checkpoint may read its name"
    for damaged in ("", "[]", "{}", '{"name": 5}'):
        note.write_text(damaged)
        with pytest.raises(ValueError, match=rf"{copies.RECORD}, which names the newest checkpoint, is damaged"):
            ddpjob_report.restore_checkpoint()
    note.unlink()
    note.mkdir()
    with pytest.raises(IsADirectoryError):
        ddpjob_report.restore_checkpoint()
    note.rmdir()
    assert ddpjob_report.restore_checkpoint() is None


def test_without_a_bucket_the_highest_step_counts_as_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "pod"
    last, best = saved(folder, "200"), folder / "best.pt"
    best.write_text("150")
    ddpjob_report.copy_checkpoint(last, 200)
    ddpjob_report.copy_checkpoint(best, 150)
    assert ddpjob_report.restore_checkpoint() == last
    ddpjob_report.copy_checkpoint(best, 150)  # Training has continued from an older state.
    assert ddpjob_report.restore_checkpoint() == best
    ddpjob_report.copy_checkpoint(last, 200)
    last.unlink()
    ddpjob_report.copy_checkpoint(best, 150)
    assert ddpjob_report.restore_checkpoint() == best


def test_a_recorded_checkpoint_in_an_unreadable_folder_is_not_taken_for_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "pod", "1")
    ddpjob_report.copy_checkpoint(path, 1)
    stats = os.stat

    def stat(place: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if place == path:
            raise OSError(errno.ESTALE, "Stale file handle")
        return stats(place, *args, **kwargs)

    monkeypatch.setattr(Path, "exists", os.path.exists)  # as in Python 3.14
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(OSError, match="Stale file handle"):
        ddpjob_report.restore_checkpoint()


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_if_the_disk_is_full_the_previous_note_about_a_checkpoint_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "pod", "1")
    ddpjob_report.copy_checkpoint(path, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (other := tmp_path / "pod" / "other.pt").touch()
    with pytest.raises(OSError, match="No space left"):
        ddpjob_report.copy_checkpoint(other, 2)
    assert ddpjob_report.restore_checkpoint() == path
    assert sorted(entry.name for entry in (tmp_path / "pod").iterdir()) == [copies.RECORD, "other.pt", "snapshot.pt"]


def test_a_job_that_gets_a_bucket_on_one_machine_continues_from_its_folder(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: the job started from scratch, although it had reported that it would resume from
    its folder.
    """
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "1")
    url = os.environ.pop("DDPJOB_CHECKPOINT_URL")
    path = saved(tmp_path / "pod", "before")
    (tmp_path / "pod" / "model-7.ckpt").touch()
    ddpjob_report.copy_checkpoint(path, 7)
    monkeypatch.setenv("DDPJOB_CHECKPOINT_URL", url)
    assert ddpjob_report.restore_checkpoint() == path
    assert resume.newest((tmp_path / "pod").glob("*.ckpt"), Path.is_file) == path
    (tmp_path / "pod" / copies.RECORD).unlink()
    assert resume.newest((tmp_path / "pod").glob("*.ckpt"), Path.is_file) == tmp_path / "pod" / "model-7.ckpt"
    monkeypatch.setenv("DDPJOB_CHECKPOINT_SHARED", "0")
    assert resume.newest((tmp_path / "pod").glob("*.ckpt"), Path.is_file) is None, "the disk belongs to a single pod"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": -1}, "step must be a whole number"),
        ({"step": 1.5}, "step must be a whole number"),
        ({"step": 10**9}, "step must be a whole number"),
        ({"step": 1, "keep": 0}, "keep must be"),
        ({"step": 1, "path": None}, "path must be a path, not None"),
        ({"step": 1, "path": "/no/such"}, "path /no/such does not exist"),
        ({"step": 1, "path": "/"}, "path / contains all checkpoints"),
        (
            {"step": 1, "path": "/proc/self/status"},
            r"path /proc/self/status is not in checkpoint_dir\(\), which is /.*/pod",
        ),
    ],
)
def test_invalid_arguments_of_copy_checkpoint_are_reported(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        ddpjob_report.copy_checkpoint(**{"path": tmp_path, **arguments})


def test_names_that_are_unsuitable_for_a_bucket_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("a b", "ä", "x" * 201):
        odd = tmp_path / "pod" / name
        odd.write_text("1")
        with pytest.raises(BucketError, match="cannot be copied; use regular files, named with only letters"):
            ddpjob_report.copy_checkpoint(odd, 1)
    (tmp_path / "pod" / "nothing").mkdir()
    with pytest.raises(BucketError, match="0 files"):
        ddpjob_report.copy_checkpoint(tmp_path / "pod" / "nothing", 1)


def test_the_error_in_an_image_without_the_library_names_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DDPJOB_CHECKPOINT_URL", "s3://models/runs/space/job")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(BucketError, match="pip install obstore"):
        ddpjob_report.restore_checkpoint()


ENDS = """
import sys, threading, time, ddpjob_report
from ddpjob_bucket import Bucket
from ddpjob_report import copies
publish, copies.LAST_SECONDS = Bucket.publish, float(sys.argv[2])
def slow(*arguments):
    time.sleep(float(sys.argv[1]))
    return publish(*arguments)
Bucket.publish = slow
path = ddpjob_report.checkpoint_dir() / "last.pt"
path.write_text("the result")
ddpjob_report.copy_checkpoint(path, 9)
if "removes" in sys.argv:
    import shutil
    [shutil.rmtree(folder) for folder in path.parent.glob(".ddpjob-copy-*")]
if "leaves" in sys.argv:
    ddpjob_report.saved_and_leave()
if "fail" in sys.argv:
    raise SystemError("a bug")
"""


def ends(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENDS, *arguments], capture_output=True, text=True, check=False, env=dict(os.environ),
        timeout=60 * slowness(),
    )  # fmt: skip


def test_a_script_exits_only_when_its_last_copy_is_complete(bucket: Bucket) -> None:
    done = ends("0.5", "60")
    assert done.returncode == 0, done.stderr
    assert bucket.entries() == [Stored(1, 9)]


def test_a_script_whose_last_copy_failed_fails(bucket: Bucket) -> None:
    done = ends("60", "0.2")
    assert done.returncode == 1 and "so the job is not complete" in done.stderr
    assert bucket.entries() == []


def test_a_script_that_removes_its_last_copy_fails_immediately(bucket: Bucket) -> None:
    began = time.monotonic()
    done = ends("1", "600", "removes")
    assert done.returncode == 1 and "will not be copied" in done.stderr and "so the job is not complete" in done.stderr
    assert done.stderr.count("warning") == 1 and time.monotonic() - began < 60 * slowness()


def test_a_script_that_must_exit_waits_for_its_copy_within_the_grace_period(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the rank was killed with its pod or, if a different pod was asked to stop, exited
    with code 1 ten minutes later.
    """
    monkeypatch.setenv("DDPJOB_GRACE_SECONDS", "5.2")
    done = ends("60", "600", "leaves")
    assert done.returncode == protocol.EXIT_STEPPED_ASIDE
    assert done.stderr.count("did not reach the bucket before the grace period was over") == 1
    monkeypatch.setenv("DDPJOB_GRACE_SECONDS", "65")
    assert ends("0.5", "600", "leaves").returncode == protocol.EXIT_STEPPED_ASIDE
    assert bucket.entries() == [Stored(1, 9)]


def test_a_script_that_fails_does_not_wait_for_its_copy(bucket: Bucket) -> None:
    began = time.monotonic()
    done = ends("600", "600", "fail")
    assert done.returncode == 1 and "a bug" in done.stderr and time.monotonic() - began < 60 * slowness()
