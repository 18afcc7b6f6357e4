"""Names a missing package and how to install it: `ddpjob` without extras has only the programs."""

from __future__ import annotations

import sys

INSTALL = "pip install '.[{extra}]' in the checkout of DDPJob"
"""How a user installs an extra. No index has the package yet, and its name is not reserved: whoever
registers it would run code on the machine of each reader who installs it by name. After the first
release this becomes "pip install 'ddpjob[{extra}]'". Until then tests/unit/test_names.py finds
every text that installs it by name."""


def missing_package(error: ModuleNotFoundError, program: str, extra: str) -> str:
    """Name the package, and the extra that brings it.

    Raises the error again if one of our own modules is missing.
    """
    if not error.name or error.name.startswith("ddpjob"):
        raise error
    if error.name.partition(".")[0] in sys.stdlib_module_names:
        return f"{program} runs on Linux and macOS, on Windows in WSL 2: this Python has no module {error.name}"
    return f"{program} needs the package {error.name}: {INSTALL.format(extra=extra)}"


def installed_version() -> str:
    """Return the version of DDPJob that is installed here."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ddpjob")
    except PackageNotFoundError:
        return "unknown"
