"""Pickles that modify the objects to which they refer."""

from __future__ import annotations

import json
import pathlib
import struct
from pathlib import Path
from typing import Any

import torch
from ddpjob_trainer.checkpoints import dcp, manifest
from torch.distributed.checkpoint import filesystem, metadata

ALLOWED: dict[str, Any] = {
    f"{owner.__module__} {owner.__qualname__}": owner
    for owner in (
        *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata),
        *(metadata.BytesStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING),
        *(filesystem._StorageInfo, torch.serialization._get_layout),
    )
} | {"pathlib PosixPath": pathlib.PosixPath}
"""Names in torch's index."""


def setting(name: str, attribute: str = "ddpjob_evil") -> bytes:
    """Return instructions that set an attribute of the object `name` (module and name) by BUILD,
    and restore the stack.
    """
    text = b"".join(b"X" + struct.pack("<I", len(part)) + part for part in (attribute.encode(), b"changed"))
    return b"c" + name.replace(" ", "\n").encode() + b"\nN}" + text + b"s\x86b0"


def calling(place: Path) -> bytes:
    """Return instructions that create a file with os.mkdir."""
    return b"cos\nmkdir\n(V" + str(place).encode() + b"\ntR0"


def before(pickled: bytes, hostile: bytes) -> bytes:
    """Return a pickle that executes hostile instructions first."""
    return pickled[:2] + hostile + pickled[2:]


def unchanged() -> bool:
    """Return whether all objects that the index may refer to are unchanged."""
    return not any(hasattr(owner, "ddpjob_evil") for owner in ALLOWED.values())


def listed_anew(path: Path) -> None:
    """Correct the sizes and checksums, as an attacker who changes the files would."""
    recorded = json.loads((path / dcp.MANIFEST).read_text())
    recorded.pop("sha256")
    for name in recorded["files"]:
        content = path / name
        recorded["files"][name] = {"size": content.stat().st_size, "sha256": dcp.sha256(content)}
    (path / dcp.MANIFEST).write_bytes(manifest.write(recorded))
