"""The ledger: each rank writes down which samples each step takes, one JSON line, flushed before the step's gradients are exchanged.

A step that was executed anywhere is then written down everywhere, even if a rank is killed in the middle of it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ddpjob_trainer.fence import Claim
from ddpjob_trainer.group import Group
from ddpjob_trainer.sampler import Step

FOLDER = "ledger"


class Ledger:
    """One rank's file in RUN/ledger, one per process; writes nothing when it is not wanted."""

    def __init__(self, run_dir: Path, wanted: bool, group: Group, claim: Claim) -> None:
        self._group = group
        self._common = {"round": claim.round, "generation": claim.generation, "life": claim.life}
        self._file = None
        if wanted:
            folder = run_dir / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            name = f"rank-{group.rank}-{os.environ.get('DDPJOB_POD', socket.gethostname())}-{os.getpid()}-{time.time_ns()}.jsonl"
            self._file = (folder / name).open("x", encoding="utf-8")

    def start(self, step: int, size: int, epochs: int) -> None:
        """This life goes on after `step` steps, over `size` training samples and `epochs` epochs."""
        self._write({"start": step, "rank": self._group.rank, "world": self._group.world, "size": size, "epochs": epochs})

    def step(self, number: int, step: Step) -> None:
        """Global step `number` (from 1) takes these samples on this rank."""
        self._write({"epoch": step.epoch + 1, "step": number, "rank": self._group.rank, "world": self._group.world, "samples": step.mine})

    def checkpoint(self, step: int) -> None:
        """A checkpoint after `step` steps is on disk."""
        self._write({"checkpoint": step})

    def end(self, step: int) -> None:
        """Training is complete after `step` steps."""
        self._write({"end": step})

    def _write(self, fields: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"time": time.time()} | self._common | fields) + "\n")
            self._file.flush()
