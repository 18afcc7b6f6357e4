"""Sources that tests read, from Go's module cache."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest


def folder_of(module: str) -> Path:
    """The folder of a module, `PATH@VERSION`, which Go fetches once. Skips the test where it cannot."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", module],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout or "{}")
    if done.returncode or "Dir" not in found:
        pytest.skip(f"{module} cannot be fetched: {found.get('Error') or done.stderr}")
    return Path(found["Dir"])
