"""Writes the module lists of docs/architecture.md from docstrings: `python
docs/generate_map.py`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = (
    *(
        "operator/ddpjob",
        "runtime/ddpjob_runtime",
        "runtime/ddpjob_pod",
        "runtime/ddpjob_report",
        "runtime/ddpjob_bucket",
    ),
    "trainer/ddpjob_trainer",
)
BEGIN, END = "<!-- modules: begin -->", "<!-- modules: end -->"


@cache
def render() -> str:
    """Return the lists: a heading for each package, and an item for each of its modules."""
    lines: list[str] = []
    for top in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            lines += ["", f"### {folder.relative_to(ROOT).as_posix()}", "", _summary(folder / "__init__.py"), ""]
            modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.name}`: {_summary(path)}" for path in modules]
    return "\n".join(lines).strip() + "\n"


def _summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def page(text: str) -> str:
    """Return the page with up-to-date lists."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
