"""Runs one of the runtime's programs by the path of this package.

    python3 PATH/ddpjob_runtime coordinator|launcher|store ARGUMENTS

By path, since neither PYTHONPATH nor the working directory may be used for it: the user's program inherits both.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PROGRAMS = {
    "coordinator": "ddpjob_runtime.coordinator.__main__",
    "launcher": "ddpjob_runtime.launcher.__main__",
    "store": "ddpjob_runtime.store",
}


def main() -> None:
    """Run the program that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PROGRAMS:
        sys.exit(f"usage: python3 {sys.argv[0]} {'|'.join(PROGRAMS)} ARGUMENTS")
    del sys.argv[1]
    importlib.import_module(PROGRAMS[name]).main()


def find_package() -> None:
    """Make the package importable and leave nothing of it on `sys.path`, where the user's modules are looked for.

    Python has put this folder on the path; submodules are found by the package's own path once it is imported.
    """
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    importlib.import_module("ddpjob_runtime")
    del sys.path[0]


if __name__ == "__main__":
    find_package()
    main()
