"""Kills at random until enough, in waves of one job of each kind; then every job must end as if nothing had been."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from arena import Arena, Seen
from jobs import KINDS, STEPS_PER_EPOCH, Kind, spec, trainer_arguments
from verdict import Verdict, judge

WEIGHTS = {"pod": 6, "two pods": 2, "coordinator": 2, "coordinator and pod": 1}
PATIENCE = 900.0
"""Seconds for a wave after its last kill."""


@dataclass
class Running:
    """A job of the wave."""

    name: str
    kind: Kind
    began: float
    kills: Counter[str] = field(default_factory=Counter)
    ended: Seen | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What was asked for. `interval`: seconds between two kills at most."""

    kills: int
    seed: int
    epochs: int
    interval: float
    kinds: tuple[Kind, ...] = KINDS
    defect: str = ""


class Torture:
    """Waves until the number of kills is reached."""

    def __init__(self, arena: Arena, plan: Plan, replays: Path) -> None:
        self.arena, self.plan, self.replays = arena, plan, replays
        self.random = random.Random(plan.seed)
        self.left = plan.kills
        self.verdicts: list[Verdict] = []
        self.for_all: Counter[str] = Counter()
        """Kills that no one job can be charged with."""

    def run(self) -> list[Verdict]:
        """One verdict for each job."""
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
                seen = job.ended or self.arena.look(job.name)
                seconds = job.seconds or time.monotonic() - job.began
                arguments = trainer_arguments(self.plan.epochs)
                verdict = judge(job.kind, self.arena.checkpoints(job.name), seen, job.kills, arguments, self.replays)
                self.verdicts.append(verdict)
                note(f"{job.name}: {seen.phase} in {seconds:.0f} s, kills {dict(job.kills)}, lives {verdict.lives} {seen.message}")
                for problem in verdict.problems:
                    note(f"{job.name}: PROBLEM: {problem}")
        finally:
            for job in jobs:
                self.arena.close(job.name)

    def _torment(self, jobs: list[Running]) -> None:
        """Until all have ended, or patience has."""
        last_kill = next_kill = time.monotonic()
        while time.monotonic() < last_kill + PATIENCE:
            for job in jobs:
                self._look(job)
            if all(job.ended for job in jobs):
                return
            if self.left > 0 and time.monotonic() >= next_kill:
                if self._kill([job for job in jobs if not job.ended]):
                    self.left -= 1
                    last_kill = time.monotonic()
                next_kill = time.monotonic() + self.random.choice((0.2, *(self.random.uniform(0, self.plan.interval) for _ in range(3))))
            time.sleep(0.1)

    def _look(self, job: Running) -> None:
        if job.ended is None:
            seen = self.arena.look(job.name)
            if seen.phase in ("Complete", "Failed"):
                job.ended, job.seconds = seen, time.monotonic() - job.began

    def _kill(self, jobs: list[Running]) -> bool:
        """Whether there was something to kill. A job is left alone before its first step and after its last."""
        weights = WEIGHTS | {name: weight for name, (weight, _) in self.arena.extras.items()}
        what = self.random.choices(list(weights), list(weights.values()))[0]
        job = self.random.choice(jobs)
        if what in self.arena.extras:
            if not self.arena.extras[what][1]():
                return False
            self.for_all[what] += 1
        else:
            seen = self.arena.look(job.name)
            victims = self._victims(what, seen)
            if not victims or not 0 < seen.step < STEPS_PER_EPOCH * self.plan.epochs:
                return False
            self.arena.kill(job.name, victims)
            note(f"{job.name}: killed {' and '.join(victims)} ({what}) at step {seen.step}")
            job.kills[what] += 1
        return True

    def _victims(self, what: str, seen: Seen) -> list[str]:
        pods = self.random.sample(seen.pods, min(len(seen.pods), 2 if what == "two pods" else 1))
        if what == "coordinator":
            return seen.coordinators
        return [*seen.coordinators, *pods] if what == "coordinator and pod" else pods


def note(text: str) -> None:
    """What happens, as it happens."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
