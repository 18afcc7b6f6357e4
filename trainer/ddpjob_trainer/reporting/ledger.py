"""The ledger, in which each rank records the samples of each step as one JSON line.

The line is flushed before the ranks exchange gradients. A step that was executed on any rank is
therefore recorded on all ranks, even if a rank is killed in the middle of the step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.errors import LedgerError

if TYPE_CHECKING:  # These modules import torch, which is not needed for reading a ledger.
    from ddpjob_trainer.data.sampler import Step
    from ddpjob_trainer.distributed.process_group import Group
    from ddpjob_trainer.lifecycle.fence import Claim

FOLDER = "ledger"


class Ledger:
    """Writes one process's file in `run_dir`/ledger, unless the ledger is turned off.

    `python -m ddpjob_trainer ledger FOLDER` checks that each epoch took each sample exactly once,
    across all restarts.
    """

    def __init__(self, run_dir: Path, group: Group, claim: Claim, *, wanted: bool = True) -> None:
        self._group = group
        self._job = claim.job
        self._common = {"round": claim.round, "generation": claim.generation, "incarnation": claim.incarnation}
        self._file = None
        if wanted:
            node = JobEnvironment.read().host
            path = run_dir / FOLDER / f"rank-{group.rank}-{node}-{os.getpid()}-{time.time_ns()}.jsonl"
            with _writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("x", encoding="utf-8")

    def start(self, step: int, size: int, epochs: int, repeats: int = 1) -> None:
        """Record that this process starts or resumes training after `step` steps.

        The training set has `size` samples, and training has `epochs` epochs. If `repeats` is above
        1, the number `sample + repeat * size` in a step stands for one version of `sample`.
        """
        about = {"job": self._job, "rank": self._group.rank, "world": self._group.world, "size": size, "epochs": epochs}
        self._write({"start": step, **about, **({"repeats": repeats} if repeats > 1 else {})})

    def step(self, number: int, step: Step) -> None:
        """Record the samples that this rank takes in global step `number` (from 1).

        Must be called before the ranks exchange the step's gradients.
        """
        self._write(
            {
                "epoch": step.epoch + 1,
                "step": number,
                "rank": self._group.rank,
                "world": self._group.world,
                "samples": step.mine,
            }
        )

    def left_out(self, number: int) -> None:
        """Record that global step `number` was skipped for a non-finite loss or gradient."""
        self._write({"leftOut": number})

    def unreadable(self, number: int, images: int) -> None:
        """Record how many images could not be read in global step `number`, over all ranks.

        These images had a weight of zero.
        """
        self._write({"unreadable": images, "of": number})

    def checkpoint(self, step: int) -> None:
        """Record that a checkpoint after `step` steps is on disk."""
        self._write({"checkpoint": step})

    def end(self, step: int, early: int | None = None) -> None:
        """Record that training is complete after `step` steps.

        `early` is the number of complete epochs if a callback ended the training before its last
        epoch.
        """
        self._write({"end": step, **({} if early is None else {"epochs": early})})

    def _write(self, fields: dict[str, Any]) -> None:
        if self._file is not None:
            with _writing(self._file.name):
                self._file.write(json.dumps({"time": time.time()} | self._common | fields) + "\n")
                self._file.flush()


@contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    """Raise LedgerError if a line cannot be written within this context.

    A ledger with a gap would not prove anything.
    """
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be written ({error.strerror}); free some space, repair the volume, or set"
            " train.ledger=false"
        ) from error
