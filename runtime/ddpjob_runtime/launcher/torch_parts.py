"""The private APIs of torch that the launcher uses or replaces, and a check that they exist.

torchrun has no hooks for a custom agent, so the launcher replaces five of torchrun's names, always
through this module's functions. All five have existed since torch 2.6, the oldest supported
version.

    torch.distributed.                                  replaced, so that
    launcher.api.LocalElasticAgent                      the coordinator controls the agent
    run.config_from_args                                workers start through worker.py
    elastic.multiprocessing.api.
        _terminate_process_handler                      signals reach only the launcher
        get_subprocess_handler                          workers are forked (Fast mode)
    elastic.multiprocessing.errors.ProcessFailure.
        __post_init__                                   a damaged error file is ignored

agent.py and rendezvous.py override or call the other names in NAMES, SET and CALLED. If a version
of torch lacks one of these names, the launcher refuses it at startup, with a message that contains
the missing name (`missing`). Without this check, the launcher would fail with an AttributeError in
the middle of a job, or silently use torchrun's own handler or barrier. Only
`get_subprocess_handler` has a fallback: workers are started cold, and the log says so.

Three parts of the project do not use this module. worker.py replaces `FileBaton.try_acquire`
itself, because it cannot import other modules. The modules `late_*.py` call the parts of torch that
exist, and report the parts that they cannot find. The trainer has a module of its own for this
purpose, `ddpjob_trainer/private_torch.py`. Neither of the two modules may import the other.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
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
"""Maps modules to the names in them that the launcher replaces, overrides or calls."""
SET = {
    (ELASTIC + "agent.server.api", "SimpleElasticAgent"): ("_worker_group", "_remaining_restarts"),
    (ELASTIC + "agent.server.local_elastic_agent", "LocalElasticAgent"): ("_pcontext",),
    (ELASTIC + "multiprocessing.api", "PContext"): ("error_files",),
    (ELASTIC + "multiprocessing.api", "SubprocessContext"): ("subprocess_handlers",),
    (ELASTIC + "multiprocessing.subprocess_handler", "SubprocessHandler"): ("proc",),
}
"""Maps a class, given by its module and name, to the attributes that its constructor must set."""
CALLED = {
    (ELASTIC + "rendezvous.c10d_rendezvous_backend", "create_backend"): 1,
    (ELASTIC + "rendezvous.api", "RendezvousStoreInfo.build"): 4,
}
"""Maps a function, given by its module and name, to the number of arguments that the launcher
passes.
"""


def missing() -> list[str]:
    """Return the names of the parts that this version of torch lacks."""
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


# ---- replacing


def use_agent(agent: Callable[..., Any]) -> None:
    """Make torchrun call `agent` to create its agent."""
    _replace("torch.distributed.launcher.api", "LocalElasticAgent", lambda _: agent)


def use_signal_handler(handler: Callable[..., None]) -> None:
    """Make torchrun install `handler` for the signals that would otherwise end it."""
    _replace(ELASTIC + "multiprocessing.api", "_terminate_process_handler", lambda _: handler)


def wrap_configuration(wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Wrap the function that turns torchrun's parsed arguments into its configuration.

    `wrap` gets the original function and returns its replacement.
    """
    _replace("torch.distributed.run", "config_from_args", wrap)


def use_worker_handler(make: Callable[[Any], Callable[..., Any]]) -> bool:
    """Make torchrun start workers with the class that `make` returns.

    `make` gets torch's SubprocessHandler. If this version of torch starts workers in an unknown
    way, return False.
    """
    base = _find(ELASTIC + "multiprocessing.subprocess_handler", "SubprocessHandler")
    if not hasattr(base, "_popen") or _find(ELASTIC + "multiprocessing.api", "get_subprocess_handler") is None:
        return False
    handler = make(base)
    _replace(
        ELASTIC + "multiprocessing.api", "get_subprocess_handler", lambda _: lambda *a, **named: handler(*a, **named)
    )
    return True


def tolerate_error_files() -> None:
    """Make torch ignore unreadable error files, which would otherwise end the launcher.

    A full disk can leave an empty error file, and a killed worker can leave an incomplete one.
    """

    def tolerate(read: Callable[[Any], None]) -> Callable[[Any], None]:
        def read_or_leave(failure: Any) -> None:
            try:
                read(failure)
            except Exception:
                path, failure.error_file = failure.error_file, ""
                read(failure)
                # `read_error_file` needs the path to report what is wrong with this file.
                failure.error_file = path

        return read_or_leave

    _replace(ELASTIC + "multiprocessing.errors", "ProcessFailure.__post_init__", tolerate)


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the value of a name with `make(VALUE)`.

    `missing` has already verified that the name exists.
    """
    *owners, attribute = name.split(".")
    place: Any = importlib.import_module(module)
    for owner in owners:
        place = getattr(place, owner, None)
    present = getattr(place, attribute, None)
    if present is None:
        raise RuntimeError(f"this version of torch has no {module}.{name}; use an earlier version (2.6 or later)")
    setattr(place, attribute, make(present))


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
