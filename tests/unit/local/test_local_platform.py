"""Ports of coordinators on one machine."""

from __future__ import annotations

import random

import pytest
from ddpjob.local.local_platform import NoFreePorts, free_ports


def test_two_runs_that_start_together_have_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them listens yet. The second one's coordinators ended one after the other, for ever."""
    first, mark = free_ports()
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: first)
    with pytest.raises(NoFreePorts):
        free_ports()
    mark.close()
    again, mark = free_ports()
    mark.close()
    assert again == first
