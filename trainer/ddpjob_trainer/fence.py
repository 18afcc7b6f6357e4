"""Who may write into a shared checkpoint folder: the newest life of the job, and no zombie of an older one."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpjob_trainer.atomic import write_atomically
from ddpjob_trainer.errors import CheckpointError, ConfigError, FencedError

EXIT_FENCED = 79
_NAME = "fence.json"
_VARIABLE = "DDPJOB_FENCE"


def place_from_env() -> tuple[int, int]:
    """(generation, round) that this process was started in; (0, 0) outside of a job. Raises ConfigError.

    The launcher gives each worker DDPJOB_FENCE; without a launcher the pod's own DDPJOB_GENERATION and DDPJOB_ROUND count.
    """
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return int(os.environ.get("DDPJOB_GENERATION") or 0), int(os.environ.get("DDPJOB_ROUND") or 0)
    if not (match := re.fullmatch(r"(\d+)\.(\d+)", text)):
        raise ConfigError(f"{_VARIABLE}={text!r}: must be GENERATION.ROUND, two whole numbers; leave it to the launcher, or unset it")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Claim:
    """One life of the job: generation and round of the group (the highest among its ranks), and a random number of its own."""

    generation: int
    round: int
    life: int
    job: str = os.environ.get("DDPJOB_UID", "")
    """A job that was deleted and made again, or run again, counts from zero: only lives of one job are compared."""
    host: str = socket.gethostname()
    time: float = 0.0

    def take(self, folder: Path) -> None:
        """Claim the folder. Raises FencedError when a newer generation or round has claimed it."""
        found = _read(folder)
        if found is not None and found.job == self.job and found.place > self.place:
            raise FencedError(self._refusal(folder, found))
        claim = asdict(self) | {"time": time.time()}
        write_atomically(folder / _NAME, json.dumps(claim).encode())

    def check(self, folder: Path) -> None:
        """Raises FencedError when another life has claimed the folder since, CheckpointError when the claim is gone or damaged."""
        found = _read(folder)
        if found is None:
            raise CheckpointError(f"checkpoint folder {folder} has lost its {_NAME}; a running job's folder must be left alone")
        if found.life == self.life:
            return
        if found.job == self.job and found.place < self.place:
            self.take(folder)  # An older life read the claim before we made ours, and wrote its own after.
            return
        raise FencedError(self._refusal(folder, found))

    @property
    def place(self) -> tuple[int, int]:
        """What lives of one job are compared by."""
        return self.generation, self.round

    def _refusal(self, folder: Path, found: Claim) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
        return (
            f"checkpoint folder {folder} was claimed on {since} by {found.host} (generation {found.generation}, round {found.round});"
            f" this process belongs to generation {self.generation}, round {self.round} and writes nothing more."
            f" Two jobs need two folders: set checkpoint.dir"
        )


def _read(folder: Path) -> Claim | None:
    path = folder / _NAME
    try:
        return Claim(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove it when no other job uses the folder") from error
