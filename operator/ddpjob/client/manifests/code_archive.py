"""Packs a folder of code into an archive, and uploads the archive to a bucket for spec.code.

An archive is named by its SHA-256, and the same files make the same archive: paths are sorted,
times and owners are 0, and modes are 644 or 755. A folder is therefore uploaded only once, however
many jobs are submitted from it, and a pod can verify that it has unpacked the right archive.

The following rules decide which files are sent. The first rule that applies wins.

1. `.git` and links to folders are left out.
2. The folder's `.ddpjobignore`, in the syntax of .gitignore, decides about files that match its
   patterns. `!NAME` sends a file that the rules below leave out. If there is a `.ddpjobignore`,
   rule 4 does not apply.
3. Hidden files, caches and outputs (DEFAULTS) are left out, as are files that look like secrets
   (SECRETS). Files that look like secrets are reported.
4. Files that match the patterns in a `.gitignore` file are left out. Each `.gitignore` applies to
   its own folder.

Example: if no ignore file mentions `certs/ca.pem`, this file is left out with a note. The line
`!certs/ca.pem` in .ddpjobignore sends the file.

docs/decisions/0029 gives the reasons.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ddpjob_runtime.protocol import MOST_CODE_BYTES, MOST_CODE_FILES, MOST_UNPACKED_BYTES

from ddpjob.client.backends.backend import Mistake

IGNORE_FILE = ".ddpjobignore"
DEFAULTS = (".*", "__pycache__/", "node_modules/", "runs/", "wandb/", "mlruns/")
SECRETS = (
    *(".env", ".env.*", ".netrc", ".git-credentials", ".pypirc", ".npmrc", ".aws/", ".ssh/", ".kube/"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx"),
    *("kubeconfig", "credentials.json", "service-account*.json"),
)
"""Patterns of files that usually hold keys or passwords."""
_SHOWN = 5
_PROGRESS_BYTES, _PROGRESS_SECONDS = 16 * 2**20, 2.0
"""The progress of an upload is reported only for archives of at least _PROGRESS_BYTES, and at most
once every _PROGRESS_SECONDS."""


@dataclass(frozen=True)
class Found:
    """The files of a folder that belong in the archive, and names to report as left out.

    The reported names are those of files that look like secrets, and of links to folders.
    """

    files: Mapping[str, Path]
    """Maps each file's path within the folder to its path on this machine, in sorted order."""
    secrets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Total size of the files and their names, in bytes. Raises OSError."""
        return sum(path.stat().st_size + len(name) for name, path in self.files.items())

    def notes(self) -> Iterator[str]:
        """Yield a sentence about skipped secrets and one about skipped links, if there are any."""
        if self.secrets:
            remedy = f"to send one, add `!NAME` to {IGNORE_FILE}"
            yield f"skipped files that look like secrets: {_some(self.secrets)}; {remedy}"
        if self.links:
            yield f"skipped links to folders: {_some(self.links)}"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- which files


@dataclass(frozen=True)
class _Pattern:
    """One line of an ignore file. `excludes` is False for a line that begins with `!`."""

    regex: re.Pattern[str]
    excludes: bool
    only_folders: bool


@dataclass(frozen=True)
class Patterns:
    """The patterns of an ignore file.

    If several patterns match a path, the last of them decides.
    """

    lines: tuple[_Pattern, ...] = ()

    @classmethod
    def read(cls, lines: Iterable[str]) -> Patterns:
        """Read lines in the syntax of .gitignore."""
        return cls(tuple(found for line in lines if (found := _pattern(line)) is not None))

    def excludes(self, path: str, *, folder: bool) -> bool | None:
        """Whether the patterns exclude a path, relative to the ignore file's folder.

        The result is None if no pattern matches the path.
        """
        for line in reversed(self.lines):
            if (folder or not line.only_folders) and line.regex.fullmatch(path):
                return line.excludes
        return None


def _pattern(line: str) -> _Pattern | None:
    line = re.sub(r"(?<!\\) +$", "", line.rstrip("\r\n"))
    if not line or line.startswith("#"):
        return None
    excludes = not line.startswith("!")
    text = line if excludes else line[1:]
    only_folders = text.endswith("/")
    text = text.rstrip("/") if only_folders else text
    if not text:
        return None
    anchored = "/" in text
    parts = text.removeprefix("/").split("/")
    regex = "" if anchored else "(?:.*/)?"
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            regex += ".+" if last else "(?:.*/)?"
        else:
            regex += _of_part(part) + ("" if last else "/")
    try:
        return _Pattern(re.compile(regex, re.DOTALL), excludes, only_folders)
    except re.error:
        # Ignore an invalid pattern, such as the range [z-a]. It could not match anything.
        return None


def _of_part(part: str) -> str:
    """Translate one part of a pattern into a regular expression. A part does not contain `/`."""
    found, at = "", 0
    while at < len(part):
        letter = part[at]
        group = re.compile(r"\[[!^]?\]?(?:\\.|\[:\w+:\]|[^]\\])*\]").match(part, at) if letter == "[" else None
        if letter == "*":
            found += "[^/]*"
        elif letter == "?":
            found += "[^/]"
        elif group is not None:
            inside = group[0][1:-1]
            negated = inside[:1] in "!^"
            body = re.sub(r"\[(?!:)", r"\\[", inside[1:] if negated else inside)
            body = "\\" + body if body.startswith("]") else body
            found += f"(?!/)[{'^' if negated else ''}{body}]"
            at = group.end() - 1
        elif letter == "\\" and at + 1 < len(part):
            at += 1
            found += re.escape(part[at])
        else:
            found += re.escape(letter)
        at += 1
    return found


def find_files(folder: Path) -> Found:
    """Return the files in a folder that belong in the archive.

    Raises Mistake if a folder, its .ddpjobignore or a .gitignore file cannot be read.
    """
    try:
        own = _ignore_file(folder / IGNORE_FILE)
        walk = _Walk(folder, own or Patterns(), by_git=own is None)
        walk.visit(folder, "", ())
    except OSError as error:
        raise Mistake(
            f"{error.filename or folder}: {error.strerror}; make it readable, or list it in {IGNORE_FILE}"
        ) from None
    return Found(dict(sorted(walk.files.items())), tuple(sorted(walk.secrets)), tuple(sorted(walk.links)))


def _ignore_file(path: Path) -> Patterns | None:
    try:
        return Patterns.read(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


_DEFAULTS, _SECRETS = Patterns.read(DEFAULTS), Patterns.read(SECRETS)


@dataclass
class _Walk:
    root: Path
    own: Patterns
    by_git: bool
    files: dict[str, Path] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def visit(self, folder: Path, inside: str, above: tuple[tuple[str, Patterns], ...]) -> None:
        """Add the files in a folder and its subfolders, unless they are left out.

        `inside` is the folder's path below the root: empty for the root, and with a final `/` for
        any other folder. `above` contains a pair for each .gitignore file in the folders above: the
        `inside` of the file's folder, and the file's patterns.
        """
        if self.by_git and (found := _ignore_file(folder / ".gitignore")) is not None:
            above = (*above, (inside, found))
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path, is_folder = inside + entry.name, entry.is_dir()
            if entry.name == ".git" or self._is_left_out(path, above, folder=is_folder):
                continue
            if is_folder and entry.is_symlink():
                self.links.append(path)
            elif is_folder:
                self.visit(Path(entry.path), f"{path}/", above)
            elif entry.is_file():
                # For a link to a file, the archive contains the content of the file.
                self.files[path] = Path(entry.path)

    def _is_left_out(self, path: str, above: tuple[tuple[str, Patterns], ...], *, folder: bool) -> bool:
        if (own := self.own.excludes(path, folder=folder)) is not None:
            return own
        if _SECRETS.excludes(path, folder=folder):
            self.secrets.append(path)
            return True
        if _DEFAULTS.excludes(path, folder=folder):
            return True
        for inside, patterns in reversed(above):
            if (verdict := patterns.excludes(path[len(inside) :], folder=folder)) is not None:
                return verdict
        return False


# --- the archive


@dataclass(frozen=True)
class Packed:
    """An archive in a temporary file."""

    path: Path
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return f"sha256-{self.sha256}.tar.gz"


def pack(found: Found, source: str, to: Path) -> Packed:
    """Write an archive with a folder's files to the path `to`.

    Messages refer to the folder as `source`. Raises Mistake if there are too many files, or if the
    files are too large.
    """
    if len(found.files) > MOST_CODE_FILES:
        raise Mistake(
            f"{source}: contains {len(found.files)} files, but at most {MOST_CODE_FILES} can be sent; {_remedy(found)}"
        )
    try:
        total = sum(path.stat().st_size for path in found.files.values())
        if total > MOST_UNPACKED_BYTES:
            raise Mistake(
                f"{source}: contains {_size(total)}, but at most {_size(MOST_UNPACKED_BYTES)} can be sent; "
                f"{_remedy(found)}"
            )
        with to.open("wb") as file:
            _write_archive(found.files, file)
        size = to.stat().st_size
        if size > MOST_CODE_BYTES:
            raise Mistake(
                f"{source}: is {_size(size)} after compression, but at most {_size(MOST_CODE_BYTES)} can be sent; "
                f"{_remedy(found)}"
            )
        with to.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(2**20):
                digest.update(piece)
    except OSError as error:
        raise Mistake(f"{error.filename or source}: {error.strerror or error}") from None
    return Packed(to, digest.hexdigest(), size)


def _write_archive(files: Mapping[str, Path], to: IO[bytes]) -> None:
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=to, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, path in files.items():
            with path.open("rb") as content:
                state = os.fstat(content.fileno())
                member = tarfile.TarInfo(name)  # TarInfo's default time and owner are 0.
                member.size, member.mode = state.st_size, 0o755 if state.st_mode & 0o100 else 0o644
                tar.addfile(member, content)


def _remedy(found: Found) -> str:
    """Suggest how to make the archive smaller, and name the largest entries in the folder."""
    sizes = dict[str, int]()
    for name, path in found.files.items():
        top = name.partition("/")[0]
        sizes[top] = sizes.get(top, 0) + path.stat().st_size
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} {_size(sizes[name])}" for name in largest)
    return f"list unneeded files in {IGNORE_FILE} (largest: {shown}), or move data to storage.data"


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# --- the upload


@dataclass(frozen=True)
class CodePlace:
    """The bucket folder for code, and how to reach the bucket from this machine."""

    url: str
    endpoint: str = ""
    region: str = ""


def send(found: Found, source: str, place: CodePlace, say: Callable[[str], None], *, upload: bool) -> dict[str, Any]:
    """Pack the files into an archive, upload the archive, and return the value of the `code` field.

    An archive that is already in the bucket is not uploaded again. With `upload=False`, the bucket
    is not accessed. Raises Mistake.
    """
    with tempfile.TemporaryDirectory(prefix="ddpjob-code-") as folder:
        packed = pack(found, source, Path(folder) / "code.tar.gz")
        if upload:
            _upload(packed, place, say)
        else:
            say(
                f"{packed.name} ({_size(packed.size)}) is not uploaded; run `ddpjob submit` without --dry-run to "
                "upload it"
            )
    return {"archive": f"{place.url.rstrip('/')}/{packed.name}", "digest": f"sha256:{packed.sha256}"}


def _upload(packed: Packed, place: CodePlace, say: Callable[[str], None]) -> None:
    from ddpjob_bucket.stored import Bucket, BucketError, LibraryMissing

    from ddpjob.missing_package import INSTALL

    try:
        bucket = Bucket.open(place.url, endpoint=place.endpoint, region=place.region)
        if bucket.size_of(packed.name) == packed.size:
            return say(f"code: {packed.name[:19]}… is already in {place.url}")
        began = time.monotonic()
        bucket.put_file(packed.name, packed.path, _watch(packed.size, say))
        say(f"code: {_size(packed.size)} uploaded to {place.url} in {time.monotonic() - began:.1f} s")
    except LibraryMissing:
        raise Mistake(f"uploading to {place.url} requires the package obstore: {INSTALL.format(extra='s3')}") from None
    except BucketError as error:
        remedy = (
            "check the bucket name, and AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in this shell"
        )
        raise Mistake(f"the code cannot be uploaded: {error}; {remedy}") from None


def _watch(size: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that reports the progress of a large upload every few seconds."""
    due = time.monotonic() + _PROGRESS_SECONDS

    def watch(read: int) -> None:
        nonlocal due
        if size >= _PROGRESS_BYTES and time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_SECONDS
            say(f"code: {_size(read)} of {_size(size)} uploaded")

    return watch
