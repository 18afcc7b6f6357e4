"""TensorBoard's event files in RUN/tensorboard.

After a restart, events of steps after the checkpoint are replaced (purge_step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpjob_trainer.config.sections import ReportConfig
from ddpjob_trainer.reporting.sinks.sink import Run, Sink


class TensorBoard:
    """Writes events, and flushes them every ten seconds."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1, flush_secs=10)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers as TensorBoard's scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, complete: bool) -> None:
        """Flush and close the event file."""
        self._writer.close()


def prepare(config: ReportConfig, run: Run) -> Callable[[], Sink]:
    """Return a function that imports and opens TensorBoard, to be called in the background."""
    return lambda: TensorBoard(run)
