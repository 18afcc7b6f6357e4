"""Applies the environment variables that a script sets before `import torch`, even though torch is
already imported.

A worker may be forked from a process that has imported torch. In that case, torch is hidden from
the worker until its program imports torch. At that import, torch rereads the variables that the
program has changed. If torch cannot reread some of them, a line on stderr names those variables.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

READ_ONCE = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "MKLDNN_", "DNNL_", "ONEDNN_", "SYMPY_",
    "PYTORCH_JIT", "KINETO_", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_CUDA_SANITIZER", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_", "TORCH_LINALG_PREFER_",
)  # fmt: skip
"""Prefixes of variables that torch or its libraries read only when they are loaded, and cannot read
again.
"""


def hide_torch(paths: list[str]) -> None:
    """Remove torch from sys.modules until the program imports it.

    The import restores torch and finds out which environment variables the program has changed.
    `paths` are the entries that torch has added to sys.path. They are also removed until the
    import.
    """
    hidden = {name: module for name, module in sys.modules.items() if name == "torch" or name.startswith("torch.")}
    for name in hidden:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in paths]
    sys.meta_path.insert(0, Reveal(hidden, paths, hide_loggers()))


def hide_loggers() -> dict[str, logging.Logger]:
    """Remove torch's loggers, and return them by name.

    If they stayed, logging.config would disable them, as it does with all existing loggers.
    """
    known = logging.root.manager.loggerDict
    names = [name for name in known if name == "torch" or name.startswith("torch.")]
    found = {name: known.pop(name) for name in names}
    return {name: logger for name, logger in found.items() if isinstance(logger, logging.Logger)}


def reveal_loggers(hidden: dict[str, logging.Logger]) -> None:
    """Restore torch's loggers.

    If the program has meanwhile configured a logger of the same name, the program's settings are
    kept, and torch's own logger object shares the state of the program's logger.
    """
    manager: Any = logging.root.manager
    for name, logger in hidden.items():
        made = manager.loggerDict.get(name)
        if isinstance(made, logging.Logger):
            made.handlers += [handler for handler in logger.handlers if handler not in made.handlers]
            made.level = logger.level or made.level
            logger.__dict__ = made.__dict__
            continue
        manager.loggerDict[name] = logger
        manager._fixupParents(logger)
        # Here, `made` is a placeholder: the program has only created a child of this logger.
        if made is not None:
            manager._fixupChildren(made, logger)
    manager._clear_cache()


class Reveal:
    """Import hook that restores torch's hidden modules when the program imports torch."""

    def __init__(self, hidden: dict[str, ModuleType], paths: list[str], loggers: dict[str, logging.Logger]) -> None:
        self._hidden, self._paths, self._loggers, self._before = hidden, paths, loggers, dict(os.environ)
        self._spec = hidden["torch"].__spec__

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for the hidden torch; None for every other module.

        torch's submodules do not need a spec, because Python imports torch first.
        """
        if name != "torch" or self._spec is None:
            return None
        spec = ModuleSpec(name, self, origin=self._spec.origin, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = self._spec.submodule_search_locations
        spec.has_location, spec.cached = True, self._spec.cached
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the hidden module instead of creating a new one."""
        return self._hidden["torch"]

    def exec_module(self, module: ModuleType) -> None:
        """Restore torch's modules without running torch's code again.

        Then make torch reread the variables that have changed.
        """
        module.__spec__ = self._spec
        sys.meta_path.remove(self)
        sys.modules.update(self._hidden)
        sys.path += self._paths
        reveal_loggers(self._loggers)
        names = {*self._before, *os.environ}
        changed = {name for name in names if self._before.get(name) != os.environ.get(name)}
        if changed:
            read_again(changed)


def read_again(changed: Iterable[str]) -> None:
    """Make torch reread these variables, and report those that it cannot reread."""
    left = {name for name in changed if name.startswith(READ_ONCE)}
    for names, read in RENEWALS:
        found = names.intersection(changed)
        if found:
            # If this version of torch lacks the function, the variable remains in `left` and is
            # reported.
            with contextlib.suppress(Exception):
                read(sys.modules["torch"])
                left -= found
    read_configurations(changed)
    if left:
        with contextlib.suppress(OSError):  # The disk may be full.
            sys.stderr.write(
                f"ddpjob: the script set {', '.join(sorted(left))} before `import torch`, but with recovery.mode "
                "Fast, torch had already been imported, so this has no effect; set them in spec.env\n"
            )


def read_threads(torch: Any) -> None:
    """Set torch's number of threads per operation from the variables of OpenMP and MKL."""
    torch.set_num_threads(int(os.environ.get("MKL_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]))


def read_allocator(torch: Any) -> None:
    """Set the options of the GPU allocator, which the program has not used yet."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    # Versions of torch without this function read the variable when the allocator is first used.
    if change is not None:
        change(text)


RENEWALS: tuple[tuple[frozenset[str], Callable[[Any], None]], ...] = (
    (frozenset({"OMP_NUM_THREADS", "MKL_NUM_THREADS"}), read_threads),
    (frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}), read_allocator),
    (frozenset({"TORCH_DISTRIBUTED_DEBUG"}), lambda torch: torch.distributed.set_debug_level_from_env()),
    (frozenset({"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT"}), lambda torch: torch._logging._init_logs()),
)


def read_configurations(changed: Iterable[str]) -> None:
    """Update the default settings in torch's configuration modules to suit the new environment.

    dynamo and inductor have such modules, for example. If the source of a module mentions one of
    the changed variables, a copy of the module is run to find its new defaults.
    """
    words = [name.encode() for name in changed]
    for name, module in list(sys.modules.items()):
        settings = getattr(module, "_config", None) if name.endswith("config") else None
        file = getattr(module, "__file__", None)
        if not name.startswith("torch.") or not isinstance(settings, dict) or not file:
            continue
        # This version of torch may be different, or its source may be missing.
        with contextlib.suppress(Exception):
            source = Path(file).read_bytes()
            if any(word in source for word in words):
                replace_defaults(name, module, settings, file)


def replace_defaults(name: str, module: Any, settings: dict[str, Any], file: str) -> None:
    """Run a copy of the module, and adopt the copy's defaults.

    Values that the program has set itself are kept.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    fresh: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = fresh
    try:
        spec.loader.exec_module(fresh)
    finally:
        sys.modules[name] = module
    for key, entry in fresh._config.items():
        for field in ("default", "env_value_force", "env_value_default"):
            if key in settings and hasattr(entry, field):
                setattr(settings[key], field, getattr(entry, field))
    module._is_dirty = True  # Otherwise, the module would keep the hash of its old settings.
