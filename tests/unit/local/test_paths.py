"""What is in a job's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpjob.local.paths import JobFolder, runs_folder


@pytest.mark.parametrize(
    ("file", "resumable"),
    [
        (".ddpjob-rounds.jsonl", False),
        ("run/metrics.jsonl", False),
        ("run/model.pt", True),
        ("model.pt", True),
        ("epoch-1/model.pt", True),
    ],
)
def test_curves_alone_are_nothing_to_resume_from(tmp_path: Path, file: str, resumable: bool) -> None:
    """A script that reports and never saves was said to resume, and began from scratch."""
    folder = JobFolder(tmp_path / "j")
    assert not folder.is_resumable()
    for name in (".ddpjob-rounds.jsonl", "run/metrics.jsonl", file):
        path = folder.checkpoints / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert folder.is_resumable() is resumable


def test_the_folder_of_runs_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's folder in its bucket is named by it: from another folder beside it, the job missed its copies."""
    monkeypatch.setenv("DDPJOB_RUNS", "../runs")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert runs_folder() == tmp_path / "runs"
