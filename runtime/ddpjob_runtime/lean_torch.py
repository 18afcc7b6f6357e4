"""Speeds up the import of torch in processes that use only its rendezvous and do not fork
workers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

META_KERNELS = "torch._meta_registrations"
"""The module that defines how torch's operators treat tensors without data. Importing it accounts
for a fifth of torch's import time.
"""


@contextlib.contextmanager
def for_rendezvous() -> Iterator[None]:
    """Defer META_KERNELS while torch is imported inside this `with`.

    The module runs when something first uses it, and never runs if nothing does.
    """
    hook = _MetaKernelsLater()
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)


class _MetaKernelsLater:
    """Import hook that runs META_KERNELS only when it is first used."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec that defers META_KERNELS; None for every other module."""
        spec = PathFinder.find_spec(name, path, target) if name == META_KERNELS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Loads a module, but runs it only when it is first used.

    Python's own LazyLoader would run the module too early: torch makes `inspect` look at all loaded
    modules, and a deferred module would run at that moment.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an empty module. Python sets its name, file and other attributes."""
        return _NotRun(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module runs only when it is first used."""


class _NotRun(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__loader__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)
