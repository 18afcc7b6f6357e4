"""A preflight's results: the ranks' findings, rank 0's judgements, and the output as a table or
JSON.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpjob_trainer.errors import PreflightError


class Status(enum.StrEnum):
    """The outcomes of a check, from worst to best."""

    FAIL = "FAIL"
    WARN = "WARN"
    SKIPPED = "SKIPPED"
    OK = "OK"


_COLOURS = {Status.FAIL: "1;31", Status.WARN: "33", Status.SKIPPED: "2", Status.OK: "32"}


@dataclass(frozen=True)
class RankFinding:
    """One rank's finding. `same` maps names to values that must not differ between ranks."""

    value: str
    status: Status = Status.OK
    remedy: str = ""
    same: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One row in the table, for one check. `culprit` lists the names of nodes or ranks at fault."""

    check: str
    status: Status
    value: str
    culprit: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Layout:
    """The nodes of the ranks that have joined.

    `leader` maps each rank to its node's leader, which is the node's first rank. `name` maps each
    rank to the name of its node.
    """

    leader: dict[int, int]
    name: dict[int, str]

    @classmethod
    def of(cls, hellos: dict[int, dict[str, Any]]) -> Layout:
        """Return the layout from the notes in which the ranks state their host and leader.

        If several nodes have the same host name (because they run on the same machine), the name of
        each of these nodes also contains its leader.
        """
        nodes = {rank: (hello["host"], hello["leader"]) for rank, hello in hellos.items()}
        hosts = [host for host, _ in set(nodes.values())]
        name = {r: host if hosts.count(host) == 1 else f"{host} (rank {first})" for r, (host, first) in nodes.items()}
        return cls({rank: leader for rank, (_, leader) in nodes.items()}, name)

    @property
    def leaders(self) -> list[int]:
        """The nodes' leaders, except leaders that have not joined."""
        return sorted(rank for rank, leader in self.leader.items() if rank == leader)

    def nodes(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the ranks' nodes, without duplicates."""
        return tuple(dict.fromkeys(self.name[rank] for rank in sorted(ranks)))

    def ranks(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return descriptions of ranks, such as `rank 3 on node-b`."""
        return tuple(f"rank {rank} on {self.name[rank]}" for rank in sorted(ranks))


def worst_first(results: Iterable[Result]) -> list[Result]:
    """Sort results by status. Results with the same status keep the order of the checks."""
    return sorted(results, key=lambda result: list(Status).index(result.status))


@dataclass(frozen=True)
class PreflightReport:
    """All results of a preflight, worst first."""

    ranks: int
    nodes: int
    seconds: float
    results: tuple[Result, ...]

    @property
    def failure(self) -> str:
        """The worst result in one sentence; empty if no check failed."""
        worst = self.results[0]
        if worst.status is not Status.FAIL:
            return ""
        where = f" at {', '.join(worst.culprit[:4])}" if worst.culprit else ""
        return f"preflight: {worst.check}{where}: {worst.value}" + (f"; {worst.remedy}" if worst.remedy else "")

    def print(self) -> None:
        """Print a headline, then a line for each result, and a line for its remedy if it has one.

        On a terminal, the output is coloured.
        """
        statuses = [result.status for result in self.results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in Status if status in statuses)
        lines = [f"preflight of {self.ranks} rank(s) on {self.nodes} node(s): {counts} ({self.seconds:.1f} s)"]
        rows = [(row.status, row.check, listed(row.culprit, " and {} more"), row.value) for row in self.results]
        wide, check, culprit = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:3])
        for result, row in zip(self.results, rows, strict=True):
            colour, plain = (f"\033[{_COLOURS[row[0]]}m", "\033[0m") if sys.stdout.isatty() else ("", "")
            lines.append(f"{colour}{row[0]:{wide}}{plain}  {row[1]:{check}}  {row[2]:{culprit}}  {row[3]}")
            lines += [f"{'':{wide}}  -> {result.remedy}"] if result.remedy else []
        print("\n".join(lines), flush=True)

    def write(self, path: Path) -> None:
        """Write the report as JSON. Raises PreflightError if the file cannot be written."""
        try:
            path.write_text(json.dumps(asdict(self) | {"failed": bool(self.failure)}, indent=2) + "\n")
        except OSError as error:
            raise PreflightError(f"--json {path}: {error.strerror}; use a file in an existing folder") from error


def listed(words: Iterable[str], more: str = ", ...", most: int = 4, by: str = ", ") -> str:
    """Join the first `most` words.

    If there are more words, append `more`, in which {} stands for the number of words left out.
    """
    words = list(words)
    return by.join(words[:most]) + (more.format(len(words) - most) if len(words) > most else "")


def gigabytes(size: float) -> str:
    """Format a size, such as `1.5 GiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
