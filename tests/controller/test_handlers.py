"""How kopf is configured to retry its requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sized

from ddpjob.controller.handlers import kopf_settings
from ddpjob.controller.operator_settings import Settings


def test_a_long_outage_of_the_api_server_does_not_end_the_operator() -> None:
    backoffs = kopf_settings(Settings(key=b"0123456789abcdef")).networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    assert not isinstance(backoffs, Sized), "kopf counts attempts if the sequence has a length"
    for _ in range(2):
        tries = list(itertools.islice(backoffs, 100))
        assert len(tries) == 100, "the sequence never ends, for any request"
        assert tries[0] == 1
        assert max(tries) <= 5
