"""Writes the file that `ddpjob why` reads, from the tables of docs/troubleshooting.md.

python docs/generate_remedies.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ddpjob.client.texts.job_text import SAID

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
FILE = ROOT / "operator" / "ddpjob" / "client" / "texts" / "remedies.json"

_LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
"""A link to another page of docs/, which a terminal would show as Markdown."""
_CONDITION = re.compile(r"## Condition (\w+)")
"""The heading above a condition's table."""


def read_remedies(page: str) -> dict[str, dict[str, str]]:
    """Read the page's tables, and return {reason: {meaning, remedy}}.

    If several conditions have the same reason, every later one is listed as `CONDITION REASON`.
    Errors that are recognized by their text are listed as `message TEXT`.
    """
    found: dict[str, dict[str, str]] = {}
    titles: list[str] = []
    kind = ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading = _CONDITION.match(line)
            kind = heading[1] if heading is not None else ""
        cells = [_LINK.sub(r"\1 (docs/\2)", cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not line.startswith("|"):
            titles = []
        elif not titles:
            titles = cells
        elif titles[0] == "reason" and not set(line) <= set("|- "):
            by_title = dict(zip(titles, cells, strict=False))
            entry = {"meaning": by_title.get("what it means", ""), "remedy": by_title.get("what to do", "")}
            for reason in re.findall(r"`(\w+)`", cells[0]):
                found.setdefault(reason if reason not in found else f"{kind} {reason}".strip(), entry)
        elif titles[0] == "the message has" and not set(line) <= set("|- "):
            for text in re.findall(r"`([^`]+)`", cells[0]):
                found[SAID + text] = {"meaning": cells[1], "remedy": cells[2]}
    return dict(sorted(found.items()))


def render(page: str) -> str:
    return json.dumps(read_remedies(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(PAGE.read_text()))
