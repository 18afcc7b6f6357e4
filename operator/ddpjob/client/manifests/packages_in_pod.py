"""Installs the packages passed to `Client.train(packages=...)` in a pod, before the function runs.

The function's script contains this file, so it must run on Python 3.9 and import only the standard
library.

The script itself installs the packages because, unlike an init container, it runs both on a cluster
and on a laptop. The API, the operator and the launcher need not know about packages, and the same
Python installs and imports them. An error from pip becomes a rank's traceback, which status, events
and `ddpjob why` already show. The price is a slower recovery, because a replacement pod must
install the packages again. For long jobs, build an image.

pip runs twice, because `--target` alone ignores the image's packages. With it, `packages=["timm"]`
would install a second torch and hide the torch that fits the driver. The first run only makes a
plan that takes the image's packages into account. The second run installs exactly the missing
packages, without dependencies:

    plan      pip install --dry-run --report FILE timm    ->  timm==1.0.9, safetensors==0.4.5
    install   pip install --no-deps --target FOLDER timm==1.0.9 safetensors==0.4.5

A plan that replaces torch is refused. FOLDER is next to the script if that location is writable,
and otherwise in the pod's temporary folder. On a laptop, it is in the job's folder, where all pods
share it and `ddpjob delete` removes it. Its name contains a digest of the requirements and of
Python's version, so an in-place restart finds the installed packages. A lock makes the ranks in a
pod take turns. The folder gets its final name only when it is complete.

If pip cannot reach the index, the rank fails, and the job tries again. Any other error from pip
fails the job immediately, before its first step, as any refusal does (exit code 78).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

KEPT = ("torch",)
"""Packages in the image that must not be replaced, because the launcher also uses them."""
PIP_SECONDS = 1800
"""Maximum duration, in seconds, of each of the two runs of pip."""
MOST_LINES = 8
"""Maximum number of lines from the end of pip's output that are shown."""


def install_packages(requirements: list[str], script: str) -> None:
    """Make the packages importable in this process and in Python processes that it starts."""
    import fcntl
    import hashlib
    import importlib
    import tempfile

    mark = hashlib.sha256(repr((sys.version_info[:2], sys.platform, requirements)).encode()).hexdigest()[:16]
    above = Path(script).absolute().parent
    if not os.access(above, os.W_OK):
        above = Path(tempfile.gettempdir())
    folder = above / f"packages-{mark}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            install_missing(requirements, folder)
    sys.path.insert(1, str(folder))  # The script's own folder is searched first.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    importlib.invalidate_caches()


def install_missing(requirements: list[str], folder: Path) -> None:
    """Install into `folder` the packages that the image lacks."""
    import json
    import shutil

    partial = folder.with_suffix(".partial")
    # Remove the incomplete folder of an earlier process that was killed while it installed
    # packages.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    plan = partial / "plan.json"
    print(f"installing packages: {', '.join(requirements)}", flush=True)
    run_pip(["--dry-run", "--report", str(plan), *requirements])
    found = [entry["metadata"] for entry in json.loads(plan.read_text(encoding="utf-8"))["install"]]
    plan.unlink()
    missing = [f"{entry['name']}=={entry['version']}" for entry in found]
    replaced = [pin for pin in missing if pin.partition("==")[0].lower() in KEPT]
    if replaced:
        refuse(
            f"installing these would replace the image's torch with {replaced[0]}; use an image with this version, or "
            "require different versions"
        )
    if missing:
        run_pip(["--no-deps", "--target", str(partial), *missing])
    partial.rename(folder)
    print(f"installed packages: {', '.join(missing) or 'none, because the image has them'}", flush=True)


def run_pip(words: list[str]) -> None:
    """Run `pip install`. If pip fails, raise an error with the last lines of its output."""
    import subprocess

    options = ["--quiet", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, *words]
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PIP_SECONDS,
            check=False, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"packages: pip did not finish within {PIP_SECONDS} s") from None
    if ran.returncode == 0:
        return
    lines = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    reason = "; ".join(lines[-MOST_LINES:]) or f"pip exited with code {ran.returncode}"
    if "no such option" in reason:
        reason += "; the image needs pip 22.2 or later"
    if "Retrying (" in ran.stdout or "[Errno" in ran.stdout or ran.returncode < 0:
        raise ConnectionError(f"packages: {reason}")
    refuse(reason)


def refuse(reason: str) -> None:
    """Raise an error that fails the job without a retry."""
    error = ValueError(f"packages: {reason}")
    error.ddpjob_refusal = True  # type: ignore[attr-defined]
    raise error
