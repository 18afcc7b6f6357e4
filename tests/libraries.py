"""Libraries that are not in the environment of the tests: a real Horovod, built once per machine and torch."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest


@cache
def horovod_installer() -> ModuleType:
    """scripts/install_horovod.py as a module."""
    spec = importlib.util.spec_from_file_location("install_horovod", Path(__file__).parents[1] / "scripts" / "install_horovod.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def horovod_site() -> Path:
    """A folder to put on sys.path. The first build takes a few minutes; skips the test where the machine cannot build it."""
    installer = horovod_installer()
    facts = installer.probe(sys.executable)
    site: Path = installer.wheel_folder(facts) / "site"
    if not (site / "horovod").exists():
        if installer.cached_wheel(facts) is None and (missing := installer.missing_tools()):
            pytest.skip(f"Horovod is not built, and this machine lacks {'; '.join(missing)}")
        installer.install(sys.executable, site)
    return site
