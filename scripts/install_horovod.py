#!/usr/bin/env python3
"""Build Horovod against the torch of a Python environment, and install it there.

    python scripts/install_horovod.py [PYTHON] [--target DIR]

Horovod's last release, 0.28.1, dates from 2023. It works with today's torch if it is compiled as
C++20, which torch's headers need, and if CMake accepts the old policies in Horovod's files. Wheels
are cached in ~/.cache/ddpjob/horovod (XDG_CACHE_HOME is respected), one for each combination of the
versions of torch and Python. A build takes a few minutes; installing a cached wheel takes seconds.

Needs a C++20 compiler, CMake and make on PATH, and pip in the interpreter that runs this program.
The environment variables of Horovod's build are passed through, for instance
HOROVOD_GPU_OPERATIONS=NCCL for GPUs, or HOROVOD_WITH_MPI=1. If something is missing, the program
exits with a message that says what.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.28.1"
REQUIRES = {
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "packaging": "packaging",
    "cffi": "cffi",
}
"""Maps each module that Horovod imports to its distribution. Only missing modules are installed."""
_PROBE = """
import importlib.util, json, platform, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
torch = None
if importlib.util.find_spec("torch") is not None:
    facts = {}
    exec(open(importlib.util.find_spec("torch").submodule_search_locations[0] + "/version.py").read(), facts)
    torch = facts["__version__"]
tag, machine = sys.implementation.cache_tag, platform.machine()
print(json.dumps({"torch": torch, "missing": missing, "tag": tag, "machine": machine}))
"""


def main() -> None:
    """Build unless the wheel is cached, then install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "python",
        nargs="?",
        default=sys.executable,
        help="interpreter of the environment (default: the one that runs this program)",
    )
    parser.add_argument("--target", type=Path, help="install into this folder instead, for PYTHONPATH")
    arguments = parser.parse_args()
    folder = install(arguments.python, arguments.target)
    print(f"Horovod {VERSION} is in {folder or arguments.python}")


def install(python: str, target: Path | None = None) -> Path | None:
    """Install Horovod into the environment of `python`, or into the folder `target`.

    Raises SystemExit with a message about what is missing or has failed.
    """
    facts = probe(python)
    with locked(cache_folder() / "lock"):
        wheel = cached_wheel(facts) or build(python, facts)
        needed = [REQUIRES[name] for name in facts["missing"] if name in REQUIRES]
        into = ["--target", str(target), "--upgrade"] if target else []
        pip(python, "install", "--no-deps", "--force-reinstall", *into, str(wheel))
        if needed:
            pip(python, "install", *into, *needed)
    return target


def probe(python: str) -> dict[str, object]:
    """Return the environment's versions and missing modules."""
    ended = subprocess.run([python, "-c", _PROBE, *REQUIRES, "setuptools"], capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(
            f"{python} cannot run: {ended.stderr.strip() or ended.returncode}; pass the path of a Python interpreter"
        )
    facts: dict[str, object] = json.loads(ended.stdout)
    if facts["torch"] is None:
        raise SystemExit(
            f"{python} does not have torch; install torch there first, because Horovod is compiled against it"
        )
    return facts


def cache_folder() -> Path:
    """Return the folder of cached wheels, and create it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "ddpjob" / "horovod"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheel_folder(facts: dict[str, object]) -> Path:
    """Return the cache folder for these versions of torch and Python, and these build options."""
    options = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if re.match(r"HOROVOD_(GPU|CPU|WITH)", name)
    ]
    key = "-".join([VERSION, f"torch{facts['torch']}", str(facts["tag"]), str(facts["machine"]), *options])
    return cache_folder() / re.sub(r"[^\w.+=-]", "_", key)


def cached_wheel(facts: dict[str, object]) -> Path | None:
    """Return the wheel of an earlier build for the same versions, or None."""
    return next(wheel_folder(facts).glob("horovod-*.whl"), None)


def missing_tools() -> list[str]:
    """Describe the build tools that this machine lacks."""
    compiler = os.environ.get("CXX") or "c++"
    tools = {
        "cmake": "CMake (Debian: apt-get install cmake; or pip install cmake)",
        "make": "make (Debian: apt-get install make)",
        compiler: "a C++ compiler (Debian: apt-get install g++)",
    }
    missing = [remedy for tool, remedy in tools.items() if shutil.which(tool) is None]
    if not missing:
        check = subprocess.run(
            [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input="#include <concepts>\n", text=True
        )
        missing = [f"a C++20 compiler ({compiler} is not one; install gcc 10 or newer)"] if check.returncode else []
    return missing


def build(python: str, facts: dict[str, object]) -> Path:
    """Download the source, patch it, compile, and cache the wheel. Raises SystemExit."""
    if missing := missing_tools():
        raise SystemExit(f"Horovod must be compiled, but this machine lacks {'; '.join(missing)}")
    if "setuptools" in facts["missing"]:  # type: ignore[operator]
        pip(python, "install", "setuptools")
    print(
        f"building Horovod {VERSION} for torch {facts['torch']}, {facts['tag']}, which takes a few minutes",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="horovod-") as temporary:
        work = Path(temporary)
        # setup.py writes the source distribution's metadata, for which it needs the torch of this
        # environment.
        pip(
            python,
            "download",
            "--no-deps",
            "--no-binary=:all:",
            "--no-build-isolation",
            f"--dest={work}",
            f"horovod=={VERSION}",
        )
        with tarfile.open(next(work.glob("horovod-*.tar.gz"))) as source:
            source.extractall(work)
        source_folder = work / f"horovod-{VERSION}"
        patch(source_folder)
        environment = {
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            **({} if "HOROVOD_WITH_MPI" in os.environ else {"HOROVOD_WITHOUT_MPI": "1"}),
            **os.environ,
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            # Do not inherit MAKEFLAGS from a make that runs this program, because they allow only
            # one job at a time.
            "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}",
        }
        pip(
            python,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            f"--wheel-dir={work / 'wheel'}",
            str(source_folder),
            env=environment,
        )
        built = next((work / "wheel").glob("horovod-*.whl"))
        folder = wheel_folder(facts)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(shutil.copy(built, folder / f".{built.name}"))
        return unfinished.rename(folder / built.name)


def patch(source: Path) -> int:
    """Set C++20 in every CMakeLists.txt of Horovod, and return the number of changed lines.

    It also removes -O3 and debug information, which account for a quarter of the compile time.

    Raises SystemExit if no file sets a standard.
    """
    changed = 0
    for file in [source / "CMakeLists.txt", *(source / "horovod").rglob("CMakeLists.txt")]:
        text, count = re.subn(r"(set\(CMAKE_CXX_STANDARD) 1[147]\)", r"\1 20)", file.read_text())
        file.write_text(text.replace('REPLACE "-O2" "-O3"', 'REPLACE "-O2 -g" "-O2"'))
        changed += count
    if not changed:
        raise SystemExit(f"{source} does not set CMAKE_CXX_STANDARD, so it is not the source of Horovod {VERSION}")
    return changed


def pip(python: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run pip for the environment of `python`. Raises SystemExit with its output if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *arguments]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stdout[-6000:]}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Allow one build at a time on this machine, so that a second one finds the wheel of the first."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
