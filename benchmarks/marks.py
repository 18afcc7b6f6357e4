"""Generated tables in a document, between <!-- NAME: begin --> and <!-- NAME: end -->."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between the marks. Raises ValueError when the document has none."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    document = path.read_text()
    if begin not in document or end not in document:
        raise ValueError(f"{path} has no marks {begin.strip()} and {end}; add them where the table belongs")
    head, _, rest = document.partition(begin)
    path.write_text(head + begin + text + "\n" + end + rest.partition(end)[2])
