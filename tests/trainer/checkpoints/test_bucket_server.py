"""Checkpoints on a real S3 server: a kill in the middle of an upload, a slow connection, and an
unreachable server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ddpjob_bucket import Bucket, BucketError
from machine import slowness
from ranks import TINY, final_losses, finish, metrics, until
from ranks import start as start_ranks
from s3_server import BUCKET, Server, SlowLine, serving

pytest.importorskip("obstore", reason="pip install obstore")
URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(autouse=True)
def found(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    shutil.rmtree(server.folder / "runs", ignore_errors=True)


def test_a_checkpoint_published_by_one_process_can_be_fetched_by_another(tmp_path: Path) -> None:
    large = tmp_path / "step-000000007.pt"
    large.write_bytes(os.urandom(23_000_000))  # uploaded in several parts
    bucket = Bucket.open(URL)
    assert bucket.entries() == [] and bucket.take_term() == 1
    entry = bucket.publish(large, 7)
    (tmp_path / "there").mkdir()
    other = Bucket.open(URL)
    assert other.entries() == [entry]
    assert other.fetch(entry, tmp_path / "there").read_bytes() == large.read_bytes()
    bucket.remove([entry])
    assert other.entries() == []


def test_keys_that_end_with_a_newline_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"{os.environ[name]}\n")
    assert Bucket.open(f"{URL}/newline").take_term() == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "two\nlines")
    with pytest.raises(BucketError, match=r"complete cannot be listed: obstore panicked: .*InvalidHeaderValue"):
        Bucket.open(URL).entries()


def test_incarnations_that_start_at_the_same_time_have_different_terms() -> None:
    """The server's conditional writes ensure this."""
    buckets = [Bucket.open(URL) for _ in range(6)]
    threads = [threading.Thread(target=one.take_term) for one in buckets]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert len({one.term for one in buckets}) == 6


# --- a training -------------------------------------------------------------------------------------------------

TRAINING = [
    "data.name=digits", "data.batch=100", "model.width=24", "train.epochs=4", "train.log_every=1", "optim.lr=0.05",
    "train.ledger=true", "train.threads=1", "checkpoint.every_steps=5", "checkpoint.every_seconds=0",
    "checkpoint.keep=2", "eval.pictures=false",
]  # fmt: skip


def start(place: Path, *more: str, port: int | None = None, server: Server | None = None) -> subprocess.Popen[bytes]:
    """Start a trainer with checkpoints on its own disk, but with a shared run folder."""
    arguments = [*TRAINING, f"checkpoint.dir={place / 'pod'}", f"train.run_dir={place / 'run'}", *more]
    variables = server.environment(port) if server else {}
    with (place / "out.txt").open("ab") as out:
        command = [sys.executable, "-m", "ddpjob_trainer", *arguments]
        return subprocess.Popen(command, cwd=place, stdout=out, stderr=out, env={**os.environ, **variables})


def ended(process: subprocess.Popen[bytes], place: Path, seconds: float = 120) -> int:
    try:
        return process.wait(seconds * slowness())
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError((place / "out.txt").read_text()[-3000:]) from None


def every_sample_once(place: Path) -> bool:
    command = [sys.executable, "-m", "ddpjob_trainer", "ledger", str(place / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    return done.returncode == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    place = tmp_path_factory.mktemp("undisturbed")
    assert ended(start(place), place) == 0
    return final_losses(place / "run")


def last_step(place: Path) -> int:
    try:
        return len(final_losses(place / "run"))
    except (OSError, ValueError, AssertionError):
        return 0


def test_a_kill_during_an_upload_over_a_slow_connection_loses_no_complete_copy(
    server: Server, tmp_path: Path, undisturbed: list[float]
) -> None:
    line = SlowLine(server.port)
    running = start(tmp_path, f"checkpoint.url={URL}", port=line.port, server=server)
    until(lambda: Bucket.open(URL).entries())
    line.bytes_per_second = 8_000.0
    complete, sent = Bucket.open(URL).entries()[0], line.sent
    until(lambda: line.sent > sent + 30_000)  # a checkpoint is several times as large as this bandwidth
    running.send_signal(signal.SIGKILL)
    running.wait()
    left = Bucket.open(URL).entries()
    assert left and complete.step <= left[0].step < last_step(tmp_path), "training did not wait for the upload"
    shutil.rmtree(tmp_path / "pod")  # the disk is lost with the pod
    line.bytes_per_second = None
    assert ended(start(tmp_path, f"checkpoint.url={URL}", server=server), tmp_path) == 0
    output = (tmp_path / "out.txt").read_text()
    assert f"resuming after step {left[0].step} of" in output, output[-3000:]
    assert every_sample_once(tmp_path)
    assert final_losses(tmp_path / "run") == undisturbed, "bit-identical"
    assert Bucket.open(URL).entries()[0].step == len(undisturbed), "the final checkpoint exists too"
    assert len(Bucket.open(URL).entries()) == 2, "checkpoint.keep"
    line.close()


def test_training_does_not_start_while_the_server_is_unreachable(
    server: Server, tmp_path: Path, undisturbed: list[float]
) -> None:
    line = SlowLine(server.port)
    running = start(tmp_path, f"checkpoint.url={URL}", "checkpoint.url_wait_seconds=2", port=line.port, server=server)
    until(lambda: Bucket.open(URL).entries())
    line.cut = True
    assert ended(running, tmp_path) == 0
    assert final_losses(tmp_path / "run") == undisturbed
    assert "after 2 s, the last checkpoint is still not in s3://bucket/runs/one" in (tmp_path / "out.txt").read_text()
    assert Bucket.open(URL).entries()[0].step < len(undisturbed)
    shutil.rmtree(tmp_path / "pod")
    again = start(tmp_path, f"checkpoint.url={URL}", port=line.port, server=server)
    assert ended(again, tmp_path, 240) not in (0, 75), "training never starts from scratch"
    assert "resuming" not in (tmp_path / "out.txt").read_text().rpartition("is not in s3://")[2]
    line.close()


def test_training_on_a_pods_own_disk_ends_when_the_bucket_has_the_result(
    server: Server, tmp_path: Path, undisturbed: list[float]
) -> None:
    line, own = SlowLine(server.port), ["checkpoint.shared=false", f"checkpoint.url={URL}"]
    running = start(tmp_path, *own, "checkpoint.url_wait_seconds=2", port=line.port, server=server)
    until(lambda: Bucket.open(URL).entries())
    line.cut = True
    assert ended(running, tmp_path) == 1
    assert (
        "exists only on this machine. Training counts as complete only if the last checkpoint is in the bucket"
        in (tmp_path / "out.txt").read_text()
    )
    assert Bucket.open(URL).entries()[0].step < len(undisturbed)
    line.cut = False
    assert ended(start(tmp_path, *own, port=line.port, server=server), tmp_path) == 0
    assert Bucket.open(URL).entries()[0].step == len(undisturbed), "the disk still had the file"
    assert final_losses(tmp_path / "run") == undisturbed
    line.close()


# --- in parts, from nodes with separate disks -------------------------------------------------------------------

PARTS = [
    *TINY, "checkpoint.format=dcp", "checkpoint.every_steps=2", "data.micro_batches=6", "ddp.ordered=true",
    "model.width=24",
]  # fmt: skip


def nodes(server: Server, place: Path, slow: SlowLine | None = None) -> Callable[[int], dict[str, str]]:
    """Return the environments of ranks on separate nodes. `slow` limits rank 1's bandwidth."""

    def node(rank: int) -> dict[str, str]:
        folder = {"DDPJOB_CHECKPOINT_DIR": str(place / f"node{rank}"), "DDPJOB_CHECKPOINT_SHARED": "0"}
        line = server.environment(slow.port if slow is not None and rank == 1 else None)
        return {**folder, **line, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    return node


def complete(server: Server) -> list[int]:
    """Return the steps of the complete checkpoints on the server's disk, newest first."""
    found = (server.folder / "runs" / "one" / "complete").glob("*.json")
    return sorted((int(path.stem.rpartition("-")[2]) for path in found), reverse=True)


def test_after_a_node_is_lost_during_its_upload_training_continues_exactly(server: Server, tmp_path: Path) -> None:
    line, args = SlowLine(server.port, 60_000.0), [*PARTS, f"checkpoint.url={URL}", "checkpoint.keep=2"]
    running = start_ranks(2, args, env=nodes(server, tmp_path, line), clean=True)
    until(lambda: complete(server), 240)
    line.cut = True
    data = server.folder / "runs" / "one" / "data"

    def begun() -> list[Path]:
        """Return the uploads that have rank 0's part but not rank 1's."""
        found = [path for path in data.iterdir() if list(path.glob("*/__0_*")) and not list(path.glob("*/__1_*"))]
        return [path for path in found if int(path.name.split("-")[1]) > complete(server)[0]]

    until(begun, 120)
    for process, _ in running:
        process.kill()
        process.join()
    [left, *_], steps = complete(server), len(final_losses(tmp_path / "node0" / "run"))
    assert left < steps, "training did not wait for the upload"
    assert begun(), "rank 1's part is missing"
    shutil.rmtree(tmp_path / "node1")
    line.close()
    ends = finish(start_ranks(3, args, env=nodes(server, tmp_path), clean=True), 240)
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert [row["step"] for row in metrics(tmp_path / "node0" / "run", "start")] == [0, left]
    alone = tmp_path / "alone"
    ends = finish(start_ranks(1, [*PARTS, "strategy=ddp", f"checkpoint.dir={alone}"], clean=True), 240)
    assert [end.code for end in ends] == [0], ends
    assert final_losses(tmp_path / "node0" / "run") == final_losses(alone / "run"), "bit-identical"
    assert len(complete(server)) == 2 and complete(server)[0] == 16, (
        "checkpoint.keep holds, and the final checkpoint is in the bucket"
    )
    assert len(list(data.glob("*/*/__2_*"))) == 2, "no files of the interrupted upload are left"


def test_ranks_of_fsdp_fetch_only_the_parts_that_they_read(server: Server, tmp_path: Path) -> None:
    args = [*TINY, "checkpoint.format=dcp", "strategy=fsdp", f"checkpoint.url={URL}", "checkpoint.keep=9"]
    for epochs in (1, 2):
        ran = start_ranks(3, [*args, f"train.epochs={epochs}"], env=nodes(server, tmp_path), clean=True)
        ends = finish(ran, 240)
        assert [end.code for end in ends] == [0, 0, 0], ends
        if epochs == 1:
            assert complete(server) == [8]
            [shutil.rmtree(path) for path in tmp_path.glob("node*/step-*")]
    for rank in range(3):
        fetched = {path.name for path in (tmp_path / f"node{rank}" / "step-000000008.dcp").iterdir()}
        tensors = {name for name in fetched if name.startswith("__")}
        own = f"__{rank}_0.distcp"
        assert own in tensors and tensors <= {"__0_0.distcp", own}, "rank 0 has the data that all ranks share"
