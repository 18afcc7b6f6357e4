"""Makes SIGTERM set a flag on which the ranks agree, so that all of them stop after the same step.

Only the ranks of a deleted pod get SIGTERM, but all ranks must save after the same step. So all
ranks exchange the flag whenever the script calls `should_stop`. The flag is one number, sent in a
separate gloo group. This exchange does not wait for the GPU, and does not mix with the script's
collectives. The save must be complete before the pod's grace period is over.

Example: node 1 gets SIGTERM during step 41. After step 41, `should_stop()` is true on every rank.
All ranks save, wait for each other, and exit with EXIT_STEPPED_ASIDE. This does not count as a
failure.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ddpjob_pod.job_environment import GRACE_SECONDS, JobEnvironment
from ddpjob_pod.sigterm import SigtermFlag

_MARGIN = 5.0
"""Seconds of the grace period that are reserved for the work after the save."""
_GLOO_DEFAULT = datetime.timedelta(minutes=30)
"""torch's default timeout for a collective over gloo."""


def _say_asked() -> None:
    rank = os.environ.get("RANK", "0")
    what = "was asked to stop; it will save at its next call to should_stop(), if there is time"
    # Write to the descriptor instead of sys.stderr, because the signal may have interrupted a write
    # to sys.stderr.
    with contextlib.suppress(OSError):
        os.write(2, f"ddpjob_report: SIGTERM: rank {rank} {what}\n".encode())


class _State:
    flag = SigtermFlag(_say_asked)
    """The flag that is set if this process was asked to stop."""
    since: float | None = None
    """When this process learned that a rank was asked to stop, as a value of time.monotonic()."""
    agreed = False
    """Whether the ranks have agreed that one of them was asked to stop."""
    warned = False
    world: Callable[[], Any] = staticmethod(lambda: None)
    group: Callable[[], Any] = staticmethod(lambda: None)
    """The separate gloo group, created for the script's process group `world`. torch owns both
    groups, and they end when the script destroys them.
    """


def agreed() -> bool:
    """Whether any rank was asked to stop.

    All ranks must call this the same number of times, so that all get the same result.
    """
    _listen()
    if not _State.agreed:
        asked_at, distributed = _State.flag.asked_at, torch_distributed()
        asked = asked_at is not None
        _State.agreed = asked if distributed is None else _any_rank(distributed, asked)
        if _State.agreed:
            _State.since = time.monotonic() if asked_at is None else asked_at
    return _State.agreed


def seconds_left() -> float:
    """Return how many seconds of the pod's grace period remain, minus a margin.

    If no rank was asked to stop, this is the whole grace period minus the margin.
    """
    since = _State.flag.asked_at if _State.since is None else _State.since
    spent = 0.0 if since is None else time.monotonic() - since
    grace = JobEnvironment.read().grace
    return max(0.0, (GRACE_SECONDS if grace is None else grace) - _MARGIN - spent)


def wait_for_others() -> None:
    """Wait until all ranks have called this. Do nothing unless the ranks have agreed to stop."""
    distributed = torch_distributed()
    if _State.agreed and distributed is not None:
        # A RuntimeError means that a rank is gone. There is no need to wait for it.
        with contextlib.suppress(RuntimeError):
            distributed.barrier(gloo_group(distributed))


def _listen() -> None:
    """Make SIGTERM set the flag.

    This is repeated at each check, because a framework may have set its own handler in the
    meantime. Lightning does so when training begins.
    """
    if _State.flag.is_listening:
        return
    if threading.current_thread() is not threading.main_thread():
        if not _State.warned:
            _State.warned = True
            sys.stderr.write(
                "ddpjob_report: SIGTERM ends this process without saving; call should_stop() in the main thread\n"
            )
        return
    _State.flag.listen()


def torch_distributed() -> Any:
    """Return torch.distributed if a process group of several ranks exists, otherwise None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None


def gloo_group(distributed: Any) -> Any:
    """Return a separate group over gloo, or the script's own group if torch lacks gloo.

    Collectives in the separate group do not wait for a GPU, and do not mix with those of the
    script.
    """
    world = distributed.group.WORLD
    if _State.world() is not world:
        gloo = distributed.is_gloo_available()
        group = distributed.new_group(backend="gloo", timeout=_timeout(world)) if gloo else world
        _State.group, _State.world = weakref.ref(group), weakref.ref(world)
    return _State.group()


def _timeout(world: Any) -> Any:
    """Return the timeout that the script has set for its group; None if gloo's default is at least
    as long.
    """
    given = []
    for device in getattr(world, "_device_types", ()):
        # An error means that this backend or this version of torch does not reveal its timeout.
        with contextlib.suppress(AttributeError, RuntimeError):
            given.append(world._get_backend(device).options._timeout)
    longest = max(given, default=_GLOO_DEFAULT)
    return longest if longest > _GLOO_DEFAULT else None


def _any_rank(distributed: Any, asked: bool) -> bool:
    torch, group = sys.modules["torch"], gloo_group(distributed)
    device = "cpu" if distributed.is_gloo_available() else torch.accelerator.current_accelerator()
    flag = torch.tensor([int(asked)], device=device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=group)
    return bool(flag.item())
