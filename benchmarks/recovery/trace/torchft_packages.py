"""Installs torchft into its own virtual environment, which uses this environment's torch."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path.home() / ".cache" / "ddpjob" / "torchft"
PACKAGES = ("torchft-nightly", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


class NotInstalled(Exception):
    """torchft cannot be installed here; the message says why."""


def find_python() -> Path:
    """Return a Python interpreter that can import torchft. The first call installs torchft.

    Raises NotInstalled.
    """
    python = FOLDER / "bin" / "python"
    if not _imports_torchft(python):
        _install(FOLDER, python)
        if not _imports_torchft(python):
            raise NotInstalled(f"torchft was installed in {FOLDER}, but cannot be imported from there")
    return python


def read_version(python: Path) -> str:
    """Return torchft's version."""
    code = "from importlib.metadata import version; print(version('torchft-nightly'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _imports_torchft(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-c", "import torchft"], capture_output=True).returncode == 0


def _install(folder: Path, python: Path) -> None:
    own = sysconfig.get_paths()["purelib"]
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    try:
        _run(sys.executable, "-m", "venv", str(folder))
        packages = Path(_run(str(python), "-c", code).strip())
        # torch is too large to be installed twice. pip detects it in the other environment, and
        # leaves it there.
        (packages / "other_environment.pth").write_text(own + "\n")
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise NotInstalled(f"torchft cannot be installed: {said.strip().splitlines()[-1]}") from error


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout
