"""A real Prometheus and promtool: those on PATH, else Debian's package, unpacked once per machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from debian_packages import unpacked

PROGRAMS = ("prometheus", "promtool")


def prometheus_programs() -> Path:
    """The folder of both programs. Skips the test where there are none; with CI=true that is a failure."""
    found = [shutil.which(name) for name in PROGRAMS]
    if all(found):
        return Path(str(found[0])).parent
    return unpacked("prometheus") / "usr" / "bin"
