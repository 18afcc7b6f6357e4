"""Times the steps of a loop: of the plain loop, or of the trainer as one of its callbacks.

The wall clock is read while the device is idle, after the warm-up and after the counted steps.
torch's profiler then records a few more steps. The busy share is the time per recorded step in
which the device works, divided by the time of a counted step, because recording slows down the
host, but not the device. Without a GPU, the busy share is the process's CPU time in the counted
steps, divided by that of all cores. Processor time includes the process's data workers.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import descendants, processor_seconds

STEPS = "BENCHMARK_STEPS"
"""Environment variable with the arguments of StepTimer."""
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that occupy the device."""


class StepTimer:
    """Prints the figures as a line of JSON after the counted steps, and again after the recorded
    steps.
    """

    def __init__(self, warm: int, counted: int, recorded: int, batch: int) -> None:
        self._warm, self._end, self._last = warm, warm + counted, warm + counted + recorded
        self._batch, self._began, self._workers, self._profiler = batch, (0.0, 0.0), 0.0, None
        self.figures: dict[str, float | None] = {}

    def on_step(self, step: int, _loss: float = 0.0) -> None:
        """Note that step number `step` (from 1) is complete."""
        if step not in (self._warm, self._end, self._last):
            return
        if on_gpu := torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        if step == self._warm:
            self._workers = _workers_seconds()
            self._began = time.perf_counter(), time.process_time()  # Searching /proc takes time, too.
        elif step == self._end:
            wall, own = (after - before for after, before in zip(now, self._began, strict=True))
            steps = self._end - self._warm
            busy = None if on_gpu else own / wall / len(os.sched_getaffinity(0))
            self.figures = {
                "images_per_second": self._batch * steps / wall,
                "step_ms": 1000 * wall / steps,
                "busy": busy,
            }
            self.figures["processor_ms"] = 1000 * (own + _workers_seconds() - self._workers) / steps
        elif self._profiler is not None:
            self._profiler.stop()
            with tempfile.NamedTemporaryFile(suffix=".json") as trace:
                self._profiler.export_chrome_trace(trace.name)
                worked = working_seconds(json.loads(Path(trace.name).read_text())["traceEvents"])
            # Without permission to read the device's counters, a trace has no kernels.
            share = 1000 * worked / (self._last - self._end) / self.figures["step_ms"]
            self.figures["busy"] = share if worked else None
        if self.figures:
            # A line in one write, because torchrun's ranks share an output and do not buffer it.
            print(json.dumps(self.figures) + "\n", end="", flush=True)
        if on_gpu and step == self._end < self._last:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()


def _workers_seconds() -> float:
    """Return the CPU time of this process's descendants so far, which are its data workers."""
    return sum(map(processor_seconds, descendants(os.getpid())))


def working_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Return how long the device worked. Kernels that overlap count once."""
    total = end = 0.0
    for first, length in sorted((event["ts"], event["dur"]) for event in events if event.get("cat") in WORK):
        total += max(0.0, first + length - max(first, end))
        end = max(end, first + length)
    return total / 1e6


def callback() -> StepTimer:
    """Return the timer that STEPS describes, for `train.callbacks`."""
    return StepTimer(*map(int, os.environ[STEPS].split(",")))
