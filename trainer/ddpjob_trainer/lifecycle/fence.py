"""Ensures that only one job, and only its newest incarnation, writes to a checkpoint folder.

Leftover processes of older incarnations are fenced.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ddpjob_pod.job_environment import JobEnvironment, VariableError

from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import CheckpointError, ConfigError, FencedError, FolderTakenError

EXIT_FENCED = 79
BEAT_SECONDS, WATCH_SECONDS = 5.0, 30.0
"""The job that owns a folder touches the folder's `owner.json` every BEAT_SECONDS. A different job
that finds no sign of the owner's end watches this file for WATCH_SECONDS. That job looks only for
changes to the file. It does not compare the file's time with its own clock, because the clocks of
two hosts can differ.
"""
_OWNER = "owner.json"
_NAME = "fence.json"


def round_from_env() -> tuple[int, int]:
    """Return the generation and round in which this process was started, or (0, 0) outside a job.

    Raises ConfigError if a variable is malformed.
    """
    try:
        return JobEnvironment.read().order
    except VariableError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class Claim:
    """One incarnation's claim to a checkpoint folder.

    A claim consists of the highest generation and round among the ranks, and a random number that
    identifies the incarnation.
    """

    generation: int
    round: int
    incarnation: int
    job: str = JobEnvironment.read().uid
    """The job's uid. When a job is recreated or rerun, generations and rounds start again at zero,
    so only claims of the same job are compared.
    """
    host: str = socket.gethostname()
    time: float = 0.0

    def take(self, folder: Path) -> None:
        """Claim the folder for this incarnation.

        Raises FencedError if a newer generation or round of the same job has claimed the folder.
        """
        found = _read(folder)
        if found is not None and found.job == self.job and found.order > self.order:
            raise FencedError(self._refusal(folder, found))
        write_atomically(folder / _NAME, json.dumps({**asdict(self), "time": time.time()}).encode())

    def check(self, folder: Path) -> None:
        """Check that this incarnation still holds the folder.

        If an older incarnation of the same job has claimed the folder, claim it again. Raises
        FencedError if any other incarnation has claimed the folder, and CheckpointError if the
        claim is missing or damaged.
        """
        found = _read(folder)
        if found is None:
            raise CheckpointError(
                f"checkpoint folder {folder} no longer contains {_NAME}; let nothing but the job "
                "change this folder while the job runs"
            )
        if found.incarnation == self.incarnation:
            return
        if found.job == self.job and found.order < self.order:
            # An older incarnation read the folder's claim before ours was written, and then
            # replaced ours with its own.
            self.take(folder)
            return
        raise FencedError(self._refusal(folder, found))

    @property
    def order(self) -> tuple[int, int]:
        """The key for comparing the claims of a job's incarnations."""
        return self.generation, self.round

    def _refusal(self, folder: Path, found: Claim) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))
        return (
            f"checkpoint folder {folder} was claimed on {since} by {found.host} (generation "
            f"{found.generation}, round {found.round}), so this process (generation "
            f"{self.generation}, round {self.round}) stops writing. If two jobs use this folder, set "
            "checkpoint.dir to separate folders"
        )


def agree_on_incarnation(group: Group) -> Claim:
    """Return this incarnation's claim, which is the same on all ranks.

    The claim consists of the highest generation and round among the ranks, and a random number that
    rank 0 draws. All ranks must call this together.
    """
    generation, round_ = round_from_env()
    generations, rounds = group.gather(generation), group.gather(round_)
    return Claim(*max(zip(generations, rounds, strict=True)), group.gather(random.SystemRandom().getrandbits(62))[0])


@dataclass(frozen=True)
class Owner:
    """The job that uses a folder. `pod` is the pod that runs the job's rank 0.

    Outside a job, `job`, `namespace` and `name` are empty, and `pod` is the host's name.
    """

    job: str
    """The job's uid."""
    namespace: str
    name: str
    pod: str
    ended: bool = False
    """Whether the job has completed training."""
    cluster: str = ""
    """An identifier of the job's cluster, empty if unknown. Jobs in different clusters can have the
    same name.
    """

    @classmethod
    def from_env(cls) -> Owner:
        """Return an Owner for the job of this process."""
        job = JobEnvironment.read()
        return cls(job.uid, job.namespace, job.name, job.host, cluster=job.cluster)

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Return the owner that the file names, or None if there is no valid file."""
        try:
            found = json.loads(path.read_text())
            return cls(**{f.name: found[f.name] for f in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def is_rival_of(self, other: Owner) -> bool:
        """Return whether the two owners must not use the folder at the same time.

        A recreated job with the same name is not a rival, because it continues in the same folder.
        """
        other_name = (self.namespace, self.name) != (other.namespace, other.name)
        return self.job != other.job and (other_name or self.is_elsewhere(other))

    def is_elsewhere(self, other: Owner) -> bool:
        """Return whether the two owners are known to belong to different clusters.

        Under `ddpjob run`, each machine counts as a cluster.
        """
        return bool(self.cluster and other.cluster) and self.cluster != other.cluster

    def __str__(self) -> str:
        who = f"job {self.namespace}/{self.name}" if self.name else "a training run outside any job"
        return f"{who} ({'pod' if self.name else 'host'} {self.pod})"


class Ownership:
    """Holds a checkpoint folder for this process's job as long as the process is alive.

    Only the rank that writes to the folder has an Ownership.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._owner = folder / _OWNER, Owner.from_env()
        self._ended = threading.Event()

    def take(self) -> Iterator[None]:
        """Take over the folder after its former owner has ended or is no longer running.

        If the former owner has not recorded its end in `owner.json`, watch this file for
        WATCH_SECONDS, and yield twice a second. Raises FolderTakenError if the file changes,
        because a change means that the former owner is still using the folder.
        """
        found = Owner.read(self._path)
        if found is not None and not found.ended and found.is_rival_of(self._owner):
            who = f"{found}{' on another cluster or machine' if found.is_elsewhere(self._owner) else ''}"
            print(
                f"{self._path.parent} was last used by {who}; waiting {WATCH_SECONDS:.0f} s to see whether that "
                "owner is still running",
                file=sys.stderr,
                flush=True,
            )
            first, until = self._mark(), time.monotonic() + WATCH_SECONDS
            while time.monotonic() < until:
                time.sleep(min(0.5, BEAT_SECONDS))
                if self._mark() not in (first, None):
                    raise FolderTakenError(
                        f"checkpoint folder {self._path.parent} is in use by {who}. Set "
                        "storage.checkpoints.subPath (or checkpoint.dir) to a different folder. To continue "
                        "that training here, wait until it has ended, or stop it"
                    )
                yield
        self._write(self._owner)
        threading.Thread(target=self._beat, name="checkpoint-owner", daemon=True).start()

    def release(self) -> None:
        """Release the folder after training, so that a different job can use it immediately."""
        self._ended.set()
        if self._is_ours():
            # If this write fails, the next job only waits longer.
            with contextlib.suppress(OSError):
                self._write(replace(self._owner, ended=True))

    def _write(self, owner: Owner) -> None:
        write_atomically(self._path, json.dumps(asdict(owner)).encode())

    def _is_ours(self) -> bool:
        found = Owner.read(self._path)
        return found is not None and found.job == self._owner.job

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # None can also mean that a network file system failed briefly.
            found = Owner.read(self._path)
            if found is not None and found.job != self._owner.job:
                return
            with contextlib.suppress(OSError):
                os.utime(self._path)  # The time comes from the file server's clock.

    def _mark(self) -> tuple[int, int] | None:
        try:
            # Opening the file makes a network file system ask its server for the current time of
            # the file.
            with self._path.open("rb") as file:
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
        raise CheckpointError(
            f"{path} is damaged ({error}); remove this file once no other job uses the folder"
        ) from error
