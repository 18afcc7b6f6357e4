"""The dcp format: a torch.distributed.checkpoint folder, into which each rank writes its shard.

torch writes the files and an index that its own reader needs. The index is a pickle, which can run
code, so this module does not read it. Instead, the manifest records where each tensor's values are
(`manifest`), and a reader copies these bytes. The folder has a temporary name until all shards are
on disk. Reading does not need a group, and does not depend on the number of ranks that wrote the
checkpoint.

If each node has its own folder, that folder contains the files that the node's ranks have written,
and the manifest of the whole checkpoint.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import itertools
import math
import os
import shutil
import struct
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from ddpjob_trainer.atomic_files import Check, discard, sync_folder, write_atomically
from ddpjob_trainer.checkpoints import manifest as manifests
from ddpjob_trainer.checkpoints.manifest import CheckpointManifest, StoredTensor, TensorChunk
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.snapshot import Layout, Snapshot, with_local
from ddpjob_trainer.checkpoints.snapshot import Path as Place
from ddpjob_trainer.checkpoints.torch_file import open_regular
from ddpjob_trainer.distributed.dtensors import is_sharded
from ddpjob_trainer.errors import CheckpointError

SUFFIX = ".dcp"
MANIFEST = "manifest.json"
_INDEX = ".metadata"
Fetch = Callable[[Iterable[str]], None]


def write(
    path: Path,
    incarnation: int,
    snapshot: Snapshot,
    metadata: Metadata,
    group: Any,
    may_write: Check,
    heads: list[int] | None = None,
) -> list[str]:
    """Write a checkpoint, and put it in place atomically. Return the files that this rank must
    upload.

    All ranks of `group` must call this together. If there is only one process, `group` is None.
    `heads` gives, for each rank, the lowest rank that sees the same folder. If all ranks share one
    folder, `heads` is None. Only these lowest ranks call `may_write`: before the first byte is
    written, and again before the rename. If one rank fails, all ranks raise OSError,
    CheckpointError, or the error that `may_write` raised.

    The returned names are those of the files that this rank has written and, on rank 0, of the
    manifest.
    """
    temporary = path.parent / f".{path.name}.{incarnation}.tmp"
    rank = 0 if group is None else dist.get_rank(group)
    head = heads[rank] if heads else 0
    tensors, state = _split(snapshot)
    try:
        begun = together(group, lambda: _begin(temporary, may_write) if rank == head else None)
        stored = _write_tensors(tensors, temporary, group)
        # All ranks must write the same manifest, but the numbers in the structure around the
        # tensors can differ between ranks. Therefore, rank 0's structure is used.
        mine = together(group, lambda: (_checksums(temporary, rank), stored, state if rank == 0 else None))
        files = [found for found, _, _ in mine]
        listed = {name: found.written() for name, found in _merge([found for _, found, _ in mine]).items()}
        recorded = metadata.written(
            files={name: entry for found in files for name, entry in sorted(found.items())},
            time=begun[0],
            tensors=listed,
            state=mine[0][2],
        )
        seen = {other: found for other, found in enumerate(files) if not heads or heads[other] == head}
        manifest = manifests.write(recorded)
        together(group, lambda: _finish(temporary, path, manifest, seen, may_write) if rank == head else None)
    except BaseException:
        if rank == head:
            discard(temporary)
        raise
    return [*files[rank], *([MANIFEST] if rank == 0 else [])]


def check(path: Path) -> Metadata:
    """Return a folder's metadata after reading and checking everything in it.

    Raises OSError, or CheckpointError with the reason.
    """
    metadata = check_sizes(path)
    check_share(path, 0, 1)
    return metadata


def check_sizes(path: Path) -> Metadata:
    """Return a folder's metadata after checking that its files exist and have the recorded sizes.

    Raises OSError, or CheckpointError with the reason.
    """
    found = read_manifest(path)
    for name, file in found.files.items():
        part = path / name
        size = part.stat().st_size if part.exists() else -1
        if size != file.size:
            raise CheckpointError(
                f"incomplete ({name} is missing)" if size < 0 else f"truncated ({name}: {size} of {file.size} bytes)"
            )
    return found.metadata


def check_share(path: Path, rank: int, world: int) -> None:
    """Verify the checksums of this rank's share of the files.

    The files are divided into `world` shares of about equal size, and `rank` is the index of this
    rank's share. Raises OSError, or CheckpointError with the reason.
    """
    files = sorted(read_manifest(path).files.items(), key=lambda item: (-item[1].size, item[0]))
    for name, file in files[rank::world]:
        if sha256(path / name) != file.sha256:
            raise CheckpointError(f"corrupt (the checksum of {name} does not match)")


def read_metadata(path: Path) -> Metadata:
    """Return a folder's metadata, without checking other files. Raises CheckpointError, OSError."""
    return read_manifest(path).metadata


def read_manifest(path: Path) -> CheckpointManifest:
    """Return the content of a folder's manifest. Raises CheckpointError, OSError."""
    try:
        with open_regular(path / MANIFEST) as file:
            # If the manifest is too large, read just enough of it for `manifests.read` to refuse
            # it.
            return manifests.read(file.read(min(os.fstat(file.fileno()).st_size, manifests.LARGEST) + 1))
    except FileNotFoundError:
        raise CheckpointError("incomplete (the manifest is missing)") from None


def contents(path: Path) -> dict[str, tuple[int, str]]:
    """Return {name: (size, SHA-256)} for the files of a checkpoint, including the manifest.

    The values for all files except the manifest itself are taken from the manifest. Raises
    CheckpointError, OSError.
    """
    listed = {name: (file.size, file.sha256) for name, file in read_manifest(path).files.items()}
    manifest = path / MANIFEST
    return {**listed, MANIFEST: (manifest.stat().st_size, sha256(manifest))}


def describe(path: Path) -> Snapshot:
    """Return the snapshot in a folder, with tensors that have a shape and dtype but no values.

    Only the manifest is read. Raises CheckpointError, OSError.
    """
    found = read_manifest(path)

    def empty(_: Place, name: str) -> torch.Tensor:
        return torch.empty(found.tensors[name].shape, dtype=found.tensors[name].dtype, device="meta")

    snapshot: Snapshot = manifests.decode(found.state, empty)
    return snapshot


def read(path: Path, layout: Layout | None = None, fetch: Fetch | None = None) -> Snapshot:
    """Return the snapshot in a folder, with tensors on the CPU.

    If `layout` returns a DTensor for a tensor, the snapshot contains only this rank's shard in that
    layout; all other tensors are complete. Before files are read, their names are passed to
    `fetch`, which downloads the missing ones. So if a rank's folder lacks files, the rank downloads
    only the files that it reads. Raises CheckpointError if this node does not see the folder, or if
    the folder does not match its manifest. Also raises the errors of `fetch`.
    """
    if fetch is not None:
        fetch([MANIFEST])
    found = read_manifest(path)
    targets: dict[str, _Target] = {}

    def place(where: Place, name: str) -> None:
        stored = found.tensors[name]
        like = layout(where, torch.Size(stored.shape)) if layout is not None else None
        targets[name] = _Target.of(stored, like)

    manifests.decode(found.state, place)
    parts = [(chunk, target) for name, target in targets.items() for chunk in target.overlapping(found.tensors[name])]
    parts.sort(key=lambda part: (part[0].file, part[0].at))
    if fetch is not None:
        fetch(sorted({chunk.file for chunk, _ in parts}))
    try:
        for name, in_file in itertools.groupby(parts, key=lambda part: part[0].file):
            with (path / name).open("rb", buffering=0) as file:
                for chunk, target in in_file:
                    target.fill(file, chunk)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} cannot be read on this node ({error.strerror}); checkpoint.format=dcp needs a folder that"
            " every node sees"
        ) from error
    snapshot: Snapshot = manifests.decode(found.state, lambda _, name: targets[name].content)
    return snapshot


@dataclass(frozen=True)
class _Target:
    """The part of a tensor that this rank needs. The part begins at `offsets` in the whole tensor.

    `tensor` is the memory for the values. `like` is the DTensor whose shard this part is, or None
    if this rank needs the whole tensor.
    """

    tensor: torch.Tensor
    offsets: Sequence[int]
    like: Any = None

    @classmethod
    def of(cls, stored: StoredTensor, like: Any) -> _Target:
        """Return a target whose values are all zero.

        The target is the shard of `like` or, if `like` is None, the whole tensor.
        """
        if like is None:
            return cls(torch.zeros(stored.shape, dtype=stored.dtype), [0] * len(stored.shape))
        [shard] = like.__create_chunk_list__()
        return cls(torch.zeros(shard.sizes, dtype=stored.dtype), shard.offsets, like)

    @property
    def content(self) -> Any:
        """The tensor to put into the snapshot."""
        return self.tensor if self.like is None else with_local(self.like, self.tensor)

    def overlapping(self, stored: StoredTensor) -> list[TensorChunk]:
        """Return the stored chunks that overlap this part of the tensor."""
        return [chunk for chunk in stored.chunks if all(low < high for low, high in self._intersect(chunk))]

    def _intersect(self, chunk: TensorChunk) -> list[tuple[int, int]]:
        """Return, for each dimension of the whole tensor, where the overlap with a chunk begins and
        ends.
        """
        sides = zip(self.offsets, self.tensor.shape, chunk.offsets, chunk.sizes, strict=True)
        return [(max(own, at), min(own + length, at + size)) for own, length, at, size in sides]

    def fill(self, file: io.FileIO, chunk: TensorChunk) -> None:
        """Read the values that this part and a chunk have in common from the chunk's file.

        Raises OSError, or CheckpointError if the file is too short.
        """
        common = self._intersect(chunk)
        into = self.tensor[
            tuple(slice(low - at, high - at) for (low, high), at in zip(common, self.offsets, strict=True))
        ]
        # Read whole rows of the chunk, but copy only the part of them that is needed.
        within = [slice(low - at, high - at) for (low, high), at in zip(common, chunk.offsets, strict=True)]
        shape = [*into.shape[:1], *chunk.sizes[1:]]
        rows = into if into.is_contiguous() and [*into.shape] == shape else torch.empty(shape, dtype=into.dtype)
        skipped = within[0].start * math.prod(chunk.sizes[1:]) if within else 0
        file.seek(chunk.at + skipped * into.dtype.itemsize)
        left = rows.reshape(-1).view(torch.uint8).numpy().data
        while left:
            if not (count := file.readinto(left)):
                raise CheckpointError(f"truncated ({chunk.file} ends within a tensor)")
            left = left[count:]
        if rows is not into:
            into.copy_(rows[(slice(None), *within[1:])])


def together(group: Any, act: Any) -> list[Any]:
    """Run `act` on all ranks, and return the results of all ranks, in rank order.

    If `act` fails on one rank, that rank raises the original error, and the other ranks raise an
    error that names the rank.
    """
    own: Any = None
    error: Exception | None = None
    try:
        own = act()
    except (OSError, CheckpointError) as problem:
        error = problem
    if group is None:
        if error is not None:
            raise error
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (own, error and (type(error), str(error))), group=group)
    if error is not None:
        raise error
    for rank, (_, elsewhere) in enumerate(found):
        if elsewhere is not None:
            kind, text = elsewhere
            raise (kind if issubclass(kind, CheckpointError) else CheckpointError)(f"rank {rank}: {text}")
    return [result for result, _ in found]


def _split(snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors by name, and the structure around them as JSON.

    Each name begins with a number, to distinguish the key "a.b" from the key "b" inside "a".
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(path: Place, tensor: torch.Tensor) -> str:
        name = f"{len(tensors)}:" + ".".join(map(str, path))
        tensors[name] = tensor
        return name

    return tensors, manifests.encode(snapshot, take)


def _begin(temporary: Path, may_write: Check) -> float:
    """Create the temporary folder, and return the current time in Unix seconds."""
    may_write()
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return round(time.time(), 3)


def _write_tensors(tensors: dict[str, Any], temporary: Path, group: Any) -> dict[str, StoredTensor]:
    """Write this rank's files.

    Return the tensors by name, each with only those chunks that this rank has written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    written: dict[str, StoredTensor] = {}

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data: Any = super().resolve_data(write_item)
            return data.contiguous()  # The manifest promises that values are in row-major order.

    class PartsWriter(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                results = super().write_data(plan, planner)
                places = {result.index: result.storage_data for result in results.value()}
                for item in plan.items:
                    written.update(_stored(temporary, item, places[item.index], written.get(item.index.fqn)))
            except Exception as error:
                # If a write fails, torch tries to close its archive, which also fails. That second
                # error would hide the cause.
                raise _disk_error(error) or error from None
            return results

    # torch would warn about the missing process group, but a single process does not need one.
    if group is None:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
    # If some tensors are sharded, let rank 0 alone write the few tensors that every rank has. If
    # these few tensors were spread over all ranks' files, each rank would have to fetch all files
    # at startup. If no tensor is sharded, let torch distribute the tensors, because every rank
    # reads all files anyway.
    planner = Planner(dedup_save_to_lowest_rank=any(map(is_sharded, tensors.values())))
    writer = PartsWriter(temporary, overwrite=True)
    # torch 2.6 lacks the no_dist argument, but detects by itself that there is no group.
    alone = {"no_dist": True} if group is None and "no_dist" in inspect.signature(save).parameters else {}
    try:
        save(tensors, storage_writer=writer, planner=planner, process_group=group, **alone)
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, OSError):
            raise OSError(error.errno, f"rank {rank}: {error.strerror}") from failed
        raise CheckpointError(f"rank {rank}: {error}") from failed
    return written


def _stored(folder: Path, item: Any, place: Any, before: StoredTensor | None) -> dict[str, StoredTensor]:
    """Return {name: tensor} for the tensor that `item` is a part of, with the chunk at `place`
    added.

    `before` is the same tensor with the chunks that this rank wrote earlier; None if there are
    none.
    """
    data = item.tensor_data
    dtype, sizes = data.properties.dtype, tuple(data.chunk.sizes)
    size = math.prod(sizes) * dtype.itemsize
    chunks = before.chunks if before is not None else ()
    if size:
        with (folder / place.relative_path).open("rb") as file:
            at = _locate(file, place.offset, place.length, size)
        chunks = (*chunks, TensorChunk(tuple(data.chunk.offsets), sizes, place.relative_path, at))
    return {item.index.fqn: StoredTensor(dtype, tuple(data.size), chunks)}


def _locate(file: IO[bytes], offset: int, length: int, size: int) -> int:
    """Return the position in a file at which the values of a tensor begin.

    torch.save wrote the tensor as `length` bytes at `offset`. The values take up `size` of these
    bytes. Raises CheckpointError.
    """
    view = _FilePart(file, offset, length)
    with zipfile.ZipFile(view) as archive:
        values = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        if [(info.compress_type, info.file_size) for info in values] != [(zipfile.ZIP_STORED, size)]:
            raise CheckpointError(
                f"torch {torch.__version__} wrote a tensor in a form that this trainer does not support; set "
                f"checkpoint.format=torch"
            )
        view.seek(values[0].header_offset)
        name, extra = struct.unpack("<26x2H", view.read(30))
        return int(offset + values[0].header_offset + 30 + name + extra)


class _FilePart(io.RawIOBase):
    """A part of an open file, presented to zipfile as a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        content = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _merge(parts: list[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Return all tensors by name, each with the chunks that all ranks have written."""
    merged: dict[str, StoredTensor] = {}
    for name, stored in (item for part in parts for item in part.items()):
        chunks = (*merged[name].chunks, *stored.chunks) if name in merged else stored.chunks
        merged[name] = StoredTensor(stored.dtype, stored.shape, chunks)
    return merged


def _disk_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _checksums(temporary: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file that this rank has written."""
    names = [path.name for path in temporary.glob(f"__{rank}_*")] + ([_INDEX] if rank == 0 else [])
    return {name: {"size": (temporary / name).stat().st_size, "sha256": sha256(temporary / name)} for name in names}


def _finish(temporary: Path, path: Path, manifest: bytes, parts: dict[int, Any], may_write: Check) -> None:
    """Check the temporary folder, write the manifest, and rename the folder to its final name.

    `parts` maps each rank that sees this folder to the sizes and checksums of that rank's files.
    """
    for rank, files in parts.items():
        for name, entry in files.items():
            part = temporary / name
            if not part.exists() or part.stat().st_size != entry["size"]:
                raise CheckpointError(
                    f"rank {min(parts)} does not see {name}, which rank {rank} has written; set checkpoint.dir "
                    "to a folder that every node sees, set checkpoint.url, or set checkpoint.format=torch"
                )
    write_atomically(temporary / MANIFEST, manifest)
    # Check that the manifest can be read. Older checkpoints are deleted next, and an unreadable
    # checkpoint must not take their place.
    read_manifest(temporary)
    sync_folder(temporary)
    may_write()
    # A folder with this name must be a broken checkpoint, because training would have resumed from
    # an intact one.
    if path.exists():
        path.rename(temporary.with_suffix(".old.tmp"))
    temporary.rename(path)
    sync_folder(path.parent)
    discard(temporary.with_suffix(".old.tmp"))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size(path: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
