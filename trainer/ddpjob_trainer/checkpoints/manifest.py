"""The manifest of a dcp checkpoint: everything needed to read the checkpoint, as JSON.

    {"format": 1, "step": 7, "epoch": null, "world": 2, "time": 1700000000.0,
     "files": {"__0_0.distcp": {"size": 4096, "sha256": "..."}, ...},
     "tensors": {"0:model.weight": {"dtype": "float32", "shape": [4, 3],
                                    "chunks": [[[0, 0], [2, 3], "__0_0.distcp", 1216], ...]}},
     "state": {"dict": [["step", 7], ["model", {"dict": [["weight", {"tensor": "0:model.weight"}]]}]]},
     "sha256": "..."}

A chunk records where its part of the tensor begins, the part's sizes, the file, and the byte at
which the values begin. The values are in row-major order, so their length follows from the sizes
and the dtype.

`state` is the structure around the tensors. Numbers, strings, true, false, null and lists stand for
themselves; an object has one key, which names a type that JSON lacks: `dict` (pairs of key and
value), `tuple`, `float` (nan, inf) or `tensor` (a name).

Anyone who can write to the folder can write a manifest with a correct checksum. `read` therefore
refuses anything that could make a reader open another file, read beyond a file, or allocate more
than the files contain.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.snapshot import Path
from ddpjob_trainer.errors import CheckpointError

LARGEST = 2**28
"""Maximum size of a manifest in bytes, enough for three million chunks."""
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("complex128", "complex64", "bool", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}
_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]{0,253}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_BEYOND, _DIMENSIONS = 2**63, 64
_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class CheckpointFile:
    """A file in the checkpoint, as recorded in the manifest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TensorChunk:
    """A part of a tensor. Its values begin at byte `at` of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int

    def written(self) -> list[Any]:
        """Return the chunk in its JSON form."""
        return [[*self.offsets], [*self.sizes], self.file, self.at]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the checkpoint. Its chunks cover it completely, without overlapping."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    def written(self) -> dict[str, Any]:
        """Return the tensor in its JSON form.

        Raises CheckpointError for a dtype that `read` does not accept.
        """
        name = str(self.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise CheckpointError(
                f"checkpoint.format=dcp does not support tensors of {self.dtype}; convert them to one of"
                f" {', '.join(DTYPES)}, or set"
                " checkpoint.format=torch"
            )
        return {"dtype": name, "shape": [*self.shape], "chunks": [chunk.written() for chunk in self.chunks]}


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a manifest that `read` has checked. `state` is still JSON, for `decode` to
    read.
    """

    metadata: Metadata
    files: Mapping[str, CheckpointFile]
    tensors: Mapping[str, StoredTensor]
    state: Any


def write(recorded: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest that contains `recorded` and its checksum."""
    return json.dumps({**recorded, "sha256": _digest(recorded)}).encode()


def read(data: bytes) -> CheckpointManifest:
    """Check the bytes of a manifest, and return their content.

    Raises CheckpointError, and no other error, if the manifest is invalid.
    """
    try:
        return _manifest(_recorded(data))
    except RecursionError:
        raise _corrupt("it is nested too deeply") from None


def _recorded(data: bytes) -> dict[str, Any]:
    """Return the JSON of a manifest, after verifying only its checksum. Raises CheckpointError."""
    if len(data) > LARGEST:
        raise _corrupt(f"it has {len(data)} bytes; the limit is {LARGEST}")
    try:
        recorded = json.loads(data)
        matches = isinstance(recorded, dict) and _digest(recorded) == recorded.pop("sha256", None)
    except RecursionError:
        raise _corrupt("it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"corrupt (its manifest is damaged: {str(error)[:200]})") from error
    if not matches:
        raise CheckpointError("corrupt (the checksum of its manifest does not match)")
    found: dict[str, Any] = recorded
    return found


def _digest(recorded: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in recorded.items() if key != "sha256"})
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(recorded: dict[str, Any]) -> CheckpointManifest:
    metadata, files = Metadata.read(recorded), _files(recorded)
    listed = recorded.get("tensors")
    if not isinstance(listed, dict):
        raise _corrupt("tensors is not an object")
    tensors = {name: _tensor(name, found, files) for name, found in listed.items()}
    held = sum(file.size for file in files.values())
    if held < sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in tensors.values()):
        raise _corrupt(f"its tensors need more bytes than its files contain ({held})")
    names: list[str] = []
    state = recorded.get("state")
    if not isinstance(decode(state, lambda _, name: names.append(name)), dict):
        raise _corrupt("state is not a dict")
    if sorted(names) != sorted(tensors):
        raise _corrupt("state does not name each tensor exactly once")
    return CheckpointManifest(metadata, files, tensors, state)


def _files(recorded: dict[str, Any]) -> dict[str, CheckpointFile]:
    """Check the list of files in a manifest, and return it. Raises CheckpointError."""
    listed, files = recorded.get("files"), dict[str, CheckpointFile]()
    if not isinstance(listed, dict):
        raise _corrupt("files is not an object")
    for name, entry in listed.items():
        match entry:
            case {"size": int(size), "sha256": str(sha256)} if (
                _NAME.fullmatch(name) and _SHA256.fullmatch(sha256) and _is_number(size)
            ):
                files[name] = CheckpointFile(size, sha256)
            case _:
                raise _corrupt(f"files[{_short(name)}] must be a file's name with its size and SHA-256")
    return files


def _tensor(name: str, found: Any, files: Mapping[str, CheckpointFile]) -> StoredTensor:
    match found:
        case {"dtype": str(dtype), "shape": list(shape), "chunks": list(chunks)} if (
            dtype in DTYPES and _are_numbers(shape) and math.prod(max(size, 1) for size in shape) < _BEYOND
        ):
            stored = StoredTensor(DTYPES[dtype], tuple(shape), tuple(_chunk(name, chunk) for chunk in chunks))
        case _:
            raise _corrupt(f"tensors[{_short(name)}] lacks a known dtype, a shape or chunks")
    for chunk in stored.chunks:
        size = math.prod(chunk.sizes) * stored.dtype.itemsize
        if chunk.file not in files or chunk.at + size > files[chunk.file].size:
            raise _corrupt(f"a chunk of tensors[{_short(name)}] lies outside the files")
    if not _covers(stored):
        raise _corrupt(f"the chunks of tensors[{_short(name)}] do not cover its shape exactly once")
    return stored


def _chunk(name: str, found: Any) -> TensorChunk:
    match found:
        case [list(offsets), list(sizes), str(file), int(at)] if (
            _are_numbers(offsets) and _are_numbers(sizes) and _is_number(at)
        ):
            return TensorChunk(tuple(offsets), tuple(sizes), file, at)
    raise _corrupt(f"a chunk of tensors[{_short(name)}] must be offsets, sizes, a file and a position in it")


def _covers(stored: StoredTensor) -> bool:
    """Return whether the chunks form a grid that covers the tensor's whole shape."""
    shape, chunks = stored.shape, stored.chunks
    if 0 in shape:
        return not chunks
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        return False
    ends: list[dict[int, int]] = []
    for dimension, size in enumerate(shape):
        starts = sorted({chunk.offsets[dimension] for chunk in chunks})
        if starts[:1] != [0]:
            return False
        ends.append(dict(zip(starts, [*starts[1:], size], strict=True)))
    cells = {chunk.offsets for chunk in chunks}
    return len(cells) == len(chunks) == math.prod(map(len, ends)) and all(
        at < at + size == end[at]
        for chunk in chunks
        for at, size, end in zip(chunk.offsets, chunk.sizes, ends, strict=True)
    )


def encode(tree: Any, name: Callable[[Path, torch.Tensor], str], path: Path = ()) -> Any:
    """Return the structure around the tensors of `tree`, in the manifest's JSON form.

    In place of each tensor, the JSON has the name that `name` returns for its path and value.
    Raises CheckpointError for a value that this form cannot represent.
    """
    if isinstance(tree, torch.Tensor):
        return {"tensor": name(path, tree)}
    if isinstance(tree, dict):
        if wrong := [key for key in tree if type(key) not in _PLAIN]:
            raise _no_place(wrong[0], path, "a key")
        return {"dict": [[encode(key, name), encode(value, name, (*path, key))] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        items = [encode(value, name, (*path, index)) for index, value in enumerate(tree)]
        return items if isinstance(tree, list) else {"tuple": items}
    if type(tree) not in _PLAIN:
        raise _no_place(tree, path, "a value")
    return {"float": str(tree)} if isinstance(tree, float) and not math.isfinite(tree) else tree


def _no_place(value: Any, path: Path, role: str) -> CheckpointError:
    return CheckpointError(
        f"the state to save has a {type(value).__module__}.{type(value).__qualname__} as {role} at"
        f" state{''.join(f'[{key!r}]' for key in path)}, which checkpoint.format=dcp does not support; use tensors,"
        " numbers, strings, and dicts, lists and tuples of them, or set checkpoint.format=torch"
    )


def decode(found: Any, tensor: Callable[[Path, str], Any], path: Path = ()) -> Any:
    """Return the structure that `encode` has turned into JSON.

    `tensor` returns the value to put in place of a tensor, given the tensor's path and name. Raises
    CheckpointError.
    """
    match found:
        case None | bool() | int() | float() | str():
            return found
        case list():
            return [decode(value, tensor, (*path, index)) for index, value in enumerate(found)]
        case {"tuple": list(items), **more} if not more:
            return tuple(decode(value, tensor, (*path, index)) for index, value in enumerate(items))
        case {"float": "nan" | "inf" | "-inf" as text, **more} if not more:
            return float(text)
        case {"tensor": str(name), **more} if not more:
            return tensor(path, name)
        case {"dict": list(pairs), **more} if not more:
            return dict(_pair(pair, tensor, path) for pair in pairs)
    raise _corrupt("state contains a value of an unknown type")


def _pair(pair: Any, tensor: Callable[[Path, str], Any], path: Path) -> tuple[Any, Any]:
    match pair:
        case [None | bool() | int() | float() | str() as key, value]:
            return key, decode(value, tensor, (*path, key))  # type: ignore[arg-type]
        case [{"float": "nan" | "inf" | "-inf" as text}, value]:
            return float(text), decode(value, tensor, (*path, text))
    raise _corrupt("a dict in state has an entry that is not a pair of key and value")


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _BEYOND


def _are_numbers(values: list[Any]) -> bool:
    return len(values) <= _DIMENSIONS and all(map(_is_number, values))


def _short(name: str) -> str:
    return repr(name[:80])


def _corrupt(what: str) -> CheckpointError:
    return CheckpointError(f"corrupt (its manifest: {what})")
