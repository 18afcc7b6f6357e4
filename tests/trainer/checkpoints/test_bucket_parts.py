"""Checkpoints in parts in a bucket. They are complete only when every rank has uploaded its
part.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_bucket import Bucket, BucketError, CopyManifest, Stored, patience
from ddpjob_trainer.checkpoints import bucket as module
from ddpjob_trainer.checkpoints import dcp
from ddpjob_trainer.checkpoints.bucket import Copies, Offered, Share
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.retention import Entry
from ddpjob_trainer.config.sections import CheckpointConfig, Format
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.lifecycle.fence import Claim
from hostile_checkpoints import ALLOWED, before, calling, listed_anew, setting, unchanged
from ranks import until
from slow_storage import Slow

pytest.importorskip("obstore", reason="pip install obstore")
MARK = "0000abcd"
PART = "__0_0.distcp"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def snapshot(step: int, value: float = 1.0) -> dict[str, Any]:
    return {"step": step, "sampler": {"epoch": 0, "consumed": 1}, "model": {"a": torch.full((5000,), value)}}


def two_nodes(place: Path, step: int, value: float = 1.0) -> tuple[Path, Path]:
    """Create a checkpoint whose tensors are on one node's disk and whose other data is on
    another's. Both nodes have the manifest.
    """
    first, second = (place / node / f"step-{step:09d}.dcp" for node in ("first", "second"))
    for path in (first, second):
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    dcp.write(first, 1, snapshot(step, value), Metadata(step), None, lambda: None)
    second.mkdir()
    shutil.copy(first / dcp.MANIFEST, second)
    (first / PART).rename(second / PART)
    return first, second


def begun(url: str, mark: str = MARK, **settings: Any) -> tuple[Copies, Share]:
    """Start an incarnation of two ranks."""
    config = CheckpointConfig(url=url, format=Format.DCP, **settings)
    copies = Copies(Bucket.open(url), config)
    copies.begin(mark, in_parts=True)
    return copies, Share(Bucket.open(url), copies.term, mark)


def rest(path: Path) -> list[str]:
    return sorted(set(dcp.contents(path)) - {PART})


def save(place: Path, copies: Copies, share: Share, step: int, value: float = 1.0) -> None:
    first, second = two_nodes(place, step, value)
    copies.offer(Entry(step, first), {}, rest(first))
    share.offer(second, step, [PART])
    until(lambda: copies.wait(0.1) and share.wait(0.1))


def read(url: str, folder: Path, copies: Copies) -> Any:
    """Return the newest checkpoint, as a rank with an empty disk reads it."""
    offered = copies.fetch_newer(folder, -1)
    assert offered is not None
    path = folder / offered.manifest.name
    return dcp.read(path, None, Offered.read(offered.written(), offered.entry.step).fetcher(Bucket.open(url), path, 0))


def test_a_checkpoint_is_complete_when_the_last_rank_has_uploaded_its_part(url: str, tmp_path: Path) -> None:
    copies, share = begun(url)
    first, second = two_nodes(tmp_path, 7)
    copies.offer(Entry(7, first), {}, rest(first))
    store = tmp_path / "store"
    until(lambda: len(list(store.glob("data/*/*/*"))) == 2)
    assert not copies.wait(0.5) and Bucket.open(url).entries() == [], "the tensors are missing"
    share.offer(second, 7, [PART])
    until(lambda: copies.wait(0.1))
    assert Bucket.open(url).entries() == [Stored(1, 7)]
    assert torch.equal(read(url, tmp_path / "empty", copies)["model"]["a"], torch.ones(5000))


def test_no_manifest_is_written_while_a_part_is_missing_or_incomplete(url: str, tmp_path: Path) -> None:
    copies, share = begun(url)
    save(tmp_path, copies, share, 7)
    bucket = Bucket.open(url)
    bucket.term, manifest = 1, bucket.manifest(Stored(1, 7))
    bucket.commit(7, manifest)
    [part] = (tmp_path / "store").glob(f"data/*/*/{PART}")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(BucketError, match=f"{PART} has not been uploaded"):
        bucket.commit(7, manifest)
    part.unlink()
    with pytest.raises(BucketError, match=f"{PART} has not been uploaded"):
        bucket.commit(7, manifest)


def test_a_part_of_the_previous_incarnation_completes_no_checkpoint(url: str, tmp_path: Path) -> None:
    """A partitioned rank continues to upload its part of a step that its successors reach as
    well.
    """
    _, zombie = begun(url)
    copies, share = begun(url, "00001234")
    first, second = two_nodes(tmp_path, 7, 2.0)
    late = two_nodes(tmp_path / "old", 7, 1.0)[1]
    copies.offer(Entry(7, first), {}, rest(first))
    zombie.offer(late, 7, [PART])
    assert zombie.wait(20)
    assert not copies.wait(0.5) and Bucket.open(url).entries() == []
    share.offer(second, 7, [PART])
    until(lambda: copies.wait(0.1))
    zombie.offer(late, 7, [PART])
    assert zombie.wait(20)
    assert torch.equal(read(url, tmp_path / "empty", copies)["model"]["a"], torch.full((5000,), 2.0))


def test_a_node_lost_before_its_upload_leaves_only_the_previous_checkpoint(url: str, tmp_path: Path) -> None:
    copies, share = begun(url)
    save(tmp_path, copies, share, 7)
    first, _ = two_nodes(tmp_path, 9, 2.0)
    copies.offer(Entry(9, first), {}, rest(first))
    until(lambda: len(list((tmp_path / "store").glob("data/*-000000009-*/*/*"))) == 2)
    again, share = begun(url, "00001234", keep=1)
    assert torch.equal(read(url, tmp_path / "empty", again)["model"]["a"], torch.ones(5000))
    save(tmp_path, again, share, 11)
    left = {path.parts[-3] for path in (tmp_path / "store").glob("data/*/*/*") if path.is_file()}
    assert left == {"000000002-000000011-00001234"}, "neither an interrupted upload, nor more than checkpoint.keep"


def test_a_rank_uploads_in_order_and_retries(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank skipped a checkpoint, that checkpoint would never be complete, although the other
    ranks have uploaded their parts.
    """
    from ddpjob_bucket import uploads

    monkeypatch.setattr(uploads, "FIRST_PAUSE", 0.02)
    put, failing = Bucket._put, [True]

    def fails(self: Bucket, key: str, file: Path) -> None:
        if PART in key and failing[0]:
            raise BucketError("the line is cut")
        put(self, key, file)

    monkeypatch.setattr(Bucket, "_put", fails)
    copies, share = begun(url)
    for step in (7, 9):
        first, second = two_nodes(tmp_path, step)
        copies.offer(Entry(step, first), {}, rest(first))
        share.offer(second, step, [PART])
    assert not share.wait(0.3)
    failing[0] = False
    until(lambda: copies.wait(0.1) and share.wait(0.1))
    assert [entry.step for entry in Bucket.open(url).entries()] == [9, 7]


def test_a_part_removed_before_its_upload_does_not_block_later_parts(url: str, tmp_path: Path) -> None:
    """Regression: the part's rank retried forever, and the first rank waited for it."""
    copies, share = begun(url)
    first, second = two_nodes(tmp_path, 7)
    (second / PART).unlink()
    copies.offer(Entry(7, first), {}, rest(first))
    share.offer(second, 7, [PART])
    until(lambda: copies.wait(0.1) and share.wait(0.1))
    assert not copies.finish({}, 0.0), "the last checkpoint is not in the bucket"
    save(tmp_path, copies, share, 9)
    assert copies.finish({}, 0.0) and Bucket.open(url).entries() == [Stored(1, 9)]
    left = {path.parts[-3] for path in (tmp_path / "store").glob("data/*/*/*") if path.is_file()}
    assert left == {f"000000001-000000009-{MARK}"}


def test_only_needed_files_that_are_missing_on_the_disk_are_fetched(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, share = begun(url)
    save(tmp_path, copies, share, 7)
    fetched, download = list[str](), Bucket._download
    monkeypatch.setattr(Bucket, "_download", lambda self, key, *more: (fetched.append(key), download(self, key, *more)))
    offered = copies.fetch_newer(tmp_path, -1)
    assert offered is not None
    path = tmp_path / "empty" / offered.manifest.name
    fetch = offered.fetcher(Bucket.open(url), path, 0)
    fetch([".metadata"])
    assert [Path(key).name for key in fetched] == [".metadata"]
    assert sorted(entry.name for entry in path.iterdir()) == [".metadata"]
    dcp.read(path, None, offered.fetcher(Bucket.open(url), path, 0))
    assert sorted(Path(key).name for key in fetched) == [".metadata", PART, "manifest.json"]
    (path / PART).write_bytes(b"of another history")
    assert torch.equal(read(url, tmp_path / "empty", copies)["model"]["a"], torch.ones(5000))
    assert len(fetched) == 4


# --- a bucket that others have written to -----------------------------------------------------------------


def republished(url: str, change: Callable[[Path], None], place: Path, copies: Copies, share: Share) -> None:
    """Change a checkpoint's files and publish it again with correct sizes and checksums."""
    first, second = two_nodes(place, 9, 2.0)
    (second / PART).rename(first / PART)
    change(first)
    listed_anew(first)
    copies.offer(Entry(9, first), {})
    until(lambda: copies.wait(0.1))


def manifest_with(old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = (path / dcp.MANIFEST).read_text()
        (path / dcp.MANIFEST).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (manifest_with(f'"{PART}", ', '"../../secret", '), "lies outside the files"),
        (manifest_with("[5000]", "[1000000000000000]"), "lies outside the files"),
        (manifest_with('"tensors": {', '"tensors": {"1:b": 5, '), "lacks a known dtype, a shape or chunks"),
        (lambda path: (path / PART).write_bytes(b"no tensors"), "lies outside the files"),
    ],
)
def test_checkpoints_that_no_trainer_has_written_are_skipped(
    change: Callable[[Path], None], why: str, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("x")
    copies, share = begun(url)
    save(tmp_path, copies, share, 7)
    republished(url, change, tmp_path, copies, share)
    checkpoints = opened(url, tmp_path / "empty")
    found = checkpoints.newest()
    assert found is not None and found["step"] == 7
    said = capfd.readouterr().err
    assert why in said and "step-000000009.dcp" in said


@pytest.mark.parametrize("name", [*sorted(ALLOWED), "os mkdir"])
def test_torchs_pickled_index_is_never_read(name: str, url: str, tmp_path: Path) -> None:
    """torch's index is a pickle, which could replace methods of every class that a reader
    returns.
    """
    made = tmp_path / "made"

    def change(path: Path) -> None:
        hostile = calling(made) if name == "os mkdir" else setting(name)
        (path / ".metadata").write_bytes(before((path / ".metadata").read_bytes(), hostile))

    copies, share = begun(url)
    republished(url, change, tmp_path, copies, share)
    found = opened(url, tmp_path / "empty").newest()
    assert found is not None and torch.equal(found["model"]["a"], torch.full((5000,), 2.0))
    assert unchanged() and not made.exists()


def opened(url: str, folder: Path, incarnation: int = 5) -> CheckpointFolder:
    made = CheckpointFolder(CheckpointConfig(url=url, format=Format.DCP, shared=False), folder, Group())
    made.claim(Claim(0, 0, incarnation))
    return made


def test_an_entry_whose_name_is_not_that_of_a_checkpoint_is_skipped(url: str, tmp_path: Path) -> None:
    copies, share = begun(url)
    save(tmp_path, copies, share, 7)
    bucket = Bucket.open(url)
    bucket.term = 1
    listed = bucket.manifest(Stored(1, 7))
    data = bucket.data_of(9, MARK)
    files = tuple(module.File(file.path.replace("step-000000007", "fence"), *((0, "x"))) for file in listed.files)
    bucket._complete(9, CopyManifest("fence.dcp", data, files))
    found = opened(url, tmp_path / "empty").newest()
    assert found is not None and found["step"] == 7
    assert not (tmp_path / "empty" / "fence.dcp").exists()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (BucketError("503 Service Unavailable"), "503 Service Unavailable"),
        (OSError(errno.ENOSPC, "No space left on device"), rf"{PART} cannot be written: No space left on device"),
    ],
)
def test_a_start_fails_instead_of_using_an_older_copy_if_a_part_cannot_be_fetched(
    fault: Exception, said: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the newest copy was deleted as superseded after a failed fetch."""
    copies, share = begun(url)
    for step in (7, 9):
        save(tmp_path, copies, share, step)
    fetch = Bucket.fetch_file

    def fails(self: Bucket, manifest: CopyManifest, file: Any, to: Path) -> None:
        if manifest.name.startswith("step-000000009") and file.path.endswith(PART):
            raise fault
        fetch(self, manifest, file, to)

    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(Bucket, "fetch_file", fails)
    with pytest.raises(CheckpointError, match=said):
        opened(url, tmp_path / "empty").newest()


def test_training_does_not_start_from_scratch_if_no_copy_can_be_read(url: str, tmp_path: Path) -> None:
    copies, share = begun(url)
    save(tmp_path, copies, share, 7)
    next((tmp_path / "store").glob(f"data/*/*/{PART}")).unlink()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        opened(url, tmp_path / "empty").newest()
    assert time.monotonic() - began < 10, "a missing file is not requested repeatedly"


def test_a_single_process_saves_in_parts_and_continues_on_another_disk(url: str, tmp_path: Path) -> None:
    checkpoints = opened(url, tmp_path / "pod")
    checkpoints.save(lambda: snapshot(7), 7)
    checkpoints.finish()
    again = opened(url, tmp_path / "other", 6)
    found = again.newest()
    assert found is not None and torch.equal(found["model"]["a"], torch.ones(5000))
    again.save(lambda: snapshot(7), 7)
    again.finish()
    assert Bucket.open(url).entries() == [Stored(1, 7)], "this step is in the bucket already"


def test_the_ranks_agree_to_wait_longer_while_one_downloads_its_part(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the others waited in a collective, so with a large model and one slow connection,
    every attempt to start timed out.
    """
    save(tmp_path, *begun(url), 7)
    at_once, slow = Bucket.fetch_file, Slow(monkeypatch)
    slowly = slow(at_once)

    def fetch(self: Bucket, manifest: CopyManifest, file: Any, to: Path) -> None:
        (slowly if file.path.endswith(PART) else at_once)(self, manifest, file, to)

    monkeypatch.setattr(Bucket, "fetch_file", fetch)
    checkpoints = opened(url, tmp_path / "empty")
    checkpoints.alive = slow.alive
    found = checkpoints.newest()
    assert found is not None and torch.equal(found["model"]["a"], torch.ones(5000))
    assert slow.ended == 1 and slow.reported >= 2
