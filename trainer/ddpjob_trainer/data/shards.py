"""Tar shards (WebDataset's layout: KEY.jpg and KEY.cls), read by byte range.

Shards may be on a file system or in object storage. An index of (shard, offset, size, label) is
built once. Any image can then be read directly, so sampling remains an exact permutation of all
images. https://github.com/webdataset/webdataset describes the layout.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.dataset import existing_folder
from ddpjob_trainer.data.images import ImageData
from ddpjob_trainer.data.shard_index import Index, cached_index, translate_errors
from ddpjob_trainer.errors import DataError

CLASSES = "classes.txt"
_REMEDY = "`python -m ddpjob_trainer shards FOLDER OUT` makes OUT/train and OUT/val from folders of images"
_MOST_NAMES = 64 << 20
"""Maximum size of classes.txt in bytes, which is enough for a million names of 64 bytes."""
_TRIES, _PAUSE = 3, 0.2


class ShardedImages:
    """The images in one folder of shards."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.labels = index.labels
        self._opened: dict[int, int] = {}
        self._owner = 0

    def name(self, number: int) -> str:
        """Return an image's shard and offset, as text for messages."""
        return f"at byte {self._index.offsets[number]} of {self._index.shards[self._index.shard[number]]}"

    def identity(self) -> npt.NDArray[np.uint8]:
        """Return bytes that identify the names of the shards and each image's place in them."""
        names = "\n".join(shard.rsplit("/", 1)[-1] for shard in self._index.shards).encode()
        columns = (self._index.lengths, self._index.shard, self._index.offsets, self._index.sizes)
        return np.frombuffer(b"".join([names, *(column.tobytes() for column in columns)]), dtype=np.uint8)

    def read(self, numbers: list[int]) -> list[bytes | OSError]:
        """Return each image's bytes, or an OSError for an image that cannot be read.

        Raises DataError if remote storage does not respond, because that is not an image's fault.
        """
        if self._index.is_local:
            return [self._local(number) for number in numbers]
        paths = [self._index.shards[self._index.shard[number]] for number in numbers]
        starts = [int(self._index.offsets[number]) for number in numbers]
        ends = [start + int(self._index.sizes[number]) for start, number in zip(starts, numbers, strict=True)]
        return list(_ranges(self._index.files(), paths, starts, ends))

    def _local(self, number: int) -> bytes | OSError:
        shard, size = int(self._index.shard[number]), int(self._index.sizes[number])
        try:
            content = os.pread(self._descriptor(shard), size, int(self._index.offsets[number]))
        except OSError as error:
            return error
        return content if len(content) == size else OSError(f"the shard ends after {len(content)} of {size} bytes")

    def _descriptor(self, shard: int) -> int:
        """Return the file descriptor of a shard, which each process opens once and keeps open."""
        if self._owner != os.getpid():
            self._owner, self._opened = os.getpid(), {}
        if shard not in self._opened:
            self._opened[shard] = os.open(self._index.shards[shard], os.O_RDONLY)
        return self._opened[shard]


def _ranges(files: Any, paths: list[str], starts: list[int], ends: list[int]) -> Iterator[bytes]:
    """Yield the bytes of each file in `paths`, from its entry in `starts` to its entry in `ends`.

    The files are read concurrently if the file system supports that. A failed read is repeated.
    Raises DataError if the last attempt fails too.
    """
    found: list[Any] = files.cat_ranges(paths, starts, ends, on_error="return")
    for content, path, start, end in zip(found, paths, starts, ends, strict=True):
        tries = 1
        while isinstance(content, Exception) or len(content) != end - start:
            if tries == _TRIES:
                reason = content if isinstance(content, Exception) else f"{len(content)} of {end - start} bytes arrived"
                raise DataError(
                    f"{path} cannot be read at byte {start}, even after {tries} attempts: {reason}; check that "
                    "data.url is reachable, then start the run again"
                )
            time.sleep(_PAUSE * 4 ** (tries - 1))
            tries += 1
            content = files.cat_ranges([path], [start], [end], on_error="return")[0]
        yield content


def open_shards(config: DataConfig, device: torch.device) -> ImageData:
    """Return the data set whose shards are in the folder `data.dir` or at `data.url`.

    Raises DataError.
    """
    root = config.url.rstrip("/") if config.url else str(existing_folder(config, f"{_REMEDY}; or set data.url"))
    with translate_errors(root):
        train, test = (cached_index(f"{root}/{part}", config.index, _REMEDY) for part in ("train", "val"))
        names = _class_names(root, train)
    if train.is_local:
        _allow_open_files()
    classes = len(names) if names else int(train.labels.max()) + 1
    for part, index in (("train", train), ("val", test)):
        odd = np.flatnonzero((index.labels < 0) | (index.labels >= classes))
        if len(odd):
            where = ShardedImages(index).name(int(odd[0]))
            raise DataError(
                f"{root}/{part} has label {index.labels[odd[0]]}, outside 0..{classes - 1} (in "
                f"{len(odd)} images, first {where}); list all classes in {root}/{CLASSES}, one per "
                "line, or rebuild the shards"
            )
    return ImageData(config, device, ShardedImages(train), ShardedImages(test), classes, names)


def _allow_open_files() -> None:
    """Raise the soft limit on open files, because each worker keeps all shards open.

    The limit is often only 1024.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS has a lower limit of its own, and refuses to exceed it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _class_names(root: str, train: Index) -> list[str] | None:
    """Return the class names in classes.txt, or None if that file does not exist.

    Without the file, the labels determine the number of classes.
    """
    files, path = train.files(), f"{root}/{CLASSES}"
    if not files.exists(path):
        return None
    if (files.size(path) or 0) > _MOST_NAMES:
        raise DataError(f"{path} has more than {_MOST_NAMES:,} bytes; write the name of one class on each line")
    return class_names(files.cat_file(path), path)


def class_names(content: bytes, where: str) -> list[str]:
    """Return the class names in the content of classes.txt.

    Newlines at the end are ignored. Editors may add them, and each would otherwise count as one
    more class. Raises DataError for an empty line between two names.
    """
    text = os.fsdecode(content.removeprefix(codecs.BOM_UTF8)).rstrip("\r\n")
    # splitlines is not used, because it would also split names at characters such as form feeds.
    names = [line.removesuffix("\r") for line in text.split("\n")] if text else []
    if "" in names:
        raise DataError(f"{where}: line {names.index('') + 1} is empty; write the name of one class on each line")
    return names


def classes_file(names: list[str]) -> bytes:
    """Return the content of classes.txt for these class names.

    Raises DataError if a name is not a single line.
    """
    if odd := next((name for name in names if "\n" in name or name.endswith("\r")), None):
        raise DataError(
            f"class folder {odd!r}: contains a line break, but {CLASSES} has one name per line; rename the folder"
        )
    return os.fsencode("".join(f"{name}\n" for name in names))
