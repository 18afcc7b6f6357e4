"""Who may write into a shared checkpoint folder: the newest life of the job, and no zombie of an older one."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpjob_trainer.checkpoint_file import write_atomically
from ddpjob_trainer.errors import CheckpointError

_NAME = "fence.json"


@dataclass(frozen=True)
class Claim:
    """One life of the job: rendezvous generation and round (the highest among its ranks), and a random number of its own."""

    generation: int
    round: int
    life: int
    job: str = os.environ.get("DDPJOB_UID", "")
    """A job that was deleted and made again, or run again, counts from zero: only lives of one job are compared."""
    host: str = socket.gethostname()
    time: float = 0.0

    def take(self, folder: Path) -> None:
        """Claim the folder. Raises CheckpointError when a newer generation or round has claimed it."""
        found = _read(folder)
        if found is not None and found.job == self.job and (found.generation, found.round) > (self.generation, self.round):
            raise CheckpointError(self._refusal(folder, found))
        claim = asdict(self) | {"time": time.time()}
        write_atomically(folder / _NAME, json.dumps(claim).encode())

    def check(self, folder: Path) -> None:
        """Raises CheckpointError when another life has claimed the folder since."""
        found = _read(folder)
        if found is None or found.life != self.life:
            raise CheckpointError(self._refusal(folder, found))

    def _refusal(self, folder: Path, found: Claim | None) -> str:
        if found is None:
            return f"checkpoint folder {folder} has lost its {_NAME}; a running job's folder must be left alone"
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
