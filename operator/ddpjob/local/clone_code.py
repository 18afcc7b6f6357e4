"""Clones spec.code.git on this machine, with the installed git and the user's credentials."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ddpjob.api.job_spec import GitCode
from ddpjob.objects.git_clone import SCRIPT, variables

_SHOWN = 500


class CloneError(Exception):
    """The commit cannot be cloned. The message quotes git."""


def clone(git: GitCode, folder: Path) -> None:
    """Clone the commit into the folder, unless the folder already contains it.

    Raises CloneError or OSError.
    """
    if shutil.which("git") is None:
        raise CloneError("spec.code.git: git is not installed here; install it, or specify a folder with --workdir DIR")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables(git, str(folder), "1 0")}
    done = subprocess.run(
        ["sh", "-c", SCRIPT], env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[-_SHOWN:]
        raise CloneError(f"spec.code.git: {git.commit[:12]} of {git.url} cannot be cloned: {said}")
