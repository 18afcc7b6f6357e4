"""Explains which package is missing and how to install it.

An installation without extras has the `ddpjob` commands but not the packages that they need.
"""

from __future__ import annotations

import sys

INSTALL = "pip install '.[{extra}]' in the checkout of DDPJob"
"""The command that installs DDPJob with an extra. DDPJob is not on any package index yet, so its
name is not reserved. Anybody could register the name and run code on the machines of users who
install DDPJob by name. Until the first release, tests/unit/test_names.py therefore rejects every
file that installs DDPJob by name. After the first release, this command becomes "pip install
'ddpjob[{extra}]'"."""


def missing_package(error: ModuleNotFoundError, program: str, extra: str) -> str:
    """Return a message that names the missing package and the extra that installs it.

    Raise the error again if the missing module is part of DDPJob.
    """
    if not error.name or error.name.startswith("ddpjob"):
        raise error
    if error.name.partition(".")[0] in sys.stdlib_module_names:
        return f"{program} runs on Linux and macOS, and on Windows in WSL 2; this Python has no module {error.name}"
    return f"{program} needs the package {error.name}; run {INSTALL.format(extra=extra)}"


def installed_version() -> str:
    """Return the version of DDPJob that is installed here."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ddpjob")
    except PackageNotFoundError:
        return "unknown"
