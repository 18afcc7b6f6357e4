"""The checkpoint folder: when to save, who writes, what is kept, and which checkpoint a start resumes from."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob_trainer.checkpoint_file import Snapshot, check, decode, encode, write_atomically
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.fence import Claim
from ddpjob_trainer.fields import from_env
from ddpjob_trainer.group import Group

_FILE = re.compile(r"step-(\d{9})\.pt")
_NOTHING, _BROKEN = -1, -2


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig:
    """When and where checkpoints are saved. One is always saved at the end of an epoch and at SIGTERM."""

    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_CHECKPOINT_DIR"))
    """Folder of checkpoints; without it RUN/checkpoints."""
    shared: bool = field(default=True, metadata=from_env("DDPJOB_CHECKPOINT_SHARED"))
    """true: every node sees the same folder, and rank 0 writes. false: each node has its own; one process of each node writes, and
    a start resumes from the newest checkpoint that any node still has."""
    every_steps: int = 0
    """Save each so many steps; 0: not by steps."""
    every_seconds: float = 60.0
    """Save each so many seconds; 0: not by time."""
    keep: int = 3
    """Whole checkpoints to keep."""
    resume: bool = True
    """Go on from the newest whole checkpoint. false: train anew, which is refused while the folder holds checkpoints."""


class CheckpointFolder:
    """Checkpoints in one folder, as seen by one rank; `writes` says whether this rank reads and writes the folder at all."""

    def __init__(self, config: CheckpointConfig, path: Path, group: Group) -> None:
        if config.keep < 1:
            raise CheckpointError(f"checkpoint.keep: {config.keep} is less than 1; keep at least the newest checkpoint")
        self._config, self.path, self._group = config, path, group
        self.writes = group.rank == 0 if config.shared else group.local_rank == 0
        self._last_save = time.monotonic()
        if self.writes:
            prepare_folder(path, "checkpoint.dir or DDPJOB_CHECKPOINT_DIR")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps by rank 0's clock and count."""
        by_steps = self._config.every_steps > 0 and step % self._config.every_steps == 0
        by_time = 0 < self._config.every_seconds <= time.monotonic() - self._last_save
        return self._group.rank == 0 and (by_steps or by_time)

    def claim(self, claim: Claim) -> None:
        """Make this life of the job the only one that may write. Raises FencedError when a newer one has the folder."""
        self._claim = claim
        if self.writes and self._config.shared:
            claim.take(self.path)
        if self.writes:
            for leftover in self.path.glob(".step-*.tmp"):
                leftover.unlink(missing_ok=True)

    def save(self, snapshot: Snapshot, step: int) -> None:
        """Write a checkpoint, drop old ones. Raises CheckpointError when the folder cannot be written, FencedError when it is not ours."""
        self._last_save = time.monotonic()
        if not self.writes:
            return
        fence = (lambda: self._claim.check(self.path)) if self._config.shared else None
        target = self.path / f"step-{step:09d}.pt"
        try:
            write_atomically(target, encode(snapshot, step), fence)
            for _, path in self._files()[self._config.keep :]:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {target} cannot be written: {error.strerror}; older ones in the folder are whole. Make room or mend the volume"
            ) from error
        self._last_save = time.monotonic()

    def skipped(self) -> None:
        """Another rank has just saved: the time until the next one is due begins anew here as well."""
        self._last_save = time.monotonic()

    def newest(self) -> Snapshot | None:
        """The newest whole checkpoint that any writing rank holds, on every rank; None when there is none at all.

        A broken one is named in a warning. Raises CheckpointError when all are broken, on every rank.
        """
        step, content = self._newest_of_mine() if self.writes else (_NOTHING, None)
        steps = self._group.gather(step)
        if max(steps) < 0:
            if _BROKEN in steps:
                raise CheckpointError(
                    f"no checkpoint in {self.path} is whole (the warnings of rank {steps.index(_BROKEN)} name each);"
                    f" nothing was overwritten. Restore one, or move them away or set checkpoint.dir to train anew"
                )
            return None
        if not self._config.resume:
            raise CheckpointError(
                f"checkpoint.resume=false, and {self.path} holds a checkpoint of step {max(steps)}:"
                f" set checkpoint.dir to another folder, or move it away"
            )
        return decode(self._group.broadcast_bytes(content, steps.index(max(steps))))

    def _newest_of_mine(self) -> tuple[int, bytes | None]:
        found = self._files()
        for step, path in found:
            try:
                content = path.read_bytes()
                if check(content) == step:
                    return step, content
                problem = "of another step than its name says"
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"not readable: {error.strerror}"
            print(f"warning: checkpoint {path} is {problem}; trying the next older one", file=sys.stderr, flush=True)
        return (_BROKEN if found else _NOTHING), None

    def _files(self) -> list[tuple[int, Path]]:
        """(step, path), newest first."""

        def matches() -> Iterator[tuple[int, Path]]:
            for path in self.path.iterdir():
                if match := _FILE.fullmatch(path.name):
                    yield int(match[1]), path

        return sorted(matches(), reverse=True)


def prepare_folder(path: Path, keys: str) -> None:
    """Make a folder and prove that it can be written. Raises CheckpointError naming the path, the reason and the remedy."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        raise CheckpointError(
            f"folder {path} cannot be written ({error.strerror}): mount it writable for uid {os.getuid()}, or set {keys} to another folder"
        ) from error
