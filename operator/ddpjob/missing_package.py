"""What a program says that lacks a package: `pip install ddpjob` brings the programs without their packages."""

from __future__ import annotations


def missing_package(error: ModuleNotFoundError, program: str, extra: str) -> str:
    """Names the package, and the extra that brings it. Raises the error again where a module of our own is missing."""
    if not error.name or error.name.startswith("ddpjob"):
        raise error
    return f"{program} needs the package {error.name}: pip install 'ddpjob[{extra}]'"
