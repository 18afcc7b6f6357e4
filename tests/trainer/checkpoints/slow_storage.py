"""A disk or a bucket as slow as ranks that waited for it in a collective could not bear."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ddpjob_trainer.distributed.process_group import Group
from machine import slowness


class Slow:
    """Makes of a function one that begins only when the ranks have agreed three times that it takes longer.

    A call fails where nobody agrees while it waits. `ended` counts the calls that have not.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended = self.reported = self._agreed = 0
        gather = Group.gather

        def counted(group: Group, value: int) -> list[int]:
            self._agreed += 1
            return gather(group, value)

        monkeypatch.setattr(Group, "gather", counted)

    def __call__(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*given: Any) -> Any:
            enough, until = self._agreed + 3, time.monotonic() + 20 * slowness()
            while self._agreed < enough:
                assert time.monotonic() < until, "the ranks do not agree meanwhile that it takes longer"
                time.sleep(0.01)
            self.ended += 1
            return act(*given)

        return slowly

    def alive(self) -> None:
        """What a rank calls to report that it waits; `reported` counts it."""
        self.reported += 1
