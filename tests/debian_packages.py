"""Programs from Debian's packages, unpacked into ~/.cache/ddpjob once per machine. No package is
installed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpjob"


def unpacked(package: str, *others: str, needed: bool = False) -> Path:
    """Return the folder with the packages' files. With `needed`, it also contains all dependencies
    that this machine lacks.

    Skips the test if the packages are not available; with CI=true, the test fails instead.
    """
    cache = CACHE / package
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("a") as lock:  # a process that waited for the lock finds them unpacked
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / "files").is_dir():
            _download(cache, [package, *others], needed=needed)
    return cache / "files"


def _download(cache: Path, packages: list[str], *, needed: bool) -> None:
    first = packages[0]
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        refuse(first, f"this machine has neither {first} nor {' and '.join(missing)}")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as temporary:
        place = Path(temporary)
        done = _fetched(place, packages, [], needed=needed)
        # Use separate package lists, because the machine's may be missing or older than the mirror.
        if done.returncode != 0:
            lists = ["-o", f"Dir::State::Lists={place}/lists", "-o", f"Dir::Cache={place}/cache"]
            (place / "lists" / "partial").mkdir(parents=True)
            _run(place, "apt-get", *lists, "update")
            done = _fetched(place, packages, lists, needed=needed)
        found = list(place.glob("*.deb"))
        if done.returncode != 0 or not any(file.name.startswith(f"{first}_") for file in found):
            refuse(first, f"`apt-get download {first}` failed: {done.stdout.strip()[-500:]}")
        for file in found:
            done = _run(place, "dpkg-deb", "--extract", str(file), str(place / "files"))
            if done.returncode != 0:
                refuse(first, f"{file.name} cannot be unpacked: {done.stdout.strip()[-500:]}")
        (place / "files").rename(cache / "files")


def _fetched(place: Path, packages: list[str], options: list[str], *, needed: bool) -> subprocess.CompletedProcess[str]:
    if needed:
        plan = _run(place, "apt-get", *options, "--simulate", "--no-install-recommends", "install", *packages)
        if plan.returncode != 0:
            return plan
        planned = [line.split()[1] for line in plan.stdout.splitlines() if line.startswith("Inst ")]
        packages = sorted({*packages, *planned})
    return _run(place, "apt-get", *options, "download", *packages)


def _run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "timed out after 300 s")


def refuse(what: str, why: str) -> None:
    """Skip the test, or fail it if CI=true."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"CI=true, but {what} is not available: {why}", pytrace=False)
    pytest.skip(f"{what} is not available: {why}")
