"""Hides a job's environment from the tests of the trainer."""

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
    """Return the run folder of the training run whose checkpoint folder is tmp_path."""
    return tmp_path / "run"
