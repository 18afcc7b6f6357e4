"""What must hold of a tortured job when it has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from arena import Seen
from ddpjob_trainer.errors import LedgerError
from ddpjob_trainer.ledger_check import Life, read, verify
from jobs import Kind, distance, weights
from replay import replay, segments


@dataclass(frozen=True)
class Verdict:
    """One job. `problems` is empty when all is well. `difference`: of any weight, from the replay; None: not compared."""

    kind: Kind
    kills: Counter[str]
    lives: int
    changes: int
    """How often the number of ranks changed."""
    repeated: int
    samples: int
    difference: float | None
    problems: tuple[str, ...]


def judge(kind: Kind, folder: Path, seen: Seen, kills: Counter[str], arguments: list[str], replays: Path) -> Verdict:
    """Complete, no restart counted, ledger exact, weights those of undisturbed training."""
    problems = [] if seen.phase == "Complete" else [f"is {seen.phase or 'Pending'}, not Complete"]
    if seen.counted:
        problems.append(f"{seen.counted} restarts were counted, and none was the job's own fault")
    lives: list[Life] = []
    samples, difference = 0, None
    try:
        lives = read([folder])
        samples = sum(verify(lives).epochs.values())
    except LedgerError as error:
        problems.append(f"ledger: {error}")
    parts = segments(lives)
    if seen.phase == "Complete":
        difference = distance(weights(folder), weights(replay(replays, parts, arguments)))
        if difference > 0:
            problems.append(f"a weight differs by {difference:.2e} from undisturbed training on as many ranks at each step")
    repeated = sum(max(0, before.last - after.start) for before, after in pairwise(lives))
    return Verdict(kind, kills, len(lives), max(0, len(parts) - 1), repeated, samples, difference, tuple(problems))


def table(verdicts: list[Verdict], for_all: Counter[str], seed: int) -> str:
    """One row for each kind of job; `for_all`: what was killed while all of them ran."""
    lines = [
        "| jobs | runs | kills | of them | Complete, ledger exact, weights equal | lives | changes of size | steps repeated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.kind == kind]
        what = sum((verdict.kills for verdict in own), Counter[str]())
        good = sum(not verdict.problems for verdict in own)
        lines.append(
            f"| {kind.name} | {len(own)} | {what.total()} | {told(what)}"
            f" | {good} of {len(own)} | {sum(v.lives for v in own)} | {sum(v.changes for v in own)} | {sum(v.repeated for v in own)} |"
        )
    kills = sum(verdict.kills.total() for verdict in verdicts) + for_all.total()
    exact = sum(verdict.samples for verdict in verdicts)
    also = f"; {told(for_all)} beside those of the table" if for_all else ""
    return "\n".join([*lines, "", f"{kills} kills, seed {seed}{also}. {exact} samples, each exactly once in its epoch."])


def told(kills: Counter[str]) -> str:
    """What and how often."""
    return ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
