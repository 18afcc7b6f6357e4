"""Writes the table of values in the chart's README.md: `python docs/generate_chart_readme.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "ddpjob-operator"
PAGE, VALUES = CHART / "README.md", CHART / "values.yaml"
_TABLE = re.compile(r"(?<=<!-- values: begin -->\n).*(?=<!-- values: end -->)", re.DOTALL)


def main() -> None:
    """Update the table in the chart's README.md."""
    PAGE.write_text(render(PAGE.read_text(), VALUES.read_text()))


def render(page: str, values: str) -> str:
    """Return the page with a row for each value, described by the comment above it in
    values.yaml.
    """
    comments = dict(_comments(values))
    rows = ["| value | default | |", "| --- | --- | --- |"]
    for path, default in _leaves(yaml.safe_load(values)):
        own = [comments.pop(".".join(path[:depth]), "") for depth in range(1, len(path) + 1)]
        text = " ".join(part for part in own if part).replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | `{json.dumps(default)}` | {text} |".replace("  |", " |"))
    return _TABLE.sub(lambda _: "\n".join(rows) + "\n", page)


def _leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and default of each value. An empty mapping counts as one value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _comments(values: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each commented key, and the comment directly above it."""
    path: list[str] = []
    block: list[str] = []
    for line in values.splitlines():
        key = re.match(r"( *)([A-Za-z]\w*):", line)
        comment = re.match(r" *# ?(.*)", line)
        if comment:
            block.append(comment[1])
            continue
        if key:
            path = [*path[: len(key[1]) // 2], key[2]]
            if block:
                yield ".".join(path), " ".join(block)
        block = []


if __name__ == "__main__":
    main()
