"""A job's script that only reports figures. It slows down, saves nothing, or stops its steps."""

from __future__ import annotations

import argparse
import time

import ddpjob_report
from ddpjob_report import link

parser = argparse.ArgumentParser()
parser.add_argument("--slow-after", type=float, default=1e9, help="seconds after which a step takes four times as long")
parser.add_argument("--hang-after", type=float, default=1e9, help="seconds after which there are no more steps")
parser.add_argument("--saved-ago", type=float, default=0.0, help="age of the newest checkpoint at the start")
parser.add_argument("--snapshot-bytes", type=float, help="memory needed for two states, which the pod does not have")
parser.add_argument("--slow-rank", action="store_true", help="report that rank 1 takes twice as long as the others")
arguments = parser.parse_args()

SAMPLES = 64
if arguments.snapshot_bytes is not None:
    link.post({"snapshotBytes": arguments.snapshot_bytes})
began = time.time()
step = 0
while True:
    before = time.time()
    while before - began > arguments.hang_after:
        time.sleep(1)
    time.sleep(1.0 if before - began > arguments.slow_after else 0.25)
    step += 1
    speed = SAMPLES / (time.time() - before)
    if arguments.slow_rank:
        link.post({"stragglers": [{"rank": 1, "slowdown": 2.0, "cost": 0.5}]})
    ddpjob_report.report(step=step, samples_per_second=speed, checkpointTime=began - arguments.saved_ago)
