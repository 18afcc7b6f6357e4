"""The torch format: a checkpoint is a single torch.save file with a zip comment.

The comment holds metadata and a checksum. Any script can read the file with `torch.load`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import stat
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from ddpjob_trainer.atomic_files import Check, replacing, write_all
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.snapshot import Snapshot
from ddpjob_trainer.errors import CheckpointError
from ddpjob_trainer.private_torch import shorten_unpickling_errors

SUFFIX = ".pt"
_END_OF_DIRECTORY, _END_SIZE, _LONGEST_COMMENT = b"PK\x05\x06", 22, 4096
_PIECE = 2**22


shorten_unpickling_errors()


class _Stream:
    """Writes the output of torch.save to a file, and computes the output's checksum at the same
    time.

    The last record of the zip archive is held back until `end`, because it must include the
    comment. The content is not duplicated in memory. Neither writing nor hashing holds the GIL.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._tail = file, hashlib.sha256(), b""
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if len(view) < _END_SIZE:
            held = self._tail + bytes(view)
            self._put(memoryview(held)[:-_END_SIZE])
            self._tail = held[-_END_SIZE:]
        else:
            self._put(memoryview(self._tail))
            self._put(view[:-_END_SIZE])
            self._tail = bytes(view[-_END_SIZE:])
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch.save calls this method, but the file has no buffer."""

    def end(self, metadata: Metadata) -> None:
        """Write the last record of the archive, with the comment."""
        if self._tail[:4] != _END_OF_DIRECTORY:
            raise CheckpointError(
                f"torch.save of torch {torch.__version__} did not write a plain zip archive; install torch 2.6 or later"
            )
        self._put(memoryview(self._tail)[:-2])
        recorded = metadata.written()
        comment = json.dumps({**recorded, "sha256": _checksum(self._hash, recorded)}).encode()
        write_all(self._file, struct.pack("<H", len(comment)) + comment)

    def _put(self, content: memoryview) -> None:
        self._hash.update(content)
        try:
            write_all(self._file, content)
        except OSError as error:
            self.error = error
            raise


def write(path: Path, snapshot: Snapshot, metadata: Metadata, before_rename: Check | None = None) -> None:
    """Write a checkpoint, and put it in place atomically.

    `before_rename` is called before the file gets its final name. Raises OSError, CheckpointError,
    and any error of `before_rename`.
    """
    with replacing(path, before_rename) as file:
        stream = _Stream(file)
        try:
            torch.save(snapshot, stream)  # type: ignore[arg-type]
        except (RuntimeError, OSError) as error:
            # If a write fails, torch tries to close its archive, which also fails. That second
            # error would hide the cause.
            raise stream.error or error from None
        stream.end(metadata)
        _read_back(Path(file.name))


def _read_back(path: Path) -> None:
    """Check that a new file's metadata and list of contents can be read.

    Older checkpoints are deleted next, so an unreadable file must not take their place. Raises
    CheckpointError, OSError.
    """
    read_metadata(path)
    try:
        with zipfile.ZipFile(path) as archive:
            held = [info.filename for info in archive.infolist()]
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path.name} cannot be read back ({error})") from error
    if not any(name.endswith("/data.pkl") for name in held):
        raise CheckpointError(f"{path.name} cannot be read back (it contains no state)")


def check(content: bytes) -> Metadata:
    """Check the content of a file, and return its metadata.

    Raises CheckpointError with the reason if the content is not an intact checkpoint.
    """
    return _check(io.BytesIO(content))


def check_file(path: Path) -> Metadata:
    """Check a file piece by piece, without loading it into memory, and return its metadata.

    Raises CheckpointError, OSError.
    """
    with open_regular(path) as file:
        return _check(file)


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading. Raises CheckpointError, OSError.

    Pipes and devices are refused, because a pipe would wait for a writer, and a device can be
    endless.
    """
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path.name} is not a regular file")
    return file


def _check(file: IO[bytes] | io.FileIO) -> Metadata:
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _LONGEST_COMMENT))
    end, comment = _split(file.read(), size)
    recorded = _read_comment(comment)
    metadata, expected = Metadata.read(recorded), recorded.pop("sha256", None)
    hashed, left = hashlib.sha256(), end + 20
    file.seek(0)
    while left and (piece := file.read(min(left, _PIECE))):
        hashed.update(piece)
        left -= len(piece)
    if _checksum(hashed, recorded) != expected:
        raise CheckpointError("corrupt (its checksum does not match)")
    return metadata


def is_ours(content: bytes) -> bool:
    """Return whether a file has a zip comment. Only this trainer's files have one."""
    try:
        return bool(_split(content[-_LONGEST_COMMENT:], len(content))[1])
    except CheckpointError:
        return False


def read_metadata(path: Path) -> Metadata:
    """Return a file's metadata without checking its content. Raises CheckpointError, OSError."""
    with open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _LONGEST_COMMENT))
        return Metadata.read(_read_comment(_split(file.read(), size)[1]))


def decode(content: bytes) -> Snapshot:
    """Return the state in the content of a file, with tensors on the CPU.

    Besides plain values, a Namespace is allowed, because files from timm and torchvision store
    their arguments in one.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        snapshot: Snapshot = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return snapshot


def read(path: Path) -> Snapshot:
    """Return the state in a file. Each tensor is held in memory only once."""
    snapshot: Snapshot = torch.load(path, map_location="cpu", weights_only=True)
    return snapshot


def describe(path: Path) -> Snapshot:
    """Return the state in a file. A tensor's values are read from disk only when they are used."""
    snapshot: Snapshot = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return snapshot


def _split(tail: bytes, size: int) -> tuple[int, bytes]:
    """Return the position of the archive's last record in the file, and the comment.

    `tail` is the end of a file of `size` bytes.
    """
    end = tail.rfind(_END_OF_DIRECTORY)
    if end < 0 or len(tail) < end + _END_SIZE:
        raise CheckpointError(f"truncated ({size} bytes, its end is missing)")
    comment = tail[end + _END_SIZE :]
    if struct.unpack("<H", tail[end + 20 : end + 22])[0] != len(comment):
        raise CheckpointError(f"truncated ({size} bytes, its end is incomplete)")
    return size - len(tail) + end, comment


def _read_comment(comment: bytes) -> Any:
    try:
        return json.loads(comment)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("not a checkpoint of this trainer (it has no checksum)") from error


def _checksum(archive: Any, recorded: dict[str, Any]) -> str:
    """Return the checksum of the archive and of the metadata in its comment.

    `archive` is the hash of the archive's bytes so far.
    """
    archive.update(json.dumps(recorded).encode())
    return str(archive.hexdigest())
