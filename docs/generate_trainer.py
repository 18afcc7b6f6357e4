"""Writes docs/trainer-keys.md, and the table of limits in docs/trainer.md, from the trainer's code.

python docs/generate_trainer.py
"""

from __future__ import annotations

import enum
import inspect
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.loader import FieldInfo, describe_type, walk
from ddpjob_trainer.config.strategy_limits import LIMITS

DOCS = Path(__file__).resolve().parent
KEYS, TRAINER = DOCS / "trainer-keys.md", DOCS / "trainer.md"
BEGIN, END = "<!-- limits: begin -->", "<!-- limits: end -->"

_HEAD = """\
# Keys of the trainer

Made from `trainer/ddpjob_trainer/config` by `python docs/generate_trainer.py`. Do not edit this
page.

Write a key as an argument (`optim.lr=0.05`), or in its section of the YAML file that `--config`
names. Arguments take precedence over the file, the file over environment variables, and those over
defaults. `--help` prints the same descriptions.
"""


def render_keys() -> str:
    """Return the page of keys: a table for each section."""
    parts = [_HEAD]
    sections = get_type_hints(Config)
    for name, fields in groupby(walk(Config), key=lambda field: field.key.rpartition(".")[0]):
        head = f"## {name}\n\n{_cell(inspect.getdoc(sections[name]) or '')}\n" if name else "## strategy\n"
        rows = ["| key | default | values | meaning |", "| --- | --- | --- | --- |", *map(_row, fields)]
        parts.append(head + "\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(field: FieldInfo) -> str:
    values = describe_type(field.type) + (f"; from `{field.env}`" if field.env else "")
    cells = (f"`{field.key}`", _default(field.default), _cell(values), _cell(field.doc))
    return "| " + " | ".join(cells) + " |"


def _default(value: Any) -> str:
    if value is None or value == "" or value == ():
        return ""
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


def _cell(text: str) -> str:
    """Return text for a cell, in which an asterisk is a character unless it is in code."""
    parts = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").split("`")
    return "`".join(part if number % 2 else part.replace("*", r"\*") for number, part in enumerate(parts))


def render_limits() -> str:
    """Return the rows of settings that some strategies do not support."""
    rows = ["| setting | not supported by | because the strategy |", "| --- | --- | --- |"]
    for limit in LIMITS:
        for why, names in groupby(limit.reasons.items(), key=lambda reason: reason[1]):
            setting = f"`{limit.key}`" if limit.is_set else limit.key
            shown = f"{setting}: {limit.values}" if limit.values else setting
            rows.append(f"| {shown} | {', '.join(f'`{name.value}`' for name, _ in names)} | {why} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with an up-to-date table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render_limits()}\n{END}{after}"


if __name__ == "__main__":
    KEYS.write_text(render_keys())
    TRAINER.write_text(page(TRAINER.read_text()))
