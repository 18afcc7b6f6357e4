"""Sets the clocks of pods with an even index back by two minutes, if this folder is on a job's
PYTHONPATH.

Only Python's clock is changed. The clock must not be ahead, because the launcher compares it with
file times, which come from this machine's clock.
"""

import os
import time

if "DDPJOB_INDEX" in os.environ:
    shift, seconds, nanoseconds = -120 + 120 * (int(os.environ["DDPJOB_INDEX"]) % 2), time.time, time.time_ns
    time.time = lambda: seconds() + shift
    time.time_ns = lambda: nanoseconds() + shift * 10**9
