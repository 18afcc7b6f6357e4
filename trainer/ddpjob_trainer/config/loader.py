"""Builds the typed configuration from YAML files, arguments and environment variables.

Each section is a frozen dataclass, and the string below a field is the field's help text.
Precedence: argument, file, environment, default.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ddpjob_trainer.config import other_names
from ddpjob_trainer.errors import ConfigError

T = TypeVar("T")

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def from_env(variable: str) -> dict[str, str]:
    """Return field metadata that names an environment variable for the field's default.

    An unset or empty variable has no effect.
    """
    return {"env": variable}


def flatten(tree: Mapping[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """Flatten sections to dotted keys: `{"optim": {"lr": 0.1}}` -> `{"optim.lr": 0.1}`.

    Dotted keys are accepted too. Raises ConfigError if a key is given twice or is not a string.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ConfigError(f"{source}: the key {key!r} is not a string; put it in quotes")
        full = f"{prefix}{key}"
        found = flatten(value, source, f"{full}.") if isinstance(value, Mapping) else {full: value}
        if twice := found.keys() & flat.keys():
            raise ConfigError(f"{source}: {min(twice)} is given twice; remove one of the two")
        flat.update(found)
    return flat


class _EachKeyOnce(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys.

    YAML forbids them, but PyYAML itself silently keeps the last value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping that a node describes. Raises ConstructorError for a duplicate key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice; remove one of the two", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Whole(int):
    """An integer that keeps its original text.

    If a key takes a string, 007 must not become 7.
    """

    written: str


class _Number(float):
    """A float that keeps its original text.

    If a key takes a string, 1.10 must not become 1.1.
    """

    written: str


_MOST_DIGITS = 100
_MOST_SHOWN = 200
"""Maximum number of characters that a message quotes from a value."""
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")


def _as_written(kind: type[_Whole] | type[_Number], read: Callable[..., Any]) -> Callable[..., Any]:
    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> _Whole | _Number | str:
        text = str(node.value)
        if ":" in text:  # YAML 1.1 would read 1:30 as 90.
            return text
        # YAML 1.1 reads 017 as octal, which is 15, and 018 as a string. Read both as decimal.
        if kind is _Whole and _LEADING_ZERO.fullmatch(text):
            sign = "-" if text.startswith("-") else ""
            node.value = sign + (text.lstrip("+-0_") or "0")
        if len(text) > _MOST_DIGITS:  # Python refuses to parse or print very long numbers.
            reason = f"a number has {len(text):,} characters; the limit is {_MOST_DIGITS}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        try:
            number = kind(read(loader, node))
        except (ValueError, IndexError) as error:  # The tag !!int may precede text that is not a number.
            raise yaml.constructor.ConstructorError(None, None, f"{text!r} is not a number", node.start_mark) from error
        number.written = text
        return number

    return construct


_EachKeyOnce.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_LEADING_ZERO.pattern + "$"), list("-+0"))
_EachKeyOnce.add_constructor("tag:yaml.org,2002:int", _as_written(_Whole, yaml.SafeLoader.construct_yaml_int))
_EachKeyOnce.add_constructor("tag:yaml.org,2002:float", _as_written(_Number, yaml.SafeLoader.construct_yaml_float))
# Keep a value that looks like a date as a string. No key takes a date, but a folder may be named
# after one.
_EachKeyOnce.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))


def read_file(path: Path) -> dict[str, Any]:
    """Return the values in a YAML file, by dotted key.

    Raises ConfigError if the file is missing, is not YAML, or does not contain a mapping.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _EachKeyOnce)
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(
            f"configuration file {path} does not exist{where}; pass an existing file with --config"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {path} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        found = type(tree).__name__
        raise ConfigError(
            f"configuration file {path} contains a {found}; write sections with keys, such as `optim: {{lr: 0.1}}`"
        )
    return flatten(tree, str(path))


def read_arguments(arguments: Iterable[str]) -> dict[str, Any]:
    """Parse arguments: `["optim.lr=0.1"]` -> `{"optim.lr": 0.1}`.

    Values are YAML scalars or lists. Raises ConfigError.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            what = other_names.remark(argument) if argument.startswith("-") else None
            raise ConfigError(
                f"argument {argument!r} is not of the form key=value{what}"
                if what
                else (
                    f"argument {argument!r} is not of the form key=value; write, for example, "
                    "optim.lr=0.1 (--help lists the keys)"
                )
            )
        key = key.removeprefix("--")
        if text.startswith("*"):  # YAML would read a pattern such as *.bias as an alias.
            values[key] = text
            continue
        try:
            values[key] = yaml.load(text, _EachKeyOnce)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: the value {text[:_MOST_SHOWN]!r} is not YAML: {error}") from error
    return values


def build(kind: type[T], *layers: tuple[str, Mapping[str, Any]]) -> T:
    """Build a `kind`, which is a dataclass of dataclasses, from the values in `layers`.

    Each layer is a pair (source, values by dotted key). Later layers override earlier ones. A key
    that no layer sets gets the value of its environment variable or, if that is not set, its
    default. If a key is unknown or its value has the wrong type, raises a ConfigError that names
    the source, the key and the remedy.
    """
    known = {field.key: field for field in walk(kind)}
    chosen: dict[str, Any] = {}
    for source, layer in layers:
        for key, value in layer.items():
            if key not in known:
                raise ConfigError(f"{source}: unknown key {key!r}{_nearest(key, known)}")
            chosen[key] = _convert(value, known[key].type, f"{source}: {key}")
    for key, field in known.items():
        if key not in chosen and field.env and os.environ.get(field.env):
            chosen[key] = _convert(os.environ[field.env], field.type, f"environment variable {field.env} ({key})")
    return _assemble(kind, chosen, "")


def check_name(key: str, name: str, known: Sequence[str]) -> None:
    """Raise ConfigError unless `name` is one of `known` or has the form package.module:name."""
    if ":" in name or name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {str(near[0])!r}?" if near else ""
    raise ConfigError(f"{key}: {name!r} is unknown; use {', '.join(known)} or package.module:function{hint}")


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    sections = [name for name in known if name.startswith(f"{key}.")]
    if sections:
        return f": is a section, not a key; set one of its keys, such as {other_names.key(key) or sections[0]}"
    if what := other_names.remark(key):
        return what
    section, _, last = key.rpartition(".")
    same = [section] if section in known else [name for name in known if name.rpartition(".")[2] == last]
    if not same and (what := other_names.remark(last)):
        return what
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    near = [*same[:2], *(name for name in close if not same or (last in name and name not in same))]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "; --help lists the keys"


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """A configuration key with its type, default, environment variable and section."""

    key: str
    type: Any
    default: Any
    env: str | None
    section: type[Any]

    @property
    def doc(self) -> str:
        """The key's help text: the string below the field in the source.

        The source is parsed only on demand, because ranks do not need help texts and should start
        fast.
        """
        return _docs(self.section).get(self.key.rpartition(".")[2], "")


def walk(kind: type[Any], prefix: str = "") -> Iterator[FieldInfo]:
    """Yield every key of a dataclass of dataclasses, in definition order."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from walk(typing.cast(type[Any], hints[field.name]), f"{prefix}{field.name}.")
        else:
            yield FieldInfo(
                prefix + field.name,
                hints[field.name],
                field.default,
                field.metadata.get("env"),
                kind,
            )


@functools.cache
def _docs(kind: type[Any]) -> dict[str, str]:
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for before, after in itertools.pairwise(body):
        documented = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and documented:
            docs[before.target.id] = inspect.cleandoc(
                typing.cast(str, typing.cast(ast.Constant, typing.cast(ast.Expr, after).value).value)
            )
    return docs


def _assemble(kind: type[T], chosen: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        key = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _assemble(typing.cast(type[Any], hints[field.name]), chosen, f"{key}.")
        elif key in chosen:
            values[field.name] = chosen[key]
    return kind(**values)


def describe_type(kind: Any) -> str:
    """Return a type's name for help texts and error messages."""
    if typing.get_origin(kind) is types.UnionType:
        first, *rest = (describe_type(part) for part in typing.get_args(kind))
        return " or ".join([first, *("a string" if name == "string" else name for name in rest)])
    if typing.get_origin(kind) is tuple:
        return f"list of {describe_type(typing.get_args(kind)[0])}s"
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ("one of " if len(kind) > 1 else "") + ", ".join(str(member.value) for member in kind)
    names = {int: "whole number", float: "number", bool: "true or false", str: "string", Path: "path"}
    return names.get(kind, str(kind))


def _with_article(kind: Any) -> str:
    name = describe_type(kind)
    return f"a {name}" if name.startswith(("list", "whole", "number", "string", "path")) else name


def _convert(value: Any, kind: Any, where: str) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None and type(None) in parts:
            return None
        others = [part for part in parts if part is not type(None)]
        if len(others) == 1:
            return _convert(value, others[0], where)
        fitting = [found for part in others if (found := _scalar(value, part)) is not None]
        if not fitting:
            raise ConfigError(f"{where}: must be {_with_article(kind)}, not {value!r}")
        return fitting[0]
    if origin is tuple:
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
        if isinstance(items, _Whole | _Number):
            items = [items]
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{where}: must be {_with_article(kind)}, such as [1, 8, 8], not {value!r}")
        return tuple(_convert(item, parts[0], where) for item in items)
    converted = _scalar(value, kind)
    if converted is None:
        near = (
            difflib.get_close_matches(str(value), [str(m.value) for m in kind], n=1)
            if issubclass(kind, enum.Enum)
            else []
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}: must be {_with_article(kind)}, not {value!r}{hint}")
    return converted


def _scalar(value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`, or return None if that is impossible.

    A number may be given as a string, because YAML 1.1 reads 1e-3 as a string.
    """
    if kind is bool:
        text = str(value).lower()
        return True if text in _TRUE else False if text in _FALSE else None
    if value is None and kind is str:  # `key=` without a value
        return ""
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        return None
    try:
        if kind is int and isinstance(value, int):
            return int(value)  # Numbers above 2^53 would change if converted through a float.
        if kind is int:
            number = float(value)
            return int(number) if number == int(number) else None
        if kind is not float and isinstance(value, _Whole | _Number):
            value = value.written
        # Shells, YAML and Kubernetes do not expand the ~ in key=~/folder.
        if kind is Path:
            return Path(value).expanduser()
        # Reject NaN. It compares false with every limit, so it would pass all checks.
        if kind is float:
            return None if math.isnan(found := float(value)) else found
        return kind(str(value)) if issubclass(kind, enum.Enum) else kind(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None


def help_text(kind: type[Any], width: int = 120) -> str:
    """Return the help text, which lists the keys by section.

    For each key, the text gives the type, the default, the environment variable and a description.
    """
    import textwrap

    lines: list[str] = []
    section = None
    for field in walk(kind):
        if (head := field.key.rpartition(".")[0]) != section:
            section = head
            lines.append(f"\n{section}:" if section else "")
        default = field.default.value if isinstance(field.default, enum.Enum) else field.default
        default = (
            list(default)
            if isinstance(default, tuple)
            else str(default).lower()
            if isinstance(default, bool)
            else default
        )
        env = f"; from {field.env}" if field.env else ""
        lines.append(f"  {field.key}={'' if default is None else default}   ({describe_type(field.type)}{env})")
        lines.extend(textwrap.wrap(field.doc, width - 8, initial_indent="        ", subsequent_indent="        "))
    return "\n".join(lines)
