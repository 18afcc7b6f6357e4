"""Deliberate defects, with which tests prove that the seeds find defects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from ddpjob.core import gates, suspend
from ddpjob.core.failures import merge_causes, node_health
from ddpjob.core.failures.classify import Cause, End
from ddpjob.core.follow import attribution
from ddpjob.core.plan import slots
from ddpjob.core.view import View
from ddpjob_runtime.coordinator.coordinator import Coordinator
from ddpjob_runtime.coordinator.hang import HangWatch
from ddpjob_runtime.coordinator.incidents import Incidents
from ddpjob_runtime.coordinator.round import Round

from .story import KINDS


@dataclass(frozen=True)
class Defect:
    """Replaces `owner.attribute` with `wrong`. `seed` is the first seed that finds the defect."""

    part: str
    faults: tuple[str, ...]
    """The kinds of fault to play, so that few seeds are needed. Empty means all."""
    owner: Any
    attribute: str
    wrong: Any
    seed: int

    @contextmanager
    def applied(self) -> Iterator[None]:
        with mock.patch.object(self.owner, self.attribute, self.wrong):
            yield


class _Blind(View):
    """A view that never sees the pods of its slots."""

    pods = property(lambda self: (None,) * len(self.status.slots))  # type: ignore[assignment]
    coordinator = property(lambda self: None)  # type: ignore[assignment]


def _no_new_generation(view: View) -> Any:
    return _right_suspend(_Blind(view.job, view.status, view.world, view.now))


_right_suspend = suspend.suspend

DEFECTS: dict[str, Defect] = {
    "an incident is counted at each reconcile": Defect(
        "core", (), attribution, "with_seen", lambda status, *_: status, 9
    ),
    "every end of a pod is a cause": Defect(
        "core", ("exit-pair", "watch-gap", "kill-operator"), merge_causes, "_belongs", lambda *_: False, 34
    ),
    "a consequence counts": Defect(
        "core",
        ("exit-pair", "two-workers", "exit"),
        merge_causes,
        "_consequence",
        lambda finding, cause: replace(finding.restart, round=cause.round),
        0,
    ),
    "the names of dropped slots are used again": Defect("core", ("scale",), slots, "_unused", lambda status: 0, 3),
    "a suspended job forgets the pods that no status shows": Defect(
        "core", ("suspend", "kill-operator", "template"), gates, "suspend", _no_new_generation, 9
    ),
    "a move to another node counts as a failure": Defect(
        "core", ("agent",), node_health, "End", lambda _, message: End(Cause.WORKER_FAILED, message), 1
    ),
    "members are not asked to stop their workers": Defect(
        "coordinator", ("hang", "isolate"), Round, "_end_workers", lambda self, *_, **__: None, 9
    ),
    "the end of a connection is not noticed": Defect(
        "coordinator", ("force-delete", "isolate"), Coordinator, "lost", lambda self, member, why: None, 21
    ),
    "a break is not recorded": Defect("coordinator", ("worker",), Incidents, "add", lambda self, *_: None, 4),
    "a hang is not noticed": Defect("coordinator", ("hang",), HangWatch, "due", lambda self: None, 0),
}


def finds(seed: int, faults: tuple[str, ...] = ()) -> str:
    """Play a seed, and return the violation that it finds, or an empty string."""
    story = KINDS["agents" if "agent" in faults else ""](seed)
    story.only = faults
    try:
        asyncio.run(story.run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def first_that_finds(defect: Defect, limit: int) -> tuple[int, str]:
    """Return the first seed below `limit` that finds a defect, with its message, or -1."""
    with defect.applied():
        for seed in range(limit):
            found = finds(seed, defect.faults)
            if found:
                return seed, found
    return -1, ""
