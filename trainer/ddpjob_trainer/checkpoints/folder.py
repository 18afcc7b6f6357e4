"""The checkpoint folder: when to save, who writes, what is kept, and which checkpoint a start resumes from."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpjob_trainer.atomic import discard
from ddpjob_trainer.checkpoints import best, parts, retention, torch_file
from ddpjob_trainer.checkpoints.config import CheckpointConfig, Format
from ddpjob_trainer.checkpoints.facts import Facts
from ddpjob_trainer.checkpoints.retention import Entry
from ddpjob_trainer.checkpoints.shelf import BROKEN, NOTHING, Shelf, prepare_folder
from ddpjob_trainer.checkpoints.snapshot import Snapshot, Staging
from ddpjob_trainer.checkpoints.writer import Landed, Writer
from ddpjob_trainer.errors import CheckpointError, FencedError, TrainerError
from ddpjob_trainer.fence import Claim
from ddpjob_trainer.group import Group
from ddpjob_trainer.signals import Due, SaverState

_ERROR_SECONDS, _LOST_PEER_SECONDS = 30.0, 2.0


class CheckpointFolder:
    """Checkpoints in one folder, as seen by one rank; `writes` says whether this rank looks after the folder."""

    def __init__(self, config: CheckpointConfig, path: Path, group: Group) -> None:
        config.check()
        self._config, self.path, self._group = config, path, group
        self.writes = group.rank == 0 if config.shared else group.local_rank == 0
        self._parts = config.format is Format.DCP
        self._shelf, self._writer, self._staging = Shelf(path), Writer(config.failures), Staging()
        self._saved_step, self._owed = -1, False
        self._scores: dict[int, float] = {}
        self._unmarked = False
        self._parts_group: Any = None
        if self.writes or self._parts:
            prepare_folder(path, "checkpoint.dir or DDPJOB_CHECKPOINT_DIR")

    def claim(self, claim: Claim) -> None:
        """Make this life of the job the only one that may write. All ranks. Raises FencedError when a newer one has the folder."""
        self._claim = claim
        if self._parts and self._group.world > 1:  # the writers talk beside training
            self._parts_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=10))
        if not self.writes:
            return
        if self._config.shared:
            claim.take(self.path)
        for leftover in [*self.path.glob(".step-*.tmp"), *self.path.glob(".best*.tmp")]:
            discard(leftover)
        self._scores = best.read_scores(self.path, self._config.best_by)

    # ------------------------------------------------------------ saving

    def due(self, step: int, *, epoch: int | None = None, last: bool = False) -> Due:
        """Whether to save after `step` steps, by rank 0's clock and count. `epoch`: so many are then complete, None: it is within one;
        `last`: training is.

        What is due while a checkpoint is on its way waits for a later step, unless retention needs this very one.
        """
        if self._group.rank != 0:
            return Due.NO
        config = self._config
        by_steps = config.every_steps > 0 and step % config.every_steps == 0
        by_time = 0 < config.every_seconds <= time.monotonic() - self._writer.ended and not self._writer.busy
        by_epoch = bool(epoch and config.every_epochs and epoch % config.every_epochs == 0)
        self._owed = self._owed or by_steps or by_time or by_epoch
        for_good = bool(epoch and config.keep_every_epochs and epoch % config.keep_every_epochs == 0)
        if last or for_good or (by_epoch and config.keep_best > 0):
            return Due.NOW
        return Due.WHEN_FREE if self._owed else Due.NO

    @property
    def state(self) -> SaverState:
        """How this rank's writer is: the ranks agree on it at each step."""
        fatal = self._writer.fatal
        return SaverState(busy=self._writer.busy, failed=fatal is not None, fenced=isinstance(fatal, FencedError))

    def save(self, make: Callable[[], Snapshot], step: int) -> None:
        """Copy what `make` gives, and put it on disk in the background. All ranks together; waits for a checkpoint that is on its way.
        Nothing happens when the state after `step` steps is on disk or on its way already.

        `landed` and `finish` tell when it is there; a failure shows in `state`.
        """
        if step == self._saved_step:
            return
        began = time.monotonic()
        self._writer.wait()
        snapshot = make()
        self._saved_step, self._owed = step, False
        state = snapshot["sampler"]
        facts = Facts(step, state["epoch"] if state["consumed"] == 0 else None, self._group.world)
        taken = self._staging.take(snapshot, whole=not self._parts, wanted=self.writes or self._parts)
        path = self._shelf.place(step, in_parts=self._parts)
        if taken:
            self._writer.start(lambda: self._write(path, taken, facts), path, step, time.monotonic() - began)
        else:
            self._writer.ended = time.monotonic()

    def landed(self) -> list[Landed]:
        """Checkpoints that have come to disk since the last call, if this rank looks after the folder."""
        landed = self._writer.landed()
        return landed if self.writes else []

    def finish(self) -> None:
        """Wait until what was saved is on disk, on every rank. All ranks together; raises CheckpointError on all when one failed."""
        self._writer.wait()
        failure = self._writer.failure
        if failure is None and self.writes and self._unmarked:
            self._writer.start(self._try_to_tidy, self.path, self._saved_step, 0.0)
            self._writer.wait()
            self._writer.landed()
        ends = self._group.gather(0 if failure is None else 2 if isinstance(failure, FencedError) else 1)
        if any(ends):
            raise self.failure(2 in ends)

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Training ends, maybe by an error: give a checkpoint that is on its way some time. Peers that are to restart wait for our end."""
        self._writer.wait(_ERROR_SECONDS if isinstance(error, TrainerError) else _LOST_PEER_SECONDS)

    def failure(self, fenced: bool) -> CheckpointError:
        """Why training ends on all ranks, said by this one."""
        if self._writer.failure is not None:
            return self._writer.failure
        kind = FencedError if fenced else CheckpointError
        return kind("another rank cannot save checkpoints any more; its message says why")

    def scored(self, step: int, values: dict[str, float]) -> None:
        """The model after `step` steps was evaluated: `values` by metric."""
        self._scores = {**self._scores, step: values[self._config.best_by.value]}
        self._unmarked = self._config.keep_best > 0

    def _write(self, path: Path, taken: Snapshot, facts: Facts) -> None:
        """In the background."""
        self._staging.settle()
        try:
            if self._parts:  # Its ranks learn together of a claim that is lost, else the others would wait for this one.
                parts.write(path, self._claim.life, taken, facts, self._parts_group, self._check_claim)
            else:
                self._check_claim()  # Nothing is made anew in a folder that has vanished.
                torch_file.write(path, taken, facts, self._check_claim)
        except OSError:
            self._check_claim()  # The next life clears up what it takes for left behind: then that is the reason.
            raise
        if self.writes:
            self._shelf.add(Entry(facts.step, path, facts.epoch))
            self._try_to_tidy()

    def _check_claim(self) -> None:
        if self.writes and self._config.shared:
            self._claim.check(self.path)

    def _try_to_tidy(self) -> None:
        """The checkpoint itself is on disk: what fails here is tried again after the next one."""
        try:
            self._tidy()
        except OSError as error:
            self._unmarked = self._config.keep_best > 0
            where, why = error.filename or self.path, error.strerror or error
            print(f"warning: {where}: {why}: older checkpoints stay, and the best one may be unmarked", file=sys.stderr, flush=True)

    def _tidy(self) -> None:
        """Mark the best, then delete what need not be kept: the mark never points to nothing. In the background."""
        self._unmarked = False  # In this order: what is scored from now on is marked by the next one.
        scores = self._scores
        entries = self._shelf.entries()
        going = retention.expendable(entries, scores, self._config)
        if self._config.keep_best:
            staying = [entry for entry in entries if entry.whole and entry not in going]
            order = retention.ranked(staying, scores, self._config.best_by)
            best.mark_best(
                self.path, self._config.best_by, {entry.step: scores[entry.step] for entry in order}, order[0].path if order else None
            )
        for entry in going:
            self._shelf.remove(entry)

    # ------------------------------------------------------------ resuming

    def newest(self) -> Snapshot | None:
        """The newest whole checkpoint that any writing rank holds, on every rank; None when there is none at all.

        A broken one is named in a warning. Raises CheckpointError when all are broken, on every rank.
        """
        step, content = self._shelf.newest_whole() if self.writes else (NOTHING, None)
        steps = self._group.gather(step)
        if max(steps) < 0:
            if BROKEN in steps:
                raise CheckpointError(
                    f"no checkpoint in {self.path} is whole (the warnings of rank {steps.index(BROKEN)} name each);"
                    f" nothing was overwritten. Restore one, or move them away or set checkpoint.dir to train anew"
                )
            return None
        if not self._config.resume:
            raise CheckpointError(
                f"checkpoint.resume=false, and {self.path} holds a checkpoint of step {max(steps)}:"
                f" set checkpoint.dir to another folder, or move it away"
            )
        self._saved_step = max(steps)
        source = steps.index(max(steps))
        if self._group.gather(isinstance(content, Path))[source]:
            return self._read_parts(self._shelf.place(max(steps), in_parts=True))
        return torch_file.decode(self._group.broadcast_bytes(content if isinstance(content, bytes) else None, source))

    def _read_parts(self, path: Path) -> Snapshot:
        """On every rank, from the folder itself. Raises CheckpointError on all when one does not see it."""
        snapshot, error = None, None
        try:
            snapshot = parts.read(path)
        except CheckpointError as problem:
            error = problem
        seen = self._group.gather(error is None)
        if error is not None:
            raise error
        if snapshot is None or not all(seen):
            raise CheckpointError(f"rank {seen.index(0)} cannot read {path}; its message says why")
        return snapshot
