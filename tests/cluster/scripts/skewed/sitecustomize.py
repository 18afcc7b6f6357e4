"""On PYTHONPATH of a job's pods: the clocks of the even ones are two minutes behind.

Only Python's, and so never ahead: the launcher compares its clock with the times of files, which remain this machine's.
"""

import os
import time

if "DDPJOB_INDEX" in os.environ:
    shift, seconds, nanoseconds = -120 + 120 * (int(os.environ["DDPJOB_INDEX"]) % 2), time.time, time.time_ns
    time.time = lambda: seconds() + shift
    time.time_ns = lambda: nanoseconds() + shift * 10**9
