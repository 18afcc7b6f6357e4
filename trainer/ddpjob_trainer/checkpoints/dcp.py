"""Format dcp: a checkpoint is a folder of torch.distributed.checkpoint; each rank writes its shard.

A manifest holds a checksum of each file. The tensors, by flat name, are torch.distributed.checkpoint's; the structure
around them is in tree.pt. The folder has a temporary name until all shards are on disk. Reading needs no group, and
does not depend on how many ranks wrote.

Where nodes have folders of their own, each holds what its ranks have written, and the manifest of all of it.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.atomic_files import Check, discard, sync_folder, write_atomically
from ddpjob_trainer.checkpoints.metadata import Metadata
from ddpjob_trainer.checkpoints.snapshot import Layout, Snapshot, map_tensors, with_local
from ddpjob_trainer.checkpoints.snapshot import Path as Place
from ddpjob_trainer.distributed.dtensors import is_sharded, local
from ddpjob_trainer.errors import CheckpointError

SUFFIX = ".dcp"
MANIFEST = "manifest.json"
_INDEX, _TREE, _TENSOR = ".metadata", "tree.pt", "__tensor__"
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
    """Put a checkpoint in place atomically; all ranks of `group` (None: one process alone) together.

    `heads`: for each rank the first of those that see the same folder; None: all see one. All ranks raise when one
    fails: OSError, CheckpointError, or what `may_write` raises, which is called on these first ranks only, before the
    first byte and before the rename.

    Returns the names of the files that are this rank's to copy: those that it has written; of rank 0 also the manifest.
    """
    temporary = path.parent / f".{path.name}.{incarnation}.tmp"
    rank = 0 if group is None else dist.get_rank(group)
    head = heads[rank] if heads else 0
    tensors, tree = _split(snapshot)
    try:
        begun = together(group, lambda: _begin(temporary, tree, may_write, rank) if rank == head else None)
        _write_tensors(tensors, temporary, group)
        mine = together(group, lambda: _checksums(temporary, rank))
        seen = {other: files for other, files in enumerate(mine) if not heads or heads[other] == head}
        manifest = _manifest(metadata.written(files=_merged(mine), time=begun[0]))
        together(group, lambda: _finish(temporary, path, manifest, seen, may_write) if rank == head else None)
    except BaseException:
        if rank == head:
            discard(temporary)
        raise
    return [*mine[rank], *([MANIFEST] if rank == 0 else [])]


def check(path: Path) -> Metadata:
    """A folder's metadata, after all of it was read.

    Raises CheckpointError saying what is wrong with it, OSError.
    """
    metadata = check_sizes(path)
    check_share(path, 0, 1)
    return metadata


def check_sizes(path: Path) -> Metadata:
    """A folder's metadata, after its files were found to be there, with the sizes that the manifest gives.

    Raises CheckpointError saying what is wrong with it, OSError.
    """
    recorded = _read_manifest(path)
    metadata = Metadata.read(recorded)
    for name, entry in recorded["files"].items():
        part = path / name
        size = part.stat().st_size if part.exists() else -1
        if size != entry["size"]:
            raise CheckpointError(
                f"incomplete ({name} is missing)"
                if size < 0
                else f"truncated ({name}: {size} of {entry['size']} bytes)"
            )
    return metadata


def check_share(path: Path, rank: int, world: int) -> None:
    """Compare the checksums of this rank's share of the files, of about as many bytes as any other's.

    Raises CheckpointError saying what is wrong, OSError.
    """
    files = sorted(_read_manifest(path)["files"].items(), key=lambda item: (-item[1]["size"], item[0]))
    for name, entry in files[rank::world]:
        if _sha256(path / name) != entry["sha256"]:
            raise CheckpointError(f"corrupt (the checksum of {name} does not match)")


def read_metadata(path: Path) -> Metadata:
    """The metadata alone; the shards are not checked. Raises CheckpointError, OSError."""
    return Metadata.read(_read_manifest(path))


def contents(path: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file by its name, as the manifest gives them, the manifest's own with them.

    Raises CheckpointError, OSError.
    """
    listed = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in _read_manifest(path)["files"].items()}
    manifest = path / MANIFEST
    return {**listed, MANIFEST: (manifest.stat().st_size, _sha256(manifest))}


def read(path: Path, layout: Layout | None = None, fetch: Fetch | None = None) -> Snapshot:
    """What was written, on the CPU: of tensors that `layout` gives a DTensor for, this rank's shard, as there; of
    others all of it.

    `fetch` is called with the names of files before they are read, and makes sure that they are there: where the
    folder does not hold all of them, this rank gets what it reads and nothing else. Raises CheckpointError when this
    node does not see the folder, or its index is no list of tensors, and what `fetch` raises.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Planner(DefaultLoadPlanner):
        """Frees each stored tensor once it is copied: torch.load leaves it in a reference cycle, and many large ones
        would wait for the garbage collector, which counts objects and not bytes.
        """

        def commit_tensor(self, *args: Any) -> None:
            super().commit_tensor(*args)
            gc.collect(1)

    class Reader(FileSystemReader):
        """Runs no code of the index, which is a pickle, and opens no file but those of the checkpoint."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return index

        def read_data(self, plan: Any, planner: Any) -> Any:
            wanted = {self.storage_data[item.storage_index].relative_path for item in plan.items}
            if not wanted <= known:
                raise CheckpointError(f"corrupt (its index names {min(wanted - known)}, which its manifest does not)")
            if fetch is not None:
                fetch(sorted(wanted))
            return super().read_data(plan, planner)

    if fetch is not None:
        fetch([MANIFEST, _INDEX, _TREE])
    try:
        tree = torch.load(path / _TREE, map_location="cpu", weights_only=True)
        index, known = _read_index(path / _INDEX), set(_read_manifest(path)["files"])
        reader = Reader(path)
        stored = index.state_dict_metadata.items()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read here ({error.strerror}): checkpoint.format=dcp needs a folder on all nodes"
        ) from error
    places = _places(tree)
    tensors: dict[str, Any] = {}
    for name, entry in stored:
        if isinstance(entry, TensorStorageMetadata):
            like = layout(places[name], entry.size) if layout is not None and name in places else None
            shape = entry.size if like is None else local(like).shape
            tensors[name] = torch.empty(shape, dtype=entry.properties.dtype)
            if like is not None:
                tensors[name] = with_local(like, tensors[name])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # Intended: each rank reads for itself.
        try:
            load(tensors, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as failed:  # No Exception; in a process that reads for itself there is one cause.
            [(cause, _)] = failed.failures.values()
            raise cause from None
    snapshot: Snapshot = _join(tree, tensors)
    return snapshot


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of torch's index and no others, so that reading one runs no code that it brings."""

    def find_class(self, module: str, name: str) -> Any:
        import torch.distributed.checkpoint.filesystem as filesystem
        import torch.distributed.checkpoint.metadata as metadata

        parts = ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
        others = ("BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
        if module == metadata.__name__ and name in (*parts, *others):
            return getattr(metadata, name)
        if (module, name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":  # Where it was written.
            return Path
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read_index(path: Path) -> Any:
    """torch.distributed.checkpoint's Metadata. Raises CheckpointError, OSError."""
    from torch.distributed.checkpoint.metadata import Metadata as Index

    try:
        with path.open("rb") as file:
            found = _IndexUnpickler(file).load()
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"corrupt (its index is not torch's: {type(error).__name__}: {error})") from error
    if not isinstance(found, Index) or not isinstance(found.state_dict_metadata, dict):
        raise CheckpointError("corrupt (its index is not torch's)")
    return found


def together(group: Any, act: Any) -> list[Any]:
    """Every rank's result of `act`, in rank order.

    When it raises on one rank, all raise: that rank the error itself, the others one that names the rank.
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
    """(tensors by flat name, the structure around them). A number before each name distinguishes
    the key a.b from a then b.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(path: tuple[str | int, ...], tensor: torch.Tensor) -> dict[str, str]:
        name = f"{len(tensors)}:" + ".".join(map(str, path))
        tensors[name] = tensor
        return {_TENSOR: name}

    return tensors, map_tensors(snapshot, take)


def _join(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        if set(tree) == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        return {key: _join(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_join(value, tensors) for value in tree])
    return tree


def _places(tree: Any, path: Place = ()) -> dict[str, Place]:
    """Where in the tree each tensor belongs, by its flat name."""
    if isinstance(tree, dict) and set(tree) == {_TENSOR}:
        return {tree[_TENSOR]: path}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {name: place for key, value in items for name, place in _places(value, (*path, key)).items()}


def _begin(temporary: Path, tree: Any, may_write: Check, rank: int) -> float:
    """The time, in Unix seconds."""
    may_write()
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    if rank == 0:
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        write_atomically(temporary / _TREE, buffer.getvalue())
    return round(time.time(), 3)


def _write_tensors(tensors: dict[str, Any], temporary: Path, group: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        """Raises the disk's error: torch closes its archive after a failed write, and fails again in its own words."""

        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().write_data(*args, **kwargs)
            except Exception as error:
                raise _disk_error(error) or error from None

    if group is None:  # Intended: one process.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
    # The few tensors that all ranks have are rank 0's to write where others are sharded: dealt out over all files, they
    # would make each rank fetch every file at a start. Where none is sharded, all ranks write and read alike.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=any(map(is_sharded, tensors.values())))
    writer = Writer(temporary, overwrite=True)
    try:
        save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, OSError):
            raise OSError(error.errno, f"rank {rank}: {error.strerror}") from failed
        raise CheckpointError(f"rank {rank}: {error}") from failed


def _disk_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _checksums(temporary: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Of the files that this rank has written."""
    names = [path.name for path in temporary.glob(f"__{rank}_*")] + ([_INDEX, _TREE] if rank == 0 else [])
    return {name: {"size": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)} for name in names}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: entry for files in parts for name, entry in sorted(files.items())}


def _manifest(recorded: dict[str, Any]) -> bytes:
    return json.dumps({**recorded, "sha256": _digest(recorded)}, indent=1).encode()


def _finish(temporary: Path, path: Path, manifest: bytes, parts: dict[int, Any], may_write: Check) -> None:
    """`parts`: size and checksum of each file by the rank that has written it, of the ranks that see this folder."""
    for rank, files in parts.items():
        for name, entry in files.items():
            part = temporary / name
            if not part.exists() or part.stat().st_size != entry["size"]:
                raise CheckpointError(
                    f"rank {min(parts)} does not see {name}, which rank {rank} has written: checkpoint.format=dcp needs"
                    " one folder that every node sees, or a bucket; set checkpoint.dir to one, checkpoint.url, or"
                    " checkpoint.format=torch"
                )
    write_atomically(temporary / MANIFEST, manifest)
    sync_folder(temporary)
    may_write()
    if path.exists():  # A broken one of this step, or training would have resumed from it.
        path.rename(temporary.with_suffix(".old.tmp"))
    temporary.rename(path)
    sync_folder(path.parent)
    discard(temporary.with_suffix(".old.tmp"))


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        recorded = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError("incomplete (it has no manifest)") from None
    except ValueError as error:
        raise CheckpointError(f"corrupt (its manifest is damaged: {error})") from error
    if not isinstance(recorded, dict) or _digest(recorded) != recorded.pop("sha256", None):
        raise CheckpointError("corrupt (the checksum of its manifest does not match)")
    return recorded


def _digest(recorded: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps({key: value for key, value in recorded.items() if key != "sha256"}).encode()
    ).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size(path: Path) -> int:
    """Bytes of all files."""
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
