"""What a program says that lacks a package: `pip install ddpjob` brings the programs without their packages."""

from __future__ import annotations

import sys


def missing_package(error: ModuleNotFoundError, program: str, extra: str) -> str:
    """Names the package, and the extra that brings it. Raises the error again where a module of our own is missing."""
    if not error.name or error.name.startswith("ddpjob"):
        raise error
    if error.name.partition(".")[0] in sys.stdlib_module_names:
        return f"{program} runs on Linux and macOS, on Windows in WSL 2: this Python has no module {error.name}"
    return f"{program} needs the package {error.name}: pip install 'ddpjob[{extra}]'"
