"""What commands print: objects as YAML and JSON, and rows of jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from ddpjob.api.job_spec import Json
from ddpjob.api.yamltext import write_document
from ddpjob.client.job_text import row


def printable(text: str) -> str:
    """Without characters that command a terminal: messages and progress are written by whoever owns the job."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def document(body: Json, kind: str) -> str:
    """An object as YAML or JSON, with a newline at the end."""
    if kind == "json":
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    return write_document(body)


def listed(bodies: Sequence[Json]) -> Json:
    """Several objects as `kubectl get -o yaml` prints them."""
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": list(bodies)}


def printed_rows(
    titles: Sequence[str], bodies: Sequence[Json], now: datetime, *,
    wide: bool, namespaces: bool, widths: list[int] | None = None,
) -> list[str]:  # fmt: skip
    """A line of titles and one for each job. `widths`: those of earlier lines, which only grow."""
    rows = [tuple(titles), *(row(body, now, wide=wide, namespaces=namespaces) for body in bodies)]
    widths = widths if widths is not None else []
    widths += [0] * (len(titles) - len(widths))
    for cells in rows:
        widths[:] = [max(width, len(cell)) for width, cell in zip(widths, cells, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]
