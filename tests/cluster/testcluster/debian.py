"""Builds the base of the real images with debootstrap: a small Debian with Python. There is no
registry from which images could be pulled.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from testcluster.settings import ClusterError, Settings

SUITE = "trixie"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
# Files that a container never reads. Folders and dpkg's own files are kept, so apt-get works in the
# image.
DROPPED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man")


def mirror() -> list[str]:
    """Return debootstrap's argument for the mirror in DDPJOB_CLUSTER_DEBIAN_MIRROR, or nothing for
    its default.
    """
    named = os.environ.get("DDPJOB_CLUSTER_DEBIAN_MIRROR")
    return [named] if named else []


def key() -> str:
    """Return a key that changes with the contents of the base."""
    return hashlib.sha256(json.dumps([SUITE, PACKAGES, DROPPED, mirror()]).encode()).hexdigest()[:16]


def base_archive(settings: Settings) -> Path:
    """Return a tar of the base's files, which is created once."""
    path = settings.cache / "images" / f"base-{key()}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".base-") as temporary:
            _make(Path(temporary), path)
        for other in path.parent.glob("base-*.tar"):
            if other != path:
                other.unlink()
    return path


def _make(temporary: Path, path: Path) -> None:
    print(f"making a Debian {SUITE} base image (only once; into {path}) ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    root, unfinished = temporary / "root", temporary / "base.tar"
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root), *mirror()]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise ClusterError(
            f"{' '.join(command)} failed; DDPJOB_CLUSTER_DEBIAN_MIRROR names another mirror:\n{done.stdout[-2000:]}"
        )
    with tarfile.open(unfinished, "w") as archive:
        archive.add(root, arcname=".", filter=_wanted)
    unfinished.rename(path)
    print(f"  {path.stat().st_size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = entry.name.removeprefix("./")
    if entry.ischr() or entry.isblk():
        return None  # the container runtime creates /dev again
    return None if not entry.isdir() and any(name.startswith(f"{folder}/") for folder in DROPPED) else entry
