"""Tables between marks in a document: <!-- NAME: begin --> and <!-- NAME: end -->."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, name: str, text: str) -> None:
    """Replaces what stands between the marks. Raises ValueError when the document has none."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    document = path.read_text()
    if begin not in document or end not in document:
        raise ValueError(f"{path} has no marks {begin.strip()} and {end}; write them where the table shall stand")
    head, _, rest = document.partition(begin)
    path.write_text(head + begin + text + "\n" + end + rest.partition(end)[2])
