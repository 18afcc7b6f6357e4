"""The fixture `machine` for tests of the process backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Yield a machine with its own run folder. Processes that a failed test left running are
    killed.
    """
    made = Machine(tmp_path)
    yield made
    made.close()
