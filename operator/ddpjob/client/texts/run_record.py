"""Reads the commit from which a job was submitted, and the GPU model and package versions that it
used.

When a job is submitted from a folder, the client records the folder's git commit in annotations.
Rank 0 sends its GPU model and package versions with its first report, and the status keeps them.
Neither source can be trusted, so the values are checked and bounded when they are read.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ddpjob_runtime.protocol import ENVIRONMENT, read_environment

from ddpjob.api.job_spec import Json

COMMIT, DIRTY = "ddpjob.io/git-commit", "ddpjob.io/git-dirty"
"""Names of two annotations. The first contains the hash of the commit. The second contains "true"
if tracked files had uncommitted changes, and "unknown" if git could not tell."""
_CHANGES = {"true": " with changes", "unknown": " (changes unknown)"}
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SECONDS = 5.0


def record_of(body: Json) -> Iterator[tuple[str, str]]:
    """Yield (label, text) pairs for the commit, the GPU, and the version of each package.

    Unknown values are left out.
    """
    notes = body["metadata"].get("annotations")
    notes = notes if isinstance(notes, dict) else {}
    commit = notes.get(COMMIT)
    if isinstance(commit, str) and _HASH.fullmatch(commit):
        yield "git commit", commit[:12] + _CHANGES.get(str(notes.get(DIRTY)), "")
    progress = (body.get("status") or {}).get("progress")
    found = read_environment(progress.get(ENVIRONMENT) if isinstance(progress, dict) else None)
    if found.get("gpu"):
        yield "GPU", found["gpu"]
    yield from found.get("packages", {}).items()


def with_commit(manifest: Json, *, again: bool = False) -> Json:
    """Return a job's manifest with the current folder's git commit in its annotations.

    An existing commit is kept, because a job that is rerun on a cluster runs the code that it was
    submitted with. With `again`, the existing commit is replaced, because the job then runs the
    code in the current folder.
    """
    notes = manifest["metadata"].get("annotations") or {}
    if COMMIT in notes and not again:
        return manifest
    found = git_notes(Path.cwd())
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": {**notes, **found}}} if found else manifest


def git_notes(folder: Path) -> dict[str, str]:
    """Return the git annotations for a job that is submitted from a folder.

    There are none if the folder is not in a git repository with a commit.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not _HASH.fullmatch(commit):
        return {}
    # Ignore untracked files, because they are often numerous, and can be data or results.
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {COMMIT: commit, DIRTY: "unknown" if changes is None else str(bool(changes)).lower()}


def _git(folder: Path, *arguments: str) -> str | None:
    """Run git and return its output; None if git fails, is missing, or takes too long."""
    # With optional locks, git would write to the repository's index, which another program may be
    # reading.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None
