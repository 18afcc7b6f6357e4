"""Starts a rank sooner: torch._dynamo is imported on demand, and imports run without the collector.

Recovery consists mostly of starts. The compiler takes 1.3 to 2 s of one, the collector an eighth of
the time of all other imports.

DistributedDataParallel and torch.optim import the compiler's front end (with sympy and triton) only
to ask whether it is in use. A stand-in module answers these questions; any other name, and any
submodule, imports the real one. Measured with torch 2.15.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_NAME = "torch._dynamo"


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collection in this `with`.

    Later collections do not look through the imported objects either, because modules stay.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        gc.freeze()


class _StandIn(types.ModuleType):
    """Answers the questions of eager mode, and becomes the real module for anything else."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__path__: list[str] = []  # A package, whose submodules _Submodules finds.
        self.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)  # init_process_group
        self.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # DistributedDataParallel

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing. Optimizer.step calls this, and eager mode has no graph to break."""

    @staticmethod
    def disable(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return the function itself, as in eager mode. Called by Optimizer.add_param_group."""
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


class _Submodules(importlib.abc.MetaPathFinder):
    """Handles `import torch._dynamo.config` while the stand-in is installed.

    It imports the real package, then its submodule.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or not isinstance(sys.modules.get(_NAME), _StandIn):
            return None
        _real()
        module = importlib.import_module(name)
        # If it stayed there, Python would take its own spec instead of this one, and run the module
        # again.
        del sys.modules[name]
        return importlib.machinery.ModuleSpec(name, _AsItIs(module))


class _AsItIs(importlib.abc.Loader):
    """Returns a module that has run, without running it again."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not self._spec:  # torch's settings modules cannot be changed.
            module.__spec__ = self._spec


def _real() -> types.ModuleType:
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
        sys.modules["torch"].__dict__.pop("_dynamo", None)
    return importlib.import_module(_NAME)


def install() -> None:
    """Install the stand-in, unless the real module is imported already.

    Not for programs that compile.
    """
    import torch

    if _NAME not in sys.modules:
        stand_in = _StandIn()
        sys.modules[_NAME] = stand_in
        torch.__dict__["_dynamo"] = stand_in
        sys.meta_path.insert(0, _Submodules())
