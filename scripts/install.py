"""Installs packages with uv into the environment of this Python, four times as fast as pip.

    python scripts/install.py ARGUMENTS...     the arguments of `pip install`

uv does not read pip's settings, so settings for package sources are passed on. If uv cannot install
a package, pip is used instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
HANDED_ON = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
"""Maps settings of pip to uv's variables for the same values."""


def settings(listed: str) -> dict[str, str]:
    """Return uv's variables for the output of `pip config list`, in which environment variables
    have priority.
    """
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        variable = HANDED_ON.get(key.rpartition(".")[2])
        values = value.strip("'\"").replace("\\n", " ").split()
        if variable is not None and values:
            found[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(values)
    return found


def main(arguments: list[str]) -> int:
    """Install the packages, and return the installer's exit code."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists() and subprocess.run([*PIP, "install", "--quiet", "uv>=0.9,<1"], check=False).returncode:
        print("uv cannot be installed here; using pip instead", file=sys.stderr)
    if uv.exists():
        listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
        environment = {**settings(listed), **os.environ}
        command = [str(uv), "pip", "install", "--python", sys.executable, *arguments]
        if subprocess.run(command, env=environment, check=False).returncode == 0:
            return 0
        print("uv failed; trying pip", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--no-compile", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
