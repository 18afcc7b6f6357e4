"""One generation's group as its coordinator sees it: rounds, breaks, incidents, the report. By the rules of the real one, coarsely."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from ddpjob.core.world import Incident, LostMember, Member, Note, Report

SILENCE, FIRST_WAIT, PACE, ATTEMPT_IDS = 6.0, 30.0, 10.0, 1_000_000
FAST_SECONDS, STANDARD_SECONDS = 0.2, 3.0
"""From a break until the group runs again, at the least."""
SETTLING = 1.0
"""Seconds from a break until its incident is told."""


@dataclass
class Group:
    generation: int
    wanted: int
    minimum: int
    fast: bool
    moment: Callable[[float], datetime]
    hang_after: float | None = None
    backoff: tuple[float, ...] = (1.0, 60.0)
    attempt: int = 0
    state: str = "Forming"
    running: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    incidents: list[Incident] = field(default_factory=list)
    told_from: list[float] = field(default_factory=list)
    silent: dict[str, float] = field(default_factory=dict)
    """Members that were connected and are not heard of: since when."""
    lost: dict[str, float] = field(default_factory=dict)
    step: int = 0
    formed: float = 0.0
    broken: float = 0.0
    waiting_since: float | None = None
    rounds: int = 0
    notes: tuple[Note, ...] = ()
    worlds: list[int] = field(default_factory=list)
    """Of every round that was formed."""

    # --- what it is told

    def follow_members(self, alive: Collection[str], ended: Collection[str], leaving: Collection[str], now: float) -> None:
        """`alive`: pods that answer; `ended`: those whose connection has ended; the others that were members are silent."""
        before = self.running | self.ready
        for pod in before - set(alive) - set(ended):
            self.silent.setdefault(pod, now)
        for pod in list(self.silent):
            if pod in alive or pod in ended:
                del self.silent[pod]
            elif now - self.silent[pod] >= SILENCE:
                self.lost[pod] = self.silent.pop(pod)
        for pod in alive:
            self.lost.pop(pod, None)
        away = {pod for pod in before if pod in ended or pod in self.lost}
        if self.state == "Running" and self.running & away:
            first = min(self.running & away)
            self.break_up("Left" if first in leaving else "PeerLost", first, f"pod {first} is gone", now=now)
        self.ready = frozenset(alive) - self.running
        self.running = self.running - away

    def gone(self, pod: str, now: float) -> None:
        self.lost.pop(pod, None)
        self.silent.pop(pod, None)
        if self.state == "Running" and pod in self.running:
            self.break_up("PeerLost", pod, "the operator says that it is gone", now=now)
        self.running, self.ready = self.running - {pod}, self.ready - {pod}

    def break_up(self, kind: str, pod: str, message: str, *, now: float, **details: object) -> None:
        """The round ends, and has one incident."""
        self.state, self.broken = "Restarting", now
        number = self.attempt * ATTEMPT_IDS + len(self.incidents) + 1
        told = Incident(
            id=number, time=self.moment(now), kind=kind, pod=pod, index=int(pod.split("-")[1]) if "-" in pod else 0,
            rank=None, local_rank=None, exit_code=None, signal=None, message=message, traceback="",
        )  # fmt: skip
        self.incidents.append(replace(told, **details))  # type: ignore[arg-type]
        self.told_from.append(now + SETTLING)

    # --- what it does

    def form(self, now: float) -> None:
        """The next round, when it may begin."""
        if self.state == "Running":
            self._grow_or_shrink(now)
            return
        there = self.running | self.ready
        if len(there) < self.minimum:
            self.waiting_since = None
            return
        self.waiting_since = now if self.waiting_since is None else self.waiting_since
        patience = FIRST_WAIT if self.rounds == 0 else 0.0 if self.fast else PACE
        if self.rounds and now - self.broken < (FAST_SECONDS if self.fast else STANDARD_SECONDS):
            return
        if len(there) >= self.wanted or now - self.waiting_since >= patience:
            chosen = [*sorted(self.running), *sorted(self.ready)][: self.wanted]
            self.running, self.ready = frozenset(chosen), there - set(chosen)
            self.state, self.formed, self.waiting_since = "Running", now, None
            self.rounds += 1
            self.worlds.append(len(chosen))

    def _grow_or_shrink(self, now: float) -> None:
        world = len(self.running)
        if world > self.wanted:
            self.state, self.broken = "Restarting", now
        elif world < self.wanted and self.ready and now - self.formed >= PACE:
            joiner = min(self.ready)
            self.break_up("Joined", joiner, f"pod {joiner} joins", now=now)

    def adopt(self, attempt: int) -> None:
        """Another coordinator has taken over; its incidents are its own."""
        if attempt != self.attempt:
            self.attempt, self.incidents, self.told_from = attempt, [], []

    # --- what it tells

    def report(self, now: float, steps: int) -> Report:
        members = [
            Member(pod=p, state="Running" if self.state == "Running" else "Ready", rank=n) for n, p in enumerate(sorted(self.running))
        ]
        members += [Member(pod=p, state="Ready") for p in sorted(self.ready)]
        return Report(
            generation=self.generation,
            state=self.state,
            attempt=self.attempt,
            wanted=self.wanted,
            minimum=self.minimum,
            hang_after=self.hang_after,
            backoff=self.backoff,
            world=len(self.running) if self.state in ("Running", "Succeeded") else None,
            members=tuple(m for m in members if m.pod not in self.lost),
            lost=tuple(LostMember(pod=p, since=self.moment(t)) for p, t in self.lost.items()),
            notes=self.notes,
            incidents=tuple(i for i, told in zip(self.incidents, self.told_from, strict=True) if told <= now),
            progress={"step": self.step, "steps": steps} if self.step else {},
        )


def moments(epoch: datetime) -> Callable[[float], datetime]:
    return lambda seconds: epoch + timedelta(seconds=seconds)
