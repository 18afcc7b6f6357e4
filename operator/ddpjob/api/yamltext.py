"""Reads YAML as kubectl does, records the line number of each field, and writes YAML for kubectl.

PyYAML by itself reads some manifests differently from kubectl. It converts dates and 1:30, which
kubectl reads as strings. It reads 1e5 as a string, and it silently drops one of two equal keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

MAX_NODES = 200_000
"""Maximum number of values in one document, counted after aliases have been expanded. Real
manifests have far fewer values, and an alias bomb has far more."""

MAX_DEPTH = 100

MAX_DIGITS = 100
"""Maximum number of characters in a number. The limit suffices for any float, and for a 64-bit
integer in base 2 with some underscores."""

MAX_SHOWN = 200
"""Maximum number of characters in a quoted value or field name. If the text is longer, a message
leaves out its middle."""

MAX_MESSAGE = 2_000
"""Maximum number of characters in one line of a message about a manifest."""

_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]
"""Maps the first character of an unquoted scalar to the pairs of a tag and a pattern to try."""
_MERGE = "tag:yaml.org,2002:merge"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """Return the text, shortened in the middle if it has more than `most` characters.

    The number of omitted characters stands between the beginning and the end.
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...({len(text) - 2 * half} more)...{text[-half:]}"


class YamlError(ValueError):
    """The text is not YAML, or it contains a value that a manifest cannot contain.

    `line` is the number of the faulty line, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message, self.line = message, line


@dataclass(frozen=True)
class Document:
    """One YAML document.

    `value` holds the document's content as plain Python values. `lines` maps the path of each field
    to the line number of the field, counted from 1.
    """

    value: Any
    line: int
    lines: dict[str, int]

    def line_of(self, path: str) -> int:
        """Return the line of the field with this path.

        If the text does not contain the field, return the line of its nearest parent.
        """
        known = [p for p in self.lines if path == p or (path.startswith(p) and path[len(p)] in ".[")]
        return self.lines[max(known, key=len)] if known else self.line

    def items(self) -> Iterator[Document]:
        """Yield each item of a Kubernetes List as a document of its own.

        If this document is not a List, yield the document itself.
        """
        items = self.value.get("items") if isinstance(self.value, dict) else None
        if not isinstance(items, list) or not str(self.value.get("kind", "")).endswith("List"):
            yield self
            return
        for position, item in enumerate(items):
            prefix = join("items", position)
            lines = {path[len(prefix) + 1 :]: n for path, n in self.lines.items() if path.startswith(prefix + ".")}
            yield Document(item, self.lines.get(prefix, self.line), lines)


def join(path: str, key: str | int) -> str:
    """Return the path of a field or an item in the value at `path`.

    `spec` and `nodes` give `spec.nodes`. An index is put in brackets, and so is a name that is not
    an identifier.
    """
    if isinstance(key, int):
        return f"{path}[{key}]"
    if _IDENTIFIER.fullmatch(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key}]"


class _Loader(yaml.SafeLoader):
    """Gives unquoted scalars the same types as kubectl does.

    kubectl follows YAML 1.1 with a few exceptions: it does not recognize dates or numbers in base
    60, and it accepts floats without a dot.
    """

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012 (as PyYAML expects)
    depth = 0
    merged = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YamlError(f"nested more than {MAX_DEPTH} levels deep, too deep for a manifest", self.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expand `<<` merge keys, but only within MAX_DEPTH and MAX_NODES.

        The limits are needed because every level of aliases multiplies the size of the document.
        """
        line = node.start_mark.line + 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YamlError(f"<<: merges through more than {MAX_DEPTH} levels, too many for a manifest", line)
        # If a mapping merges itself, the inner call finds the empty list that is set here.
        pairs, node.value = node.value, []
        own, merged = [], list[tuple[yaml.Node, yaml.Node]]()
        for key, value in pairs:
            if key.tag != _MERGE:
                own.append((key, value))
                continue
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                if not isinstance(part, yaml.MappingNode):
                    raise YamlError("<<: merges a mapping, or a list of mappings", part.start_mark.line + 1)
                self.flatten_mapping(part)
                self.merged += len(part.value)
                if self.merged > MAX_NODES:
                    raise YamlError(f"<<: merges more than {MAX_NODES} values, too many for a manifest", line)
            for part in reversed(parts):
                merged += part.value
        node.value = merged + own
        self.depth -= 1


for _tag, _pattern, _first in (
    ("bool", r"y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("int", r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _both(tables: Iterable[_Resolvers]) -> _Resolvers:
    first = {letter for table in tables for letter in table}
    return {letter: [rule for table in tables for rule in table.get(letter, ())] for letter in first}


class _Dumper(yaml.SafeDumper):
    """Quotes strings that kubectl or PyYAML would otherwise read as values of a different type.

    Examples are 1e-4, y and 0o17.
    """

    yaml_implicit_resolvers = _both((yaml.SafeDumper.yaml_implicit_resolvers, _Loader.yaml_implicit_resolvers))


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Write a multi-line string as a literal block, so that people can review scripts.

    PyYAML quotes strings that a literal block cannot hold. A string with line breaks other than
    newlines is quoted too, because kubectl and PyYAML read such line breaks differently.
    """
    lines = "\n" in text and bool(text.strip("\n")) and all(c.isprintable() or c == "\n" for c in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if lines else None)


_Dumper.add_representer(str, _represent_text)


def write_document(value: Any) -> str:
    """Write a value as YAML that `read_documents`, kubectl and PyYAML all read the same way."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _without_tabs(text: str) -> str:
    """Replace the tabs in a JSON text with spaces.

    YAML does not allow tabs for indentation. Text that is not JSON is left unchanged. The
    replacement does not affect any string, because a JSON string cannot contain a raw tab.
    """
    if "\t" in text and text.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return text.replace("\t", " ")
    return text


def _characters(text: str, line: int) -> str:
    """Join each surrogate pair in a text into the character that it stands for.

    JSON writes a character beyond 16 bits as two escapes, and a YAML reader reads these as two
    separate characters. Raises YamlError if one half of a pair is missing.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise YamlError(
            f"{shown(text)!a} contains only half of a surrogate pair; write both escapes, such as \\ud83d\\ude00",
            line,
        ) from error


def read_documents(text: str) -> Iterator[Document]:
    """Read a YAML stream, and yield its nonempty documents.

    Raises YamlError.
    """
    try:
        loader = _Loader(_without_tabs(text))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"not YAML: the character {error.character:#04x} is not allowed in text", line) from error
    try:
        while loader.check_node():
            node = loader.get_node()
            # check_node has returned True, so there is a node.
            assert node is not None
            builder = _Builder(loader)
            value = builder.build(node, "")
            if value is not None:
                yield Document(value, node.start_mark.line + 1, builder.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = shown(str(error.problem or error.context))
        if "'\\t'" in problem:
            problem += "; indent with spaces, since YAML does not allow tabs there"
        elif error.context == "while scanning a quoted scalar" and error.context_mark:
            mark, problem = error.context_mark, "a quote opened on this line is not closed"
        elif "<block" in problem or "not allowed here" in problem:
            problem += "; check the indentation of this line against the lines above it"
        raise YamlError(f"not YAML: {problem}", mark.line + 1 if mark else 1) from error
    finally:
        loader.dispose()


_BOOL = "tag:yaml.org,2002:bool"


def _is_true(node: yaml.ScalarNode) -> bool:
    return str(node.value).lower() in ("y", "yes", "true", "on")


class _Builder:
    """Converts the YAML nodes of one document to plain Python values."""

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader
        self.lines: dict[str, int] = {}
        self._count = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: str) -> Any:
        self._count += 1
        if self._count > MAX_NODES:
            raise YamlError(
                f"more than {MAX_NODES} values in one document, too many for a manifest", node.start_mark.line + 1
            )
        if id(node) in self._open:
            raise YamlError(
                "an alias refers to a value that contains the alias; write the value out", node.start_mark.line + 1
            )
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._child(item, join(path, position)) for position, item in enumerate(node.value)]
            # There are no other kinds of YAML nodes.
            assert isinstance(node, yaml.ScalarNode)
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _child(self, node: yaml.Node, path: str) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        return self.build(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        self._refuse_duplicates(node, path)
        self.loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = self._key(key_node)
            child = join(path, name)
            self.lines[child] = key_node.start_mark.line + 1
            values[name] = self.build(value_node, child)
        return values

    def _refuse_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            name, line = self._key(key_node), key_node.start_mark.line + 1
            if name in seen:
                raise YamlError(
                    f"{shown(join(path, name))}: given twice (first in line {seen[name]}); remove one", line
                )
            seen[name] = line

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise YamlError(
                "a field name must be a string; quote templates such as {{ name }}", node.start_mark.line + 1
            )
        if node.tag == _BOOL:
            # kubectl also turns a boolean key into the text `true` or `false`.
            return str(_is_true(node)).lower()
        return _characters(node.value, node.start_mark.line + 1)

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        line, kind = node.start_mark.line + 1, node.tag.removeprefix("tag:yaml.org,2002:")
        if kind in ("str", "merge"):
            return _characters(node.value, line)
        construct: Callable[[], Any] | None = {
            "bool": lambda: _is_true(node),
            "null": lambda: None,
            "int": lambda: self.loader.construct_yaml_int(node),
            "float": lambda: self.loader.construct_yaml_float(node),
        }.get(kind)
        if construct is None:
            raise YamlError(f"the tag {shown(node.tag)} is not supported in manifests; remove it", line)
        # Refuse very large integers, because Python refuses to convert them to text.
        if kind in ("int", "float") and len(node.value) > MAX_DIGITS:
            raise YamlError(f"{_field(path, node)}: a number of {len(node.value):,} characters; {_NUMBERS}", line)
        try:
            value = construct()
        except (ValueError, IndexError, OverflowError) as error:
            raise YamlError(f"{shown(node.value)!r} is not a valid value for the tag {node.tag}", line) from error
        if isinstance(value, float) and not math.isfinite(value):
            raise YamlError(f"{_field(path, node)}: not a number that a manifest can contain; {_NUMBERS}", line)
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise YamlError(f"{_field(path, node)}: a number of more than 64 bits; {_NUMBERS}", line)
        return value


_NUMBERS = "write an integer of at most 64 bits or a finite float, or quote it if it is text"


def _field(path: str, node: yaml.ScalarNode) -> str:
    return f"{shown(path)}={shown(node.value, 40)}" if path else shown(node.value, 40)
