"""Checkpoints in an object store are complete or absent, and ordered by incarnation, even if
uploads fail.
"""

from __future__ import annotations

import errno
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ddpjob_bucket import Bucket, BucketError, Stored, Uploads, Waiting, stored
from ddpjob_bucket import uploads as module
from ddpjob_bucket.stored import discard
from ranks import until

obstore = pytest.importorskip("obstore", reason="pip install obstore")


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    from obstore.store import LocalStore, MemoryStore

    return MemoryStore() if request.param == "memory" else LocalStore(str(tmp_path / "store"), mkdir=True)


def keys(store: Any) -> list[str]:
    return sorted(item["path"] for page in obstore.list(store) for item in page)


def saved(folder: Path, step: int, content: bytes = b"weights") -> Path:
    path = folder / f"step-{step:09d}.pt"
    path.write_bytes(content)
    return path


def begun(store: Any) -> Bucket:
    made = Bucket(store, "s3://b/p")
    made.take_term()
    return made


def test_a_published_checkpoint_can_be_fetched_unchanged(store: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    bucket = begun(store)
    assert bucket.entries() == []
    bucket.publish(saved(tmp_path, 5, b"x" * 3_000_000), 5, epoch=1)
    bucket.publish(saved(tmp_path, 9), 9)
    later = Bucket(store, "s3://b/p")
    assert [one.step for one in later.entries()] == [9, 5]
    assert later.manifest(Stored(1, 5)).epoch == 1
    fetched = later.fetch(Stored(1, 5), tmp_path / "there")
    assert fetched.name == "step-000000005.pt" and fetched.read_bytes() == b"x" * 3_000_000
    assert [path.name for path in (tmp_path / "there").iterdir()] == [fetched.name]


def test_a_page_that_a_proxy_sends_for_every_request_is_not_an_empty_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"<html><body>Please log in</body></html>"

    class LoginPage(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), LoginPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(BucketError, match=r"s3://bucket/p/complete cannot be listed.*Please log in"):
            Bucket.open("s3://bucket/p").entries()
        server.shutdown()


def test_an_interrupted_upload_is_deleted_by_the_next_incarnation(store: Any, tmp_path: Path) -> None:
    bucket = begun(store)
    bucket.publish(saved(tmp_path, 5), 5)
    obstore.put(store, "data/000000001-000000009-0123abcd/step-000000009.pt", b"half")
    assert [one.step for one in Bucket(store, "s3://b/p").entries()] == [5]
    bucket.sweep()
    assert any("000000009-0123abcd" in key for key in keys(store)), "the incarnation's own upload may be in progress"
    second = begun(store)
    second.sweep()
    assert not any("0123abcd" in key for key in keys(store))
    assert second.entries() == [Stored(1, 5)]


def test_a_checkpoint_is_incomplete_during_an_upload_and_after_a_failed_upload(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, put, seen = begun(store), obstore.put, []

    def fails(store: Any, key: str, file: Any, **more: Any) -> None:
        if not key.startswith("data/"):
            return put(store, key, file, **more)
        seen.append(Bucket(store, "s3://b/p").entries())
        raise obstore.exceptions.GenericError("the line is cut")

    monkeypatch.setattr(obstore, "put", fails)
    with pytest.raises(BucketError, match="the line is cut"):
        bucket.publish(saved(tmp_path, 5), 5)
    assert seen == [[]] and bucket.entries() == []


def test_a_checkpoint_completed_while_an_older_incarnation_sweeps_is_kept(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the checkpoint was only in the second of two listings, so it counted as
    superseded.
    """
    old, new, listed = begun(store), begun(store), Bucket._listed
    old.publish(saved(tmp_path, 100), 100)

    def and_meanwhile() -> list[Stored]:
        found = listed(old)
        if len(found) == 1:
            new.publish(saved(tmp_path, 90), 90)
        return found

    monkeypatch.setattr(old, "_listed", and_meanwhile)
    old.sweep()
    assert new.entries() == [Stored(2, 90)]
    assert new.fetch(Stored(2, 90), tmp_path).read_bytes() == b"weights"


@pytest.mark.parametrize("failing", ["/b", ".json"], ids=["a file", "the manifest"])
def test_files_of_failed_uploads_are_deleted(
    failing: str, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt to upload a folder has its own location. Regression: failed attempts on an
    unreliable line filled the bucket.
    """
    bucket, put, fails = begun(store), obstore.put, [True]
    (folder := tmp_path / "checkpoint-5").mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(name)

    def cut(at: Any, key: str, file: Any, **how: Any) -> Any:
        if key.endswith(failing) and fails:
            fails.pop()
            raise obstore.exceptions.GenericError("the line is cut")
        return put(at, key, file, **how)

    monkeypatch.setattr(obstore, "put", cut)
    with pytest.raises(BucketError, match="the line is cut"):
        bucket.publish(folder, 5)
    entry = bucket.publish(folder, 5)
    bucket.sweep()
    data = bucket.manifest(entry).data
    assert [key for key in keys(store) if key.startswith("data/")] == [f"{data}/checkpoint-5/{name}" for name in "ab"]


def test_a_link_to_a_folder_is_not_silently_left_out_of_a_copy(store: Any, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.pt").write_text("weights")
    (checkpoint / "state.json").write_text("{}")
    (checkpoint / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BucketError, match="checkpoint-5/model: links to folders cannot be copied"):
        begun(store).publish(checkpoint, 5)


def test_a_partitioned_incarnation_never_supersedes_the_one_that_continued(store: Any, tmp_path: Path) -> None:
    old = begun(store)
    old.publish(saved(tmp_path, 100), 100)
    new = begun(store)
    new.publish(saved(tmp_path, 110), 110)
    old.publish(saved(tmp_path, 130, b"of another history"), 130)
    assert new.entries() == [Stored(2, 110), Stored(1, 100)]
    new.sweep()
    assert not any("000000130" in key for key in keys(store))


def test_two_incarnations_that_start_at_the_same_time_have_different_terms(store: Any) -> None:
    buckets = [Bucket(store, "s3://b/p") for _ in range(8)]
    threads = [threading.Thread(target=one.take_term) for one in buckets]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert sorted(one.term for one in buckets) == list(range(1, 9))


@pytest.mark.parametrize("size", [0, 999, 1000, 1001, 2000, 2500])
def test_a_large_file_is_fetched_by_several_requests(
    size: int, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client abandons a request after two minutes, so a larger file would never arrive in a
    single one.
    """
    monkeypatch.setattr(stored, "_RANGE", 1000)
    bucket, content = begun(store), bytes(i % 251 for i in range(size))
    entry = bucket.publish(saved(tmp_path, 5, content), 5)
    asked, get = list[Any](), obstore.get
    monkeypatch.setattr(obstore, "get", lambda at, key, **how: (asked.append(key), get(at, key, **how))[1])
    (tmp_path / "there").mkdir()
    assert bucket.fetch(entry, tmp_path / "there").read_bytes() == content
    assert len([key for key in asked if key.startswith("data/")]) == max(1, -(-size // 1000))
    [data] = [key for key in keys(store) if key.startswith("data/")]
    for damaged in (content + b"more", content[:-1] + b"?", content[:-1] or b"?"):
        obstore.put(store, data, damaged)
        with pytest.raises(BucketError, match="differs from the uploaded file in size or checksum"):
            bucket.fetch(entry, tmp_path / "there")


@pytest.mark.parametrize("content", [b"weightz", b"weight", b"weights and more"])
def test_content_that_differs_from_the_upload_is_refused(content: bytes, store: Any, tmp_path: Path) -> None:
    bucket = begun(store)
    entry = bucket.publish(saved(tmp_path, 5), 5)
    [data] = [key for key in keys(store) if key.startswith("data/")]
    obstore.put(store, data, content)
    (tmp_path / "there").mkdir()
    with pytest.raises(BucketError, match="differs from the uploaded file in size or checksum"):
        bucket.fetch(entry, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


DATA = "data/000000001-000000005-00000000"
FILE = {"path": "x", "size": 1, "sha256": "a"}


@pytest.mark.parametrize(
    "text",
    [
        b"{", b"[]", b"null", b'{"step": 5}',
        *(json.dumps({"step": 5, "name": "x", "data": DATA, "files": [FILE], **wrong}).encode() for wrong in (
            {"step": 6}, {"epoch": "1"}, {"name": ".."}, {"name": "a/b"}, {"name": 5},
            {"data": "data/../../secret"}, {"data": None}, {"files": []}, {"files": [FILE] * 5001},
            {"files": None}, {"files": ["x"]},
            *({"files": [{**FILE, **field}]} for field in (
                {"path": "../x"}, {"path": "x/../../y"}, {"path": "x//y"}, {"path": "/x"}, {"path": "y"},
                {"path": "x/\n"}, {"path": 5}, {"size": -1}, {"size": "1"}, {"size": True}, {"sha256": None})))),
        b" " * (2**20 + 1),
    ],
)  # fmt: skip
def test_a_forged_manifest_in_a_bucket_is_refused(text: bytes, store: Any) -> None:
    bucket = begun(store)
    obstore.put(store, Stored(1, 5).key, text)
    with pytest.raises(BucketError):
        bucket.manifest(Stored(1, 5))


def test_removed_checkpoints_are_deleted_and_scores_are_kept(store: Any, tmp_path: Path) -> None:
    bucket = begun(store)
    first = bucket.publish(saved(tmp_path, 5), 5)
    bucket.publish(saved(tmp_path, 6), 6)
    bucket.remove([first])
    assert [one.step for one in bucket.entries()] == [6]
    assert not any("000000005" in key for key in keys(store))
    assert bucket.scores("loss") == {}
    bucket.put_scores({6: 0.5}, "loss")
    assert Bucket(store, "s3://b/p").scores("loss") == {6: 0.5}
    assert Bucket(store, "s3://b/p").scores("accuracy") == {}
    bucket.put_scores({6: 0.5, 7: math.nan}, "loss")
    (name,) = (key for key in keys(store) if key.endswith("scores.json"))
    text = bytes(obstore.get(store, name).bytes())
    assert b"null" in text and b"NaN" not in text
    read = bucket.scores("loss")
    assert read[6] == 0.5 and math.isnan(read[7])


def test_unreadable_scores_do_not_count_as_missing(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the best checkpoint's score was unreadable, so it was deleted like any other."""
    bucket = begun(store)
    bucket.put_scores({6: 0.5}, "loss")

    def away(*_: Any, **__: Any) -> None:
        raise obstore.exceptions.GenericError("503 Service Unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(obstore, "get", away)
        with pytest.raises(BucketError, match="503"):
            bucket.scores("loss")
    assert bucket.scores("loss") == {6: 0.5}
    of_loss = (b'{"metric": "loss"}', b'{"metric": "loss", "scores": {"6": []}}', b'{"metric": "loss", "scores": []}')
    for damaged in (b"{", b"[]", b"null", b" " * (2**20 + 1), *of_loss):
        obstore.put(store, "scores.json", damaged)
        assert bucket.scores("loss") == {}


def test_a_bucket_that_cannot_be_opened_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BucketError, match=rf"^file://{tmp_path}/file/x cannot be opened: Not a directory"):
        Bucket.open(f"file://{tmp_path}/file/x")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    with pytest.raises(BucketError, match=r"^s3://bucket/p cannot be opened: .*SecretAccessKey"):
        Bucket.open("s3://bucket/p")


@pytest.mark.parametrize("url", ["gs://a", "s3://", "s3:/bucket", "s3://UPPER/x", "/folder"])
def test_unsupported_urls_are_refused(url: str) -> None:
    with pytest.raises(BucketError, match="s3://BUCKET/PREFIX"):
        Bucket.open(url)


# --- uploads ----------------------------------------------------------------------------------------------------


class Slow(Bucket):
    """An upload that waits until the gate is open, and fails `failures` times."""

    failures = 0

    def __init__(self) -> None:
        from obstore.store import MemoryStore

        super().__init__(MemoryStore(), "s3://b/p")
        self.gate, self.begun, self.steps = threading.Event(), threading.Event(), list[int]()
        self.term = 1

    def publish(self, path: Path, step: int, epoch: int | None = None) -> Stored:
        self.begun.set()
        assert self.gate.wait(10)
        self.steps.append(step)
        if self.failures:
            self.failures -= 1
            raise BucketError("the bucket is away")
        return super().publish(path, step, epoch)


def test_training_does_not_wait_for_uploads_and_the_newest_is_uploaded_next(tmp_path: Path) -> None:
    bucket, tidied = Slow(), list[int]()
    uploads = Uploads(bucket, lambda: tidied.append(1), print)
    paths = {step: saved(tmp_path, step) for step in (1, 2, 3)}
    uploads.offer(Waiting(paths[1], 1, None))
    assert bucket.begun.wait(10)
    uploads.offer(Waiting(paths[2], 2, None))
    uploads.offer(Waiting(paths[3], 3, None))
    assert [uploads.holds(paths[step]) for step in (1, 2, 3)] == [True, False, True], (
        "at most two checkpoints are kept in memory"
    )
    assert not uploads.wait(0.05) and uploads.behind_seconds > 0
    bucket.gate.set()
    assert uploads.wait(10)
    assert bucket.steps == [1, 3] and uploads.newest == 3 and len(tidied) == 2
    assert uploads.behind_seconds == 0 and not uploads.holds(paths[3])


def test_only_the_newest_unclaimed_uploads_are_remembered() -> None:
    """The uploads belong to a script, which may run for months."""
    bucket: Any = None
    uploads = Uploads(bucket, lambda: None, print, publish=lambda one: None, in_turn=True)
    for step in range(module.MOST_COMPLETED + 10):
        uploads.offer(Waiting(Path("x"), step))
    assert uploads.wait(60)
    assert list(uploads.completed) == list(range(10, module.MOST_COMPLETED + 10))
    uploads.close()


def test_a_failed_upload_is_retried_with_growing_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)
    bucket, said = Slow(), list[str]()
    bucket.failures = 4
    bucket.gate.set()
    uploads = Uploads(bucket, lambda: None, said.append)
    began = time.monotonic()
    uploads.offer(Waiting(saved(tmp_path, 1), 1, None))
    assert uploads.wait(10)
    assert time.monotonic() - began > 0.02 * (1 + 2 + 4 + 8)
    assert bucket.steps == [1] * 5 and uploads.failures == 0
    assert len(said) == 4 and all("training continues" in text for text in said)
    uploads.close()


def test_waiting_for_the_last_upload_ends_a_long_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is 60 s after several minutes without the bucket, and the pod's grace period is
    shorter.
    """
    monkeypatch.setattr(module, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(module, "LONGEST_AWAITED", 0.1)
    bucket, said = Slow(), list[str]()
    bucket.failures = 2
    bucket.gate.set()
    uploads = Uploads(bucket, lambda: None, said.append)
    uploads.offer(Waiting(saved(tmp_path, 1), 1, None))
    until(lambda: said)
    assert not uploads.wait(0), "a check alone does not end the pause"
    time.sleep(0.3)
    assert bucket.steps == [1]
    began = time.monotonic()
    assert uploads.wait(30)
    assert bucket.steps == [1] * 3 and time.monotonic() - began > 0.1
    uploads.close()


@pytest.mark.parametrize("slow", [True, False], ids=["a slow connection", "a server that refuses"])
def test_on_a_slow_connection_a_large_file_is_sent_part_by_part(
    slow: bool, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen simultaneous parts would share the bandwidth, so all of them would time out and start
    again.
    """
    bucket, put, how, clock = begun(store), obstore.put, list[Any](), [0.0]
    monkeypatch.setattr(stored.time, "monotonic", lambda: clock[0])

    def over_the_line(at: Any, key: str, file: Any, chunk_size: int = 0, max_concurrency: int = 12) -> Any:
        if isinstance(file, Path) and file.stat().st_size > chunk_size:
            how.append(max_concurrency)
            if max_concurrency > 1:
                clock[0] += 121 if slow else 30
                raise obstore.exceptions.GenericError("HTTP error: error sending request")
        return put(at, key, file)

    monkeypatch.setattr(obstore, "put", over_the_line)
    large = saved(tmp_path, 5, bytes(6 * 2**20))
    if not slow:
        with pytest.raises(BucketError, match="error sending request"):
            bucket.publish(large, 5)
        assert how == [12]
        return
    entries = [bucket.publish(large, 5), bucket.publish(saved(tmp_path, 6, bytes(6 * 2**20)), 6)]
    assert bucket.entries() == entries[::-1]
    assert how == [12, 1, 1], "the next upload starts immediately"


def test_an_error_in_a_callback_does_not_end_the_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning goes to a log file on a full disk, for example."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)
    problems = [BucketError("the line is cut")]

    def publish(one: Waiting) -> None:
        if problems:
            raise problems.pop()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    uploads = Uploads(Slow(), lambda: None, full, full, publish=publish, done=full)
    for step in (1, 2):
        uploads.offer(Waiting(tmp_path, step))
        assert uploads.wait(10), "the thread has not ended"
    assert uploads.newest == 2
    uploads.close()


def test_a_fetch_that_cannot_be_completed_leaves_the_local_checkpoint(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, rename = begun(store), Path.rename
    (folder := tmp_path / "checkpoint-5").mkdir()
    (folder / "a").write_text("a")
    entry = bucket.publish(folder, 5)

    def fails(path: Path, to: Path) -> Path:
        if path.name.endswith(".fetch.tmp"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        bucket.fetch(entry, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name] == ["checkpoint-5"]
    assert (folder / "a").read_text() == "a"


def test_an_upload_that_fails_for_an_unknown_reason_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)
    said: list[str] = []
    problems: list[Exception] = [RuntimeError("can't start new thread")]

    def publish(one: Waiting) -> None:
        if problems:
            raise problems.pop()

    def tidy() -> None:
        raise MemoryError

    uploads = Uploads(Slow(), tidy, said.append, publish=publish)
    uploads.offer(Waiting(tmp_path, 1))
    assert uploads.wait(10), "waiting for the upload ends"
    assert uploads.newest == 1
    assert "RuntimeError: can't start new thread" in said[0] and "MemoryError" in said[1]
    uploads.close()


@pytest.mark.parametrize("removed", ["checkpoint", "checkpoint/b"])
def test_the_upload_of_a_removed_checkpoint_is_abandoned(
    removed: str, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the upload was retried forever, and the process waited for it. If only a part had
    been removed, the rest counted as a complete copy.
    """
    bucket, said = Bucket(store, "memory://"), list[str]()
    bucket.take_term()
    (tmp_path / "checkpoint").mkdir()
    for name in "abc":
        (tmp_path / "checkpoint" / name).write_text(name)
    put = Bucket._put

    def removes(self: Bucket, key: str, file: Path) -> None:
        if file.name == "a":
            discard(tmp_path / removed)
        put(self, key, file)

    monkeypatch.setattr(Bucket, "_put", removes)
    done: list[int | None] = []
    uploads = Uploads(bucket, bucket.sweep, said.append, done=lambda: done.append(uploads.newest))
    uploads.offer(Waiting(tmp_path / "checkpoint", 1))
    assert uploads.wait(20) and uploads.lost and uploads.newest is None and done == []
    assert uploads.behind_seconds > 0, "the latest checkpoint is not in the bucket"
    assert (
        len(said) == 1
        and "was removed before it was uploaded to memory://; the checkpoint of step 1 will not be copied" in said[0]
    )
    uploads.offer(Waiting(saved(tmp_path, 2), 2))
    assert uploads.wait(20) and not uploads.lost and done == [2] and uploads.behind_seconds == 0
    assert bucket.entries() == [Stored(1, 2)] and len(bucket._keys("data")) == 1, (
        "no files of the first checkpoint are left"
    )
    uploads.close()
