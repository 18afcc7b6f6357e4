"""Retained checkpoints: the newest, the best, and the ends of some epochs. A broken one does not
count, and the newest complete one is always kept.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpjob_trainer import atomic_files
from ddpjob_trainer.checkpoints import index
from ddpjob_trainer.checkpoints.best import read_scores
from ddpjob_trainer.checkpoints.compatibility import read_whole
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.retention import Entry, expendable
from ddpjob_trainer.config.sections import CheckpointConfig, Format, Metric
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.lifecycle.fence import Claim
from hypothesis import given
from hypothesis import strategies as st
from ranks import TINY, good, metrics


def entries(steps: range, *, epoch_every: int = 10, broken: tuple[int, ...] = ()) -> list[Entry]:
    return [
        Entry(
            step, Path(f"step-{step:09d}.pt"), None if step % epoch_every else step // epoch_every, step not in broken
        )
        for step in steps
    ]


def left(found: list[Entry], scores: dict[int, float], **config: object) -> list[int]:
    gone = expendable(found, scores, CheckpointConfig(**config))  # type: ignore[arg-type]
    return [entry.step for entry in found if entry not in gone]


def test_only_the_newest_checkpoints_are_kept() -> None:
    assert left(entries(range(5, 45, 5)), {}, keep=3) == [30, 35, 40]


def test_the_best_checkpoints_are_kept_in_addition_to_the_newest() -> None:
    scores = {10: 0.5, 20: 0.9, 30: 0.7, 40: 0.6}
    assert left(entries(range(5, 45, 5)), scores, keep=2, keep_best=2) == [20, 30, 35, 40]
    assert left(entries(range(5, 45, 5)), scores, keep=1, keep_best=1, best_by=Metric.LOSS) == [10, 40]


def test_the_first_of_equally_good_checkpoints_is_kept() -> None:
    assert left(entries(range(10, 50, 10)), {10: 0.5, 20: 0.9, 30: 0.9}, keep=1, keep_best=1) == [20, 40]


def test_checkpoints_at_selected_epochs_are_kept_forever() -> None:
    assert left(entries(range(5, 95, 5)), {}, keep=1, keep_every_epochs=3) == [30, 60, 90]


def test_a_broken_checkpoint_does_not_count_and_is_deleted_when_old() -> None:
    found = entries(range(5, 45, 5), broken=(20, 35, 40))
    assert left(found, {40: 1.0, 10: 0.1}, keep=2, keep_best=1, keep_every_epochs=2) == [10, 25, 30, 35, 40]


@pytest.mark.parametrize("metric", Metric)
def test_a_score_that_is_not_a_number_is_the_worst(metric: Metric) -> None:
    scores = {10: math.nan, 20: 0.5, 30: -math.inf}
    assert left(entries(range(5, 45, 5)), scores, keep=1, keep_best=1, best_by=metric) == [20, 40]


@given(
    steps=st.sets(st.integers(1, 60), min_size=1),
    broken=st.sets(st.integers(1, 60)),
    scores=st.dictionaries(st.integers(1, 60), st.floats(0, 1)),
    keep=st.integers(1, 4),
    keep_best=st.integers(0, 3),
    every=st.integers(0, 3),
)
def test_the_newest_complete_checkpoints_are_always_kept(
    steps: set[int], broken: set[int], scores: dict[int, float], keep: int, keep_best: int, every: int
) -> None:
    found = [Entry(step, Path(str(step)), step // 10 if step % 10 == 0 else None, step not in broken) for step in steps]
    stays = left(found, scores, keep=keep, keep_best=keep_best, keep_every_epochs=every)
    whole = sorted(step for step in steps if step not in broken)
    assert set(whole[-keep:]) <= set(stays)
    scored = [scores[step] for step in whole if step in scores]
    if keep_best and scored:
        assert max(scored) in [scores[step] for step in stays if step in scores]


def opened(path: Path, **settings: object) -> CheckpointFolder:
    made = CheckpointFolder(CheckpointConfig(**settings), path, Group())  # type: ignore[arg-type]
    made.claim(Claim(0, 0, 1))
    return made


def save(folder: CheckpointFolder, step: int, **scores: float) -> None:
    """Save at the end of an epoch, then evaluate."""
    folder.save(lambda: {"step": step, "sampler": {"epoch": step // 10, "consumed": 0 if step % 10 == 0 else 1}}, step)
    if scores:
        folder.scored(step, scores)
    folder.finish()


def test_a_complete_checkpoint_is_not_deleted_because_of_a_newer_broken_one(tmp_path: Path) -> None:
    """A broken newer file must not displace the only good one if keep=1."""
    folder = opened(tmp_path, keep=1)
    save(folder, 6)
    (tmp_path / "step-000000008.pt").write_bytes(b"broken")
    again = opened(tmp_path, keep=1)
    assert again.newest() is not None
    save(again, 7)
    assert [path.name for path in sorted(tmp_path.glob("step*"))] == ["step-000000007.pt", "step-000000008.pt"]
    assert opened(tmp_path, keep=1).newest() == {"step": 7, "sampler": {"epoch": 0, "consumed": 1}}


def test_a_folder_of_parts_is_removed_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill during the removal leaves a remainder that has no checkpoint's name. The next start
    deletes it.
    """
    folder = opened(tmp_path, keep=1, format=Format.DCP)
    save(folder, 1)

    def killed(path: Path) -> None:
        (path / "__0_0.distcp").unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_files.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        atomic_files.remove(tmp_path / "step-000000001.dcp")
    monkeypatch.undo()
    claims = {"fence.json", "owner.json"}
    assert {path.name for path in tmp_path.iterdir()} - claims == {".step-000000001.dcp.gone.tmp"}
    opened(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= claims


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(index, "remove", refuse)
    folder = opened(tmp_path, keep=1)
    save(folder, 1)
    save(folder, 2)
    assert "step-000000001.pt cannot be removed: Operation not permitted" in capsys.readouterr().err
    monkeypatch.undo()
    save(folder, 3)
    assert [path.name for path in tmp_path.glob("step*")] == ["step-000000003.pt"], "the removal is retried"


def test_a_checkpoint_that_a_user_has_removed_does_not_count(tmp_path: Path) -> None:
    folder = opened(tmp_path, keep=2)
    for step in (1, 2, 3):
        save(folder, step)
        if step == 2:
            (tmp_path / "step-000000002.pt").unlink()
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-000000001.pt", "step-000000003.pt"]


def test_the_best_checkpoint_is_found_by_its_link_even_after_a_restart(tmp_path: Path) -> None:
    folder = opened(tmp_path, keep=1, keep_best=1)
    save(folder, 10, accuracy=0.4, loss=1.0)
    save(folder, 20, accuracy=0.8, loss=1.0)
    save(folder, 30, accuracy=0.7, loss=1.0)
    assert torch.load(tmp_path / "best.pt", weights_only=True)["step"] == 20
    again = opened(tmp_path, keep=1, keep_best=1)
    save(again, 40, accuracy=0.6, loss=0.5)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["best.pt", "step-000000020.pt", "step-000000040.pt"]
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "best": "step-000000020.pt",
        "metric": "accuracy",
        "scores": {"20": 0.8, "40": 0.6},
    }
    save(again, 50, accuracy=0.9, loss=0.5)
    assert (tmp_path / "best.pt").resolve().name == "step-000000050.pt"
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-000000050.pt"]


def test_a_dangling_link_does_not_stop_a_removal(tmp_path: Path) -> None:
    (tmp_path / "step-000000001.pt").symlink_to("gone")
    folder = opened(tmp_path, keep=1)
    for step in (2, 3):
        save(folder, step)
    assert [path.name for path in tmp_path.glob("step*")] == ["step-000000003.pt"]


def test_a_folder_in_place_of_the_best_link_does_not_stop_a_removal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the checkpoint folder was copied with links followed, it has a folder in place of the
    link.
    """
    (tmp_path / "best.dcp").mkdir()
    folder = opened(tmp_path, keep=1, keep_best=1, format=Format.DCP)
    for step, accuracy in ((10, 0.4), (20, 0.8)):
        save(folder, step, accuracy=accuracy)
    assert [path.name for path in tmp_path.glob("step*")] == ["step-000000020.dcp"]
    assert json.loads((tmp_path / "best.json").read_text())["best"] == "step-000000020.dcp"
    assert "best.dcp is a folder instead of a link, so it was not updated" in capsys.readouterr().err and not list(
        tmp_path.glob(".best*")
    )


@pytest.mark.parametrize("later", [{"keep_best": 0}, {"keep_best": 1, "best_by": Metric.LOSS}])
def test_the_mark_of_a_best_checkpoint_that_is_no_longer_kept_is_removed(tmp_path: Path, later: dict[str, Any]) -> None:
    """Loading and evaluating a folder use the mark."""
    save(opened(tmp_path, keep=1, keep_best=1), 10, accuracy=0.4, loss=1.0)
    save(opened(tmp_path, keep=1, **later), 20)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["step-000000020.pt"]
    assert read_whole(tmp_path)["step"] == 20


def test_scores_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    """Other programs could not parse NaN."""
    folder = opened(tmp_path, keep_best=2, best_by=Metric.LOSS)
    for step, loss in ((10, math.nan), (20, math.inf), (30, 0.5)):
        save(folder, step, accuracy=0.1, loss=loss)
    assert json.loads((tmp_path / "best.json").read_text())["scores"] == {"10": None, "20": None, "30": 0.5}
    scores = read_scores(tmp_path, Metric.LOSS)
    assert scores[30] == 0.5 and math.isnan(scores[10]) and math.isnan(scores[20])


def test_scores_of_a_different_metric_or_a_damaged_file_are_discarded_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(opened(tmp_path, keep_best=1), 10, accuracy=0.4, loss=1.0)
    opened(tmp_path, keep_best=1, best_by=Metric.LOSS)
    assert "best.json has scores for accuracy instead of checkpoint.best_by=loss" in capsys.readouterr().err
    (tmp_path / "best.json").write_text("{")
    opened(tmp_path, keep_best=1)
    assert "best.json is damaged" in capsys.readouterr().err
    opened(tmp_path, keep_best=0)
    assert not capsys.readouterr().err, "no best checkpoint is chosen"


def test_the_best_of_all_evaluations_is_marked_during_training(tmp_path: Path) -> None:
    arguments = [
        *TINY,
        "train.epochs=4",
        "checkpoint.keep=1",
        "checkpoint.keep_best=1",
        "checkpoint.keep_every_epochs=3",
    ]
    good(2, [*arguments, f"checkpoint.dir={tmp_path}"])
    evaluations = {line["step"]: line["accuracy"] for line in metrics(tmp_path / "run", "eval")}
    best = torch.load(tmp_path / "best.pt", weights_only=True)["step"]
    assert len(evaluations) == 4 and evaluations[best] == max(evaluations.values())
    assert {int(path.stem[5:]) for path in tmp_path.glob("step*")} == {32, 24, best}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, r"checkpoint.keep=0: must be at least 1"),
        ({"failures": 0}, r"checkpoint.failures=0: must be at least 1"),
        ({"keep_best": -1}, r"checkpoint.keep_best=-1: must be at least 0"),
        (
            {"keep_every_epochs": 3, "every_epochs": 2},
            r"checkpoint.keep_every_epochs=3: must be a multiple of checkpoint.every_epochs=2",
        ),
        ({"keep_best": 1, "every_epochs": 0}, r"checkpoint.keep_best needs checkpoints .* set checkpoint.every_epochs"),
    ],
)
def test_contradictory_settings_of_retention_are_refused(
    settings: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointFolder(CheckpointConfig(**settings), tmp_path, Group())  # type: ignore[arg-type]
