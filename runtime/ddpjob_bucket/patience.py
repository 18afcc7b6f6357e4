"""Retries requests at startup, so that ranks survive a short outage of the bucket."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from ddpjob_bucket.stored import BucketError, Damaged

TRIES, FIRST_PAUSE = 5, 1.0
"""The number of attempts at startup, and the pause after the first attempt, in seconds. Each later
pause is twice as long as the previous one. Every pause is shortened or lengthened at random, by up
to half.
"""
T = TypeVar("T")


def patiently(act: Callable[[], T], say: Callable[[str], None]) -> T:
    """Call `act` up to TRIES times with pauses in between, and return its result.

    Raises the BucketError of the last attempt. Damaged is raised immediately, because retrying
    would not help.
    """
    for number in range(1, TRIES):
        try:
            return act()
        except Damaged:
            raise
        except BucketError as error:
            say(f"{error}; retrying")
            # Vary the pause, because the ranks of a job start together and should not all retry
            # together.
            time.sleep(FIRST_PAUSE * 2 ** (number - 1) * random.Random().uniform(0.5, 1.5))
    return act()
