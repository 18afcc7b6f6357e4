"""Defers the import of torch._dynamo until it is needed, so that a replacement node trains sooner.

DistributedDataParallel and torch.optim import torch's compiler only to check whether it is in use.
The compiler in turn imports sympy and half of torch.distributed. All these imports take as long as
the rest of `import torch`. Until torch._dynamo is needed, a stand-in module answers the checks as
the real module would. As soon as the program uses anything else in torch._dynamo, the real module's
code runs in the stand-in's namespace, and the stand-in becomes the real module.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"
COMPILER = "torch._compile"
"""The torch module whose decorator excludes functions such as Optimizer.add_param_group from
compilation.
"""
_KEPT = "__dynamo_disable"
"""Name of the function attribute in which torch._compile caches the result of `disable`."""
_lock = threading.RLock()


@contextlib.contextmanager
def uncollected(*, keep: bool = False) -> Iterator[None]:
    """Suspend the garbage collector while this `with` block imports torch.

    The collector takes up to a fifth of the import time, and finds no garbage among imported
    modules. With `keep`, the collector permanently ignores all objects that exist after the
    imports, so pass `keep` only at the start of a program.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if keep:
            gc.freeze()


def put_off() -> None:
    """Import torch, and defer the import of torch._dynamo unless it has happened already."""
    torch = importlib.import_module("torch")
    if NAME not in sys.modules and (module := _not_run()) is not None:
        sys.modules[NAME] = vars(torch)["_dynamo"] = module


def find() -> ModuleSpec | None:
    """Return a spec with which an import hook imports the stand-in instead of torch._dynamo.

    Return None if this version of torch has no _dynamo.
    """
    module = _not_run()
    return None if module is None else ModuleSpec(NAME, _AsItIs(module))


def _not_run() -> _Late | None:
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.loader is None or not spec.origin:
        return None
    module = _Late(spec)
    sys.meta_path.insert(0, vars(module)["_finder"])
    return module


def is_put_off() -> bool:
    """Whether the stand-in still takes the place of torch._dynamo."""
    return isinstance(sys.modules.get(NAME), _Late)


def load() -> None:
    """Import torch._dynamo now if its import was deferred. Raises any error from the import."""
    module = sys.modules.get(NAME)
    if isinstance(module, _Late):
        _load(module)


class _Late(ModuleType):
    """The stand-in for torch._dynamo.

    When a name is looked up that the stand-in does not know, the real module's code is run.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(NAME)
        vars(self).update(
            __spec__=spec, __loader__=spec.loader, __package__=NAME, __file__=spec.origin, __cached__=spec.cached,
            __path__=spec.submodule_search_locations, _finder=_Submodules(), _disabled=[],
            graph_break=lambda msg="": None, disable=self._disable,
            trace_rules=_Part(self, "trace_rules", clear_lru_cache=lambda: None),
            utils=_Part(self, "utils", **_ddp_mode(Path(str(spec.origin)).with_name("config.py"))),
        )  # fmt: skip

    def _disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the function unchanged if torch's own decorator makes this call.

        Nothing can be compiled before torch._dynamo is loaded, so there is nothing to disable yet.
        All other calls go to the real `disable`.
        """
        if fn is None or sys._getframe(1).f_globals.get("__name__") != COMPILER:
            return _load(self).disable(fn, *args, **kwargs)
        vars(self)["_disabled"].append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            # inspect and warnings look up names with double underscores in every module. These
            # lookups must not load torch._dynamo.
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return getattr(_load(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__spec__":
            vars(self)[name] = value
        else:
            setattr(_load(self), name, value)

    def __dir__(self) -> list[str]:
        return dir(_load(self))


class _Part(SimpleNamespace):
    """Stand-in for a submodule. It has a few known functions, and looks up any other name in the
    real submodule.
    """

    def __init__(self, parent: _Late, name: str, **known: Callable[..., Any]) -> None:
        super().__init__(**known)
        self._whole: Callable[[], Any] = lambda: getattr(_load(parent), name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole(), name)


class _Submodules:
    """Import hook that runs the code of torch._dynamo before any of its submodules is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Run the code of torch._dynamo, and return a spec for the submodule `name`.

        Return None if that code has not imported the submodule. This hook must come before Python's
        own hooks in sys.meta_path.
        """
        if not name.startswith(NAME + ".") or not is_put_off():
            return None
        load()
        # The code of torch._dynamo may have imported this submodule already. If the submodule
        # stayed in sys.modules, Python would ignore this spec and run the submodule again. A
        # program would then change settings in the second copy, although the compiler reads the
        # first.
        module = sys.modules.pop(name, None)
        return None if module is None else ModuleSpec(name, _AsItIs(module))


class _AsItIs(Loader):
    """Loader that returns an existing module without running it. The module has run already, or
    will run later.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the existing module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import has replaced. Do not run the module."""
        # torch's modules of settings reject assignments to other attributes, so assign the spec
        # only if it differs.
        if module.__spec__ is not self._spec:
            module.__spec__ = self._spec


def _ddp_mode(settings: Path) -> dict[str, Callable[..., Any]]:
    """Return {name: stand-in} for the function with which DDP reads the `optimize_ddp` setting.

    The stand-in returns the usual default of this setting. `settings` is the path of config.py in
    torch._dynamo. If that file has a different default, the result is empty. A program can change
    the setting only by importing the real module.
    """
    try:
        known = re.search(r"^optimize_ddp\b(?:[^=\n]|\n(?!\w))*=\s*True$", settings.read_text(), re.M)
    except (OSError, ValueError):
        return {}
    return {"get_optimize_ddp_mode": lambda: "ddp_optimizer"} if known else {}


def _load(module: _Late) -> Any:
    """Run the code of the real module in the stand-in, and return the module.

    Raises any error from that code. After an error, the next import of torch._dynamo bypasses the
    stand-in.
    """
    with _lock:
        if not isinstance(module, _Late):
            return module  # Another thread loaded the module first, or this thread is already running its code.
        names = vars(module)
        spec, disabled = names["__spec__"], names["_disabled"]
        sys.meta_path.remove(names["_finder"])
        for name in ("_finder", "_disabled", "graph_break", "disable", "trace_rules", "utils"):
            del names[name]
        object.__setattr__(module, "__class__", ModuleType)
        try:
            with uncollected():
                spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(NAME, None)
            vars(sys.modules["torch"]).pop("_dynamo", None)
            raise
        for function in disabled:
            vars(function).pop(_KEPT, None)  # Without the cached result, torch calls the real `disable` next time.
        return module
