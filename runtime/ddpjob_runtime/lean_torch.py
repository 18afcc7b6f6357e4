"""Imports torch for its rendezvous alone: no worker may be forked from a process that did."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

META_KERNELS = "torch._meta_registrations"
"""What torch's operators do with tensors that have no data: a fifth of the time that its import takes."""


@contextlib.contextmanager
def for_rendezvous() -> Iterator[None]:
    """Around an import of torch: that module runs as soon as anything asks it for a name, which may be never."""
    hook = _MetaKernelsLater()
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)


class _MetaKernelsLater:
    """Import hook for that module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where it always is, to be run later; None for any other."""
        spec = PathFinder.find_spec(name, path, target) if name == META_KERNELS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Gives a module that is run when it is needed. Python's own LazyLoader runs it for inspect, which torch asks."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Python fills in its name, its file and the like."""
        return _NotRun(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not yet."""


class _NotRun(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__loader__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)
