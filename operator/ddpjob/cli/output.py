"""Formats the output of commands: objects as YAML or JSON or with a kubectl template, and jobs as
table rows.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from io import TextIOWrapper
from typing import Any

import click

from ddpjob.api.job_spec import Json
from ddpjob.api.yamltext import write_document
from ddpjob.client.texts.job_text import header, row, table


def printable(text: str) -> str:
    """Return the text without the characters that control a terminal.

    The owner of a job can put any characters into the job's messages and progress.
    """
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


STATE_COLOURS = {
    **dict.fromkeys(("Running", "Complete"), "green"),
    "Failed": "red",
    **dict.fromkeys(("Restarting", "Suspended", "Queued", "Interrupted"), "yellow"),
    **dict.fromkeys(("Starting", "Pending"), "cyan"),
}
"""Maps each state to the name of its colour. click and rich use the same names."""
_STATE = re.compile(rf"(?<![^\s])({'|'.join(STATE_COLOURS)})(?![^\s])")


def paint(line: str) -> str:
    """Colour the first state in a line.

    Names of jobs are in lower case, so the first state is always the one in the STATE column. click
    removes the colour again if the output is not a terminal.
    """
    return _STATE.sub(lambda found: click.style(found[0], fg=STATE_COLOURS[found[0]]), line, count=1)


def usable_streams() -> None:
    """Prepare the standard streams so that printing to them does not fail.

    Printing would fail if the caller had closed a stream (`<&-`, `>&-`), or if the encoding of the
    output lacked a character.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - os.devnull is a str, and the stream stays open
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - os.devnull is a str, and the stream stays open
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon_output() -> None:
    """Discard everything that is written to standard output from now on.

    The buffer still contains text that cannot be written. Without this function, Python would fail
    when it flushes the buffer at exit.
    """
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - os.devnull is a str
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def document(body: Json, kind: str) -> str:
    """Return an object as YAML or JSON, with a newline at the end."""
    if kind == "json":
        text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
        return re.sub(r"[^\n -~]", lambda found: _escaped(found[0]), text)
    return write_document(body)


def _escaped(character: str) -> str:
    """Return a character of a JSON text, escaped if it could control a terminal.

    JSON itself requires an escape only for control characters below 32.
    """
    return character if character.isprintable() else json.dumps(character)[1:-1]


def documents(bodies: Sequence[Json], kind: str) -> str:
    """Return several objects as one text, either YAML documents or a JSON List.

    JSON needs the List because a JSON text can contain only one value. A single object is returned
    without a List.
    """
    if kind == "json" and len(bodies) > 1:
        return document(make_list(bodies), kind)
    return "---\n".join(document(body, kind) for body in bodies)


_ESCAPED = re.compile(r"\.((?:[^.\[\]\\\s]|\\.)*\\.(?:[^.\[\]\\\s]|\\.)*)")
r"""A name with escaped dots, as in `.metadata.labels.ddpjob\.io/job`."""
_PART = re.compile(r"""\{((?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^{}"'])*)\}|([^{}]+)|(.)""", re.DOTALL)


class PathTemplate:
    """The template of `-o jsonpath=TEMPLATE`, as in kubectl.

    A template consists of text and of parts in braces. The braces contain a path, a quoted string,
    `range PATH` or `end`. Raises ValueError with the reason if the template is invalid.
    """

    def __init__(self, template: str) -> None:
        parts = list(_PART.finditer(template))
        if stray := next((part[3] for part in parts if part[3]), ""):
            raise ValueError(f"unmatched {stray} in {template!r}; write a path such as {{.status.phase}}")
        if not any(part[1] is not None for part in parts):
            raise ValueError(f"there is no path in {template!r}; write one in braces, as in {{.status.phase}}")
        self._steps = self._read(iter(parts), within=False)

    def _read(self, parts: Iterator[re.Match[str]], *, within: bool) -> list[str | tuple[Any, Any]]:
        """Convert the parts of a template's text into the steps that print the template.

        A step is either a string to print, or a pair (path, inner steps). The inner steps run once
        for each value that the path finds. If the inner steps are None, the value itself is
        printed. If `within` is true, the parts follow a `range`, and the steps stop at the `end` of
        that `range`.
        """
        steps: list[str | tuple[Any, Any]] = []
        for part in parts:
            inner = (part[1] or "").strip()
            if part[1] is None:
                steps.append(part[2])
            elif inner[:1] in ("'", '"'):
                steps.append(_unquoted(inner))
            elif inner == "end" and within:
                return steps
            elif inner.startswith("range "):
                steps.append((_path(inner.removeprefix("range ").strip()), self._read(parts, within=True)))
            elif inner == "end":
                raise ValueError("{end} without {range PATH} before it")
            else:
                steps.append((_path(inner), None))
        if within:
            raise ValueError("{range PATH} without {end} after it")
        return steps

    def text(self, body: Json) -> str:
        """Return the template's text, filled in with the values of this object.

        A path that finds no value is replaced with an empty string.
        """
        return self._filled(self._steps, body)

    def _filled(self, steps: list[str | tuple[Any, Any]], value: Any) -> str:
        texts = []
        for step in steps:
            if isinstance(step, str):
                texts.append(step)
                continue
            path, inner = step
            found = path.findall(value)
            if inner is None:
                texts.append(" ".join(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in found))
            else:
                texts += [self._filled(inner, one) for one in found]
        return "".join(texts)


def _unquoted(text: str) -> str:
    """Return the content of a string in single or double quotes.

    Escape sequences are resolved as in JSON.
    """
    try:
        inner = text[1:-1] if text[0] == '"' else text[1:-1].replace("\\'", "'").replace('"', '\\"')
        return str(json.loads(f'"{inner}"'))
    except ValueError:
        raise ValueError(f"{text} is not a quoted string") from None


def _path(text: str) -> Any:
    # The import is slow, and most commands do not need the module.
    import jsonpath

    rest = text.removeprefix("$").removeprefix("@")
    if rest and rest[0] not in ".[":
        raise ValueError(f"{{{text}}} is not a path; write a path such as {{.status.phase}}")
    rest = _ESCAPED.sub(lambda name: "['" + re.sub(r"\\(.)", r"\1", name[1]) + "']", rest)
    try:
        return jsonpath.compile("$" + ("" if rest == "." else rest))
    except jsonpath.JSONPathError as error:
        raise ValueError(f"{{{text}}}: {str(error).splitlines()[0]}") from None


def make_list(bodies: Sequence[Json]) -> Json:
    """Return several objects as one Kubernetes List, as `kubectl get -o yaml` prints them."""
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": list(bodies)}


def format_rows(
    bodies: Sequence[Json], now: datetime, *,
    wide: bool = False, namespaces: bool = False, widths: list[int] | None = None,
) -> list[str]:  # fmt: skip
    """Return a line with the column titles, and a line for each job.

    `widths` contains the column widths of earlier lines. The function updates `widths`, and never
    makes a column narrower. If `widths` is empty, the columns start with the widths that later
    lines usually need. If `widths` is None, each column is as wide as its content.
    """
    titles = header(wide=wide, namespaces=namespaces)
    if widths == []:
        widths += [_USUAL.get(title, 0) for title in titles]
    return table([titles, *(row(body, now, wide=wide, namespaces=namespaces) for body in bodies)], widths)


_USUAL = {"STATE": 10, "NODES": 6, "PROGRESS": 16, "LOSS": 9, "SPEED": 12, "AGE": 6, "DURATION": 8, "GPUHOURS": 8}
"""Initial widths of columns that are empty or narrow at the beginning of a job."""
