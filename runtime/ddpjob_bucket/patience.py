"""Retries requests at startup, so that a short outage of the bucket does not fail all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ddpjob_bucket.stored import BucketError, Damaged

TRIES, FIRST_PAUSE = 5, 1.0
"""Number of attempts at startup, and the seconds before the second attempt. Each pause doubles."""
T = TypeVar("T")


def patiently(act: Callable[[], T], say: Callable[[str], None]) -> T:
    """Call `act` up to TRIES times, with pauses, and return its result. Raises BucketError.

    Damaged is raised immediately, because retrying would not help.
    """
    for number in range(1, TRIES):
        try:
            return act()
        except Damaged:
            raise
        except BucketError as error:
            say(f"{error}; retrying")
            time.sleep(FIRST_PAUSE * 2 ** (number - 1))
    return act()
