"""`python -m ddpjob_trainer ledger DIR`: was every sample of every epoch taken exactly once, whatever happened on the way?

In the final history the last execution of each global step counts. It must deal every epoch out exactly once, and steps may be
repeated only from the newest checkpoint on that was saved before a life of the job ended.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import LedgerError
from ddpjob_trainer.ledger import FOLDER


@dataclass
class Life:
    """One life of the job: from a (re)start of all ranks to their end."""

    id: int
    began: float
    generation: int
    round: int
    start: int
    world: int
    size: int
    epochs: int
    parts: dict[int, dict[int, tuple[int, list[int]]]] = field(default_factory=lambda: defaultdict(dict))
    """step -> rank -> (epoch, samples)"""
    checkpoints: list[int] = field(default_factory=list)
    end: int | None = None

    @property
    def last(self) -> int:
        """The last step that any rank began."""
        return max(self.parts, default=self.start)


@dataclass(frozen=True)
class Verdict:
    """What the ledger shows: the lives, and epoch -> samples taken in the final history."""

    lives: list[Life]
    epochs: dict[int, int]
    size: int


def read(folders: list[Path]) -> list[Life]:
    """The lives found in the ledgers under `folders`, oldest first. Raises LedgerError when there is none or a line is damaged."""
    files = sorted({path for folder in folders for path in folder.rglob("rank-*.jsonl") if path.parent.name == FOLDER})
    if not files:
        raise LedgerError(f"no ledger under {', '.join(map(str, folders))}: train with train.ledger=true, and name the run's folder")
    rows = [row for path in files for row in _rows(path)]
    lives: dict[int, Life] = {}
    for row in sorted(rows, key=lambda row: (row["time"], "start" not in row)):
        if "start" in row:
            lives.setdefault(
                row["life"],
                Life(row["life"], row["time"], row["generation"], row["round"], row["start"], row["world"], row["size"], row["epochs"]),
            )
    for row in rows:
        if row["life"] not in lives:
            raise LedgerError(f"a line of a life that never began: {row}")
        _add(lives[row["life"]], row)
    return sorted(lives.values(), key=lambda life: life.began)


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise LedgerError(f"{path}, line {number} is damaged: {error}") from error
            # The last line without its newline: the process was killed while writing it, before the step took effect.
    return rows


def _add(life: Life, row: dict[str, Any]) -> None:
    if "samples" in row:
        ranks = life.parts[row["step"]]
        if row["rank"] in ranks:
            raise LedgerError(f"step {row['step']}: rank {row['rank']} executed it twice in one life (round {life.round})")
        ranks[row["rank"]] = (row["epoch"], row["samples"])
    elif "checkpoint" in row:
        life.checkpoints.append(row["checkpoint"])
    elif "end" in row:
        life.end = row["end"]


def verify(lives: list[Life]) -> Verdict:
    """Raises LedgerError with the first violation."""
    _check_restarts(lives)
    size = lives[0].size
    if odd := [life for life in lives if life.size != size]:
        raise LedgerError(f"the training set had {size} samples at first and {odd[0].size} in round {odd[0].round}")
    final = _final_history(lives)
    taken: dict[int, int] = {}
    for epoch, steps in _by_epoch(lives, final).items():
        taken[epoch] = _check_epoch(epoch, steps, size)
    _check_complete(lives[-1], taken, size)
    return Verdict(lives, taken, size)


def _check_restarts(lives: list[Life]) -> None:
    newest_checkpoint, furthest = 0, 0
    for number, life in enumerate(lives):
        if life.start < newest_checkpoint:
            raise LedgerError(
                f"life {number} went on after step {life.start}, though step {newest_checkpoint} was in a checkpoint: too much was repeated"
            )
        if life.start > furthest:
            raise LedgerError(f"life {number} went on after step {life.start}, and no life before it came further than step {furthest}")
        expected = list(range(life.start + 1, life.last + 1))
        if sorted(life.parts) != expected:
            missing = sorted(set(expected) - set(life.parts))
            raise LedgerError(f"life {number} left out step {missing[0] if missing else min(life.parts)}")
        newest_checkpoint = max([newest_checkpoint, *life.checkpoints])
        furthest = max(furthest, life.last)


def _final_history(lives: list[Life]) -> dict[int, Life]:
    """step -> the life whose execution counts. What came after a later life's start was undone by it."""
    final: dict[int, Life] = {}
    for life in lives:
        final = {step: owner for step, owner in final.items() if step <= life.start}
        final.update(dict.fromkeys(life.parts, life))
    return final


def _by_epoch(lives: list[Life], final: dict[int, Life]) -> dict[int, list[tuple[int, list[int]]]]:
    """epoch -> [(step, samples of all ranks)]. The last step of all may be incomplete if the job was killed in it."""
    epochs: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    last = max(final, default=0)
    for step, life in sorted(final.items()):
        ranks = life.parts[step]
        if sorted(ranks) != list(range(life.world)):
            if step == last and life.end is None and step not in life.checkpoints:
                continue
            missing = sorted(set(range(life.world)) - set(ranks))
            raise LedgerError(
                f"step {step} counts, and rank {missing[0]} of {life.world} did not take part in it (its ledger file may be lost)"
            )
        numbers = {epoch for epoch, _ in ranks.values()}
        if len(numbers) > 1:
            raise LedgerError(f"step {step}: the ranks were in different epochs, {sorted(numbers)}")
        epochs[numbers.pop()].append((step, [sample for rank in sorted(ranks) for sample in ranks[rank][1]]))
    return epochs


def _check_epoch(epoch: int, steps: list[tuple[int, list[int]]], size: int) -> int:
    taken_at: dict[int, int] = {}
    for step, samples in steps:
        for sample in samples:
            if not 0 <= sample < size:
                raise LedgerError(f"epoch {epoch}, step {step}: sample {sample} does not exist (the set has {size})")
            if sample in taken_at:
                raise LedgerError(f"epoch {epoch}: sample {sample} was taken twice, in step {taken_at[sample]} and in step {step}")
            taken_at[sample] = step
    return len(taken_at)


def _check_complete(last: Life, taken: dict[int, int], size: int) -> None:
    """Every epoch but the one under way must be whole; after the end, all."""
    under_way = None if last.end is not None else max(taken, default=None)
    expected = range(1, last.epochs + 1) if last.end is not None else range(1, max(taken, default=0) + 1)
    for epoch in expected:
        if taken.get(epoch, 0) != size and epoch != under_way:
            raise LedgerError(f"epoch {epoch}: {size - taken.get(epoch, 0)} of {size} samples were never taken")


def table(verdict: Verdict) -> str:
    """Lives and epochs, for people."""
    lines = ["life  generation  round  world  from step  to step  repeated"]
    furthest = 0
    for number, life in enumerate(verdict.lives):
        repeated = max(0, furthest - life.start) if number else 0
        lines.append(
            f"{number:>4}  {life.generation:>10}  {life.round:>5}  {life.world:>5}  {life.start + 1:>9}  {life.last:>7}  {repeated:>8}"
        )
        furthest = max(furthest, life.last)
    whole = sum(count == verdict.size for count in verdict.epochs.values())
    lines.append(f"epochs: {whole} whole, {verdict.size} samples each exactly once")
    if partial := {epoch: count for epoch, count in verdict.epochs.items() if count != verdict.size}:
        lines.extend(f"epoch {epoch}: under way, {count} of {verdict.size} samples, none twice" for epoch, count in partial.items())
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table; exit code 1 with the first violation."""
    if not arguments:
        raise LedgerError("no folder named; write python -m ddpjob_trainer ledger RUN [RUN ...]")
    print(table(verify(read([Path(argument) for argument in arguments]))))
    return 0
