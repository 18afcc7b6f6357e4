"""Libraries that the test environment lacks: a real Horovod, built once per machine and torch
version.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import install_horovod


def horovod_site() -> Path:
    """Return a folder to put on sys.path. The first build takes minutes. Skips the test if the
    machine cannot build it.
    """
    facts = install_horovod.probe(sys.executable)
    site = install_horovod.wheel_folder(facts) / "site"
    # A process that waited here finds it installed, because another worker already imports from it.
    with install_horovod.locked(install_horovod.cache_folder() / "site-lock"):
        if not (site / "horovod").exists():
            if install_horovod.cached_wheel(facts) is None and (missing := install_horovod.missing_tools()):
                pytest.skip(f"Horovod is not built, and this machine lacks {'; '.join(missing)}")
            install_horovod.install(sys.executable, site)
    return site
