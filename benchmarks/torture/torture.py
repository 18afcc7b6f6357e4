"""Kills jobs at random, in waves with one job of each kind. Every job must end as if
undisturbed.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.torture.arena import COPY_KILL, Arena, Observed
from benchmarks.torture.jobs import KINDS, STEPS_PER_EPOCH, Kind, spec, trainer_arguments
from benchmarks.torture.verdict import Verdict, judge

WEIGHTS = {"pod": 6, "two pods": 2, "coordinator": 2, "coordinator and pod": 1}
OF_PODS = ("pod", "coordinator and pod")
"""Kills that remove one node together with its memory."""
SEVERAL = ("two pods", "host")
"""Kills that may remove all nodes of a job at once, together with their memory."""
APART = 2.0
"""Seconds between two kills of a job whose states are in memory, at least."""
APART_AFTER_FAULT = 15.0
"""The same after a fault other than a kill. By then, a job has recovered from a suspended process."""
NOTICED = 30.0
"""Seconds after which the status shows a new round if a node was lost. Otherwise the lost pod was a
spare."""
PATIENCE = 900.0
"""How long a wave may take to finish after the last kill, in seconds."""


@dataclass
class Running:
    """A job in a wave."""

    name: str
    kind: Kind
    began: float
    kills: Counter[str] = field(default_factory=Counter)
    disturbed: Observed | None = None
    """The job's state before the last kill."""
    disturbed_at: float = 0.0
    apart: float = 0.0
    """Seconds for which the job is left alone after the last kill."""
    loses: bool = False
    """Whether the last kill removed a node's memory."""
    at_risk: int = 1
    """The largest number of steps at risk that the job has shown."""
    ended: Observed | None = None
    seconds: float = 0.0

    def disturb(self, observed: Observed, what: str) -> None:
        """Record a kill or another fault."""
        self.disturbed, self.loses, self.disturbed_at = observed, what in OF_PODS, time.monotonic()
        self.apart = APART if what in WEIGHTS else APART_AFTER_FAULT

    def has_recovered(self, observed: Observed) -> bool:
        """Whether all nodes have the newest state again, so that a node may be lost."""
        before = self.disturbed
        if before is None:
            return True
        passed = time.monotonic() - self.disturbed_at
        unaffected = observed.round == before.round and (not self.loses or passed >= NOTICED)
        return (observed.start != before.start or unaffected) and passed >= self.apart


@dataclass(frozen=True)
class Plan:
    """A run's options. `interval` is the maximum time between two kills in seconds."""

    kills: int
    seed: int
    epochs: int
    interval: float
    kinds: tuple[Kind, ...] = KINDS
    defect: str = ""


class Torture:
    """Runs waves until the number of kills is reached."""

    def __init__(self, arena: Arena, plan: Plan, replays: Path) -> None:
        self.arena, self.plan, self.replays = arena, plan, replays
        self.random = random.Random(plan.seed)
        self.left = plan.kills
        self.verdicts: list[Verdict] = []
        self.for_all: Counter[str] = Counter()
        """Number of kills of each kind that affects all jobs, such as the operator's."""
        self.missed = 0
        """Number of kills in a copy that did not happen, for instance because the pod was a spare."""

    def run(self) -> list[Verdict]:
        """Run the waves, and return one verdict for each job."""
        wave = 0
        while self.left > 0:
            self._wave(wave)
            wave += 1
        return self.verdicts

    def _wave(self, number: int) -> None:
        jobs = [Running(f"w{number}-{kind.name}", kind, time.monotonic()) for kind in self.plan.kinds]
        try:
            for job in jobs:
                self.arena.start(job.name, spec(job.kind, self.plan.epochs, self.plan.defect))
            self._torment(jobs)
            for job in jobs:
                observed = replace(job.ended or self.arena.observe(job.name), at_risk=job.at_risk)
                seconds = job.seconds or time.monotonic() - job.began
                if missed := self.arena.missed(job.name):
                    job.kills[COPY_KILL] -= missed
                    self.missed += missed
                arguments = trainer_arguments(self.plan.epochs, job.kind)
                verdict = judge(
                    job.kind, self.arena.checkpoints(job.name), observed, job.kills, arguments, self.replays
                )
                self.verdicts.append(verdict)
                counts = f"kills {dict(job.kills)}, incarnations {verdict.incarnations}"
                note(f"{job.name}: {observed.phase} in {seconds:.0f} s, {counts} {observed.message}")
                for problem in verdict.problems:
                    note(f"{job.name}: PROBLEM: {problem}")
        finally:
            for job in jobs:
                self.arena.close(job.name)

    def _torment(self, jobs: list[Running]) -> None:
        """Kill until all jobs have ended, or PATIENCE has passed."""
        last_kill = next_kill = time.monotonic()
        while time.monotonic() < last_kill + PATIENCE:
            for job in jobs:
                self._observe(job)
            if all(job.ended for job in jobs):
                return
            if self.left > 0 and time.monotonic() >= next_kill:
                if self._kill([job for job in jobs if not job.ended]):
                    self.left -= 1
                    last_kill = time.monotonic()
                next_kill = time.monotonic() + self.random.choice(
                    (0.2, *(self.random.uniform(0, self.plan.interval) for _ in range(3)))
                )
            time.sleep(0.1)

    def _observe(self, job: Running) -> None:
        if job.ended is None:
            observed = self.arena.observe(job.name)
            job.at_risk = max(job.at_risk, observed.at_risk)
            if observed.phase in ("Complete", "Failed"):
                job.ended, job.seconds = observed, time.monotonic() - job.began

    def _kill(self, jobs: list[Running]) -> bool:
        """Kill something. Return whether there was anything to kill."""
        shuffled = self.random.sample(jobs, len(jobs))
        ready = ((job, observed) for job in shuffled if (observed := self._disturbable(job)) is not None)
        found = next(ready, None)
        if found is None:
            return False
        job, observed = found
        others = {**self.arena.extras, **self.arena.faults}
        weights = WEIGHTS | {name: weight for name, (weight, _) in others.items()}
        if job.kind.snapshots:
            weights = {name: weight for name, weight in weights.items() if name not in SEVERAL}
        what = self.random.choices(list(weights), list(weights.values()))[0]
        if what in self.arena.extras:
            if not self.arena.extras[what][1]():
                return False
            self.for_all[what] += 1
        else:
            job.disturb(observed, what)
            if what in self.arena.faults:
                if done := self.arena.faults[what][1](job.name, observed):
                    note(f"{job.name}: {what}: {done}, at step {observed.step}")
                    job.kills[what] += 1
                return bool(done)
            victims = self._victims(what, observed)
            if not victims:
                return False
            self.arena.kill(job.name, victims)
            note(f"{job.name}: killed {' and '.join(victims)} ({what}) at step {observed.step}")
            job.kills[what] += 1
        return True

    def _disturbable(self, job: Running) -> Observed | None:
        """Return the state of a job that may be disturbed now, otherwise None.

        Jobs are not disturbed before their first step or after their last.
        """
        observed = self.arena.observe(job.name)
        trains = 0 < observed.step < STEPS_PER_EPOCH * self.plan.epochs
        may = trains and (not job.kind.snapshots or job.has_recovered(observed))
        return observed if may else None

    def _victims(self, what: str, observed: Observed) -> list[str]:
        pods = self.random.sample(observed.pods, min(len(observed.pods), 2 if what == "two pods" else 1))
        if what == "coordinator":
            return observed.coordinators
        return [*observed.coordinators, *pods] if what == "coordinator and pod" else pods


def note(text: str) -> None:
    """Log an event to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
