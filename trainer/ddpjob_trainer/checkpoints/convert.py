"""Convert a checkpoint in format dcp that an earlier version has written: its manifest did not describe the tensors.

They were described by torch's index and the structure around them by tree.pt, both pickles. `_Records` reads those
without handing out any class or function of a library: whatever a pickle names is a class of its own, made for that
name alone, and only remembers what it was given. What a pickle calls, builds or changes is therefore such a record.

The tensors stay where they are. One that was stored in an order other than row-major (model.channels_last) is
copied in row-major order to a file of its own. The manifest, which is replaced last and at once, is what makes the
checkpoint converted; the version that has written it can still read it.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from ddpjob_trainer.atomic_files import replacing, write_all, write_atomically
from ddpjob_trainer.checkpoints import dcp, manifest
from ddpjob_trainer.checkpoints.manifest import Chunk, Stored
from ddpjob_trainer.errors import CheckpointError

_INDEX, _TREE, _REORDERED = ".metadata", "tree.pt", "__reordered.distcp"
_LARGEST = 2**28
"""Bytes of tree.pt that are read."""


class _Record:
    """An instance of a class that a pickle names."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        """`__new__` keeps them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle._Unpickler):
    """Python's slow unpickler, because the fast one allocates as large a memo as nine bytes of a pickle ask for.

    The opcode that allocates a bytearray of any size is unknown here.
    """

    dispatch: ClassVar[Any] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Record,), {})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def convert(path: Path) -> bool:
    """Convert a checkpoint. Returns False if it needs no conversion. Raises CheckpointError with file and reason."""
    try:
        return _convert(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is {error}; nothing was changed") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be converted: {error.strerror or error}; nothing was changed") from error
    except Exception as error:  # Any content may follow a correct checksum.
        raise CheckpointError(
            f"{path} is not a checkpoint that an earlier version has written ({type(error).__name__}: {error});"
            " nothing was changed"
        ) from error


def _convert(path: Path) -> bool:
    recorded = manifest.read_recorded(dcp.manifest_content(path))
    if "tensors" in recorded:
        dcp.check_sizes(path)
        return False
    files = manifest.read_files(recorded)
    dcp.compare_checksums(path, files)
    index, tree = _unpickled((path / _INDEX).read_bytes()).state, _tree(path / _TREE)
    places = {
        (key.state["fqn"], key.state["offset"].args[0]): place.state for key, place in index["storage_data"].items()
    }
    reordered = path / _REORDERED
    with replacing(reordered) as file:
        tensors = {
            name: _stored(_Source(path, files, name, places), entry.state, file)
            for name, entry in index["state_dict_metadata"].items()
        }
        extra = file.tell()
    if not extra:
        reordered.unlink()
    listed = {_REORDERED: {"size": extra, "sha256": dcp.sha256(reordered)}} if extra else {}
    content = manifest.write(
        {
            **recorded,
            "files": {**recorded["files"], **listed},
            "tensors": {name: stored.written() for name, stored in tensors.items()},
            "state": _with_tensors(manifest.encode(tree, lambda *_: "")),
        }
    )
    manifest.read(content, path)  # Refuses what no trainer has written.
    write_atomically(path / dcp.MANIFEST, content)
    return True


def _unpickled(content: bytes) -> Any:
    return _Records(io.BytesIO(content)).load()


def _tree(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        with archive.open(name) as file:
            return _unpickled(file.read(_LARGEST))


def _with_tensors(found: Any) -> Any:
    """Name the tensors in the structure as the manifest does: it came with a dict of one key in place of each."""
    match found:
        case {"dict": [["__tensor__", str(name)]]}:
            return {"tensor": name}
        case dict():
            return {key: _with_tensors(value) for key, value in found.items()}
        case list():
            return [_with_tensors(value) for value in found]
    return found


@dataclass(frozen=True)
class _Source:
    """Where a tensor's chunks are, by its name and their offsets, as torch's index says."""

    path: Path
    files: Mapping[str, manifest.File]
    name: str
    places: Mapping[tuple[str, tuple[int, ...]], dict[str, Any]]


def _stored(source: _Source, entry: dict[str, Any], reordered: IO[bytes]) -> Stored:
    """A tensor's place by torch's index; a chunk that is not row-major goes to `reordered` too."""
    dtype = manifest.DTYPES[entry["properties"].state[0].__name__]
    chunks = []
    for chunk in entry["chunks"]:
        offsets, sizes = chunk.state["offsets"].args[0], chunk.state["sizes"].args[0]
        size = math.prod(sizes) * dtype.itemsize
        if not size:
            continue
        place = source.places[source.name, offsets]
        name = place["relative_path"]
        if name not in source.files:
            raise CheckpointError(f"corrupt (its index names {str(name)[:80]!r}, which its manifest does not)")
        with (source.path / name).open("rb") as file:
            at, pickled = dcp.locate(file, place["offset"], place["length"], size)
            _, begin, shape, strides, *_ = _unpickled(pickled).args
            if begin != 0 or shape != sizes or at + size > source.files[name].size:
                raise CheckpointError(f"corrupt (a chunk of {source.name[:80]!r} is not what its index says)")
            if not _is_row_major(sizes, strides):
                file.seek(at)
                values = torch.frombuffer(bytearray(file.read(size)), dtype=dtype).as_strided(sizes, strides)
                name, at = _REORDERED, reordered.tell()
                write_all(reordered, values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        chunks.append(Chunk(offsets, sizes, name, at))
    return Stored(dtype, entry["size"].args[0], tuple(chunks))


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
