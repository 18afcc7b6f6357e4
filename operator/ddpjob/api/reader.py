"""Reads a DDPJob manifest as `kubectl apply` would store it, or reports why the manifest is
rejected.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob.api.job import API_VERSION, KIND
from ddpjob.api.job_spec import Json
from ddpjob.api.schema import MOST_PROBLEMS, Problem, apply_defaults, check_schema, object_schema
from ddpjob.api.yamltext import Document, YamlError, read_documents

MAX_BYTES = 3 * 1024 * 1024
"""Maximum size in bytes of a request body that the API server accepts."""

CONVERTIBLE = ("PyTorchJob", "TrainJob")
"""Kinds of objects that `ddpjob convert` translates."""

_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""The letters and digits from which the API server forms the suffix for generateName. They include
no vowels, so that a suffix does not spell a word."""


MOST_LINES = 21
"""Maximum number of problems that `listed` shows for one manifest. The rest are only counted."""
_LONGEST_LINE = 1000


def listed(problems: Sequence[Problem], line: Callable[[Problem], str] = str) -> str:
    """Return a text with one line for each of the first MOST_LINES problems.

    If there are more problems, a last line says how many.
    """
    lines = [_without_middle(line(problem)) for problem in problems[:MOST_LINES]]
    if len(problems) > MOST_LINES:
        least = "at least " if len(problems) >= MOST_PROBLEMS else ""
        lines.append(f"... and {least}{len(problems) - MOST_LINES} more; correct these first")
    return "\n".join(lines)


def _without_middle(text: str) -> str:
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 205]} ... {text[-200:]}"


class ManifestError(ValueError):
    """A manifest that cannot be used.

    `problems` contains every problem that was found. `str()` returns one line for each of the first
    MOST_LINES problems.
    """

    def __init__(self, source: str, problems: Iterable[Problem], document: Document | None = None) -> None:
        self.source, self.problems = source, tuple(problems)
        self._document = document
        super().__init__(listed(self.problems, self._line))

    def _line(self, problem: Problem) -> str:
        where = self.source if self._document is None else f"{self.source}, line {self._document.line_of(problem.path)}"
        return f"{problem} ({where})" if problem.path else f"{where}: {problem}"


def validate(manifest: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[Problem]:
    """Return the problems that would make the API server reject a DDPJob.

    The list is empty if the DDPJob is valid. `old` is the existing DDPJob that an update would
    replace, or None if the DDPJob is new. Neither object needs to have the CRD's defaults. The
    content of podTemplate.spec is checked in `ddpjob.objects`, not here.
    """
    from ddpjob.api.cel import check_rules

    wrong_kind = list(_wrong_kind(manifest))
    if wrong_kind:
        return wrong_kind
    stored = with_defaults(manifest)
    # Check the rules only if the object fits the schema. Otherwise, the schema and a rule could
    # both report the same error.
    return sorted(check_schema(stored) or check_rules(stored, None if old is None else with_defaults(old)))


def with_defaults(manifest: Mapping[str, Any]) -> Json:
    """Return the manifest as the API server would store it.

    The function fills in defaults, makes a name from generateName, and drops any status in the
    manifest.
    """
    stored: Json = apply_defaults({key: value for key, value in manifest.items() if key != "status"}, object_schema())
    metadata = stored.setdefault("metadata", {})
    if isinstance(metadata, dict) and isinstance(metadata.get("generateName"), str) and not metadata.get("name"):
        metadata["name"] = metadata["generateName"][:58] + "".join(secrets.choice(_NAME_LETTERS) for _ in range(5))
    return stored


@dataclass(frozen=True)
class Manifest:
    """A DDPJob from a manifest, as the user wrote it."""

    source: str
    document: Document
    others: tuple[str, ...] = ()
    """Kind and name of each object in the same text that is not a DDPJob."""

    @property
    def name(self) -> str:
        return _name(self.document.value)

    def checked(self) -> Json:
        """Check the manifest, and return the object that `kubectl apply` would store.

        Raises ManifestError if the manifest has problems.
        """
        problems = validate(self.document.value)
        if problems:
            raise self.error(problems)
        return with_defaults(self.document.value)

    def error(self, problems: Iterable[Problem]) -> ManifestError:
        """Return a ManifestError that lists the problems with their line numbers."""
        return ManifestError(self.source, problems, self.document)


def read_manifests(source: Path | str, label: str = "the manifest") -> list[Manifest]:
    """Return the DDPJobs in a file (given as a Path) or in YAML text (given as a str).

    Their content is not checked. The items of a List count as separate objects, and objects of
    other kinds are ignored. Raises ManifestError if the text contains no DDPJob, or if two DDPJobs
    have the same name.
    """
    label, text = (str(source), _read_file(source)) if isinstance(source, Path) else (label, source)
    found, names = _jobs(label, _documents(label, text)), set[tuple[str, str]]()
    for manifest in found:
        metadata = manifest.document.value.get("metadata")
        named = (str(metadata.get("namespace", "")) if isinstance(metadata, Mapping) else "", manifest.name)
        if manifest.name and named in names:
            again = f"{manifest.name} is already the name of an earlier {KIND} in this file; choose a different name"
            raise manifest.error([Problem("metadata.name", again)])
        names.add(named)
    return found


def _read_file(path: Path) -> str:
    try:
        if path.is_dir():
            raise _error(path, "this is a folder; specify a file")
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise _error(path, f"larger than {MAX_BYTES // 1024**2} MiB, the API server's limit")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        others = [found.name for found in path.parent.glob("*.y*ml")]
        near = difflib.get_close_matches(path.name, others, n=1)
        where = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise _error(path, f"no such file{where}" + (f"; did you mean {near[0]}?" if near else "")) from error
    except UnicodeDecodeError as error:
        raise _error(
            path, f"not UTF-8 text (invalid byte at offset {error.start}); expected a YAML manifest"
        ) from error
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
        raise _error(label, f"empty; expected a {KIND}")
    return documents


def _jobs(label: str, documents: list[Document]) -> list[Manifest]:
    documents = [item for document in documents for item in document.items()]
    for document in documents:
        if not isinstance(document.value, dict):
            found = f"a manifest must be a mapping with apiVersion and kind, not {str(document.value)[:40]!r}"
            raise _error(f"{label}, line {document.line}", found)
    others = tuple(f"{d.value.get('kind', '')} {_name(d.value)}" for d in documents if _is_other_kind(d.value))
    jobs = [Manifest(label, d, others) for d in documents if not _is_other_kind(d.value)]
    if jobs:
        return jobs
    if not documents:
        raise _error(label, f"the List has no items; expected a {KIND}")
    kinds = ", ".join(f"{d.value.get('kind', 'an object without kind')} (line {d.line})" for d in documents)
    convert = any(d.value.get("kind") in CONVERTIBLE for d in documents)
    remedy = f"; run `ddpjob convert {label}` to translate it" if convert else f" and kind: {KIND}"
    raise _error(label, f"no {KIND} found, only {kinds}; a {KIND} has apiVersion: {API_VERSION}{remedy}")


def _is_other_kind(manifest: Mapping[str, Any]) -> bool:
    """Whether the object is clearly of a different kind.

    A misspelled DDPJob does not count.
    """
    ours = str(manifest.get("apiVersion", "")).split("/")[0] == API_VERSION.split("/")[0]
    return not ours and str(manifest.get("kind", "")).lower() != KIND.lower()


def _wrong_kind(manifest: Mapping[str, Any]) -> Iterable[Problem]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != wanted:
            given = f"{manifest[field]!r} is not supported" if field in manifest else "required, but missing"
            yield Problem(field, f"{given}; use {wanted}")
    metadata = manifest.get("metadata")
    if metadata is None or (
        isinstance(metadata, Mapping) and not (metadata.get("name") or metadata.get("generateName"))
    ):
        yield Problem("metadata.name", "required, but missing; name the job")
        for field in manifest.keys() - {"apiVersion", "kind", "metadata", "spec", "status"}:
            below = "metadata" if field in ("name", "namespace", "labels", "annotations") else "spec"
            yield Problem(str(field), f"unknown field; if it belongs to {below}, indent it below {below}:")


def _name(manifest: Mapping[str, Any]) -> str:
    metadata = manifest.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
