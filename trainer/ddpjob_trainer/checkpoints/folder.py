"""Manages the checkpoint folder: when to save, which ranks write, what to keep, and where to
resume.
"""

from __future__ import annotations

import datetime
import io
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddpjob_trainer.atomic_files import discard
from ddpjob_trainer.checkpoints import best, dcp, manifest, retention, torch_file
from ddpjob_trainer.checkpoints import snapshot as snapshots
from ddpjob_trainer.checkpoints.bucket import Copies, FetchError, Offered, Share, open_bucket
from ddpjob_trainer.checkpoints.index import BROKEN, NOTHING, CheckpointIndex, prepare_folder
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.retention import Entry
from ddpjob_trainer.checkpoints.snapshot import Layout, Snapshot, Staging, map_tensors
from ddpjob_trainer.checkpoints.writer import CompletedSave, Writer
from ddpjob_trainer.config import loader
from ddpjob_trainer.config.sections import CheckpointConfig, Format, Interval
from ddpjob_trainer.distributed.process_group import Group, done_in_thread
from ddpjob_trainer.errors import CheckpointError, ConfigError, FencedError, TrainerError, first_line
from ddpjob_trainer.lifecycle.fence import Claim, Ownership, agree_on_incarnation
from ddpjob_trainer.lifecycle.signals import Due, SaverState

_T = TypeVar("_T")
_LARGE_BYTES = 2**18
_SHARE = 0.01
"""Share of the training time that saves may take if checkpoint.every_seconds is auto."""
_LEAST_SECONDS, _MOST_SECONDS = 10.0, 300.0
_ERROR_SECONDS, _LOST_PEER_SECONDS = 30.0, 2.0


class CheckpointFolder:
    """The checkpoints in one folder, as seen by one rank.

    `writes` is True on the ranks that maintain the folder: they write single-file checkpoints,
    record which checkpoints exist, and delete old ones.
    """

    def __init__(self, config: CheckpointConfig, path: Path, group: Group) -> None:
        config.check()
        self._config, self.path, self._group = config, path, group
        self._parts = config.format is Format.DCP
        # With a bucket, the parts of a checkpoint can be on different disks. In that case, `claim`
        # finds out which ranks share a folder, and then sets `writes` again.
        one_folder = config.shared and not (self._parts and config.url)
        self.writes = group.rank == 0 if one_folder else group.local_rank == 0
        self._index, self._writer, self._staging = CheckpointIndex(path), Writer(config.failures), Staging()
        self._saved_step, self._owed = -1, False
        self._scores: dict[int, float] = {}
        self._unmarked = False
        self._parts_group: Any = None
        self._ownership = Ownership(path)
        self._heads: list[int] | None = None
        """A list that gives, for each rank, the lowest rank that sees the same folder.

        These lowest ranks maintain the folders. The list exists only if checkpoints are in parts
        and are copied to a bucket. Otherwise, checkpoint.shared decides which ranks maintain a
        folder.
        """
        self._bucket = open_bucket(config) if config.url and (group.rank == 0 or self._parts) else None
        # Single-file checkpoints are the same on all ranks that write them, so only rank 0 uploads
        # them. If a checkpoint is in parts, each rank uploads its own files.
        self.copies = Copies(self._bucket, config) if self._bucket is not None and group.rank == 0 else None
        self.alive: Callable[[], None] = lambda: None
        """A function that is called repeatedly while the ranks wait for a disk or the bucket."""
        self._share: Share | None = None
        self._copied: Path | None = None
        """The path of the multi-part checkpoint that was last offered to the bucket."""
        self._uncopied: tuple[Entry, list[str]] | None = None
        """The newest multi-part checkpoint and the names of this rank's files in it; None if the
        checkpoint has already been offered to the bucket.
        """
        if self.writes or self._parts:
            prepare_folder(path, "checkpoint.dir or DDPJOB_CHECKPOINT_DIR")

    @classmethod
    def open(cls, group: Group, **settings: Any) -> CheckpointFolder:
        """Open a checkpoint folder for your own training loop, and claim it for this incarnation.

        `settings` are keys of the configuration's `checkpoint` section, such as every_steps=100 or
        keep=5. By default, `dir`, `shared` and `url` come from the job's environment; outside a
        job, `dir` is ./checkpoints.

        All ranks must call this together. Raises ConfigError for a setting that is unknown or
        invalid, and for `load`, `load_average` and `load_except`, which apply only to the built-in
        trainer. Also raises the errors of `claim`.
        """
        if unused := sorted({"load", "load_average", "load_except"} & set(settings)):
            raise ConfigError(
                f"CheckpointFolder.open: {unused[0]} applies only to the built-in trainer; leave it out, and if"
                " newest() returns None, load the weights with torch.load"
            )
        config = loader.build(CheckpointConfig, ("CheckpointFolder.open", settings))
        folder = cls(config, config.dir or Path("checkpoints"), group)
        folder.claim(agree_on_incarnation(group))
        return folder

    @property
    def incarnation(self) -> Claim:
        """The claim with which this incarnation owns the folder; the same on all ranks."""
        return self._claim

    def claim(self, claim: Claim) -> None:
        """Make this incarnation of the job the only one that may write to the folder.

        All ranks must call this together. Raises FencedError if a newer incarnation has claimed the
        folder, and FolderTakenError if another job uses the folder.
        """
        self._claim = claim
        # The threads that write a checkpoint need their own process group, because they communicate
        # while training continues.
        if self._parts and self._group.world > 1:
            self._parts_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=10))
            if self._config.url:
                self._heads = self._find_heads()
                self.writes = self._heads[self._group.rank] == self._group.rank
        if self._config.shared:
            self._take_together()
        if self.writes:
            if self._config.shared:
                claim.take(self.path)
            for leftover in [*self.path.glob(".step-*.tmp"), *self.path.glob(".best*.tmp")]:
                discard(leftover)
            if self._config.keep_best:
                self._scores = best.read_scores(self.path, self._config.best_by)
        mark = f"{claim.incarnation % 2**32:08x}"
        if self.copies is not None:
            self._scores = self.copies.begin(mark, in_parts=self._parts) | self._scores
        if self._parts and self._config.url:
            term = self._group.gather(self.copies.term if self.copies is not None else 0)[0]
            if self.copies is None and self._bucket is not None:
                self._share = Share(self._bucket, term, mark)

    def _find_heads(self) -> list[int]:
        """Return, for each rank, the lowest rank that sees the same folder.

        All ranks must call this together. Each rank creates a file in its folder, and looks for the
        files of the other ranks. This is necessary because each node can have its own disk, but
        pods on the same machine can also share one.
        """

        def sign(rank: int) -> Path:
            return self.path / f".step-seen-{self._claim.incarnation}-{rank}.tmp"

        own = self._group.rank
        sign(own).touch()
        self._group.barrier()
        heads = self._group.gather(next(rank for rank in range(own + 1) if sign(rank).exists()))
        sign(own).unlink(missing_ok=True)
        return heads

    @property
    def _scattered(self) -> bool:
        """Whether a checkpoint's parts are on several disks, so that only the bucket has all of
        them.
        """
        several = bool(self._config.url) and self._group.world > 1
        return several and (any(self._heads) if self._heads else not self._config.shared)

    def _take_together(self) -> None:
        """Make sure that no other job uses the folder, then claim it for this job.

        A former owner that has not reported its end is watched for some time. This can take longer
        than train.timeout_seconds, so all ranks communicate twice a second during this time.
        """
        watching, taking = True, self._ownership.take() if self.writes else iter(())
        while watching:
            watching = any(self._group.gather(next(taking, True) is None))

    # ------------------------------------------------------------ saving

    def due(self, step: int, *, epoch: int | None = None, last: bool = False) -> Due:
        """Return whether to save after `step` steps. Only rank 0 decides; other ranks get Due.NO.

        `epoch` is the number of epochs completed after these steps, or None if they end within an
        epoch. `last` means that training is complete. If a save becomes due while an earlier one is
        in progress, the new save is postponed to a later step, unless retention needs exactly this
        state.
        """
        if self._group.rank != 0:
            return Due.NO
        config = self._config
        by_steps = config.every_steps > 0 and step % config.every_steps == 0
        by_time = 0 < self._interval() <= time.monotonic() - self._writer.ended and not self._writer.busy
        by_epoch = bool(epoch and config.every_epochs and epoch % config.every_epochs == 0)
        self._owed = self._owed or by_steps or by_time or by_epoch
        for_good = bool(epoch and config.keep_every_epochs and epoch % config.keep_every_epochs == 0)
        if last or for_good or (by_epoch and config.keep_best > 0):
            return Due.NOW
        return Due.WHEN_FREE if self._owed else Due.NO

    def _interval(self) -> float:
        """Return the interval between timed saves, in seconds; 0 if there are no timed saves."""
        seconds = self._config.every_seconds
        if not isinstance(seconds, Interval):
            return seconds
        return min(_MOST_SECONDS, max(_LEAST_SECONDS, self._writer.cost / _SHARE))

    @property
    def state(self) -> SaverState:
        """The state of this rank's checkpoint writer.

        The ranks exchange these states when they decide together whether to stop or save.
        """
        fatal = self._writer.fatal
        return SaverState(busy=self._writer.busy, failed=fatal is not None, fenced=isinstance(fatal, FencedError))

    def save(self, make: Callable[[], Snapshot], step: int) -> None:
        """Copy the state that `make` returns, and write the copy to disk in the background.

        The state is a dict of tensors, numbers, strings, and dicts, lists and tuples of these. It
        must include the sampler's `state_dict()` under the key "sampler". Raises CheckpointError
        for any other state, because a resume could not read it.

        All ranks must call this together. The call waits for any save in progress, and does nothing
        if the state after `step` steps has already been saved. `completed` and `finish` report a
        successful save, and `state` reports a failed one.
        """
        if step == self._saved_step:
            return
        began = time.monotonic()
        self._wait_for_the_disk()
        snapshot = make()
        snapshots.check(snapshot)
        if self._parts:
            # This raises an error for values that the manifest's JSON cannot represent.
            manifest.encode(snapshot, lambda *_: "")
        self._saved_step, self._owed = step, False
        state = snapshot["sampler"]
        metadata = Metadata(step, state["epoch"] if state["consumed"] == 0 else None, self._group.world)
        taken = self._staging.take(snapshot, whole=not self._parts, wanted=self.writes or self._parts)
        path = self._index.path_of(step, in_parts=self._parts)
        if taken:
            self._writer.start(lambda: self._write(path, taken, metadata), path, step, time.monotonic() - began)
        else:
            self._writer.ended = time.monotonic()

    def completed(self) -> list[CompletedSave]:
        """Return the saves completed since the last call, if this rank maintains the folder."""
        completed = self._writer.completed()
        return completed if self.writes else []

    def finish(self, seconds: float | None = None) -> None:
        """Wait until every save is on disk, and then until the last checkpoint is uploaded.

        All ranks must call this together. The upload to checkpoint.url can take up to `seconds`;
        None means checkpoint.url_wait_seconds. If `seconds` is None and checkpoint.shared is false,
        an incomplete upload raises CheckpointError. An error on one rank raises CheckpointError on
        all ranks.
        """
        began = time.monotonic()
        self._wait_for_the_disk()
        if seconds is not None:
            seconds = max(0.0, seconds - (time.monotonic() - began))
        failure, wait = self._writer.failure, self._config.url_wait_seconds if seconds is None else seconds
        if self._parts and self._config.url and not any(self._group.gather(failure is not None)):
            self._wait_for_parts(wait)
        if failure is None and self.writes and self._unmarked:
            self._writer.start(self._try_to_tidy, self.path, self._saved_step, 0.0)
            self._writer.wait()
            self._writer.completed()
        copies = self.copies if failure is None else None
        if self._config.url and not self._parts:
            self._wait_together(lambda pause: copies is None or copies.wait(pause), wait)
        if copies is not None:
            copied = copies.finish(self._scores, wait)
            if not copied and seconds is None and not self._config.shared:
                failure = CheckpointError(
                    f"the last checkpoint is not in checkpoint.url={self._config.url} (see the warnings), and "
                    f"{self.path} exists only on this machine. Training counts as complete only if the last "
                    "checkpoint is in the bucket; repair the connection, then start the run again"
                )
        ends = self._group.gather(0 if failure is None else 2 if isinstance(failure, FencedError) else 1)
        if any(ends):
            raise failure or self.failure(2 in ends)

    def _wait_for_parts(self, seconds: float) -> None:
        """Offer the last checkpoint to the bucket, and wait until it is uploaded.

        All ranks must call this together.
        """
        if self._uncopied is not None:
            self._offer(*self._uncopied)
        copying = self.copies or self._share
        self._wait_together(lambda pause: copying is None or copying.wait(pause), seconds)

    def _wait_for_the_disk(self) -> None:
        """Wait until no rank is writing a checkpoint. All ranks must call this together."""

        def written(pause: float) -> bool:
            self._writer.wait(pause)
            return not self._writer.busy

        self._wait_together(written)

    def _wait_together(self, done: Callable[[float], bool], seconds: float = math.inf) -> None:
        """Wait up to `seconds` until `done` returns true on every rank.

        All ranks must call this together. The argument of `done` is the maximum number of seconds
        to wait. The ranks exchange the results of `done` twice a second. Without this exchange, one
        rank could wait longer than the timeout of a collective operation, and the other ranks would
        fail.
        """
        until, states = time.monotonic() + seconds, [1]
        while any(states) and 2 not in states:
            waits = not done(min(0.5, max(0.0, until - time.monotonic())))
            states = self._group.gather(0 if not waits else 1 if time.monotonic() < until else 2)
            self.alive()

    def _in_thread(self, act: Callable[[], _T]) -> Future[_T]:
        """Run `act()` in a thread, and return a future of its result once all ranks are done.

        All ranks must call this together. `act` may take a long time, because it depends on the
        disk or the bucket.
        """
        return done_in_thread(self._group, "checkpoint", act, self.alive)

    def release(self) -> None:
        """Release the folder when training is complete, so that a different job can claim it."""
        if self.writes and self._config.shared:
            self._ownership.release()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for a save in progress when training ends, even if training ends with an error.

        The wait has a time limit, because the other ranks cannot restart before this process has
        ended.
        """
        self._writer.wait(_ERROR_SECONDS if isinstance(error, TrainerError) else _LOST_PEER_SECONDS)

    def failure(self, fenced: bool) -> CheckpointError:
        """Return the error to raise on this rank after any rank has failed to save a checkpoint."""
        if self._writer.failure is not None:
            return self._writer.failure
        kind = FencedError if fenced else CheckpointError
        return kind("another rank can no longer save checkpoints; see its message for the reason")

    def scored(self, step: int, values: dict[str, float]) -> None:
        """Record the metrics of the model after `step` steps. `values` maps names to numbers."""
        if (score := values.get(self._config.best_by.value)) is None:
            return
        self._scores = {**self._scores, step: score}
        self._unmarked = self._config.keep_best > 0

    def _write(self, path: Path, taken: Snapshot, metadata: Metadata) -> None:
        """Write the checkpoint that `save` has copied. This runs in the writer's thread."""
        self._staging.settle()
        entry, names = Entry(metadata.step, path, metadata.epoch), list[str]()
        try:
            # If a rank has lost its claim, all ranks must learn that together in `dcp.write`.
            # Otherwise, the other ranks would wait for that rank.
            if self._parts:
                incarnation, group = self._claim.incarnation, self._parts_group
                names = dcp.write(path, incarnation, taken, metadata, group, self._check_claim, self._heads)
            else:
                # This raises an error if the folder is gone, so that the folder is not recreated.
                self._check_claim()
                torch_file.write(path, taken, metadata, self._check_claim)
        except OSError:
            # A newer incarnation removes temporary files. If this removal has caused the error,
            # report the lost claim instead.
            self._check_claim()
            raise
        if self.writes:
            self._index.add(entry)
        if self._parts and self._config.url:
            # All ranks must offer the same checkpoints for upload. If the ranks chose different
            # checkpoints, no upload would ever be complete. Therefore, all ranks offer this
            # checkpoint only if rank 0 has seen the previous upload complete.
            free = dcp.together(self._parts_group, lambda: self.copies is None or self.copies.wait(0))[0]
            self._uncopied = entry, names
            if free:
                self._offer(entry, names)
        elif self.copies is not None:
            self.copies.offer(entry, self._scores)
        if self.writes:
            self._try_to_tidy()

    def _offer(self, entry: Entry, names: list[str]) -> None:
        """Queue the upload of this rank's files in a multi-part checkpoint. All ranks must call
        this.
        """
        self._copied, self._uncopied = entry.path, None
        if self.copies is not None:
            self.copies.offer(entry, self._scores, names)
        elif self._share is not None:
            self._share.offer(entry.path, entry.step, names)

    def _check_claim(self) -> None:
        if self.writes and self._config.shared:
            self._claim.check(self.path)

    def _try_to_tidy(self) -> None:
        """Tidy the folder. If that fails, print only a warning.

        The new checkpoint is already on disk, and the next save tries again.
        """
        try:
            self._tidy()
        except OSError as error:
            self._unmarked = self._config.keep_best > 0
            where, why = error.filename or self.path, error.strerror or error
            print(
                f"warning: the checkpoint folder cannot be tidied, because {where} cannot be changed ({why}); "
                "older checkpoints remain, and best.json may be outdated",
                file=sys.stderr,
                flush=True,
            )

    def _tidy(self) -> None:
        """Mark the best checkpoint, then delete the checkpoints that retention does not keep.

        The order ensures that the mark never refers to a deleted checkpoint. Runs in the
        background.
        """
        # Reset the flag before reading the scores. An evaluation that is recorded from now on sets
        # the flag again, so the next save updates the mark.
        self._unmarked = False
        scores = self._scores
        entries = self._index.entries()
        doomed = retention.expendable(entries, scores, self._config)
        if self._config.keep_best:
            kept = [entry for entry in entries if entry.whole and entry not in doomed]
            order = retention.ranked(kept, scores, self._config.best_by)
            best.mark_best(
                self.path,
                self._config.best_by,
                {entry.step: scores[entry.step] for entry in order},
                order[0].path if order else None,
            )
        # keep_best is off now, but an earlier run with keep_best has marked a checkpoint that will
        # be deleted.
        elif best.find_marked(self.path) in [entry.path for entry in doomed]:
            best.unmark(self.path)
        for entry in doomed:
            # Do not delete the multi-part checkpoint that was last offered to the bucket, because
            # other ranks may still be uploading their parts of that checkpoint.
            if entry.path != self._copied and (self.copies is None or not self.copies.holds(entry.path)):
                self._index.remove(entry)

    # ------------------------------------------------------------ resuming

    def newest(self, layout: Layout | None = None, newer_than: int = NOTHING) -> Snapshot | None:
        """Return, on every rank, the newest intact checkpoint that any writing rank has.

        Return None if no checkpoint is from a step after `newer_than`.

        With checkpoint.format=dcp, `layout` determines for which tensors a rank receives only its
        shard. No rank holds two copies of a tensor in memory. A checkpoint counts as broken if any
        rank cannot read it. A warning then names the checkpoint, and the next older one is tried.
        Raises CheckpointError on every rank if all checkpoints are broken.
        """
        step, path = self._newest_here()
        if self._config.url:
            copy = self._newest_copy(max(step, newer_than), layout)
            # Delete incomplete sets of parts. Otherwise, such a set would count as the newest
            # checkpoint.
            if self._scattered and self.writes:
                self._index.forget_parts_after(NOTHING if copy is None else self._saved_step)
            if copy is not None:
                return copy
            step, path = self._newest_here()
        steps = self._group.gather(step)
        if max(steps) < 0:
            if BROKEN in steps and newer_than == NOTHING:
                raise CheckpointError(
                    f"no checkpoint in {self.path} is intact (see the warnings of rank {steps.index(BROKEN)}); "
                    "nothing was overwritten. Restore one, or start from scratch in a different checkpoint.dir"
                )
            return None
        newest = max(steps)
        self._check_that_it_resumes(newest)
        if newest <= newer_than:
            return None
        source = steps.index(newest)
        own = path if self._group.rank == source else None
        if self._group.gather(path is not None and path.suffix == dcp.SUFFIX)[source]:
            parts = self._index.path_of(newest, in_parts=True)
            snapshot, problem = self._read_parts(parts, layout)
            broken = parts if self.writes else None
        else:
            found, problem = self._agree_on(lambda: None if own is None else torch_file.read(own))
            snapshot = None if problem else self._spread(found, source)
            broken = own
        if problem:
            if broken is not None:
                self._index.broken(newest, broken, problem)
            if self.copies is not None:
                self.copies.pass_over(newest)
            return self.newest(layout, newer_than)
        if self._is_kept(newest, path if step == newest else None):
            self._saved_step = newest
        return snapshot

    def _check_that_it_resumes(self, step: int) -> None:
        if not self._config.resume:
            raise CheckpointError(
                f"checkpoint.resume=false, but {self.path} has a checkpoint of step {step}; set checkpoint.dir"
                " to a different folder, or move the checkpoint away"
            )

    def _newest_here(self) -> tuple[int, Path | None]:
        """Return (step, path) of the newest intact checkpoint in this rank's folder.

        All ranks must call this together. Ranks that do not maintain a folder get NOTHING and None.
        """
        looking = partial(self._index.newest_whole, in_parts=not self._scattered)
        return self._in_thread(lambda: looking() if self.writes else (NOTHING, None)).result()

    def _newest_copy(self, step: int, layout: Layout | None) -> Snapshot | None:
        """Return the bucket's newest checkpoint, or None.

        The checkpoint is returned only if it is in parts and newer than the checkpoints of all
        ranks. `step` is the newest step for which this rank has a checkpoint. If the bucket's
        newest checkpoint is a single file, it is downloaded into rank 0's folder, and None is
        returned. Raises CheckpointError on all ranks if the bucket cannot be read: training must
        not start from scratch while the only checkpoints may be in the bucket.
        """
        newest = max(self._group.gather(step))
        while True:
            offered: Offered | None = None
            unread: CheckpointError | None = None
            fetch = partial(self.copies.fetch_newer, self.path, newest) if self.copies is not None else lambda: None
            fetching = self._in_thread(fetch)
            try:
                offered = fetching.result()
            except CheckpointError as error:
                unread = error
            if offered is not None and not offered.in_parts:
                self._index.replaced(self.path / offered.manifest.name)
                offered = None
            if any(self._group.gather(unread is not None)):
                raise unread or CheckpointError("rank 0 cannot read checkpoint.url; see its message for the reason")
            found = self._group.gather(offered.entry.step if offered is not None else NOTHING)[0]
            if found == NOTHING:
                return None
            self._check_that_it_resumes(found)
            text = self._group.broadcast_bytes(offered.written() if offered is not None else None, 0)
            snapshot, problem = self._read_copy(Offered.read(text, found), layout)
            if snapshot is not None:
                return snapshot
            if self.copies is not None and offered is not None:
                self.copies.cannot_be_read(offered, problem)

    def _read_copy(self, offered: Offered, layout: Layout | None) -> tuple[Snapshot | None, str]:
        """Read a multi-part checkpoint from the bucket.

        Each rank fetches only the files that it needs. All ranks must call this together. Return
        (snapshot, ""), or (None, PROBLEM) with the problem of the first rank that cannot read the
        checkpoint. Raises CheckpointError on all ranks if a rank cannot fetch files because of the
        bucket or a disk.
        """
        folder, step = self.path / offered.manifest.name, offered.entry.step
        snapshot: Snapshot | None = None
        unfetched: FetchError | None = None
        problem = ""

        def fetch() -> Snapshot:
            bucket = self._bucket or open_bucket(self._config)
            return dcp.read(folder, layout, offered.fetcher(bucket, folder, self._group.rank))

        reading = self._in_thread(fetch)
        try:
            snapshot = reading.result()
            if snapshot.get("step") != step:
                problem = f"from step {snapshot.get('step')}, which contradicts its name"
        except FetchError as error:
            unfetched = error
        # A different program may have written the file, so reading it can fail in any way.
        except Exception as error:
            problem = self._unreadable(error)
        if 1 in (failed := self._group.gather(unfetched is not None)):
            raise unfetched or CheckpointError(
                f"rank {failed.index(1)} cannot fetch its part of the checkpoint; see that rank's message for "
                "the reason"
            )
        if problem := self._first_problem(problem):
            return None, problem
        self._saved_step = step
        if self.writes:
            self._index.add(Entry(step, folder, offered.manifest.epoch))
        return snapshot, ""

    def _is_kept(self, step: int, path: Path | None) -> bool:
        """Return whether the state after `step` steps counts as saved.

        Rank 0 decides. Without a bucket, the state counts as saved, because it is on disk. With a
        bucket, the state counts as saved if the bucket has it, or if rank 0 has it in the file
        `path`. In the second case, this file is uploaded. A file on another node's disk does not
        count, because rank 0 cannot upload it.
        """
        kept = True
        if self.copies is not None:
            kept = self.copies.has(step) or path is not None
            if path is not None and not self.copies.has(step):
                known = next((entry for entry in self._index.entries() if entry.path == path), None)
                self.copies.offer(known or Entry(step, path), self._scores)
        return bool(self._group.gather(kept)[0])

    def _spread(self, own: Snapshot | None, source: int) -> Snapshot:
        """Send the snapshot `own` of rank `source` to all ranks, and return it.

        Large tensors are sent one by one, and each is received directly in its final memory.
        """
        if self._group.world == 1:
            assert own is not None
            return own
        buffer = io.BytesIO()
        if own is not None:
            torch.save(map_tensors(own, lambda _, tensor: tensor.to("meta") if _is_large(tensor) else tensor), buffer)
        sent = self._group.broadcast_bytes(None if own is None else buffer.getvalue(), source)
        tree = own or torch.load(io.BytesIO(sent), map_location="cpu", weights_only=True)

        def receive(_: Any, tensor: torch.Tensor) -> torch.Tensor:
            whole = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
            if _is_large(tensor):
                self._group.broadcast_tensors([whole], source)
            return whole

        spread: Snapshot = map_tensors(tree, receive)
        return spread

    def _first_problem(self, problem: str) -> str:
        """Return, on all ranks, the problem of the lowest failing rank; empty if none failed.

        All ranks must call this together.
        """
        found = self._group.gather(bool(problem))
        if not any(found):
            return ""
        source = found.index(1)
        said = problem.encode(errors="replace") if self._group.rank == source else None
        return self._group.broadcast_bytes(said, source).decode()

    def _read_parts(self, path: Path, layout: Layout | None) -> tuple[Snapshot | None, str]:
        """Read a multi-part checkpoint. Return (this rank's data, ""), or (None, PROBLEM).

        PROBLEM comes from the lowest rank that cannot read its data. All ranks must call this
        together. If a rank does not see the folder, the checkpoint is not at fault, so
        CheckpointError is raised on all ranks.
        """
        seen = self._group.gather(self._in_thread(partial(os.path.exists, path)).result())
        if not all(seen):
            raise CheckpointError(
                f"rank {seen.index(0)} does not see {path}; for checkpoint.format=dcp, set checkpoint.dir to a"
                " folder that every node sees, or set checkpoint.url"
            )
        _, problem = self._agree_on(partial(dcp.check_share, path, self._group.rank, self._group.world))
        return (None, problem) if problem else self._agree_on(partial(dcp.read, path, layout))

    def _agree_on(self, act: Callable[[], _T]) -> tuple[_T | None, str]:
        """Run `act` on all ranks. Return (this rank's result, ""), or (None, PROBLEM) if a rank
        failed.

        PROBLEM comes from the lowest rank that failed. All ranks must call this together. `act`
        reads data that a different program may have written, so it can fail in any way.
        """
        result, problem = None, ""
        acting = self._in_thread(act)
        try:
            result = acting.result()
        except Exception as error:
            problem = self._unreadable(error)
        problem = self._first_problem(problem)
        return (None if problem else result), problem

    def _unreadable(self, error: Exception) -> str:
        """Return what is wrong with a checkpoint, based on the error from reading it."""
        if isinstance(error, CheckpointError):
            return str(error)
        where = f"not readable on rank {self._group.rank}"
        if isinstance(error, OSError):
            return f"{where}: {error.filename or self.path}: {error.strerror or error}"
        return f"{where}: {type(error).__name__}: {first_line(error)}"


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > _LARGE_BYTES
