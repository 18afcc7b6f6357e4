"""Writes the Python references in docs/own-scripts.md and docs/python.md: `python
docs/generate_api.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGES = {"own-scripts.md": "ddpjob_trainer.api", "python.md": "ddpjob"}
"""Pages in docs/, each with the package whose `__all__` it describes."""
BEGIN, END = "<!-- api: begin -->", "<!-- api: end -->"


def _render(package: str) -> str:
    """Return a section for each exported name, with its signature, its docstring and its
    members.
    """
    api = importlib.import_module(package)
    return "\n\n".join(part for name in api.__all__ for part in _section(name, getattr(api, name)))


def _section(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if not callable(value):
        yield f"`{name} = {value!r}`"
    elif not inspect.isclass(value) or not issubclass(value, Exception | enum.Enum):
        yield f"```python\n{name}{_signature(value)}\n```"
    if doc := _doc(value):
        yield doc
    if inspect.isclass(value):
        lines = [*_members(value)]
        if lines:
            yield "\n".join(lines)
        yield from _long_members(value)


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield f"One of {', '.join(f'`{member}`' for member in kind.__members__)}."
        return
    yield from _fields(kind)
    for name, member in vars(kind).items():
        if name.startswith("_") or issubclass(kind, Exception) or (inspect.isfunction(member) and _is_long(member)):
            continue
        if isinstance(member, property):
            yield f"- `{name}`: {_line(member)}"
        elif isinstance(member, classmethod) or inspect.isfunction(member):
            yield f"- `{name}{_signature(getattr(kind, name), bound=inspect.isfunction(member))}`: {_line(member)}"


def _fields(kind: type) -> Iterator[str]:
    """Yield a list item for each documented field of a dataclass."""
    if not dataclasses.is_dataclass(kind):
        return
    [body] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    for named, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        match named, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield f"- `{name}`: {' '.join(text.split())}"


def _long_members(kind: type) -> Iterator[str]:
    """Yield a section for each method with too many parameters for one line, with an item for each
    parameter.
    """
    for name, member in vars(kind).items():
        if inspect.isfunction(member) and not name.startswith("_") and _is_long(member):
            signature = _signature(member, bound=True).replace("(", "(\n    ", 1).replace(") ->", ",\n) ->")
            text = re.sub(r"^(?=`)", "- ", re.sub(r"\n(?!`|\n)", " ", _doc(member)), flags=re.MULTILINE)
            yield f"#### {kind.__name__}.{name}"
            yield f"```python\n{name}{re.sub(r', (?=[a-z_*]+[:,])', ',' + chr(10) + '    ', signature)}\n```"
            yield text.replace("\n\n ", "\n\n")


def _is_long(member: Any) -> bool:
    return len(inspect.signature(member).parameters) > 10


class _Bare(str):
    """An annotation whose repr is the annotation as written in the source, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _signature(value: Any, *, bound: bool = False) -> str:
    found = inspect.signature(value)
    bare = [each.replace(annotation=_bare(each.annotation)) for each in found.parameters.values()]
    result = inspect.Signature.empty if inspect.isclass(value) else _bare(found.return_annotation)
    text = str(found.replace(parameters=bare[bound:], return_annotation=result))
    text = re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", text)  # Members of enumerations.
    return re.sub(r"(= [A-Z]\w+)\([^()]*\)", r"\1()", text)  # Defaults of dataclasses.


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _doc(value: Any) -> str:
    own = value.__doc__ if callable(value) else None
    return "" if own is None or own.startswith(f"{getattr(value, '__name__', '')}(") else inspect.cleandoc(own)


def _line(value: Any) -> str:
    return " ".join(inspect.cleandoc(inspect.getdoc(value) or "").split())


def file(page: str) -> Path:
    """Return the path of a page of PAGES."""
    return Path(__file__).resolve().parent / page


def made(page: str) -> str:
    """Return the text of a page of PAGES with an up-to-date reference."""
    before, _, rest = file(page).read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{_render(PAGES[page])}\n\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        file(page).write_text(made(page))
