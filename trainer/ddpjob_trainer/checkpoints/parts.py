"""Format dcp: one checkpoint, one folder of torch.distributed.checkpoint; each rank writes its part, a manifest holds a checksum of each.

The tensors, by flat name, are torch.distributed.checkpoint's; what is around them is in tree.pt. The folder has a temporary name until all
parts are on disk. A read needs no group, and takes no notice of how many ranks wrote.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.atomic import Check, discard, sync_folder, write_atomically
from ddpjob_trainer.checkpoints.facts import Facts
from ddpjob_trainer.checkpoints.snapshot import Snapshot, map_tensors
from ddpjob_trainer.errors import CheckpointError

SUFFIX = ".dcp"
_MANIFEST, _TREE, _TENSOR = "manifest.json", "tree.pt", "__tensor__"


def write(path: Path, life: int, snapshot: Snapshot, facts: Facts, group: Any, may_write: Check) -> None:
    """Put a checkpoint in place, atomically; all ranks of `group` (None: one process alone) together, and all raise when one fails.

    Raises OSError, CheckpointError, and what `may_write` raises: it is called on the first rank only, before the first byte and before the
    rename.
    """
    temporary = path.parent / f".{path.name}.{life}.tmp"
    first = group is None or dist.get_rank(group) == 0
    tensors, tree = _split(snapshot)
    try:
        together(group, lambda: _begin(temporary, tree, may_write) if first else None)
        _write_tensors(tensors, temporary, group)
        mine = together(group, lambda: _checksums(temporary, 0 if group is None else dist.get_rank(group)))
        together(group, lambda: _finish(temporary, path, facts, mine, may_write) if first else None)
    except BaseException:
        if first:
            discard(temporary)
        raise


def check(path: Path) -> Facts:
    """The facts of a whole folder, all of it read. Raises CheckpointError saying what is wrong with it, OSError."""
    said = _read_manifest(path)
    facts = Facts.read(said)
    for name, entry in said["files"].items():
        part = path / name
        size = part.stat().st_size if part.exists() else -1
        if size != entry["size"]:
            raise CheckpointError(f"incomplete ({name} is missing)" if size < 0 else f"truncated ({name}: {size} of {entry['size']} bytes)")
        if _sha256(part) != entry["sha256"]:
            raise CheckpointError(f"corrupt (the checksum of {name} does not match)")
    return facts


def read_facts(path: Path) -> Facts:
    """The facts alone; the parts are not checked. Raises CheckpointError, OSError."""
    return Facts.read(_read_manifest(path))


def read(path: Path) -> Snapshot:
    """What was written, whole tensors on the CPU. Raises CheckpointError when this node does not see the folder."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        tree = torch.load(path / _TREE, map_location="cpu", weights_only=True)
        reader = FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata.items()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read here ({error.strerror}): checkpoint.format=dcp needs a folder on all nodes"
        ) from error
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # Asked for: each rank reads for itself.
        load(tensors, storage_reader=reader, no_dist=True)
    snapshot: Snapshot = _join(tree, tensors)
    return snapshot


def together(group: Any, act: Any) -> list[Any]:
    """Every rank's result of `act`, in rank order; when it raised anywhere, that is raised everywhere: here as it was, else by name."""
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
    """(tensors by flat name, the tree around them). A number before each name tells the key a.b from a then b."""
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


def _begin(temporary: Path, tree: Any, may_write: Check) -> None:
    may_write()
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    write_atomically(temporary / _TREE, buffer.getvalue())


def _write_tensors(tensors: dict[str, Any], temporary: Path, group: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        """Lets through what the disk said: torch closes its archive after a failed write, and fails again in its own words."""

        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().write_data(*args, **kwargs)
            except Exception as error:
                raise _said_by_disk(error) or error from None

    if group is None:  # Asked for: one process.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        save(tensors, storage_writer=Writer(temporary, overwrite=True), process_group=group, no_dist=group is None)
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, OSError):
            raise OSError(error.errno, f"rank {rank}: {error.strerror}") from failed
        raise CheckpointError(f"rank {rank}: {error}") from failed


def _said_by_disk(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _checksums(temporary: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Of the files that this rank has written."""
    names = [path.name for path in temporary.glob(f"__{rank}_*")] + ([".metadata", _TREE] if rank == 0 else [])
    return {name: {"size": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)} for name in names}


def _finish(temporary: Path, path: Path, facts: Facts, parts: list[dict[str, Any]], may_write: Check) -> None:
    for rank, files in enumerate(parts):
        for name, entry in files.items():
            part = temporary / name
            if not part.exists() or part.stat().st_size != entry["size"]:
                raise CheckpointError(
                    f"rank 0 does not see {name}, which rank {rank} has written: checkpoint.format=dcp needs one folder that every node"
                    f" sees; set checkpoint.dir to one, or checkpoint.format=torch"
                )
    said = facts.written(files={name: entry for files in parts for name, entry in sorted(files.items())})
    write_atomically(temporary / _MANIFEST, json.dumps({**said, "sha256": _digest(said)}, indent=1).encode())
    sync_folder(temporary)
    may_write()
    if path.exists():  # a broken one of this step, else training would have gone on from it; a folder cannot be renamed onto another
        path.rename(temporary.with_suffix(".old.tmp"))
    temporary.rename(path)
    sync_folder(path.parent)
    discard(temporary.with_suffix(".old.tmp"))


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        said = json.loads((path / _MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError("incomplete (it has no manifest)") from None
    except ValueError as error:
        raise CheckpointError(f"corrupt (its manifest is damaged: {error})") from error
    if not isinstance(said, dict) or _digest(said) != said.pop("sha256", None):
        raise CheckpointError("corrupt (the checksum of its manifest does not match)")
    return said


def _digest(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps({key: value for key, value in said.items() if key != "sha256"}).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size(path: Path) -> int:
    """Bytes of all parts."""
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
