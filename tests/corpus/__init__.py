"""Manifests with the verdict that both the API server and ddpjob's own reader must give.

- `valid/NAME.yaml` is accepted, and the stored object is the same.
- `invalid/NAME.yaml` is refused. Lines `# says: TEXT` must be in both messages, and
  `# locally: TEXT` only in the reader's.
- `updates/NAME.yaml` has two documents, the old object and its replacement, and
  `# allowed` or `# refused: TEXT`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A file, with the strings that a refusal must contain, by the component that refuses."""

    path: Path
    says: tuple[str, ...]
    locally: tuple[str, ...]
    refused: bool

    def documents(self) -> list[Any]:
        return list(yaml.safe_load_all(self.path.read_text()))


def cases(kind: str) -> list[Case]:
    """Return all files of `valid`, `invalid` or `updates`."""
    return [_read(path, kind) for path in sorted((FOLDER / kind).glob("*.yaml"))]


def _read(path: Path, kind: str) -> Case:
    lines = path.read_text().splitlines()
    says, locally, refused = (_after(f"# {word}: ", lines) for word in ("says", "locally", "refused"))
    if kind == "updates" and not refused and lines[0] != "# allowed":
        raise ValueError(f"{path}: the first line must be '# allowed' or '# refused: TEXT'")
    return Case(path, says + refused, locally, kind == "invalid" or bool(refused))


def _after(beginning: str, lines: list[str]) -> tuple[str, ...]:
    return tuple(line.removeprefix(beginning) for line in lines if line.startswith(beginning))
