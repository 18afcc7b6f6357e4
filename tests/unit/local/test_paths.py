"""The contents of a job's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpjob.local.paths import JobFolder, runs_folder


@pytest.mark.parametrize(
    ("file", "resumable"),
    [
        (".ddpjob-rounds.jsonl", False),
        ("run/metrics.jsonl", False),
        ("stacks/round-0.1-rank-0.txt", False),
        ("run/model.pt", True),
        ("model.pt", True),
        ("epoch-1/model.pt", True),
    ],
)
def test_a_folder_with_only_curves_or_stacks_does_not_count_as_a_checkpoint(
    tmp_path: Path, file: str, resumable: bool
) -> None:
    """Regression: a script that reports but never saves was said to resume, although it started
    from scratch.
    """
    folder = JobFolder(tmp_path / "j")
    assert not folder.is_resumable()
    for name in (".ddpjob-rounds.jsonl", "run/metrics.jsonl", file):
        path = folder.checkpoints / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert folder.is_resumable() is resumable


def test_the_folder_of_runs_has_one_canonical_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's folder in its bucket is named after it. Regression: a job in a sibling folder did not
    find its copies.
    """
    monkeypatch.setenv("DDPJOB_RUNS", "../runs")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert runs_folder() == tmp_path / "runs"
