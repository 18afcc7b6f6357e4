"""The release before this one, from the repository's history: its CRD, and its operator as a process."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

COMMIT = "fa181b7323f9f129215c41c30b0d54e4c982e9d6"
"""The last one whose protocol had no version: jobs' pods run files beside each other, in a ConfigMap for each job."""
CHECKOUT = Path(__file__).parents[2]


def is_known() -> bool:
    """Not in a shallow clone."""
    found = subprocess.run(["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"], cwd=CHECKOUT, capture_output=True)
    return found.returncode == 0


def unpack(folder: Path) -> None:
    """Its operator and its chart, in `folder`."""
    command = ["git", "archive", COMMIT, "operator", "charts"]
    archive = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it.
        tar.extractall(folder)
