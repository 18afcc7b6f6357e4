"""Simulates a disk or bucket so slow that a collective would time out if the ranks waited in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from ddpjob_trainer.distributed.process_group import Group
from machine import slowness


class Slow:
    """Makes functions slow: a call begins only after the ranks have agreed three times to wait
    longer, and fails if they do not agree.

    `ended` counts the calls that succeeded.
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
