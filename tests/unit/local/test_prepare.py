"""The folders of a new run."""

from __future__ import annotations

from pathlib import Path

from ddpjob.api.job_status import utc_now
from ddpjob.local.paths import JobFolder
from ddpjob.local.runner import prepare


def test_a_fresh_start_moves_checkpoints_within_the_target_of_a_linked_folder(tmp_path: Path) -> None:
    """Regression: the link itself was moved. Afterwards, a relative link led nowhere, and new
    checkpoints filled the smaller disk.
    """
    large, folder = tmp_path / "large", JobFolder(tmp_path / "runs" / "j")
    large.mkdir()
    folder.path.mkdir(parents=True)
    (large / "model.pt").write_text("old")
    folder.checkpoints.symlink_to(Path("..", "..", "large"))
    run = prepare(folder, fresh=True, now=utc_now())
    assert (run.path / "earlier-checkpoints" / "model.pt").read_text() == "old"
    assert folder.checkpoints.resolve() == large and not any(large.iterdir())
