"""Ports of coordinators on one machine."""

from __future__ import annotations

import random

import pytest
from ddpjob.local.local_platform import NoFreePorts, free_ports


def test_two_runs_that_start_together_use_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the ports is in use yet. Regression: the second run's coordinators failed one after
    another, forever.
    """
    first, mark = free_ports()
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: first)
    with pytest.raises(NoFreePorts):
        free_ports()
    mark.close()
    again, mark = free_ports()
    mark.close()
    assert again == first
