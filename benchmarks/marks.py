"""Writes generated tables into a document, between <!-- NAME: begin --> and <!-- NAME: end -->."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_table_option(parser: argparse.ArgumentParser, name: str, more: str = "") -> None:
    """Add `--table FILE` (default None), the document for `write_between`.

    `more` is appended to the help.
    """
    where = f"write the table between <!-- {name}: begin --> and <!-- {name}: end --> of a document"
    parser.add_argument("--table", type=Path, metavar="FILE", help=f"{where}{more}")


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between the marks. Raises ValueError if the document has no such marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    document = path.read_text()
    if begin not in document or end not in document:
        raise ValueError(f"{path} has no marks {begin.strip()} and {end}; add them where the table belongs")
    head, _, rest = document.partition(begin)
    path.write_text(head + begin + text + "\n" + end + rest.partition(end)[2])
