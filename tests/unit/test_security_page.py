"""SECURITY.md names a test for every protection that it claims, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def protections(text: str) -> list[str]:
    """Return the rows of the tables that list prevented actions and limits."""
    heads = r"^\| (?:cannot|what a tenant chooses \| bound) \| tested by \|\n\|(?: --- \|)+\n"
    tables = re.findall(heads + r"((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def test_the_protections_on_the_page_are_found() -> None:
    assert len(protections(TEXT)) >= 15
    assert protections("| cannot | tested by |\n| --- | --- |\n| a | b |\n\n| c | d |\n") == ["| a | b |"]


@pytest.mark.parametrize("row", protections(TEXT), ids=lambda row: row[2:40])
def test_a_protection_names_its_test(row: str) -> None:
    _, tested_by = row.strip("| ").rsplit(" | ", 1)
    assert NAMED.search(tested_by), f"name the test as `tests/PATH.py::FUNCTION`: {row}"


@pytest.mark.parametrize(("path", "function"), sorted(set(NAMED.findall(TEXT))))
def test_each_test_named_on_the_page_exists(path: str, function: str) -> None:
    found = re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), flags=re.MULTILINE)
    assert found, f"SECURITY.md names {path}::{function}, which does not exist; name the test as it is called now"
