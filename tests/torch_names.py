"""Finds assignments to attributes of torch in a module. Runs on Python 3.9 without torch."""

from __future__ import annotations

import ast
from pathlib import Path

SETTINGS = "torch.backends."
"""Prefix of names that any program may assign to, according to torch's documentation."""


def replaced_names(folder: Path) -> list[str]:
    """Return the places "FILE:LINE" that assign to an attribute of an object imported from
    torch.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        bound = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                bound |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
                bound |= {alias.asname or "torch" for alias in names}
        for node in ast.walk(tree):
            for target in [*getattr(node, "targets", []), getattr(node, "target", None)]:
                text = ast.unparse(target) if isinstance(target, ast.Attribute) else ""
                if text.split(".")[0] in bound and not text.startswith(SETTINGS):
                    found.append(f"{path.name}:{node.lineno}")
    return found
