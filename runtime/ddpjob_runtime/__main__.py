"""Runs one of the runtime's programs. The first argument names it, such as coordinator or launcher.

    python3 PATH/ddpjob_runtime coordinator|launcher|store|check ARGUMENTS

The runtime is started by its path rather than with `python3 -m`, because PYTHONPATH and the working
directory belong to the user's program, which inherits both.
"""

from __future__ import annotations

import os
import signal
import sys

if os.getpid() == 1 and {"launcher", "coordinator"} & set(sys.argv[1:2]):
    # The kernel drops signals that PID 1 neither handles nor blocks. If SIGTERM were not blocked
    # here, a pod that is deleted while this process still imports modules would stay for its whole
    # grace period.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))

import importlib
from pathlib import Path

PROGRAMS = {
    "coordinator": "ddpjob_runtime.coordinator.__main__",
    "launcher": "ddpjob_runtime.launcher.__main__",
    "store": "ddpjob_runtime.store",
    "check": "ddpjob_runtime.hardware_check",
}


def main() -> None:
    """Run the program that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PROGRAMS:
        sys.exit(f"usage: python3 {sys.argv[0]} {'|'.join(PROGRAMS)} ARGUMENTS")
    from ddpjob_runtime.archive import Archive

    del sys.argv[1]
    sys.path_hooks.insert(0, Archive)
    # Importing Archive made Python cache zipimport's loader for the archive's path. Remove that
    # loader from the cache.
    sys.path_importer_cache.clear()
    program = importlib.import_module(PROGRAMS[name])
    sys.path_hooks.remove(Archive)
    program.main()


def find_package() -> None:
    """Import the runtime's packages without changing `sys.path`, which belongs to the user.

    Python has put an entry for this file on `sys.path`: the file's folder or, in job pods, the
    archive. This function removes that entry after the imports. Once a package is imported, Python
    finds its submodules through the package's own path.
    """
    folder = Path(__file__).resolve().parent
    sys.path[0] = str(folder.parent if folder.is_dir() else folder)
    for package in ("ddpjob_runtime", "ddpjob_pod"):
        importlib.import_module(package)
    del sys.path[0]


if __name__ == "__main__":
    find_package()
    main()
