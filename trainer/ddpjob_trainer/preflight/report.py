"""The one table: worst first, with culprit and remedy; rich on a TTY, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpjob_trainer.errors import PreflightError
from ddpjob_trainer.preflight.check import Result, Status

_WORST_FIRST = list(Status)
_COLOURS = {Status.FAIL: "bold red", Status.WARN: "yellow", Status.SKIPPED: "dim", Status.OK: "green"}


@dataclass(frozen=True)
class Report:
    """All results, worst first."""

    ranks: int
    nodes: int
    seconds: float
    results: tuple[Result, ...]

    @classmethod
    def of(cls, ranks: int, nodes: int, seconds: float, results: list[Result]) -> Report:
        """Sorted by how bad they are; in the order of the checks among equals."""
        return cls(ranks, nodes, seconds, tuple(sorted(results, key=lambda result: _WORST_FIRST.index(result.status))))

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(result.status is Status.FAIL for result in self.results)

    def headline(self) -> str:
        """Counts."""
        counts = {status: sum(result.status is status for result in self.results) for status in Status}
        named = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
        return f"preflight of {self.ranks} rank(s) on {self.nodes} node(s): {named} ({self.seconds:.1f} s)"

    def first_failure(self) -> str:
        """The worst result in one sentence; empty when none failed."""
        if not self.failed:
            return ""
        worst = self.results[0]
        where = f" at {', '.join(worst.culprit[:4])}" if worst.culprit else ""
        return f"preflight: {worst.check}{where}: {worst.value}" + (f"; {worst.remedy}" if worst.remedy else "")

    def lines(self) -> str:
        """The table as plain text; the remedy in a line of its own."""
        rows = [(result.status.value, result.check, _culprit(result), result.value) for result in self.results]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        shown = [self.headline()]
        for row, result in zip(rows, self.results, strict=True):
            shown.append("  ".join(f"{cell:{width}}" for cell, width in zip(row[:3], widths, strict=True)) + f"  {row[3]}")
            if result.remedy:
                shown.append(f"{'':{widths[0]}}  -> {result.remedy}")
        return "\n".join(shown)

    def show(self) -> None:
        """Print it."""
        if not sys.stdout.isatty():
            print(self.lines(), flush=True)
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self.headline(), title_justify="left")
        for column in ("", "check", "culprit", "found", "remedy"):
            table.add_column(column, overflow="fold")
        for result in self.results:
            status = f"[{_COLOURS[result.status]}]{result.status.value}[/]"
            table.add_row(status, *(_plain(text) for text in (result.check, _culprit(result), result.value, result.remedy)))
        Console().print(table)

    def write(self, path: Path) -> None:
        """As JSON. Raises PreflightError when the file cannot be written."""
        try:
            path.write_text(json.dumps(asdict(self) | {"failed": self.failed}, indent=2) + "\n")
        except OSError as error:
            raise PreflightError(f"--json {path}: {error.strerror}; give a file in a folder that exists") from error


def _culprit(result: Result) -> str:
    more = f" and {len(result.culprit) - 4} more" if len(result.culprit) > 4 else ""
    return ", ".join(result.culprit[:4]) + more


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
