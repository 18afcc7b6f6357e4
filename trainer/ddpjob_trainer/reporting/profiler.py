"""Runs torch.profiler for a few steps of training.

The result is a trace for each rank, and a table of the operators that take the most time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = "profile"
_ROWS = 40


class Profile:
    """Profiles COUNT global steps, beginning with step START.

    `steps` is (START, COUNT). If `steps` is empty, nothing is profiled. In the step before START,
    the profiler warms up.
    """

    def __init__(self, steps: tuple[int, ...], run_dir: Path, rank: int) -> None:
        self._first, self._count = (steps[0], steps[1]) if steps else (0, 0)
        self._folder, self._rank = run_dir / FOLDER, rank
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Start or advance the profiler. Must be called before each global step `step` (from 1)."""
        if not self._count or (self._profiler is None and not max(1, self._first - 1) <= step <= self._first):
            return
        if self._profiler is not None:
            self._profiler.step()
            if step >= self._first + self._count:
                self.close()
            return
        from torch import profiler

        warmup = self._first - step
        self._profiler = profiler.profile(
            activities=self._activities(),
            schedule=profiler.schedule(wait=0, warmup=warmup, active=self._count, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profiler.start()

    def close(self) -> None:
        """Write the profile of the steps so far.

        Needed if training ends during the profiled steps.
        """
        if self._profiler is not None:
            profiler, self._profiler, self._count = self._profiler, None, 0
            profiler.stop()

    def _activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]

    def _write(self, profiler: Any) -> None:
        trace, table = self._folder / f"rank-{self._rank}.json.gz", self._folder / f"rank-{self._rank}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            table.write_text(profiler.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=60))
        except OSError as error:
            print(f"warning: the profile cannot be written to {self._folder}: {error}", file=sys.stderr, flush=True)
            return
        if self._rank == 0:
            print(f"profile: {trace} (open in https://ui.perfetto.dev or chrome://tracing), {table}", flush=True)
