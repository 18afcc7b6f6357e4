"""Checks that the user's program can be found, without running any of it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class InitFailure(Exception):
    """The program cannot start, and a retry would not help. The message says what to change."""


def check_script(script: str) -> None:
    """Raise InitFailure unless `script` is a readable file, or a folder with a __main__.py."""
    path = Path(script)
    where = f"{script!r} (working directory {Path.cwd()})"
    unreadable = f"script {where} cannot be read by user {os.getuid()}; make the file and its folders readable"
    try:
        # Path.exists() is not reliable if a parent folder cannot be read: some versions of Python
        # raise an error, and others return False.
        path.stat()
        lacks_main = path.is_dir() and not (path / "__main__.py").is_file()
    except PermissionError:
        raise InitFailure(unreadable) from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            # This error is a problem of the node or its volume, so the script might exist.
            raise
        raise InitFailure(
            f"script {where} does not exist; correct the path, or put the file into the image or a volume"
        ) from None
    if lacks_main:
        raise InitFailure(f"script {where} is a folder without __main__.py; specify a Python file")
    if not os.access(path, os.R_OK):
        raise InitFailure(unreadable)


def check_command(command: str) -> None:
    """Raise InitFailure unless the command is on PATH or is the path of a program.

    With --no-python, torchrun runs such a command instead of a Python script.
    """
    if shutil.which(command) is None:
        raise InitFailure(
            "command {!r} is neither an executable file nor on PATH ({})".format(command, os.environ.get("PATH", ""))
        )


def check_module(name: str) -> None:
    """Raise InitFailure unless `python -m NAME` would work.

    NAME must be a module, or a package that contains a __main__.py. Parent packages are not
    imported.
    """
    cwd = str(Path.cwd())
    if cwd not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, cwd)
    searched = "searched in: working directory {}, PYTHONPATH {!r}, the image's packages".format(
        cwd, os.environ.get("PYTHONPATH", "")
    )
    placeholders: list[str] = []
    try:
        problem = _missing_part(name, placeholders)
    finally:
        for parent in placeholders:
            del sys.modules[parent]
    if problem:
        raise InitFailure(f"module {name!r}: {problem} ({searched})")


def _missing_part(name: str, placeholders: list[str]) -> str:
    """Return what is wrong with a dotted module name; empty if the module can be found.

    The import system expects parent packages in sys.modules. To avoid importing them, this function
    adds placeholders to sys.modules, and adds the placeholders' names to `placeholders`.
    """
    path: list[str] | None = None
    parts = name.split(".")
    for i in range(len(parts)):
        full = ".".join(parts[: i + 1])
        spec = _find(full, path)
        if spec is None:
            return f"no module named {full!r}"
        if spec.submodule_search_locations is None:
            return "" if i == len(parts) - 1 else f"{full!r} is not a package"
        path = list(spec.submodule_search_locations)
        if full not in sys.modules:
            sys.modules[full] = ModuleType(full)
            sys.modules[full].__path__ = path
            placeholders.append(full)
    return (
        ""
        if _find(name + ".__main__", path) is not None
        else "it is a package without __main__.py; specify one of its modules"
    )


def _find(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, path) if find_spec is not None else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
