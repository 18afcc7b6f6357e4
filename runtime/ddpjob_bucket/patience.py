"""Retries requests at startup, so that a short outage of the bucket does not fail all ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from ddpjob_bucket.stored import BucketError, Damaged

TRIES, FIRST_PAUSE = 5, 1.0
"""Number of attempts at startup, and the seconds before the second attempt. Each pause doubles,
and varies by half."""
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
            # All ranks of a job start together, and should not retry at the same moment.
            time.sleep(FIRST_PAUSE * 2 ** (number - 1) * random.Random().uniform(0.5, 1.5))
    return act()
