"""Checks the private parts of torch that both recovery modes need.

A torch that lacks one is refused at the start, and the message names the part. Otherwise the
launcher would end with an AttributeError in the middle of a job, or torchrun's own handler or
barrier would be used unnoticed. Parts that have a fallback are checked where they are used: see
`warm_workers` and the modules `late_*.py`.
"""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter
from typing import Any

ELASTIC = "torch.distributed.elastic."
NAMES = {
    "torch.distributed.run": ("config_from_args", "get_args_parser", "run"),
    "torch.distributed.launcher.api": ("LocalElasticAgent",),
    ELASTIC + "agent.server.api": (
        *("SimpleElasticAgent._rendezvous", "SimpleElasticAgent._initialize_workers"),
        *("SimpleElasticAgent._exit_barrier", "RunResult", "WorkerState.UNHEALTHY"),
    ),
    ELASTIC + "agent.server.local_elastic_agent": (
        *("LocalElasticAgent._start_workers", "LocalElasticAgent._stop_workers"),
        "LocalElasticAgent._monitor_workers",
    ),
    ELASTIC + "multiprocessing.api": (
        "_terminate_process_handler",
        "SubprocessContext.close",
        "SubprocessContext.pids",
    ),
    ELASTIC + "multiprocessing.errors": ("ProcessFailure.__post_init__",),
    ELASTIC + "multiprocessing.subprocess_handler": ("SubprocessHandler.close",),
}
"""The names that are replaced, overridden or called, by module."""
SET = {
    (ELASTIC + "agent.server.api", "SimpleElasticAgent"): ("_worker_group", "_remaining_restarts"),
    (ELASTIC + "agent.server.local_elastic_agent", "LocalElasticAgent"): ("_pcontext",),
    (ELASTIC + "multiprocessing.api", "PContext"): ("error_files",),
    (ELASTIC + "multiprocessing.api", "SubprocessContext"): ("subprocess_handlers",),
    (ELASTIC + "multiprocessing.subprocess_handler", "SubprocessHandler"): ("proc",),
}
"""The attributes that a class's constructor sets."""
CALLED = {
    (ELASTIC + "rendezvous.c10d_rendezvous_backend", "create_backend"): 1,
    (ELASTIC + "rendezvous.api", "RendezvousStoreInfo.build"): 4,
}
"""The number of arguments with which each function is called."""


def missing() -> list[str]:
    """Return the parts that this torch lacks."""
    wanted = [(module, name) for module, names in NAMES.items() for name in names]
    lacks = [f"{module}.{name}" for module, name in wanted if _find(module, name) is None]
    for (module, name), attributes in SET.items():
        code = getattr(getattr(_find(module, name), "__init__", None), "__code__", None)
        names = code.co_names if code is not None else ()
        lacks += [f"{module}.{name}.{attribute}" for attribute in attributes if attribute not in names]
    for (module, name), count in CALLED.items():
        if not _takes(_find(module, name), count):
            lacks.append(f"{module}.{name} with {count} argument{'s' * (count > 1)}")
    return lacks


def _find(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
