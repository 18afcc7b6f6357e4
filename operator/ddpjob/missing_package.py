"""Explains which package is missing and how to install it.

An installation without extras has the `ddpjob` commands but not the packages that they need.
"""

from __future__ import annotations

import sys

INSTALL = "pip install '.[{extra}]' in the checkout of DDPJob"
"""How a user installs an extra. The package is not in any index yet, and its name is not reserved,
so anyone who registers it could run code on the machines of readers who install it by name. Until
the first release, tests/unit/test_names.py finds every file that installs it by name. After the
first release, this command becomes "pip install 'ddpjob[{extra}]'"."""


def missing_package(error: ModuleNotFoundError, program: str, extra: str) -> str:
    """Return a message that names the missing package and the extra that includes it.

    Re-raises the error if one of DDPJob's own modules is missing.
    """
    if not error.name or error.name.startswith("ddpjob"):
        raise error
    if error.name.partition(".")[0] in sys.stdlib_module_names:
        return f"{program} runs on Linux and macOS, and on Windows in WSL 2; this Python has no module {error.name}"
    return f"{program} needs the package {error.name}: {INSTALL.format(extra=extra)}"


def installed_version() -> str:
    """Return the version of DDPJob that is installed here."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ddpjob")
    except PackageNotFoundError:
        return "unknown"
