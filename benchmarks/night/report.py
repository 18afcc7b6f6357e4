"""Writes the tables of a night."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from benchmarks.night.night import Record
from benchmarks.night.schedule import PRIORITIES, Job
from benchmarks.night.waits import Lack, Wait, Whose

AIM = 10.0
"""Maximum number of seconds that a job may wait although it fits."""
SHOWN = 5


def longest(record: Record) -> float:
    """Return the longest wait of a job, in seconds, for needed nodes that it could have had."""
    return max((wait.seconds for wait in record.waits_for(Lack.GANG, Lack.NODE)), default=0.0)


def table(record: Record, jobs: dict[str, Job], seed: int) -> str:
    """Return the figures and then the longest waits, in Markdown."""
    needed, more = record.waits_for(Lack.GANG, Lack.NODE), record.waits_for(Lack.MORE)
    complete = sum(status.get("phase") == "Complete" for status in record.statuses.values())
    counted = sum(status.get("restarts", {}).get("counted", 0) for status in record.statuses.values())
    total = sum(status.get("restarts", {}).get("total", 0) for status in record.statuses.values())
    held, offered = _gpu_seconds(record)
    lost = sum(wait.gpu_seconds for wait in needed)
    over = [wait for wait in needed if wait.seconds > AIM]
    rows = [
        ("jobs that are Complete", str(complete), f"{len(jobs)}", _yes(complete == len(jobs)), _shapes(jobs)),
        ("jobs whose ledger has each sample once per epoch", str(record.exact), f"{len(jobs)}",
         _yes(record.exact == len(jobs)), f"{record.samples} samples; {record.fenced} groups were fenced"),
        ("restarts that counted", str(counted), "0", _yes(counted == 0), f"of {total}: {_listed(record.reasons())}"),
        ("longest wait of a job that fits", f"{longest(record):.0f} s", f"{AIM:.0f} s", _yes(longest(record) <= AIM),
         f"{len(needed)} waits, {len(over)} beyond the aim; {_shares(needed)}"),
        ("longest wait for a spare or an elastic node", f"{more[0].seconds if more else 0:.0f} s", "", "",
         f"{len(more)} waits; {_shares(more)}"),
        ("GPUs idle while a job that fits waits", f"{lost / offered:.1%}", "", "",
         f"{lost:.0f} of {offered:.0f} GPU-seconds"),
        ("GPUs in use", f"{held / offered:.0%}", "", "",
         f"until the last job ended, after {record.seconds / 60:.1f} minutes"),
        ("GPUs in use for steps that count", f"{record.useful / offered:.0%}", "", "",
         "the rest: starts, waits for a gang's other pods, repeated steps"),
        ("pods that the scheduler preempted", str(len(record.preempted)), "", "", ""),
        ("share of a CPU for kube-scheduler", f"{record.scheduler_seconds / record.seconds:.1%}", "", "",
         f"{record.scheduler_seconds:.0f} s"),
        ("faults", str(len(record.faults)), "", "", _listed(Counter(str(kind) for _, kind, _ in record.faults))),
    ]  # fmt: skip
    for name in reversed(PRIORITIES):
        waited = [at - record.created[job] for job, at in record.first_held.items() if jobs[job].priority == name]
        if waited:
            rows.append(
                (f"priority {name}: time until a job first has its nodes", f"{median(waited):.0f} s", "", "",
                 f"median of {len(waited)}, at most {max(waited):.0f} s")
            )  # fmt: skip
    lines = ["| figure | value | aim | reached | notes |", "| --- | ---: | ---: | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "The longest waits of jobs that fit:", ""]
    lines += ["| job | waited for | from, s | for, s | operator's turn, s | kube-scheduler's, s | its message |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for wait in needed[:SHOWN]:
        job = jobs[wait.job]
        turns = f"{wait.of[Whose.OPERATOR]:.0f} | {wait.of[Whose.SCHEDULER]:.0f}"
        lines.append(
            f"| {wait.job}, {job.nodes} x {job.gpus}, {job.priority} | {wait.lack} | {wait.began:.0f} |"
            f" {wait.seconds:.0f} | {turns} | {_short(wait.said)} |"
        )
    load = f"load average {min(record.loads):.1f} to {max(record.loads):.1f}"
    if record.mistaken:
        load += f", so a healthy node was considered lost {record.mistaken} times"
    return "\n".join([*lines, "", f"Seed {seed}; {os.cpu_count()} cores; {load}."])


def _gpu_seconds(record: Record) -> tuple[float, float]:
    """Return (held, offered) GPU-seconds."""
    held = offered = 0.0
    for before, after in pairwise(record.looks):
        passed = after.at - before.at
        held += passed * sum(before.held.values())
        offered += passed * before.offered
    return held, offered or 1.0


def _shapes(jobs: dict[str, Job]) -> str:
    all_of = jobs.values()
    elastic, spare = sum(j.minimum < j.nodes for j in all_of), sum(j.spares > 0 for j in all_of)
    kinds = Counter(job.priority for job in all_of)
    return f"{', '.join(f'{kinds[name]} {name}' for name in PRIORITIES)}; {elastic} elastic, {spare} with a spare"


def _shares(waits: Iterable[Wait]) -> str:
    of: Counter[Whose] = Counter()
    for wait in waits:
        of.update(wait.of)
    return ", ".join(f"{whose}'s turn {of[whose]:.0f} s" for whose in Whose)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.most_common()) or "none"


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"


def _short(text: str, most: int = 110) -> str:
    text = text.replace("|", "/").replace("\n", " ")
    return text if len(text) <= most else f"{text[:most]} ..."
