"""What must hold of a tortured job when it has ended."""

from __future__ import annotations

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
    kills: dict[str, int]
    lives: int
    changes: int
    """How often the number of ranks changed."""
    repeated: int
    samples: int
    difference: float | None
    problems: tuple[str, ...]


def judge(kind: Kind, folder: Path, seen: Seen, kills: dict[str, int], arguments: list[str], replays: Path) -> Verdict:
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


def table(verdicts: list[Verdict], seed: int) -> str:
    """One row for each kind of job."""
    lines = [
        "| jobs | runs | kills | of them | Complete, ledger exact, weights equal | lives | changes of size | steps repeated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.kind == kind]
        what: dict[str, int] = {}
        for verdict in own:
            for name, count in verdict.kills.items():
                what[name] = what.get(name, 0) + count
        good = sum(not verdict.problems for verdict in own)
        lines.append(
            f"| {kind.name} | {len(own)} | {sum(what.values())} | {', '.join(f'{name} {count}' for name, count in sorted(what.items()))}"
            f" | {good} of {len(own)} | {sum(v.lives for v in own)} | {sum(v.changes for v in own)} | {sum(v.repeated for v in own)} |"
        )
    kills = sum(sum(verdict.kills.values()) for verdict in verdicts)
    exact = sum(verdict.samples for verdict in verdicts)
    return "\n".join([*lines, "", f"{kills} kills, seed {seed}; {exact} samples, each exactly once in its epoch."])
