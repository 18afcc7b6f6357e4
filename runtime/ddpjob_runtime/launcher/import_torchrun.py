"""torchrun's module, with what torch forgets to require on Python 3.9."""

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
    """torch.distributed.run. Raises whatever an image with a broken torch raises, ImportError and OSError among it."""
    with uncollected(), _backport():
        return importlib.import_module("torch.distributed.run")


@contextlib.contextmanager
def _backport() -> Iterator[None]:
    """On Python 3.9, torch imports `entry_points` from a package that it does not require (pytorch/pytorch#163946).

    Images without that package get a stand-in for as long as the import takes: a script must not find it later.
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
    """Entry points of a group, found by their names as well."""

    def __getitem__(self, name: Any) -> Any:
        return next(point for point in self if point.name == name)
