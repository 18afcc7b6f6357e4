"""A simulated training run with the trainer's ledger, checkpoints and fence, but without
arithmetic.

A step is recorded in the ledger when it begins, and takes effect when it ends, a second later. A
step lost in between is in the ledger too, as with the trainer. A group without a network, and so
without a checkpoint folder, takes no steps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_trainer.atomic_files import write_atomically
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.data.sampler import Dealing, ElasticSampler, Step
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import FencedError, LedgerError
from ddpjob_trainer.lifecycle.fence import EXIT_FENCED, Claim
from ddpjob_trainer.reporting.ledger import Ledger

from benchmarks.night.schedule import BATCH, Job
from benchmarks.night.simulated import Launcher, Network, Training, WorkerRound

STEP_SECONDS = 1.0
CHECKPOINT_EVERY = 10
_CHECKPOINT = "checkpoint.json"


@dataclass
class _Life:
    """One incarnation: a round's workers, starting at the checkpoint from which they resumed."""

    claim: Claim
    done: int
    samplers: list[ElasticSampler]
    ledgers: list[Ledger]
    coming: list[Iterator[Step]] = field(default_factory=list)
    begun: list[Step] | None = None


class PlayedTraining(Training):
    """The training of the job with this `uid`."""

    def __init__(self, network: Network, job: Job, uid: str, folder: Path, *, forgets: bool = False) -> None:
        super().__init__(network, job.steps)
        self.job, self.uid, self.folder = job, uid, folder
        self.forgets = forgets
        """Whether training resumes from the beginning, as a deliberate defect."""
        self.fenced = 0
        self._lives: dict[WorkerRound, _Life] = {}
        folder.mkdir()

    def runs(self, current: WorkerRound) -> bool:
        return super().runs(current) and not any(
            member.pod.host.cut or member.pod.isolated for member in current.working.values()
        )

    def _tick(self, current: WorkerRound) -> None:
        """Begin a step if possible; `_step` ends it."""
        life = self._lives.get(current)
        if life is None:
            try:
                life = self._lives[current] = self._resume(current)
            except FencedError as error:
                self._end_fenced(current, str(error))
                return
        if life.begun is None and life.done < self.steps and self.runs(current):
            life.begun = [next(steps) for steps in life.coming]
            for ledger, step in zip(life.ledgers, life.begun, strict=True):
                ledger.step(life.done + 1, step)
        pace = STEP_SECONDS * self.job.nodes / current.world
        self.network.clock.later(pace, lambda: self._step(current))

    def _resume(self, current: WorkerRound) -> _Life:
        """Resume from the checkpoint. Raises FencedError if a later round has the folder."""
        claim = Claim(current.generation, current.number, random.getrandbits(62), self.uid, current.working[0].pod.name)
        claim.take(self.folder)
        state: dict[str, Any] = {"epoch": 0, "consumed": 0, "seed": 0, "size": self.job.samples, "step": 0}
        if (self.folder / _CHECKPOINT).exists() and not self.forgets:
            state = json.loads((self.folder / _CHECKPOINT).read_text())
        samplers = []
        for rank in range(current.world):
            sampler = ElasticSampler(self.job.samples, BATCH, Dealing(rank, current.world))
            sampler.load_state_dict(state)
            samplers.append(sampler)
        ledgers = [Ledger(self.folder, Group(rank, current.world), claim) for rank in range(current.world)]
        for ledger in ledgers:
            ledger.start(state["step"], self.job.samples, self.job.epochs)
        coming = [sampler.upcoming(self.job.epochs) for sampler in samplers]
        return _Life(claim, state["step"], samplers, ledgers, coming)

    def _step(self, current: WorkerRound) -> None:
        if current.broken or not current.working:
            return
        life = self._lives[current]
        if life.begun is not None and self.runs(current):
            for sampler, step in zip(life.samplers, life.begun, strict=True):
                sampler.done(step)
            life.done, life.begun = life.done + 1, None
            self.made, self.last_step = life.done, self.network.clock.now
            if (life.done % CHECKPOINT_EVERY == 0 or life.done == self.steps) and not self._save(current, life):
                return
            self._report(current.working[0])
        if life.done >= self.steps:
            for ledger in life.ledgers:
                ledger.end(life.done)
            del self._lives[current]
            for member in list(current.working.values()):
                self.network.clock.later(self.network.draw("notice"), member.finished)
            return
        self._tick(current)

    def _save(self, current: WorkerRound, life: _Life) -> bool:
        """Write a checkpoint. Return False if a later round has the folder, so that this round
        ends.
        """
        try:
            life.claim.check(self.folder)
        except FencedError as error:
            self._end_fenced(current, str(error))
            return False
        state = life.samplers[0].state_dict() | {"step": life.done}
        write_atomically(self.folder / _CHECKPOINT, json.dumps(state).encode())
        life.ledgers[0].checkpoint(life.done)
        return True

    def _end_fenced(self, current: WorkerRound, why: str) -> None:
        self.fenced += 1
        for member in list(current.working.values()):
            if member.round is current:
                member.worker_ends(f"FencedError: {why}", EXIT_FENCED)

    def save_and_leave(self, current: WorkerRound) -> None:
        life = self._lives.get(current)
        if life is None or not self.runs(current) or self._save(current, life):
            super().save_and_leave(current)

    def left(self, launcher: Launcher, current: WorkerRound, how: str) -> None:
        super().left(launcher, current, how)
        if current.broken:
            self._lives.pop(current, None)


class Trainings:
    """The training runs of all jobs, behind the interface of a single run.

    A launcher's calls go to its own job's training.
    """

    def __init__(self) -> None:
        self.of_job: dict[str, PlayedTraining] = {}

    def _of(self, launcher: Launcher) -> PlayedTraining:
        return self.of_job[launcher.pod.body["metadata"]["labels"]["ddpjob.io/job"]]

    def meet(self, launcher: Launcher, go: dict[str, Any]) -> WorkerRound:
        return self._of(launcher).meet(launcher, go)

    def started(self, launcher: Launcher, current: WorkerRound) -> None:
        self._of(launcher).started(launcher, current)

    def left(self, launcher: Launcher, current: WorkerRound, how: str) -> None:
        self._of(launcher).left(launcher, current, how)

    def save_and_leave(self, current: WorkerRound) -> None:
        self._of(next(iter(current.arrived.values()))).save_and_leave(current)


def judge(training: PlayedTraining) -> tuple[int, str]:
    """Return the samples in the final history, and its faults.

    This is the same check as for a tortured job's ledger.
    """
    try:
        summary = verify(read([training.folder]))
    except LedgerError as error:
        return 0, f"ledger: {error}"
    samples = sum(summary.epochs.values())
    wanted = training.job.samples * training.job.epochs
    return samples, "" if samples == wanted else f"ledger: {samples} of {wanted} samples were taken"
