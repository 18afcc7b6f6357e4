"""The part of `ddpjob doctor` that needs no cluster and checks whether this machine can run jobs.

torch is queried in a separate process, because the operator's package never imports it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ddpjob.client.texts.diagnose import Diagnosis
from ddpjob.local.adapt_spec import usable_gpus
from ddpjob.local.local_platform import NoFreePorts, free_ports
from ddpjob.local.paths import RUNS_VARIABLE, runs_folder
from ddpjob.missing_package import installed_version

_TORCH_SECONDS = 120.0
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.version.cuda or "", torch.distributed.is_available(), gpus]))
"""
_LITTLE_SHARED_MEMORY, _LITTLE_DISK = 256 * 2**20, 2**30
"""Minimum free space, in bytes, in shared memory and on the disk. With less shared memory, a data
loader with workers soon fails. With less disk space, saving a checkpoint soon fails. By default,
Docker gives a container only 64 MiB of shared memory."""


def checks_of_machine(shared_memory: Path = Path("/dev/shm")) -> Iterator[Diagnosis]:
    """Check this machine and yield the result of each check.

    The checks are ordered so that the first failure explains later failures.
    """
    yield Diagnosis(True, f"client {installed_version()}, Python {platform.python_version()} ({sys.executable})")
    linux = platform.system() == "Linux"
    yield Diagnosis(linux, f"system: {platform.system()}", "jobs run on Linux; on Windows use WSL 2")
    yield from _torch_and_gpus()
    yield _room("shared memory", shared_memory, _LITTLE_SHARED_MEMORY, "in a container: docker run --shm-size=1g")
    yield _ports()
    yield _disk()


def _torch_and_gpus() -> Iterator[Diagnosis]:
    install = "install torch for the Python named above (pip install torch)"
    said = ""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
            check=False,
        )
        said = asked.stderr.strip()
        version, cuda, distributed, gpus = json.loads(asked.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Diagnosis(False, f"torch: the import took longer than {_TORCH_SECONDS:.0f} s", install)
        return
    except (OSError, ValueError, IndexError):
        why = said.splitlines()[-1] if said else "it cannot be imported"
        yield Diagnosis(False, f"torch: {why}", install)
        return
    built = f"CUDA {cuda}" if cuda else "without CUDA"
    remedy = "this torch has no torch.distributed; install a different build"
    yield Diagnosis(bool(distributed), f"torch {version}, {built}", remedy)
    listed = len(usable_gpus())
    if gpus:
        yield Diagnosis(True, f"GPUs: {len(gpus)} ({', '.join(dict.fromkeys(gpus))})")
    elif listed:
        remedy = "update the driver, which is too old for this torch" if cuda else "install a build of torch with CUDA"
        yield Diagnosis(False, f"GPUs: nvidia-smi lists {listed}, but torch finds none", f"{remedy} (see pytorch.org)")
    else:
        yield Diagnosis(True, "GPUs: none; jobs train on the CPU (gpusPerNode: 0)")


def _room(what: str, folder: Path, least: int, remedy: str) -> Diagnosis:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Diagnosis(False, f"{what}: {folder}: {error.strerror}", remedy)
    return Diagnosis(free >= least, f"{what}: {free / 2**30:.1f} GiB free in {folder}", remedy)


def _ports() -> Diagnosis:
    try:
        free_ports()[1].close()
    except NoFreePorts as error:
        return Diagnosis(False, "ports: none are free", str(error))
    except OSError as error:
        return Diagnosis(False, f"ports: {error.strerror}", "a job needs TCP ports on 127.0.0.1")
    return Diagnosis(True, "ports: free on 127.0.0.1")


def _disk() -> Diagnosis:
    """Check the disk that contains, or will contain, the folder of runs."""
    runs = runs_folder()
    there = next(folder for folder in (runs, *runs.parents) if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Diagnosis(False, f"disk: {there} is not writable", f"set {RUNS_VARIABLE} to a different folder for runs")
    return _room("disk", there, _LITTLE_DISK, f"free some space, or set {RUNS_VARIABLE} to a different folder for runs")
