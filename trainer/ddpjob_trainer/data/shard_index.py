"""The index of a folder of tar shards, which locates each image.

The index is built once from the tars' headers, kept in a file, and rebuilt when shards change.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from ddpjob_pod.file_lock import alone

from ddpjob_trainer.atomic_files import replacing
from ddpjob_trainer.data.decode import MOST_BYTES
from ddpjob_trainer.data.listing import read_arrays, user_cache
from ddpjob_trainer.errors import DataError, TrainerError

FILE = "index.npz"
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
MOST_LABEL = 10_000_000
"""Maximum label. The highest label determines the size of a model's last layer."""
_MOST_HEADER, _MOST_DIGITS = 1 << 20, 32
"""Maximum sizes in bytes: of an extended tar header, which holds a long name, and of a .cls file.
"""
_EXTENDED = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
_LOOKED_AT = 4 * tarfile.RECORDSIZE
"""Number of bytes to check after a tar's end-of-archive marker. Tools pad the last record of a tar
to 10240 bytes with zeros, so fewer bytes might all be padding.
"""
_WEB = ("http://", "https://")
_REMOTE = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}


@dataclass(frozen=True)
class Index:
    """The place and label of each image in a folder of shards.

    Image i has the label `labels[i]`. Its `sizes[i]` bytes begin at `offsets[i]` in
    `shards[shard[i]]`. `url` is the folder that contains the shards. A shard's stamp changes with
    the shard's content, even if the length stays the same, as when only labels change; see
    `stamp_of`.
    """

    url: str
    shards: list[str]
    lengths: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.str_]
    shard: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int64]

    @property
    def is_local(self) -> bool:
        """Whether the shards are files on this machine."""
        return "://" not in self.url

    def files(self) -> Any:
        """Return fsspec's file system for the shards. Every process gets its own."""
        return file_system(self.url)


def file_system(url: str) -> Any:
    """Return fsspec's file system for a path or URL.

    Raises a DataError that explains what to install or what to write.
    """
    import fsspec

    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        package = _REMOTE.get(protocol)
        remedy = f"run pip install {package}" if package else "use a path, or an s3://, gs:// or https:// address"
        raise DataError(f"data.url: {url} cannot be opened ({error}); {remedy}") from error


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Turn any exception that occurs when reading a remote `url` into a DataError.

    The type of the original exception depends on the library that fsspec uses for the URL.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if "://" not in url:
            raise
        raise DataError(
            f"{url} cannot be read ({type(error).__name__}: {error}); check that data.url is correct "
            "and reachable, and that credentials for it are set"
        ) from error


def cached_index(url: str, folder: Path | None, remedy: str) -> Index:
    """Return the index of the shards at `url`. If there is no valid index, build it.

    The index is kept in `folder`. If `folder` is None, it is kept next to the shards or, if their
    folder is not writable, in the user's cache. Raises DataError, with `remedy` if the shards are
    at fault.
    """
    beside = f"{url}/{FILE}"
    files = file_system(url)
    # Few web servers can list folders, so trust the list of shards in the index.
    if url.startswith(_WEB) and files.exists(beside):
        return _load(files.open(beside, "rb"), url)
    found = _listing(url, remedy)
    if files.exists(beside) and _is_of(index := _load(files.open(beside, "rb"), url), found, copied="://" in url):
        return index
    path = _cache_path(url, folder)
    # The ranks of a node start at the same time. The lock lets only one of them build the index.
    with ExitStack() as held:
        with _keeping(path):
            held.enter_context(alone(path.with_name(f".{path.name}.lock")))
        if path.is_file() and _is_of(index := _load(path.open("rb"), url), found):
            return index
        index = _scan(url, found, remedy)
        with _keeping(path):
            save(index, path)
    return index


@contextmanager
def _keeping(path: Path) -> Iterator[None]:
    """Replace an OSError with a DataError, because the index cannot be written to `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the index of the shards cannot be written to {path} ({error.strerror or error}); free some space,"
            " or set data.index to a different folder"
        ) from error


def save(index: Index, path: Path) -> None:
    """Write the index atomically."""
    names = np.array([name.rsplit("/", 1)[-1] for name in index.shards])
    with replacing(path) as file:
        np.savez(
            file,
            names=names,
            lengths=index.lengths,
            stamps=index.stamps,
            shard=index.shard,
            offsets=index.offsets,
            sizes=index.sizes,
            labels=index.labels,
        )


def stamp_of(entry: Mapping[str, Any]) -> str:
    """Return a stamp that changes with a file's content.

    `entry` is fsspec's information about the file. The stamp is a checksum or, if the file system
    does not report one, the time of the last change. If the file system reports neither, the stamp
    is empty. A stamp begins with its kind, because only stamps of the same kind can be compared.
    """
    kinds = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated")
    return next((f"{kind.lower()} {entry[kind]}" for kind in kinds if entry.get(kind)), "")


@dataclass(frozen=True)
class _Found:
    """The shards that are in a folder now."""

    shards: list[str]
    lengths: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.str_]


def _listing(url: str, remedy: str) -> _Found:
    """Return the shards in a folder, in the order of their names. Raises DataError."""
    files = file_system(url)
    try:
        entries = {str(entry["name"]).rsplit("/", 1)[-1]: entry for entry in files.ls(url, detail=True)}
    except OSError as error:
        raise DataError(f"shards {url} cannot be listed ({error}): {remedy}") from error
    names = sorted(name for name in entries if name.endswith(".tar"))
    if not names:
        raise DataError(f"{url} has no .tar files: {remedy}")
    sizes = [entries[name]["size"] for name in names]
    lengths = [files.size(f"{url}/{name}") if size is None else size for name, size in zip(names, sizes, strict=True)]
    return _Found(
        [f"{url}/{name}" for name in names],
        np.array(lengths, dtype=np.int64),
        np.array([stamp_of(entries[name]) for name in names]),
    )


def _load(file: IO[bytes], url: str) -> Index:
    """Read an index from a file, and check it. Raises DataError."""
    columns = {"shard": np.int32, "offsets": np.int64, "sizes": np.int32, "labels": np.int64, "lengths": np.int64}
    try:
        with file:
            saved = read_arrays(file)
        shards = [f"{url}/{name}" for name in saved["names"].tolist()]
        values = {key: saved[key].astype(kind, casting="same_kind") for key, kind in columns.items()}
        index = Index(url=url, shards=shards, stamps=saved["stamps"], **values)
        _check(index)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, NotImplementedError) as error:
        raise DataError(
            f"the index of {url} is damaged ({error}); remove {getattr(file, 'name', FILE)} to have the index rebuilt"
        ) from error
    return index


def _check(index: Index) -> None:
    """Raise ValueError if an index is inconsistent or points outside its shards."""
    if any("/" in name[len(index.url) + 1 :] for name in index.shards):
        raise ValueError("a shard's name contains a slash")
    rows = (index.shard, index.offsets, index.sizes, index.labels)
    tables = (index.lengths, index.stamps)
    if {row.shape for row in rows} != {(len(index.labels),)} or {row.shape for row in tables} != {(len(index.shards),)}:
        raise ValueError("its columns differ in length")
    if index.stamps.dtype.kind != "U" or (index.lengths < 0).any():
        raise ValueError("it lacks the stamps or the lengths of its shards")
    if len(index.labels) and (index.shard.min() < 0 or index.shard.max() >= len(index.shards)):
        raise ValueError("an image is not in any shard")
    ends = index.lengths[index.shard]
    if (index.offsets < 0).any() or (index.sizes < 0).any() or (index.offsets > ends - index.sizes).any():
        raise ValueError("an image ends beyond its shard")


def _is_of(index: Index, found: _Found, *, copied: bool = False) -> bool:
    """Return whether the index was built from the shards that were found.

    If `copied` is set, the index may have been built elsewhere and copied to object storage
    together with the shards. Stamps of different kinds are then not compared.
    """
    names = [[name.rsplit("/", 1)[-1] for name in each.shards] for each in (index, found)]
    if names[0] != names[1] or not np.array_equal(index.lengths, found.lengths):
        return False
    pairs = zip(index.stamps.tolist(), found.stamps.tolist(), strict=True)
    return all(one == other or (copied and one.split()[:1] != other.split()[:1]) for one, other in pairs)


def _cache_path(url: str, folder: Path | None) -> Path:
    """Return the path at which to keep an index.

    The path is in `folder`. If `folder` is None, it is next to the shards or, if their folder is
    not writable, in the user's cache. Raises DataError.
    """
    if folder is None and "://" not in url and os.access(url, os.W_OK):
        return Path(url) / FILE
    path = (folder or user_cache()) / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{FILE}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"folder {path.parent} cannot be written ({error.strerror}); set data.index to a different folder"
        ) from error
    return path


def _scan(url: str, found: _Found, remedy: str) -> Index:
    rows: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(found.shards):
        try:
            with file_system(url).open(shard, "rb") as file:
                rows.extend((number, *row) for row in _samples(file, shard, remedy))
        except (OSError, ValueError, RecursionError, tarfile.TarError) as error:
            raise DataError(f"shard {shard} cannot be read ({error}): {remedy}") from error
    if not rows:
        raise DataError(f"{url} has no images ({', '.join(_IMAGES[:4])}, ...) in its .tar files: {remedy}")
    table = np.array(rows, dtype=np.int64)
    return Index(
        url=url,
        shards=found.shards,
        lengths=found.lengths,
        stamps=found.stamps,
        shard=table[:, 0].astype(np.int32),
        offsets=table[:, 1],
        sizes=table[:, 2].astype(np.int32),
        labels=table[:, 3],
    )


class _Member(tarfile.TarInfo):
    """The header of a tar member.

    Large extended headers are refused, because tarfile would read them into memory.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type in _EXTENDED and self.size > _MOST_HEADER:
            raise tarfile.ReadError(f"an extended header has {self.size:,} bytes; the limit is {_MOST_HEADER:,}")
        return super()._proc_member(archive)  # type: ignore[misc]


def _samples(file: IO[bytes], shard: str, remedy: str) -> Iterator[tuple[int, int, int]]:
    """Return (offset, size, label) for each image in a tar, in the tar's order.

    Raises DataError.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    dotted: dict[str, str] = {}
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}"
            if extension.lower().endswith(".cls"):
                dotted[key] = member.name
            if member.isfile() and extension.lower() in _IMAGES:
                if member.size > MOST_BYTES:
                    raise DataError(f"{shard}: {member.name} has {member.size:,} bytes; the limit is {MOST_BYTES:,}")
                images[key] = (member.offset_data, member.size)
            elif member.isfile() and extension.lower() == "cls":
                content = archive.extractfile(member)
                assert content is not None
                labels[key] = _label(content.read(_MOST_DIGITS), f"{shard}: {member.name}")
        _check_end(file, archive.offset, shard)
    if lost := [name for key, name in dotted.items() if key not in images]:
        raise DataError(
            f"{shard}: {lost[0]} has no image with the same key (such files: {len(lost)}), because a "
            "WebDataset key ends at the first dot; use names without other dots"
        )
    if alone := labels.keys() - images.keys():
        raise DataError(
            f"{shard}: {min(alone)}.cls has no image with the same key (files without an image:"
            f" {len(alone)}; images are {', '.join(_IMAGES)}): {remedy}"
        )
    if without := images.keys() - labels.keys():
        raise DataError(
            f"{shard}: {min(without)} has no .cls file with its class number (images without a .cls "
            f"file: {len(without)}): {remedy}"
        )
    return ((*position, labels[key]) for key, position in images.items())


def _check_end(file: IO[bytes], end: int, shard: str) -> None:
    """Raise DataError if the tar is truncated at `end`, or if data follows its end-of-archive
    marker.

    tarfile does not report either of these.
    """
    file.seek(end)
    left = file.read(_LOOKED_AT)
    if len(left) < tarfile.BLOCKSIZE:
        raise DataError(f"{shard} is truncated (it has no end-of-archive marker); copy or write it again")
    if left.strip(tarfile.NUL):
        raise DataError(
            f"{shard} continues after its end-of-archive marker, where tools stop reading; if it contains"
            " several tars, put each into a separate file"
        )


def _label(content: bytes, where: str) -> int:
    try:
        label = int(content)
    except ValueError:
        raise DataError(
            f"{where} contains {content[:20]!r} instead of a class number; write an integer of at least 0"
        ) from None
    if abs(label) > MOST_LABEL:
        raise DataError(f"{where} has class {label}, more than {MOST_LABEL:,}; number the classes from 0")
    return label
