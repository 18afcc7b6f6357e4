"""Source files from Go's module cache, for tests that read them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest


def folder_of(module: str) -> Path:
    """Return the folder of the module `PATH@VERSION`. Go downloads it once. Skip the test if the
    download fails.
    """
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
