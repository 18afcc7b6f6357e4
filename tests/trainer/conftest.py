"""The trainer's tests must not see a job's environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("DDPJOB_", "TORCHELASTIC_", "PET_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The run's folder of a training whose checkpoint folder is tmp_path."""
    return tmp_path / "run"
