"""A machine for the tests of the process backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A folder of runs of its own; what a failed test left running is killed."""
    made = Machine(tmp_path)
    yield made
    made.close()
