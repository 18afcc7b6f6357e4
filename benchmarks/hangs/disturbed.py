"""A plain training script that evaluates or writes a slow checkpoint once in each period.

    torchrun ... disturbed.py FOLDER KIND PERIOD

The newest step is written to FOLDER. KIND is a group of calm.py, and PERIOD is in seconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

EVALUATION_SECONDS = 60.0
CHECKPOINT_BYTES, DISK_BYTES_PER_SECOND = 50 << 17, 1 << 17


def evaluate() -> None:
    """Compute for a minute."""
    end = time.monotonic() + EVALUATION_SECONDS
    while time.monotonic() < end:
        sum(range(10_000))
        time.sleep(0.005)


def write_slowly() -> None:
    """Simulate a failing disk: write to a pipe that is drained slowly."""
    reading, writing = os.pipe()

    def drain() -> None:
        while os.read(reading, DISK_BYTES_PER_SECOND // 4):
            time.sleep(0.25)
        os.close(reading)

    disk = threading.Thread(target=drain)
    disk.start()
    with os.fdopen(writing, "wb", buffering=0) as file:
        for _ in range(CHECKPOINT_BYTES >> 16):
            file.write(bytes(1 << 16))
    disk.join()


def main() -> None:
    """Train, and evaluate or write a checkpoint once in each period."""
    folder, kind, period = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, step, due = dist.get_rank(), 0, time.monotonic() + period
    weights = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    while True:
        if time.monotonic() >= due:
            if (kind, rank) == ("evaluation", 1):
                evaluate()
            elif (kind, rank) == ("slow_disk", 0):
                write_slowly()
            due = time.monotonic() + period
        dist.all_reduce(torch.ones(1))
        weights.grad = torch.ones(1)
        optimizer.step()
        step += 1
        if rank == 0:
            (folder / "step").write_text(f"{step} {time.time()}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
