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
    """Sends torch.save's output to the file and the checksum.

    The archive's last record is held back, because it must include the comment. The content is not
    duplicated in memory. Neither writing nor hashing holds the GIL.
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
        """Do nothing, because the file has no buffer. torch.save calls this."""

    def end(self, metadata: Metadata) -> None:
        """Write the last record with the comment."""
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
    """Put a checkpoint in place atomically.

    Raises OSError, CheckpointError, and any error that `before_rename` raises.
    """
    with replacing(path, before_rename) as file:
        stream = _Stream(file)
        try:
            torch.save(snapshot, stream)  # type: ignore[arg-type]
        except (RuntimeError, OSError) as error:
            # After a failed write, torch closes its archive, which fails again with a different
            # message.
            raise stream.error or error from None
        stream.end(metadata)
        _read_back(Path(file.name))


def _read_back(path: Path) -> None:
    """Read back a file's metadata and directory.

    An unreadable file must not replace a readable one. Raises CheckpointError, OSError.
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
    """Return the metadata from a whole file's content.

    Raises CheckpointError with the reason.
    """
    return _check(io.BytesIO(content))


def check_file(path: Path) -> Metadata:
    """Return the metadata after checking a file without keeping it in memory.

    Raises CheckpointError, OSError.
    """
    with open_regular(path) as file:
        return _check(file)


def open_regular(path: Path) -> io.FileIO:
    """Open a file for reading. Raises CheckpointError, OSError.

    A pipe would wait for a writer, and a device may have no end, so both are refused.
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
    """Return whether the file has a comment, which only this trainer's files have."""
    try:
        return bool(_split(content[-_LONGEST_COMMENT:], len(content))[1])
    except CheckpointError:
        return False


def read_metadata(path: Path) -> Metadata:
    """Return the metadata without checking the content. Raises CheckpointError, OSError."""
    with open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - _LONGEST_COMMENT))
        return Metadata.read(_read_comment(_split(file.read(), size)[1]))


def decode(content: bytes) -> Snapshot:
    """Return the content with tensors on the CPU.

    A Namespace is allowed, because timm's and torchvision's files store their arguments in one.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        snapshot: Snapshot = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return snapshot


def read(path: Path) -> Snapshot:
    """Return the content of a file, with one copy of each tensor in memory."""
    snapshot: Snapshot = torch.load(path, map_location="cpu", weights_only=True)
    return snapshot


def describe(path: Path) -> Snapshot:
    """Return the content of a file, whose tensors are not read until their values are used."""
    snapshot: Snapshot = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return snapshot


def _split(tail: bytes, size: int) -> tuple[int, bytes]:
    """Return (where the archive's last record begins in the file, the comment)."""
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
    """Return the checksum over the archive and the comment's metadata."""
    archive.update(json.dumps(recorded).encode())
    return str(archive.hexdigest())
