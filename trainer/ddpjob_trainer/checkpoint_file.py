"""One checkpoint, one file: what torch.save writes, with a zip comment that holds a format version, the step and a checksum.

`torch.load` of any script reads it as it is. Written to a temporary name in the same folder, synced, renamed, and the folder synced.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch

from ddpjob_trainer.errors import CheckpointError

FORMAT = 1
_END_OF_DIRECTORY, _END_SIZE, _LONGEST_COMMENT = b"PK\x05\x06", 22, 4096
Snapshot = dict[str, Any]


def encode(snapshot: Snapshot, step: int) -> bytes:
    """The file's content. Tensors, numbers, text and containers of them only."""
    buffer = io.BytesIO()
    torch.save(snapshot, buffer)
    archive = buffer.getvalue()
    if archive[-_END_SIZE : -_END_SIZE + 4] != _END_OF_DIRECTORY:
        raise CheckpointError(f"torch.save of torch {torch.__version__} wrote no plain zip archive; install a torch from 2.6 on")
    body = archive[:-2]
    facts = {"format": FORMAT, "step": step, "sha256": hashlib.sha256(body).hexdigest()}
    comment = json.dumps(facts).encode()
    return body + struct.pack("<H", len(comment)) + comment


def check(content: bytes) -> int:
    """The step of a whole file's content. Raises CheckpointError saying what is wrong with it."""
    end = content.rfind(_END_OF_DIRECTORY, max(0, len(content) - _LONGEST_COMMENT))
    if end < 0 or len(content) < end + _END_SIZE:
        raise CheckpointError(f"truncated ({len(content)} bytes, its end is missing)")
    comment = content[end + _END_SIZE :]
    if struct.unpack("<H", content[end + 20 : end + 22])[0] != len(comment):
        raise CheckpointError(f"truncated ({len(content)} bytes, its end is cut)")
    try:
        facts = json.loads(comment)
        version, step, checksum = facts["format"], int(facts["step"]), facts["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("no checkpoint of this trainer (it carries no checksum)") from error
    if version != FORMAT:
        raise CheckpointError(f"of format {version}, and this trainer reads format {FORMAT}; resume it with the trainer that wrote it")
    if hashlib.sha256(content[: end + 20]).hexdigest() != checksum:
        raise CheckpointError("corrupt (its checksum does not match)")
    return step


def decode(content: bytes) -> Snapshot:
    """What `encode` was given, tensors on the CPU."""
    snapshot: Snapshot = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return snapshot


def write_atomically(path: Path, content: bytes, before_rename: Any = None) -> None:
    """Write, sync, rename, sync the folder: after a crash at any instant `path` is the old file or the whole new one.

    `before_rename`, if given, is called when the content is on disk; what it raises keeps the old file. Raises OSError.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            before_rename()
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
