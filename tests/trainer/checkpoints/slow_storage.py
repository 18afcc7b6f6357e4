"""A disk or bucket that is so slow that a collective in which ranks waited for it would time
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ddpjob_trainer.distributed.process_group import Group
from machine import slowness


class Slow:
    """Return a function that begins only after the ranks have agreed three times to wait longer.

    A call fails if the ranks do not agree while it waits. `ended` counts the other calls.
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
                assert time.monotonic() < until, "the ranks did not agree in time to wait longer"
                time.sleep(0.01)
            self.ended += 1
            return act(*given)

        return slowly

    def alive(self) -> None:
        """Count one report from a waiting rank."""
        self.reported += 1
