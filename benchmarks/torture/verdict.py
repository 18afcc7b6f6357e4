"""Checks a tortured job that has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ddpjob_trainer.commands.check_ledger import Incarnation, read, verify
from ddpjob_trainer.errors import LedgerError

from benchmarks.torture.arena import COPY_KILL, Observed
from benchmarks.torture.jobs import Kind, distance, weights
from benchmarks.torture.replay import replay, segments


@dataclass(frozen=True)
class Verdict:
    """A job's result; `problems` describes the failed checks."""

    kind: Kind
    kills: Counter[str]
    incarnations: int
    changes: int
    """Number of times that the number of ranks changed."""
    repeated: int
    samples: int
    difference: float | None
    """The largest difference between a weight and the replay's; None if they were not compared."""
    problems: tuple[str, ...]


def judge(
    kind: Kind, folder: Path, observed: Observed, kills: Counter[str], arguments: list[str], replays: Path
) -> Verdict:
    """Check a job's phase, counted restarts, ledger and weights.

    The job must be Complete without a counted restart, and its ledger and weights must be those of
    undisturbed training. A kill may repeat as many complete steps as lie between two copies;
    with "auto", as many as `observed` has at risk.
    """
    own = kills[COPY_KILL]
    problems = [] if observed.phase == "Complete" else [f"the phase is {observed.phase or 'Pending'}, not Complete"]
    if observed.counted > own:
        problems.append(f"{observed.counted} restarts were counted, but {own} were the job's own failures")
    incarnations: list[Incarnation] = []
    samples, difference = 0, None
    try:
        incarnations = read([folder])
        samples = sum(verify(incarnations).epochs.values())
    except LedgerError as error:
        problems.append(f"ledger: {error}")
    parts = segments(incarnations)
    if observed.phase == "Complete":
        place = replays / kind.strategy / str(bool(kind.snapshots))
        place.mkdir(parents=True, exist_ok=True)
        difference = distance(weights(folder), weights(replay(place, parts, arguments)))
        if difference > 0:
            problems.append(
                f"a weight differs by {difference:.2e} from undisturbed training with the same ranks at each step"
            )
    lost = [max(0, before.last - after.start) for before, after in pairwise(incarnations)]
    repeated = sum(lost)
    at_risk = kind.snapshots if isinstance(kind.snapshots, int) else observed.at_risk
    if kind.snapshots and (most := max(lost, default=0)) > at_risk + 1:
        allowed = f"at most {at_risk} complete and one started step may be repeated"
        problems.append(f"{most} steps were repeated after one kill; {allowed}")
    return Verdict(
        kind, kills, len(incarnations), max(0, len(parts) - 1), repeated, samples, difference, tuple(problems)
    )


def table(verdicts: list[Verdict], for_all: Counter[str], seed: int) -> str:
    """Return a table with one row per kind of job. `for_all` contains the kills that affected all
    jobs.
    """
    lines = [
        "| jobs | runs | kills | of them | Complete, ledger exact, weights equal | incarnations"
        " | changes of size | steps repeated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.kind == kind]
        what = sum((verdict.kills for verdict in own), Counter[str]())
        good = sum(not verdict.problems for verdict in own)
        lines.append(
            f"| {kind.name} | {len(own)} | {what.total()} | {listed(what)}"
            f" | {good} of {len(own)} | {sum(v.incarnations for v in own)} | {sum(v.changes for v in own)}"
            f" | {sum(v.repeated for v in own)} |"
        )
    kills = sum(verdict.kills.total() for verdict in verdicts) + for_all.total()
    exact = sum(verdict.samples for verdict in verdicts)
    also = f" They include kills that affect all jobs: {listed(for_all)}." if for_all else ""
    return "\n".join(
        [*lines, "", f"{kills} kills with seed {seed}.{also} {exact} samples, each exactly once in its epoch."]
    )


def listed(kills: Counter[str]) -> str:
    """Return the kinds of kills and the number of each."""
    return ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
