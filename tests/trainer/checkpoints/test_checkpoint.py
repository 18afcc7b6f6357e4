"""Checkpoints are atomic, checksummed, and written while training continues. Training resumes from
the newest complete checkpoint, whichever node has it.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddpjob_trainer import config, train
from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.checkpoints import dcp, folder, torch_file, writer
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.torch_file import check, decode
from ddpjob_trainer.config.sections import CheckpointConfig, Format
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError, FencedError
from ddpjob_trainer.lifecycle.fence import Claim
from ddpjob_trainer.lifecycle.signals import Due
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TINY, good, metrics, run, stop_at
from slow_storage import Slow


def content(path: Path, step: int = 7) -> bytes:
    torch_file.write(path, {"weights": torch.arange(100.0), "step": step}, Metadata(step, 1, 2))
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the content of a checkpoint's file."""
    return content(tmp_path_factory.mktemp("whole") / "a.pt")


def test_a_saved_file_can_be_read_back_and_by_torch_load(tmp_path: Path) -> None:
    written = content(tmp_path / "a.pt")
    metadata = check(written)
    assert (metadata.step, metadata.epoch, metadata.world) == (7, 1, 2) and torch_file.read_metadata(
        tmp_path / "a.pt"
    ) == metadata
    assert torch.equal(decode(written)["weights"], torch.arange(100.0))
    assert torch.load(tmp_path / "a.pt", weights_only=True)["step"] == 7


def test_the_file_equals_torch_saves_output_except_for_a_comment(tmp_path: Path) -> None:
    """The comment contains the hash of the content."""
    snapshot = {
        "weights": torch.randn(300, 7),
        "empty": torch.zeros(0),
        "half": torch.ones(5, dtype=torch.float16),
        "n": [1, "two", None],
    }
    torch_file.write(tmp_path / "a.pt", snapshot, Metadata(1))
    buffer = io.BytesIO()
    torch.save(snapshot, buffer)
    assert (tmp_path / "a.pt").read_bytes().startswith(buffer.getvalue()[:-2])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_truncation_of_a_file_is_detected(whole: bytes, data: st.DataObject) -> None:
    with pytest.raises(CheckpointError):
        check(whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_changed_byte_of_a_file_is_detected(whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    try:
        metadata = check(bytes(damaged))
    except CheckpointError:
        return
    assert metadata == check(whole) and place > len(whole) - 200, (
        "only white space in the comment may change undetected"
    )


@pytest.mark.parametrize(
    ("said", "changed"), [(b'"step": 7', b'"step": 8'), (b'"epoch": 1', b'"epoch": 2'), (b'"world": 2', b'"world": 3')]
)
def test_a_checkpoints_metadata_is_covered_by_the_checksum(said: bytes, changed: bytes, whole: bytes) -> None:
    assert whole.count(said) == 1
    with pytest.raises(CheckpointError, match=r"corrupt \(its checksum does not match\)"):
        check(whole.replace(said, changed))


def opened(path: Path, *, incarnation: int = 1, **settings: Any) -> CheckpointFolder:
    made = CheckpointFolder(CheckpointConfig(**settings), path, Group())
    made.claim(Claim(0, 0, incarnation))
    return made


def state(step: int) -> dict[str, Any]:
    return {"step": step, "sampler": {"epoch": 0, "consumed": step}}


def save(folder: CheckpointFolder, step: int) -> None:
    folder.save(lambda: state(step), step)
    folder.finish()


@pytest.mark.parametrize("planted", ["step-000000009.pt", "step-000000009.dcp/manifest.json"])
@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_pipes_and_devices_in_the_folder_are_not_read(special: str, planted: str, tmp_path: Path) -> None:
    """A pipe would wait for a writer for ever, and a device may have no end."""
    checkpoints = opened(tmp_path, format="torch")
    save(checkpoints, 1)
    (tmp_path / planted).parent.mkdir(exist_ok=True)
    if special == "pipe":
        os.mkfifo(tmp_path / planted)
    else:
        (tmp_path / planted).symlink_to(special)
    assert opened(tmp_path, format="torch").newest() == state(1)


def test_an_interrupted_write_leaves_the_old_file_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    write_atomically(target, b"old")

    def crash() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, b"new", crash)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_broken_checkpoint_is_reported_and_the_next_older_one_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = opened(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    newest, middle = tmp_path / "step-000000003.pt", tmp_path / "step-000000002.pt"
    newest.write_bytes(newest.read_bytes()[:-300])
    middle.write_bytes(b"")
    assert checkpoints.newest() == state(1)
    warnings = capsys.readouterr().err
    assert f"{newest} is truncated" in warnings and f"{middle} is truncated (0 bytes" in warnings


def test_if_all_checkpoints_are_broken_the_start_fails_and_overwrites_nothing(tmp_path: Path) -> None:
    good(1, [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}"])
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    (end,) = run(1, [*TINY, f"checkpoint.dir={tmp_path}"])
    assert end.code == 1 and re.search(
        r"CheckpointError: no checkpoint in .* is intact .* nothing was overwritten", end.error
    )
    assert {path: path.read_bytes() for path in tmp_path.glob("*.pt")} == before


def test_a_superseded_incarnation_writes_nothing(tmp_path: Path) -> None:
    zombie = opened(tmp_path, incarnation=1)
    save(zombie, 1)
    fresh = CheckpointFolder(CheckpointConfig(), tmp_path, Group())
    fresh.claim(Claim(1, 4, 2))
    message = r"was claimed on .*generation 1, round 4.*this process \(generation 0, round 0\) stops writing"
    with pytest.raises(CheckpointError, match=message):
        save(zombie, 2)
    with pytest.raises(CheckpointError, match="was claimed on"):
        opened(tmp_path, incarnation=3)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-000000001.pt"]
    assert json.loads((tmp_path / "fence.json").read_text())["incarnation"] == 2


@pytest.mark.parametrize("format", list(Format))
def test_an_incarnation_superseded_during_a_write_does_not_publish_the_file(
    format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor claims the folder after the content has been written, but before the file has
    its name, so the successor's cleanup does not remove it.
    """
    old = opened(tmp_path, format=format)
    sync = os.fsync

    def sync_and_lose(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        sync(descriptor)
        Claim(1, 0, 2).take(tmp_path)

    monkeypatch.setattr(os, "fsync", sync_and_lose)
    with pytest.raises(FencedError, match="so this process \\(generation 0, round 0\\) stops writing"):
        save(old, 2)
    assert list(tmp_path.glob("step*")) == []


def test_a_folder_that_is_not_writable_is_reported_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        CheckpointError, match=r"folder .*file/checkpoints cannot be written \(Not a directory\).*checkpoint.dir"
    ):
        train.run(config.load(None, [*TINY, f"checkpoint.dir={tmp_path / 'file' / 'checkpoints'}"]))
    with pytest.raises(CheckpointError, match=r"folder /proc/nowhere cannot be written"):
        train.run(config.load(None, [*TINY, "checkpoint.dir=/proc/nowhere"]))


@pytest.mark.parametrize("lost", [0, 1])
def test_with_a_checkpoint_folder_per_node_any_node_may_be_lost(lost: int, tmp_path: Path) -> None:
    """There are two nodes with one rank each. After a stop, one node's folder is gone."""
    arguments = [*TINY, "checkpoint.shared=false"]

    def node(rank: int) -> dict[str, str]:
        return {"DDPJOB_CHECKPOINT_DIR": str(tmp_path / f"node{rank}"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    assert [end.code for end in run(2, arguments, prepare=stop_at(3), env=node)] == [75, 75]
    assert (tmp_path / "node0" / "step-000000003.pt").exists() and (tmp_path / "node1" / "step-000000003.pt").exists()
    shutil.rmtree(tmp_path / f"node{lost}")
    good(2, arguments, env=node)
    assert metrics(tmp_path / f"node{lost}" / "run", "start")[0]["step"] == 3
    models = [torch.load(tmp_path / f"node{rank}" / "step-000000016.pt", weights_only=True)["model"] for rank in (0, 1)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


# ------------------------------------------------------------ while training continues


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block every write until the event is set."""
    go = threading.Event()
    write = torch_file.write

    def wait_and_write(*args: Any) -> None:
        assert go.wait(20)
        write(*args)

    monkeypatch.setattr(folder.torch_file, "write", wait_and_write)
    return go


def test_training_continues_during_the_write_without_changing_the_saved_state(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    checkpoints = opened(tmp_path, every_steps=5, every_seconds=0)
    weights = torch.ones(1000)
    momentum = {"layer": {"step": torch.tensor(3.0), "list": [1, 2]}}
    checkpoints.save(lambda: {**state(1), "model": {"w": weights}, "optimizer": momentum}, 1)
    weights.zero_()
    momentum["layer"]["step"].zero_()
    momentum["layer"]["list"].append(3)  # type: ignore[union-attr]
    assert checkpoints.state.busy and checkpoints.completed() == [] and not list(tmp_path.glob("*.pt"))
    slow_disk.set()
    checkpoints.finish()
    (completed,) = checkpoints.completed()
    assert completed.step == 1 and completed.pause_seconds < completed.write_seconds
    found = checkpoints.newest()
    assert found is not None and torch.equal(found["model"]["w"], torch.ones(1000))
    assert found["optimizer"] == {"layer": {"step": torch.tensor(3.0), "list": [1, 2]}}


@pytest.mark.parametrize("again", [True, False], ids=["before the next save", "before the end"])
def test_the_ranks_agree_to_wait_longer_for_a_slow_write(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the ranks waited in a collective, which timed out, so a large checkpoint was
    never complete.
    """
    write, slow = torch_file.write, Slow(monkeypatch)
    slowly = slow(write)
    monkeypatch.setattr(torch_file, "write", lambda *given: (write if slow.ended else slowly)(*given))
    checkpoints = opened(tmp_path)
    checkpoints.save(lambda: state(1), 1)
    save(checkpoints, 2) if again else checkpoints.finish()
    assert slow.ended == 1
    checkpoints.finish()


@pytest.mark.parametrize(
    ("format", "module", "name"),
    [
        (Format.TORCH, torch_file, "check_file"),
        (Format.TORCH, torch_file, "read"),
        (Format.DCP, dcp, "check_share"),
        (Format.DCP, dcp, "read"),
    ],
)
def test_the_ranks_agree_to_wait_longer_for_a_slow_read(
    format: Format, module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the ranks waited in a collective, which timed out, so training could not resume
    from a large checkpoint.
    """
    writer = opened(tmp_path, format=format)
    save(writer, 1)
    writer.finish()
    slow = Slow(monkeypatch)
    monkeypatch.setattr(module, name, slow(getattr(module, name)))
    reader = opened(tmp_path, format=format)
    reader.alive = slow.alive
    assert reader.newest() is not None
    assert slow.ended == 1 and slow.reported >= 2


def test_no_step_counts_as_overdue_while_the_ranks_wait_for_the_last_save(tmp_path: Path) -> None:
    """Regression: the stacks of all threads were written, although nothing hung."""

    def prepare(rank: int) -> None:
        slow_writes(4.0)(rank)
        finish = CheckpointFolder.finish

        def finish_and_look(self: CheckpointFolder, seconds: float | None = None) -> None:
            finish(self, seconds)
            began: float = self.alive.__self__._began  # type: ignore[attr-defined]
            assert time.monotonic() - began < 3.5

        CheckpointFolder.finish = finish_and_look  # type: ignore[method-assign]

    good(1, [*TINY, f"checkpoint.dir={tmp_path}"], prepare=prepare)


def test_a_save_that_is_due_during_a_write_is_postponed_and_not_dropped(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    checkpoints = opened(tmp_path, every_steps=5, every_seconds=0)
    assert [checkpoints.due(step) for step in (4, 5)] == [Due.NO, Due.WHEN_FREE]
    checkpoints.save(lambda: state(5), 5)
    assert checkpoints.due(6) is Due.NO
    assert [checkpoints.due(step) for step in (10, 11)] == [Due.WHEN_FREE, Due.WHEN_FREE], (
        "the save stays due until it is done"
    )
    slow_disk.set()
    checkpoints.save(lambda: state(12), 12)  # waits for the write in progress
    assert checkpoints.due(13) is Due.NO
    checkpoints.finish()
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["step-000000005.pt", "step-000000012.pt"]


@pytest.mark.parametrize(
    ("cost", "waits", "due"), [(0.0, 9.9, 10.1), (0.05, 9.9, 10.1), (0.5, 49.0, 51.0), (7.0, 299.0, 301.0)]
)
def test_saves_take_at_most_one_percent_of_the_time(
    cost: float, waits: float, due: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = opened(tmp_path)
    checkpoints._writer.cost, checkpoints._writer.ended = cost, 1000.0
    monkeypatch.setattr(folder, "time", SimpleNamespace(monotonic=lambda: 1000.0 + waits))
    assert checkpoints.due(1) is Due.NO
    monkeypatch.setattr(folder, "time", SimpleNamespace(monotonic=lambda: 1000.0 + due))
    assert checkpoints.due(2) is Due.WHEN_FREE
    with pytest.raises(ConfigError, match="every_seconds=-1: must be at least 0"):
        CheckpointConfig(every_seconds=-1).check()


def test_the_cost_of_a_save_excludes_the_time_of_the_disk(tmp_path: Path) -> None:
    def works() -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    made = writer.Writer(1)
    for act, least, most in ((works, 0.7, 10.0), (lambda: time.sleep(0.3), 0.5, 0.75)):
        made.start(act, tmp_path / "c", 1, 0.5)
        made.wait()
        assert least <= made.cost < most


def test_a_save_that_retention_or_the_end_needs_is_due_immediately(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, keep_every_epochs=2, every_seconds=0)
    assert checkpoints.due(10, epoch=1) is Due.WHEN_FREE
    assert checkpoints.due(20, epoch=2) is Due.NOW
    assert checkpoints.due(30, epoch=3, last=True) is Due.NOW
    assert opened(tmp_path, keep_best=1).due(40, epoch=1) is Due.NOW


def slow_writes(seconds: float) -> Callable[[int], None]:
    """Slow down each rank's disk by this many seconds per write."""

    def prepare(rank: int) -> None:
        import time

        write = torch_file.write

        def slowly(*args: Any) -> None:
            time.sleep(seconds)
            write(*args)

        folder.torch_file.write = slowly  # type: ignore[assignment]

    return prepare


def test_with_a_slow_disk_steps_continue_and_the_last_state_is_saved(tmp_path: Path) -> None:
    """A checkpoint is due at each step, but each write takes longer than many steps, so the other
    saves wait. Evaluation and the final checkpoint are not affected.
    """
    good(2, [*TINY, "checkpoint.every_steps=1", f"checkpoint.dir={tmp_path}"], prepare=slow_writes(1.0))
    saved = [line["step"] for line in metrics(tmp_path / "run", "checkpoint")]
    assert saved[0] == 1 and saved[-1] == 16 and len(saved) < 9, saved
    assert len(metrics(tmp_path / "run", "step")) == 16


def test_a_save_is_logged_only_after_its_file_exists(tmp_path: Path) -> None:
    """Another process must not see the log line about a checkpoint before the file exists."""

    def prepare(rank: int) -> None:
        from ddpjob_trainer.reporting.reporter import Reporter

        report = Reporter.checkpoint

        def checked(self: Reporter, step: int, seconds: float) -> None:
            assert (tmp_path / f"step-{step:09d}.pt").exists()
            report(self, step, seconds)

        Reporter.checkpoint = checked  # type: ignore[method-assign]

    good(2, [*TINY, "checkpoint.every_steps=3", "checkpoint.keep=100", f"checkpoint.dir={tmp_path}"], prepare=prepare)
    assert {line["step"] for line in metrics(tmp_path / "run", "checkpoint")} == {
        int(path.stem[5:]) for path in tmp_path.glob("*.pt")
    }
