"""Reads a DDPJob manifest: what `kubectl apply` would store of it, or every reason why it would not."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddpjob.api.schema import Problem, apply_defaults, check_schema, object_schema
from ddpjob.api.types import API_VERSION, KIND, Json
from ddpjob.api.yamltext import Document, YamlError, read_documents

MAX_BYTES = 3 * 1024 * 1024
"""The API server takes no larger request."""

_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""The API server's own for generateName: no vowels, so no words."""


class ManifestError(ValueError):
    """A manifest that cannot be used. `problems` holds all that is wrong; `str()` gives a line for each."""

    def __init__(self, source: str, problems: Iterable[Problem], document: Document | None = None) -> None:
        self.source, self.problems = source, tuple(problems)
        self._document = document
        super().__init__("\n".join(map(self._line, self.problems)))

    def _line(self, problem: Problem) -> str:
        where = self.source if self._document is None else f"{self.source}, line {self._document.line_of(problem.path)}"
        return f"{problem} ({where})" if problem.path else f"{where}: {problem}"


def validate(manifest: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[Problem]:
    """What the API server would refuse of a DDPJob: of a new one, or of one that replaces `old`. Empty: nothing.

    Both are taken as they are written; defaults are filled in here. podTemplate.spec is checked elsewhere.
    """
    from ddpjob.api.cel import check_rules

    wrong_kind = list(_wrong_kind(manifest))
    if wrong_kind:
        return wrong_kind
    stored = with_defaults(manifest)
    # Rules are written for objects that fit the schema; on others they would report the same thing a second time.
    return sorted(check_schema(stored) or check_rules(stored, None if old is None else with_defaults(old)))


def with_defaults(manifest: Mapping[str, Any]) -> Json:
    """The manifest as the API server would store it: defaults filled in, no status."""
    stored: Json = apply_defaults({key: value for key, value in manifest.items() if key != "status"}, object_schema())
    metadata = stored.setdefault("metadata", {})
    if isinstance(metadata, dict) and isinstance(metadata.get("generateName"), str) and not metadata.get("name"):
        metadata["name"] = metadata["generateName"][:58] + "".join(secrets.choice(_NAME_LETTERS) for _ in range(5))
    return stored


def read_manifest(source: Path | str, *, name: str | None = None) -> Json:
    """The one DDPJob of a file (Path) or of YAML text (str), checked and with defaults.

    Other kinds in the file are left alone. With several DDPJobs `name` says which. Raises ManifestError.
    """
    label, text = (str(source), _read_file(source)) if isinstance(source, Path) else ("the manifest", source)
    document = _choose(label, _documents(label, text), name)
    problems = validate(document.value)
    if problems:
        raise ManifestError(label, problems, document)
    return with_defaults(document.value)


def _read_file(path: Path) -> str:
    try:
        if path.is_dir():
            raise _error(path, "is a folder; name a file")
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise _error(path, f"is larger than {MAX_BYTES // 1024**2} MiB, which no manifest is")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise _error(path, f"does not exist (looked in {Path.cwd()})" if not path.is_absolute() else "does not exist") from error
    except UnicodeDecodeError as error:
        raise _error(path, f"is not UTF-8 text (byte {error.start}); a manifest is a YAML file") from error
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from error


def _error(source: object, message: str) -> ManifestError:
    return ManifestError(str(source), [Problem("", message)])


def _documents(label: str, text: str) -> list[Document]:
    try:
        documents = list(read_documents(text))
    except YamlError as error:
        raise _error(f"{label}, line {error.line}", error.message) from error
    if not documents:
        raise _error(label, f"is empty; it must hold a {KIND}")
    return documents


def _choose(label: str, documents: list[Document], name: str | None) -> Document:
    for document in documents:
        if not isinstance(document.value, dict):
            found = f"a manifest is a mapping that begins with apiVersion and kind, not {str(document.value)[:40]!r}"
            raise _error(f"{label}, line {document.line}", found)
    jobs = [d for d in documents if not _is_other_kind(d.value)]
    if name is not None:
        jobs = [d for d in jobs if _name(d.value) == name]
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        raise _error(label, f"holds {len(jobs)} DDPJobs ({', '.join(_name(d.value) for d in jobs)}); say by name which one")
    if name is not None:
        raise _error(label, f"holds no {KIND} called {name}")
    kinds = ", ".join(f"{d.value.get('kind', 'something without kind')} (line {d.line})" for d in documents)
    raise _error(label, f"holds no {KIND}; found {kinds}. It needs apiVersion: {API_VERSION} and kind: {KIND}")


def _is_other_kind(manifest: Mapping[str, Any]) -> bool:
    """Whether this is plainly an object of another kind; a DDPJob with a typing error is not."""
    ours = str(manifest.get("apiVersion", "")).split("/")[0] == API_VERSION.split("/")[0]
    return not ours and str(manifest.get("kind", "")).lower() != KIND.lower()


def _wrong_kind(manifest: Mapping[str, Any]) -> Iterable[Problem]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != wanted:
            given = f"{manifest[field]!r} is not known" if field in manifest else "required, but missing"
            yield Problem(field, f"{given}; write {wanted}")
    metadata = manifest.get("metadata")
    if metadata is None or (isinstance(metadata, Mapping) and not (metadata.get("name") or metadata.get("generateName"))):
        yield Problem("metadata.name", "required, but missing; name the job")


def _name(manifest: Mapping[str, Any]) -> str:
    metadata = manifest.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
