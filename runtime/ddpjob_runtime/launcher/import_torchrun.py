"""Imports torchrun's module, with a substitute for a package that torch needs on Python 3.9."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from ddpjob_pod.late_dynamo import uncollected

BACKPORT = "importlib_metadata"


def import_torchrun() -> Any:
    """Import and return torch.distributed.run.

    If torch is broken, any error may be raised, such as ImportError or OSError.
    """
    with uncollected(), _backport():
        return importlib.import_module("torch.distributed.run")


@contextlib.contextmanager
def _backport() -> Iterator[None]:
    """Provide a substitute for the package BACKPORT, which torch needs on Python 3.9.

    torch imports `entry_points` from this package, but does not install it
    (pytorch/pytorch#163946). If an image lacks the package, the substitute exists only while torch
    is being imported, so that scripts do not find it later.
    """
    if sys.version_info >= (3, 10) or importlib.util.find_spec(BACKPORT) is not None:
        yield
        return
    stand_in: Any = types.ModuleType(BACKPORT)
    stand_in.entry_points = lambda group: _EntryPoints(importlib.metadata.entry_points().get(group, ()))
    sys.modules[BACKPORT] = stand_in
    try:
        yield
    finally:
        del sys.modules[BACKPORT]


class _EntryPoints(tuple):  # type: ignore[type-arg]
    """The entry points of a group. `points[NAME]` is the entry point with that name."""

    def __getitem__(self, name: Any) -> Any:
        return next(point for point in self if point.name == name)
