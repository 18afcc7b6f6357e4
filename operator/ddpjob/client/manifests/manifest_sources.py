"""Reads and checks manifests from files, folders and standard input.

`ddpjob validate` and `ddpjob run` use it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path

from ddpjob.api.job_spec import Json
from ddpjob.api.reader import Manifest, ManifestError, listed, read_manifests, validate, with_defaults
from ddpjob.client.backends.backend import Mistake
from ddpjob.local.paths import runs_folder

SUFFIXES = (".yaml", ".yml", ".json")


class BadInput(Mistake):
    """The input is invalid, so nothing was started. The message has one line per reason."""


def manifests(sources: Iterable[str | Path]) -> Iterator[Manifest | BadInput]:
    """Yield each DDPJob in the sources, or the reason why a manifest cannot be read.

    Sources are files, folders and standard input (`-`).
    """
    for source in sources:
        try:
            yield from _read(str(source))
        except BadInput as error:
            yield error
        except ManifestError as error:
            yield BadInput(str(error))


def standard_input() -> str:
    """Read all of standard input as UTF-8, regardless of the terminal's encoding.

    Raises BadInput.
    """
    if not isinstance(sys.stdin, TextIOWrapper):
        return str(sys.stdin.read())
    try:
        text: str = sys.stdin.buffer.read().decode("utf-8-sig")
        return text
    except UnicodeDecodeError as error:
        raise BadInput(
            f"standard input: not UTF-8 text (invalid byte at offset {error.start}); expected a YAML manifest"
        ) from error


def refuse_address(source: str, command: str) -> None:
    """Raise BadInput if `source` is a web address.

    `command` is the name of a ddpjob command. The message suggests downloading the manifest with
    curl and piping it to this command.
    """
    if source.startswith(("http://", "https://")):
        raise BadInput(f"{source}: URLs are not fetched; write `curl -fsSL {source} | ddpjob {command} -`")


def _read(source: str) -> Iterator[Manifest | BadInput]:
    refuse_address(source, "...")
    if source == "-":
        yield from read_manifests(standard_input(), "standard input")
    elif source.endswith(".py"):
        line = shlex.quote(source)
        yield BadInput(
            f"{source}: a script, not a manifest; write a manifest with `ddpjob init {line}`, or submit the script "
            f"with `ddpjob submit {line}`"
        )
    elif Path(source).is_dir():
        files = _files(Path(source))
        jobs = 0
        for file in files:
            try:
                for manifest in read_manifests(file):
                    jobs += 1
                    yield manifest
            except ManifestError as error:
                # Ignore files without a DDPJob, because a folder can also contain other kinds of
                # manifests.
                if "no DDPJob found" not in str(error):
                    jobs += 1
                    yield BadInput(str(error))
        if not jobs:
            yield BadInput(
                f"{source}: no DDPJob found in its manifest files ({', '.join(SUFFIXES)}; files read: {len(files)})"
            )
    else:
        yield from read_manifests(Path(source))


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder that can contain manifests.

    The folders that `ddpjob run` keeps for its jobs are skipped at all depths.
    """
    above, records = folder.resolve(), {file.parent.resolve() for file in runs_folder().glob("*/status.json")}
    records = {record for record in records if above in record.parents}
    found = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(path for path in found if records.isdisjoint(path.resolve().parents))


def checked(manifest: Manifest) -> Json:
    """Return the manifest with its defaults. Raises BadInput if the job could not run."""
    from ddpjob.client.manifests.later_refusals import later_refusals

    try:
        body = manifest.checked()
        faults = later_refusals(body)
        if faults:
            raise manifest.error(faults)
    except ManifestError as error:
        raise BadInput(str(error)) from error
    return body


def check_made(body: Json, what: str = "the job that the options describe") -> None:
    """Check a job that was built from options or values, and not read from a source.

    `what` describes the job in messages. Raises BadInput.
    """
    from ddpjob.client.manifests.later_refusals import later_refusals

    faults = validate(body) or later_refusals(with_defaults(body))
    if faults:
        raise BadInput(listed(faults, lambda fault: f"{fault} ({what})"))


def read_job(source: str | Path, name: str | None = None) -> Json:
    """Read a DDPJob from a source, check it, and return it with its defaults.

    If `name` is given, return the DDPJob with this name. Otherwise, the source must contain exactly
    one DDPJob. Raises BadInput.
    """
    found = []
    for manifest in manifests([source]):
        if isinstance(manifest, BadInput):
            raise manifest
        found.append(manifest)
    fitting = [m for m in found if name is None or m.name == name]
    listed = ", ".join(m.name for m in found)
    if not fitting:
        raise BadInput(f"{source}: no DDPJob is named {name}; the names are {listed}")
    if len(fitting) > 1:
        raise BadInput(f"{source}: contains {len(fitting)} DDPJobs ({listed}); choose one with --name NAME")
    return checked(fitting[0])
