"""`python -m ddpjob_trainer ledger DIR` checks that every sample of every epoch was taken exactly
once.

The final history consists of the last execution of each global step. It must contain every sample
of each epoch exactly once. An incarnation must not repeat steps from before the newest checkpoint
that was saved when it started. The command also shows steps that did not change any weight, and
images that could not be read.

With repeated augmentation (data.repeats), an epoch of n samples takes n versions, each exactly
once. These are all versions of n / repeats samples (rounded up), except for some versions of the
last sample. The epoch determines the samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_trainer.config.command_line import wants_help
from ddpjob_trainer.errors import LedgerError
from ddpjob_trainer.reporting.ledger import FOLDER

_SHOWN = 10


@dataclass
class Incarnation:
    """One incarnation of the job, from a start or restart of all ranks until they end."""

    id: int
    began: float
    generation: int
    round: int
    start: int
    world: int
    size: int
    epochs: int
    parts: dict[int, dict[int, tuple[int, list[int]]]] = field(default_factory=lambda: defaultdict(dict))
    """Each rank's epoch and samples in each step, as {step: {rank: (epoch, samples)}}."""
    checkpoints: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    """Steps that left the weights unchanged, because the loss or a gradient was not finite."""
    unreadable: dict[int, int] = field(default_factory=dict)
    """Number of unreadable images on all ranks, by step."""
    end: int | None = None
    repeats: int = 1
    """Number of differently augmented versions of each sample (data.repeats)."""
    job: str = ""
    """The uid of the job; empty if the run was not in a job."""

    @property
    def last(self) -> int:
        """The last step that any rank began."""
        return max(self.parts, default=self.start)


@dataclass(frozen=True)
class LedgerSummary:
    """A summary of a ledger: its incarnations, and the number of samples that each epoch took.

    `epochs` counts only the final history. `left_out` maps each step that left the weights
    unchanged to the number of samples in that step. `unreadable` is the number of images with
    weight zero.
    """

    incarnations: list[Incarnation]
    epochs: dict[int, int]
    size: int
    left_out: dict[int, int] = field(default_factory=dict)
    unreadable: int = 0
    repeats: int = 1


def read(folders: list[Path]) -> list[Incarnation]:
    """Return the incarnations recorded in the ledgers under `folders`, oldest first.

    Raises LedgerError if there are no incarnations or a line is damaged.
    """
    files = sorted({path for folder in folders for path in folder.rglob("rank-*.jsonl") if path.parent.name == FOLDER})
    if not files:
        raise LedgerError(
            f"no ledger under {', '.join(map(str, folders))}; train with train.ledger=true, and pass the folder "
            "of that run"
        )
    rows = [row for path in files for row in _rows(path)]
    incarnations: dict[int, Incarnation] = {}
    for row in sorted(rows, key=lambda row: (row["time"], "start" not in row)):
        if "start" in row:
            incarnations.setdefault(
                row["incarnation"],
                Incarnation(
                    row["incarnation"],
                    row["time"],
                    row["generation"],
                    row["round"],
                    row["start"],
                    row["world"],
                    row["size"],
                    row["epochs"],
                    repeats=row.get("repeats", 1),
                    job=row["job"],
                ),
            )
    if not incarnations:
        raise LedgerError(
            f"the ledger under {', '.join(map(str, folders))} contains no step yet; wait until the run has trained "
            f"some steps"
        )
    for row in rows:
        if row["incarnation"] not in incarnations:
            raise LedgerError(f"a line belongs to an incarnation that never started: {row}")
        _add(incarnations[row["incarnation"]], row)
    return _in_order(list(incarnations.values()))


def _in_order(incarnations: list[Incarnation]) -> list[Incarnation]:
    """Sort the incarnations, oldest first.

    Incarnations of the same job are sorted by generation and round, not by time, because clocks may
    differ by minutes between hosts.
    """
    began: dict[str, float] = {}
    for it in incarnations:
        began[it.job] = min(it.began, began.get(it.job, it.began))

    def order(it: Incarnation) -> tuple[float, int, int, float]:
        return (began[it.job], it.generation, it.round, it.began) if it.job else (it.began, 0, 0, 0.0)

    return sorted(incarnations, key=order)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"time", "incarnation"} <= row.keys():
                raise ValueError("it is not a line of a ledger")
            rows.append(row)
        except ValueError as error:
            if number < len(lines):
                raise LedgerError(f"{path}, line {number} is damaged: {error}") from error
            # The process was killed while it wrote the last line, which therefore lacks its
            # newline. The step has not taken effect, so ignore the line.
    return rows


def _add(incarnation: Incarnation, row: dict[str, Any]) -> None:
    if "samples" in row:
        ranks = incarnation.parts[row["step"]]
        if row["rank"] in ranks:
            raise LedgerError(
                f"step {row['step']}: rank {row['rank']} executed this step twice in one incarnation (round "
                f"{incarnation.round})"
            )
        ranks[row["rank"]] = (row["epoch"], row["samples"])
    elif "leftOut" in row:
        incarnation.left_out.add(row["leftOut"])
    elif "unreadable" in row:
        incarnation.unreadable[row["of"]] = row["unreadable"]
    elif "checkpoint" in row:
        incarnation.checkpoints.append(row["checkpoint"])
    elif "end" in row:
        incarnation.end = row["end"]
        incarnation.epochs = row.get("epochs", incarnation.epochs)


def verify(incarnations: list[Incarnation]) -> LedgerSummary:
    """Check the incarnations, and return a summary. Raises LedgerError for the first violation."""
    _check_restarts(incarnations)
    size = incarnations[0].size
    if odd := [incarnation for incarnation in incarnations if incarnation.size != size]:
        raise LedgerError(f"the training set had {size} samples at first, but {odd[0].size} in round {odd[0].round}")
    repeats = incarnations[0].repeats
    if odd := [incarnation for incarnation in incarnations if incarnation.repeats != repeats]:
        raise LedgerError(
            f"a sample had {repeats} versions per epoch at first, but {odd[0].repeats} in round {odd[0].round}"
        )
    final = _final_history(incarnations)
    taken: dict[int, int] = {}
    for epoch, steps in _by_epoch(incarnations, final).items():
        taken[epoch] = _check_epoch(epoch, steps, size, repeats)
    _check_complete(incarnations[-1], taken, size)
    left_out = {
        step: sum(len(samples) for _, samples in owner.parts[step].values())
        for step, owner in sorted(final.items())
        if step in owner.left_out
    }
    unreadable = sum(owner.unreadable.get(step, 0) for step, owner in final.items() if step not in left_out)
    return LedgerSummary(incarnations, taken, size, left_out, unreadable, repeats)


def _check_restarts(incarnations: list[Incarnation]) -> None:
    newest_checkpoint, furthest = 0, 0
    for number, incarnation in enumerate(incarnations):
        if incarnation.start < newest_checkpoint:
            raise LedgerError(
                f"incarnation {number} resumed after step {incarnation.start}, although there was a checkpoint "
                f"of step {newest_checkpoint}, so it repeated too many steps"
            )
        if incarnation.start > furthest:
            raise LedgerError(
                f"incarnation {number} resumed after step {incarnation.start}, but earlier incarnations reached"
                f" only step {furthest}"
            )
        expected = list(range(incarnation.start + 1, incarnation.last + 1))
        if sorted(incarnation.parts) != expected:
            missing = sorted(set(expected) - set(incarnation.parts))
            raise LedgerError(f"incarnation {number} skipped step {missing[0] if missing else min(incarnation.parts)}")
        newest_checkpoint = max([newest_checkpoint, *incarnation.checkpoints])
        furthest = max(furthest, incarnation.last)


def _final_history(incarnations: list[Incarnation]) -> dict[int, Incarnation]:
    """Map each step to the incarnation whose execution of the step counts.

    An incarnation that resumes after a step replaces all later steps of earlier incarnations.
    """
    final: dict[int, Incarnation] = {}
    for incarnation in incarnations:
        final = {step: owner for step, owner in final.items() if step <= incarnation.start}
        final.update(dict.fromkeys(incarnation.parts, incarnation))
    return final


def _by_epoch(incarnations: list[Incarnation], final: dict[int, Incarnation]) -> dict[int, list[tuple[int, list[int]]]]:
    """Return a list of pairs (step, samples of all ranks) for each epoch.

    If the job was killed before all ranks had recorded its last step, that step is left out. Raises
    LedgerError if any other step lacks a rank, or if ranks disagree on the epoch.
    """
    epochs: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    last = max(final, default=0)
    for step, incarnation in sorted(final.items()):
        ranks = incarnation.parts[step]
        if sorted(ranks) != list(range(incarnation.world)):
            if step == last and incarnation.end is None and step not in incarnation.checkpoints:
                continue
            missing = sorted(set(range(incarnation.world)) - set(ranks))
            raise LedgerError(
                f"rank {missing[0]} of {incarnation.world} has no line for step {step}, which was not repeated "
                "later (the rank's ledger file may be lost)"
            )
        numbers = {epoch for epoch, _ in ranks.values()}
        if len(numbers) > 1:
            raise LedgerError(f"step {step}: the ranks were in different epochs, {sorted(numbers)}")
        epochs[numbers.pop()].append((step, [sample for rank in sorted(ranks) for sample in ranks[rank][1]]))
    return epochs


def _check_epoch(epoch: int, steps: list[tuple[int, list[int]]], size: int, repeats: int) -> int:
    def shown(number: int) -> str:
        return f"sample {number % size}" + (f" in version {number // size}" if repeats > 1 else "")

    taken_at: dict[int, int] = {}
    for step, samples in steps:
        for sample in samples:
            if not 0 <= sample < size * repeats:
                versions = f" in {repeats} versions" if repeats > 1 else ""
                raise LedgerError(
                    f"epoch {epoch}, step {step}: sample {sample} does not exist (the set has {size} samples{versions})"
                )
            if sample in taken_at:
                raise LedgerError(
                    f"epoch {epoch}: {shown(sample)} was used twice, in steps {taken_at[sample]} and {step}"
                )
            taken_at[sample] = step
    versions_of: dict[int, int] = defaultdict(int)
    for number in taken_at:
        versions_of[number % size] += 1
    if (several := sum(count < repeats for count in versions_of.values())) > 1 and len(taken_at) == size:
        raise LedgerError(f"epoch {epoch}: {several} samples were not used in all {repeats} versions")
    return len(taken_at)


def _check_complete(last: Incarnation, taken: dict[int, int], size: int) -> None:
    """Raise LedgerError if an epoch is incomplete.

    Only the current epoch of an unfinished run may be incomplete.
    """
    current = None if last.end is not None else max(taken, default=None)
    expected = range(1, last.epochs + 1) if last.end is not None else range(1, max(taken, default=0) + 1)
    for epoch in expected:
        if taken.get(epoch, 0) != size and epoch != current:
            raise LedgerError(f"epoch {epoch}: {size - taken.get(epoch, 0)} of {size} samples were never used")


def table(summary: LedgerSummary) -> str:
    """Return a table of incarnations and epochs."""
    lines = ["incarnation  generation  round  world  from step  to step  repeated"]
    furthest = 0
    for number, incarnation in enumerate(summary.incarnations):
        repeated = max(0, furthest - incarnation.start) if number else 0
        lines.append(
            f"{number:>11}  {incarnation.generation:>10}  {incarnation.round:>5}  {incarnation.world:>5}"
            f"  {incarnation.start + 1:>9}  {incarnation.last:>7}  {repeated:>8}"
        )
        furthest = max(furthest, incarnation.last)
    whole = sum(count == summary.size for count in summary.epochs.values())
    each = f"{summary.size} samples, each used exactly once"
    if (repeats := summary.repeats) > 1:
        each = (
            f"{summary.size} versions, each used exactly once: {repeats} (data.repeats) of each of "
            f"{-(-summary.size // repeats)} samples per epoch"
        )
    lines.append(f"epochs: {whole} whole, {each}")
    if partial := {epoch: count for epoch, count in summary.epochs.items() if count != summary.size}:
        lines.extend(
            f"epoch {epoch}: in progress, {count} of {summary.size} samples, none twice"
            for epoch, count in partial.items()
        )
    if summary.left_out:
        first = ", ".join(map(str, list(summary.left_out)[:_SHOWN])) + ", ..." * (len(summary.left_out) > _SHOWN)
        lines.append(
            f"skipped: {len(summary.left_out)} steps ({first}) with {sum(summary.left_out.values())} samples left the"
            " weights unchanged, because the loss or a gradient was not finite"
        )
    if summary.unreadable:
        lines.append(f"unreadable: {summary.unreadable} images were given weight zero")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Check the ledgers in the given folders, and print the table.

    Raises LedgerError for the first violation.
    """
    if wants_help(arguments):
        print(__doc__)
        return 0
    if not arguments:
        raise LedgerError("no folder given; use python -m ddpjob_trainer ledger RUN [RUN ...]")
    print(table(verify(read([Path(argument) for argument in arguments]))))
    return 0
