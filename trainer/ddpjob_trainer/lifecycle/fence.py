"""Who may write to a shared checkpoint folder: one job at a time, and of it the newest incarnation, no zombie of an
older one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError, FencedError, FolderTakenError

EXIT_FENCED = 79
BEAT_SECONDS, WATCH_SECONDS = 5.0, 30.0
"""The owner of a folder touches its file so often; another job, which finds no sign that the owner has ended, watches
that file for so long. No clocks are compared: they differ."""
_OWNER = "owner.json"
_NAME = "fence.json"


def round_from_env() -> tuple[int, int]:
    """(generation, round) in which this process was started; (0, 0) outside of a job. Raises ConfigError.

    The launcher gives each worker DDPJOB_FENCE; without a launcher the pod's own DDPJOB_GENERATION and DDPJOB_ROUND
    count.
    """
    job = JobEnvironment.read()
    text = job.fence
    if not text:
        return int(job.generation or 0), int(job.round or 0)
    if not (match := re.fullmatch(r"(\d+)\.(\d+)", text)):
        raise ConfigError(
            f"DDPJOB_FENCE={text!r}: must be GENERATION.ROUND, two whole numbers; leave it to the launcher, or unset it"
        )
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Claim:
    """One incarnation of the job: generation and round of the group (the highest among its ranks),
    and a random number.
    """

    generation: int
    round: int
    incarnation: int
    job: str = JobEnvironment.read().uid
    """A job that is created or run again counts from zero: only incarnations of one job are compared."""
    host: str = socket.gethostname()
    time: float = 0.0

    def take(self, folder: Path) -> None:
        """Claim the folder. Raises FencedError when a newer generation or round has claimed it."""
        found = _read(folder)
        if found is not None and found.job == self.job and found.order > self.order:
            raise FencedError(self._refusal(folder, found))
        write_atomically(folder / _NAME, json.dumps({**asdict(self), "time": time.time()}).encode())

    def check(self, folder: Path) -> None:
        """Check the claim.

        Raises FencedError when another incarnation has claimed the folder since, CheckpointError
        when the claim is gone or damaged.
        """
        found = _read(folder)
        if found is None:
            raise CheckpointError(
                f"checkpoint folder {folder} has lost its {_NAME}; a running job's folder must be left alone"
            )
        if found.incarnation == self.incarnation:
            return
        if found.job == self.job and found.order < self.order:
            self.take(folder)  # An older one read the claim before ours was written, and wrote its own after.
            return
        raise FencedError(self._refusal(folder, found))

    @property
    def order(self) -> tuple[int, int]:
        """What incarnations of one job are compared by."""
        return self.generation, self.round

    def _refusal(self, folder: Path, found: Claim) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
        return (
            f"checkpoint folder {folder} was claimed on {since} by {found.host} (generation {found.generation}, round"
            f" {found.round}); this process belongs to generation {self.generation}, round {self.round} and writes"
            " nothing more. Two jobs need two folders: set checkpoint.dir"
        )


def agree_on_incarnation(group: Group) -> Claim:
    """One identity for this incarnation: the highest generation and round among its ranks, and a random number.

    Rank 0 draws the number. All ranks together.
    """
    generation, round_ = round_from_env()
    generations, rounds = group.gather(generation), group.gather(round_)
    return Claim(*max(zip(generations, rounds, strict=True)), group.gather(random.SystemRandom().getrandbits(62))[0])


@dataclass(frozen=True)
class Owner:
    """The job that uses a folder; `pod` holds its rank 0. A training outside of a job has no names."""

    job: str
    """Its uid."""
    namespace: str
    name: str
    pod: str
    ended: bool = False
    """Whether it has completed its training."""
    cluster: str = ""
    """Distinguishes clusters, each of which may have a job of this name. Empty: not known."""

    @classmethod
    def from_env(cls) -> Owner:
        """This process'."""
        job = JobEnvironment.read()
        return cls(job.uid, job.namespace, job.name, job.host, cluster=job.cluster)

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """The one that the file names; None where there is none, or what it says cannot be understood."""
        try:
            found = json.loads(path.read_text())
            return cls(**{f.name: found[f.name] for f in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def is_rival_of(self, other: Owner) -> bool:
        """Whether both may not use the folder together. A job that is created again under its name continues."""
        other_name = (self.namespace, self.name) != (other.namespace, other.name)
        return self.job != other.job and (other_name or self.is_elsewhere(other))

    def is_elsewhere(self, other: Owner) -> bool:
        """Whether they are known to be of two clusters, or of two machines without one."""
        return bool(self.cluster and other.cluster) and self.cluster != other.cluster

    def __str__(self) -> str:
        who = f"job {self.namespace}/{self.name}" if self.name else "a training outside of jobs"
        return f"{who} ({'pod' if self.name else 'host'} {self.pod})"


class Ownership:
    """Keeps a folder for this process' job as long as the process lives; the writing rank has it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._owner = folder / _OWNER, Owner.from_env()
        self._ended = threading.Event()

    def take(self) -> Iterator[None]:
        """Take the folder over from a job that has ended, or does not run any more.

        Raises FolderTakenError where another job uses it. A former one that has not said that it has ended is watched
        for WATCH_SECONDS first; meanwhile this yields, twice a second.
        """
        found = Owner.read(self._path)
        if found is not None and not found.ended and found.is_rival_of(self._owner):
            who = f"{found}{' of another cluster or machine' if found.is_elsewhere(self._owner) else ''}"
            print(
                f"{self._path.parent} was used by {who}: watches for {WATCH_SECONDS:.0f} s whether that still runs",
                file=sys.stderr,
                flush=True,
            )
            first, until = self._mark(), time.monotonic() + WATCH_SECONDS
            while time.monotonic() < until:
                time.sleep(min(0.5, BEAT_SECONDS))
                if self._mark() not in (first, None):
                    raise FolderTakenError(
                        f"checkpoint folder {self._path.parent} is in use by {who}: two jobs need two folders. Set"
                        " storage.checkpoints.subPath (or checkpoint.dir) to another one; to continue that job's"
                        " training here, let it end or delete it first"
                    )
                yield
        self._write(self._owner)
        threading.Thread(target=self._beat, name="checkpoint-owner", daemon=True).start()

    def release(self) -> None:
        """Training is complete: another job may continue at once."""
        self._ended.set()
        if self._is_ours():
            with contextlib.suppress(OSError):  # It only saves the next one the time to watch.
                self._write(replace(self._owner, ended=True))

    def _write(self, owner: Owner) -> None:
        write_atomically(self._path, json.dumps(asdict(owner)).encode())

    def _is_ours(self) -> bool:
        found = Owner.read(self._path)
        return found is not None and found.job == self._owner.job

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            found = Owner.read(self._path)  # None as well where a network file system fails for a moment.
            if found is not None and found.job != self._owner.job:
                return
            with contextlib.suppress(OSError):
                os.utime(self._path)  # by the file server's clock

    def _mark(self) -> tuple[int, int] | None:
        try:
            with self._path.open("rb") as file:  # opened: a network file system then asks its server
                found = os.fstat(file.fileno())
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _read(folder: Path) -> Claim | None:
    path = folder / _NAME
    try:
        return Claim(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove it when no other job uses the folder") from error
