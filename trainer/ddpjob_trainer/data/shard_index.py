"""Where each image of a folder of tar shards lies: made once by reading the tars' headers, kept as a file, made anew when shards change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ddpjob_trainer.atomic import replacing
from ddpjob_trainer.errors import DataError, TrainerError

FILE = "index.npz"
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff")
_WEB = ("http://", "https://")
_REMOTE = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}


@dataclass(frozen=True)
class Index:
    """Image i: `sizes[i]` bytes from `offsets[i]` on in `shards[shard[i]]`, with `labels[i]`. `url`: the folder."""

    url: str
    shards: list[str]
    lengths: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int64]

    @property
    def is_local(self) -> bool:
        """Whether the shards are files of this machine."""
        return "://" not in self.url

    def files(self) -> Any:
        """fsspec's file system of the shards; each process has its own."""
        return file_system(self.url)


def file_system(url: str) -> Any:
    """fsspec's file system for a path or URL. Raises DataError naming what to install."""
    import fsspec

    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        package = _REMOTE.get(protocol)
        remedy = f"pip install {package}" if package else "write a path, or an s3://, gs:// or https:// address"
        raise DataError(f"data.url: {url} cannot be opened ({error}): {remedy}") from error


@contextmanager
def answering(url: str) -> Iterator[None]:
    """What a store's library raises, which need not be an OSError, as DataError."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if "://" not in url:
            raise
        raise DataError(
            f"{url} cannot be read ({type(error).__name__}: {error}):"
            f" see that data.url is right and answers, and that its credentials are here"
        ) from error


def cached_index(url: str, folder: Path | None, remedy: str) -> Index:
    """The index of the shards at `url`: beside them, in `folder`, or in the user's cache; made if need be. Raises DataError."""
    beside = f"{url}/{FILE}"
    files = file_system(url)
    if url.startswith(_WEB) and files.exists(beside):  # Few web servers list folders: the file's own list is believed there.
        return _loaded(files.open(beside, "rb"), url)
    shards, lengths = _listing(url, remedy)
    if files.exists(beside) and _is_of(index := _loaded(files.open(beside, "rb"), url), shards, lengths):
        return index
    place = _place(url, folder)
    with (place.parent / f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The ranks of a node come here together; one of them makes it.
        if place.is_file() and _is_of(index := _loaded(place.open("rb"), url), shards, lengths):
            return index
        index = _scan(url, shards, lengths, remedy)
        save(index, place)
    return index


def save(index: Index, path: Path) -> None:
    """Write it, whole or not at all."""
    names = np.array([name.rsplit("/", 1)[-1] for name in index.shards])
    with replacing(path) as file:
        np.savez(
            file,
            names=names,
            lengths=index.lengths,
            shard=index.shard,
            offsets=index.offsets,
            sizes=index.sizes,
            labels=index.labels,
        )


def _listing(url: str, remedy: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The shards' addresses in the order of their names, and their lengths in bytes."""
    files = file_system(url)
    try:
        found = sorted((str(entry["name"]).rsplit("/", 1)[-1], entry["size"]) for entry in files.ls(url, detail=True))
    except OSError as error:
        raise DataError(f"shards {url} cannot be listed ({error}): {remedy}") from error
    shards = [f"{url}/{name}" for name, _ in found if name.endswith(".tar")]
    if not shards:
        raise DataError(f"{url} holds no .tar files: {remedy}")
    lengths = [files.size(f"{url}/{name}") if size is None else size for name, size in found if name.endswith(".tar")]
    return shards, np.array(lengths, dtype=np.int64)


def _loaded(file: IO[bytes], url: str) -> Index:
    """The index in a file. Raises DataError."""
    try:
        with file, np.load(file, allow_pickle=False) as saved:
            shards = [f"{url}/{name}" for name in saved["names"].tolist()]
            columns = {key: saved[key] for key in ("lengths", "shard", "offsets", "sizes", "labels")}
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise DataError(
            f"the list of images of {url} is damaged ({error}): remove {getattr(file, 'name', FILE)}, it is made anew"
        ) from error
    return Index(url=url, shards=shards, **columns)


def _is_of(index: Index, shards: list[str], lengths: npt.NDArray[np.int64]) -> bool:
    """Whether it was made from these shards."""
    names = [[name.rsplit("/", 1)[-1] for name in found] for found in (index.shards, shards)]
    return names[0] == names[1] and np.array_equal(index.lengths, lengths)


def _place(url: str, folder: Path | None) -> Path:
    """Where an index is kept that is not beside the shards."""
    if folder is None and "://" not in url and os.access(url, os.W_OK):
        return Path(url) / FILE
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpjob_trainer"
    place = (folder or cache) / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{FILE}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"folder {place.parent} cannot be written ({error.strerror}): set data.index to another one") from error
    return place


def _scan(url: str, shards: list[str], lengths: npt.NDArray[np.int64], remedy: str) -> Index:
    rows: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(shards):
        try:
            with file_system(url).open(shard, "rb") as file:
                rows.extend((number, *row) for row in _samples(file, shard, remedy))
        except (OSError, tarfile.TarError) as error:
            raise DataError(f"shard {shard} cannot be read ({error}): {remedy}") from error
    if not rows:
        raise DataError(f"{url} holds no images ({', '.join(_IMAGES[:4])}, ...) in its .tar files: {remedy}")
    table = np.array(rows, dtype=np.int64)
    return Index(url, shards, lengths, table[:, 0].astype(np.int32), table[:, 1], table[:, 2].astype(np.int32), table[:, 3])


def _samples(file: IO[bytes], shard: str, remedy: str) -> Iterator[tuple[int, int, int]]:
    """(offset, size, label) of each image, in the order in which they lie in the tar."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}"
            if member.isfile() and extension.lower() in _IMAGES:
                images[key] = (member.offset_data, member.size)
            elif member.isfile() and extension.lower() == "cls":
                content = archive.extractfile(member)
                assert content is not None
                labels[key] = _label(content.read(), f"{shard}: {member.name}")
    if without := images.keys() - labels.keys():
        raise DataError(f"{shard}: {min(without)} has no .cls file with its class number ({len(without)} such images): {remedy}")
    return ((*place, labels[key]) for key, place in images.items())


def _label(content: bytes, where: str) -> int:
    try:
        return int(content)
    except ValueError:
        raise DataError(f"{where} holds {content[:20]!r}, not a class number; write a number from 0 on") from None
