"""Retries a request of a start, so that a short outage of the bucket does not end all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ddpjob_bucket.stored import BucketError, Damaged

TRIES, FIRST_PAUSE = 5, 1.0
"""How often a start tries, and the seconds between the first two tries, doubled each time."""
T = TypeVar("T")


def patiently(act: Callable[[], T], say: Callable[[str], None]) -> T:
    """Return what `act` returns. Raises BucketError; Damaged at once, because it will not heal."""
    for number in range(1, TRIES):
        try:
            return act()
        except Damaged:
            raise
        except BucketError as error:
            say(f"{error}; tried again")
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))
    return act()
