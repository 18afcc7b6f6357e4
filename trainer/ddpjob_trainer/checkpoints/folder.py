"""The checkpoint folder: decides when to save, which ranks write, what to keep, where to resume."""

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
"""Share of the time that saves may take with checkpoint.every_seconds=auto."""
_LEAST_SECONDS, _MOST_SECONDS = 10.0, 300.0
_ERROR_SECONDS, _LOST_PEER_SECONDS = 30.0, 2.0


class CheckpointFolder:
    """The checkpoints in one folder, as seen by one rank.

    `writes` indicates whether this rank maintains the folder.
    """

    def __init__(self, config: CheckpointConfig, path: Path, group: Group) -> None:
        config.check()
        self._config, self.path, self._group = config, path, group
        self._parts = config.format is Format.DCP
        # With a bucket, parts may be on any disk; `claim` determines which rank maintains which
        # folder.
        one_folder = config.shared and not (self._parts and config.url)
        self.writes = group.rank == 0 if one_folder else group.local_rank == 0
        self._index, self._writer, self._staging = CheckpointIndex(path), Writer(config.failures), Staging()
        self._saved_step, self._owed = -1, False
        self._scores: dict[int, float] = {}
        self._unmarked = False
        self._parts_group: Any = None
        self._ownership = Ownership(path)
        self._heads: list[int] | None = None
        """The first rank that sees the same folder, for each rank. None means that
        checkpoint.shared decides which ranks maintain a folder.
        """
        self._bucket = open_bucket(config) if config.url and (group.rank == 0 or self._parts) else None
        # Every writing rank has the same checkpoint, so one rank copies it. If it is in parts, each
        # rank copies its own part.
        self.copies = Copies(self._bucket, config) if self._bucket is not None and group.rank == 0 else None
        self.alive: Callable[[], None] = lambda: None
        """Called repeatedly while the ranks wait for a disk or the bucket."""
        self._share: Share | None = None
        self._copied: Path | None = None
        """The multi-part checkpoint last offered to the bucket."""
        self._uncopied: tuple[Entry, list[str]] | None = None
        """The newest checkpoint and this rank's files in it, if these have not been offered yet."""
        if self.writes or self._parts:
            prepare_folder(path, "checkpoint.dir or DDPJOB_CHECKPOINT_DIR")

    @classmethod
    def open(cls, group: Group, **settings: Any) -> CheckpointFolder:
        """Open the folder for your own training loop, and claim it for this incarnation of the job.

        `settings` are keys of the configuration's section `checkpoint`, such as every_steps=100,
        keep=5. By default, `dir`, `shared` and `url` come from the job's environment; outside a
        job, `dir` is ./checkpoints. Raises ConfigError for a setting that is unknown, invalid, or
        only for the built-in trainer (load, load_average, load_except). Also raises the errors of
        `claim`. All ranks must call this together.
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
        """This incarnation's claim, which is the same on all ranks."""
        return self._claim

    def claim(self, claim: Claim) -> None:
        """Make this incarnation of the job the only one that may write.

        All ranks must call this together. Raises FencedError if a newer incarnation has claimed the
        folder, and FolderTakenError if another job uses the folder.
        """
        self._claim = claim
        # The writers communicate while training continues.
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
        """Find, for each rank, the first rank that sees its folder, by checking the disks.

        All ranks must call this together. Each node may have its own disk, but pods on the same
        machine may share one.
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
        """Whether no rank sees all parts of a checkpoint, so that only the bucket has all parts."""
        several = bool(self._config.url) and self._group.world > 1
        return several and (any(self._heads) if self._heads else not self._config.shared)

    def _take_together(self) -> None:
        """Claim the folder for this job.

        Watching a former owner may take longer than train.timeout_seconds. So the waiting ranks
        agree twice a second to keep waiting.
        """
        watching, taking = True, self._ownership.take() if self.writes else iter(())
        while watching:
            watching = any(self._group.gather(next(taking, True) is None))

    # ------------------------------------------------------------ saving

    def due(self, step: int, *, epoch: int | None = None, last: bool = False) -> Due:
        """Return whether to save after `step` steps. Only rank 0 decides; other ranks get Due.NO.

        `epoch` is the number of epochs completed by then, or None within an epoch; `last` means
        that training is complete. If a save becomes due while another is in progress, it is
        postponed to a later step, unless retention needs exactly this step.
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
        """Return the seconds between two saves by time; 0 means none."""
        seconds = self._config.every_seconds
        if not isinstance(seconds, Interval):
            return seconds
        return min(_MOST_SECONDS, max(_LEAST_SECONDS, self._writer.cost / _SHARE))

    @property
    def state(self) -> SaverState:
        """The state of this rank's writer. The ranks exchange these states in each agreement."""
        fatal = self._writer.fatal
        return SaverState(busy=self._writer.busy, failed=fatal is not None, fenced=isinstance(fatal, FencedError))

    def save(self, make: Callable[[], Snapshot], step: int) -> None:
        """Copy the result of `make`, and write it to disk in the background.

        The result of `make` is a dict of tensors, numbers, strings, and dicts, lists and tuples of
        these. It must include the sampler's `state_dict()` under the key "sampler". Raises
        CheckpointError for anything else, because a resume could not read it.

        This waits for any save in progress, and does nothing if the state after `step` steps has
        already been saved. `completed` and `finish` report success; `state` reports a failure. All
        ranks must call this together.
        """
        if step == self._saved_step:
            return
        began = time.monotonic()
        self._wait_for_the_disk()
        snapshot = make()
        snapshots.check(snapshot)
        if self._parts:
            manifest.encode(snapshot, lambda *_: "")  # Raises for values that JSON cannot hold.
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
        """Wait until every save is on disk, on every rank. All ranks must call this together.

        Then waits up to `seconds` for the last upload to checkpoint.url. None means
        checkpoint.url_wait_seconds; with checkpoint.shared=false, an upload that is incomplete by
        then raises CheckpointError. Raises CheckpointError on all ranks if one rank failed.
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
                    f"the last checkpoint is not in checkpoint.url={self._config.url} (see the warnings),"
                    f" and {self.path} exists only on this machine. Training is complete only once its result"
                    " is in the bucket"
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
        """Wait until no rank is saving. All ranks must call this together."""

        def written(pause: float) -> bool:
            self._writer.wait(pause)
            return not self._writer.busy

        self._wait_together(written)

    def _wait_together(self, done: Callable[[float], bool], seconds: float = math.inf) -> None:
        """Wait up to `seconds` until `done` returns true on every rank.

        All ranks must call this together. `done` receives the number of seconds that it may wait.
        The ranks agree twice a second. Otherwise, a single rank could wait for longer than a
        collective may take, and the other ranks would fail.
        """
        until, states = time.monotonic() + seconds, [1]
        while any(states) and 2 not in states:
            waits = not done(min(0.5, max(0.0, until - time.monotonic())))
            states = self._group.gather(0 if not waits else 1 if time.monotonic() < until else 2)
            self.alive()

    def _in_thread(self, act: Callable[[], _T]) -> Future[_T]:
        """Run `act()` in a thread, and return its outcome.

        The duration depends on the disk or the bucket. All ranks must call this together.
        """
        return done_in_thread(self._group, "checkpoint", act, self.alive)

    def release(self) -> None:
        """Let another job continue from this folder, after training is complete."""
        if self.writes and self._config.shared:
            self._ownership.release()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Give a save in progress some time when training ends, possibly with an error.

        The time is limited, because restarting peers wait for this process to end.
        """
        self._writer.wait(_ERROR_SECONDS if isinstance(error, TrainerError) else _LOST_PEER_SECONDS)

    def failure(self, fenced: bool) -> CheckpointError:
        """Return the error that ends training on all ranks."""
        if self._writer.failure is not None:
            return self._writer.failure
        kind = FencedError if fenced else CheckpointError
        return kind("another rank can no longer save checkpoints; see its message for the reason")

    def scored(self, step: int, values: dict[str, float]) -> None:
        """Record the model's evaluation after `step` steps; `values` maps metrics to values."""
        if (score := values.get(self._config.best_by.value)) is None:
            return
        self._scores = {**self._scores, step: score}
        self._unmarked = self._config.keep_best > 0

    def _write(self, path: Path, taken: Snapshot, metadata: Metadata) -> None:
        """Write a checkpoint in the background."""
        self._staging.settle()
        entry, names = Entry(metadata.step, path, metadata.epoch), list[str]()
        try:
            # All ranks must notice a lost claim together; otherwise, the others would wait for this
            # rank.
            if self._parts:
                incarnation, group = self._claim.incarnation, self._parts_group
                names = dcp.write(path, incarnation, taken, metadata, group, self._check_claim, self._heads)
            else:
                self._check_claim()  # Raises if the folder is gone, so that it is not recreated.
                torch_file.write(path, taken, metadata, self._check_claim)
        except OSError:
            # The error may be the result of a newer incarnation, which removes temporary files.
            self._check_claim()
            raise
        if self.writes:
            self._index.add(entry)
        if self._parts and self._config.url:
            # All ranks must upload the same checkpoints, or none would ever be complete. The next
            # upload begins when rank 0 has seen the last one complete.
            free = dcp.together(self._parts_group, lambda: self.copies is None or self.copies.wait(0))[0]
            self._uncopied = entry, names
            if free:
                self._offer(entry, names)
        elif self.copies is not None:
            self.copies.offer(entry, self._scores)
        if self.writes:
            self._try_to_tidy()

    def _offer(self, entry: Entry, names: list[str]) -> None:
        """Offer this rank's files of a multi-part checkpoint to the bucket. All ranks do so."""
        self._copied, self._uncopied = entry.path, None
        if self.copies is not None:
            self.copies.offer(entry, self._scores, names)
        elif self._share is not None:
            self._share.offer(entry.path, entry.step, names)

    def _check_claim(self) -> None:
        if self.writes and self._config.shared:
            self._claim.check(self.path)

    def _try_to_tidy(self) -> None:
        """Tidy the folder, with a warning if that fails.

        The checkpoint itself is on disk. The next save tidies again.
        """
        try:
            self._tidy()
        except OSError as error:
            self._unmarked = self._config.keep_best > 0
            where, why = error.filename or self.path, error.strerror or error
            print(
                f"warning: the checkpoint folder cannot be tidied: {where}: {why}; older checkpoints remain, and"
                " best.json may be outdated",
                file=sys.stderr,
                flush=True,
            )

    def _tidy(self) -> None:
        """Mark the best checkpoint, then delete expendable ones, so that the mark never dangles.

        Runs in the background.
        """
        # Set this first, so that the next save marks any checkpoint scored from now on.
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
        # The mark was made by an earlier run with keep_best.
        elif best.find_marked(self.path) in [entry.path for entry in doomed]:
            best.unmark(self.path)
        for entry in doomed:
            # Other ranks may still be uploading their parts of the checkpoint offered last.
            if entry.path != self._copied and (self.copies is None or not self.copies.holds(entry.path)):
                self._index.remove(entry)

    # ------------------------------------------------------------ resuming

    def newest(self, layout: Layout | None = None, newer_than: int = NOTHING) -> Snapshot | None:
        """Return, on every rank, the newest intact checkpoint that any writing rank has.

        Return None if there is no checkpoint of a later step than `newer_than`.

        `layout` determines for which tensors a rank needs only its shard (format dcp). A rank never
        has a tensor in memory twice. A checkpoint that some rank cannot read counts as broken, and
        is named in a warning. Raises CheckpointError on every rank if all checkpoints are broken.
        """
        step, path = self._newest_here()
        if self._config.url:
            copy = self._newest_copy(max(step, newer_than), layout)
            # Otherwise an incomplete set of parts would count as the newest checkpoint.
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
        """Return the newest whole checkpoint on this rank, as (step, path).

        All ranks must call this together.
        """
        looking = partial(self._index.newest_whole, in_parts=not self._scattered)
        return self._in_thread(lambda: looking() if self.writes else (NOTHING, None)).result()

    def _newest_copy(self, step: int, layout: Layout | None) -> Snapshot | None:
        """Return the bucket's newest checkpoint, if it is in parts and newer than all checkpoints
        that ranks have.

        `step` is this rank's newest step. If the checkpoint is a file, this puts it into rank 0's
        folder and returns None. Raises CheckpointError on all ranks if the bucket cannot be read,
        because training must not start from scratch if the bucket holds the only checkpoints.
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
        """Read a multi-part checkpoint from the bucket. Each rank fetches only files that it reads.

        All ranks must call this together. Return (snapshot, ""), or (None, the problem of the first
        rank that has one). Raises CheckpointError on all ranks if the bucket or a disk is the
        cause.
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
                problem = f"of step {snapshot.get('step')}, which contradicts its name"
        except FetchError as error:
            unfetched = error
        except Exception as error:  # Reading a file that this trainer did not write can fail in any way.
            problem = self._unreadable(error)
        if 1 in (failed := self._group.gather(unfetched is not None)):
            raise unfetched or CheckpointError(
                f"rank {failed.index(1)} cannot fetch its part; see its message for the reason"
            )
        if problem := self._first_problem(problem):
            return None, problem
        self._saved_step = step
        if self.writes:
            self._index.add(Entry(step, folder, offered.manifest.epoch))
        return snapshot, ""

    def _is_kept(self, step: int, path: Path | None) -> bool:
        """Return whether the state after `step` steps need not be saved again.

        This is so if the bucket has the state, or if this rank's file of the state, `path`, will be
        uploaded. A file that is only on another node's disk does not count, because it will not be
        uploaded from there.
        """
        kept = True
        if self.copies is not None:
            kept = self.copies.has(step) or path is not None
            if path is not None and not self.copies.has(step):
                known = next((entry for entry in self._index.entries() if entry.path == path), None)
                self.copies.offer(known or Entry(step, path), self._scores)
        return bool(self._group.gather(kept)[0])

    def _spread(self, own: Snapshot | None, source: int) -> Snapshot:
        """Return rank `source`'s snapshot on every rank.

        Large tensors are sent one by one, each into its final memory.
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
        """Return, on all ranks, the problem of the first rank that has one; empty if none has.

        All ranks must call this together.
        """
        found = self._group.gather(bool(problem))
        if not any(found):
            return ""
        source = found.index(1)
        said = problem.encode(errors="replace") if self._group.rank == source else None
        return self._group.broadcast_bytes(said, source).decode()

    def _read_parts(self, path: Path, layout: Layout | None) -> tuple[Snapshot | None, str]:
        """Return (this rank's data, ""), or (None, the problem of the first rank that cannot read).

        All ranks must call this together. If one rank does not see the folder, the checkpoint is
        not at fault, so CheckpointError is raised on all ranks.
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
        """Return (this rank's result of `act`, the first rank's problem).

        All ranks must call this together. The problem is empty if all ranks succeed. `act` reads
        data that another program may have written, so it can fail in any way.
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
        """Describe what is wrong with a checkpoint, based on the error from reading it."""
        if isinstance(error, CheckpointError):
            return str(error)
        where = f"not readable on rank {self._group.rank}"
        if isinstance(error, OSError):
            return f"{where}: {error.filename or self.path}: {error.strerror or error}"
        return f"{where}: {type(error).__name__}: {first_line(error)}"


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > _LARGE_BYTES
