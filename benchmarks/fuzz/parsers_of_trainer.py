"""The trainer's parsers for untrusted checkpoints and for data sets."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.fuzz.mutate import Form
from benchmarks.fuzz.watch import Parser, Target, scratch

_SIDE = 24
"""Side in pixels to which images are scaled."""


class _Untouched:
    """Detects whether reading a pickle has changed a class, as the BUILD opcode may."""

    def __init__(self, *classes: type) -> None:
        self._before = {kind: dict(vars(kind)) for kind in classes}

    def check(self) -> None:
        """Undo changes, because they would spoil later inputs. Raises AssertionError if there were
        any.
        """
        changed, nothing = [], object()
        for kind, before in self._before.items():
            after = dict(vars(kind))
            for name in sorted(before.keys() | after):
                if before.get(name, nothing) is not after.get(name, nothing):
                    changed.append(f"{kind.__module__}.{kind.__qualname__}.{name}")
                    setattr(kind, name, before[name]) if name in before else delattr(kind, name)
        assert not changed, f"it has replaced {', '.join(changed)}"


def _checkpoint_files() -> Target:
    """Fuzz a single-file checkpoint with a correct checksum. Checksums protect only against
    accidental damage.
    """
    import torch
    from ddpjob_trainer.checkpoints import torch_file
    from ddpjob_trainer.checkpoints.metadata import Metadata
    from ddpjob_trainer.errors import CheckpointError

    torch.set_num_threads(1)
    path = scratch("checkpoint-files") / "step-000000003.pt"
    torch_file.write(path, {"model": {"a": torch.zeros(2)}, "sampler": [1, "x"]}, Metadata(3))
    end = path.read_bytes().rfind(b"PK\x05\x06") + 22
    archive, comment = path.read_bytes()[: end - 2], path.read_bytes()[end:]

    def read(data: bytes) -> None:
        try:
            recorded = json.loads(data)
        except RecursionError:
            recorded = None
        if isinstance(recorded, dict):
            recorded.pop("sha256", None)
            digest = hashlib.sha256(archive + json.dumps(recorded).encode()).hexdigest()
            data = json.dumps({**recorded, "sha256": digest}).encode()
        path.write_bytes(archive + struct.pack("<H", len(data) & 0xFFFF) + data)
        torch_file.read_metadata(path)
        torch_file.check_file(path)

    return Target(read, [comment], (CheckpointError, ValueError))


def _weights() -> Target:
    """Fuzz any file given as checkpoint.load."""
    import argparse

    import torch
    from ddpjob_trainer.checkpoints.compatibility import read_whole
    from ddpjob_trainer.errors import CheckpointError

    torch.set_num_threads(1)
    path = scratch("weights") / "weights.pt"
    buffer, old = io.BytesIO(), io.BytesIO()
    state = {"a": torch.zeros(2, 3), "b": [1, "x", {"c": torch.ones(1, dtype=torch.bfloat16)}]}
    torch.save(state, buffer)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    untouched = _Untouched(argparse.Namespace, pathlib.Path, pathlib.PurePath, type(path))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read_whole(path)
        finally:
            untouched.check()

    return Target(read, [buffer.getvalue(), old.getvalue()], (CheckpointError,))


def _checkpoint_folder(name: str) -> Path:
    """Write a complete checkpoint in the dcp format, and return its path."""
    import torch
    from ddpjob_trainer.checkpoints import dcp
    from ddpjob_trainer.checkpoints.metadata import Metadata

    torch.set_num_threads(1)
    folder = scratch(name) / "step-000000003.dcp"
    dcp.write(folder, 0, {"model": {"a": torch.zeros(2, 3)}, "b": [1, "x"]}, Metadata(3), None, lambda: None)
    return folder


def _record(path: Path, recorded: dict[str, Any]) -> None:
    """Write a manifest with its checksum, which anyone can calculate."""
    recorded = {key: value for key, value in recorded.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(recorded).encode()).hexdigest()
    path.write_text(json.dumps({**recorded, "sha256": digest}))


def _dcp_manifests() -> Target:
    """Fuzz the manifest of a checkpoint folder, and the files that the trainer then reads."""
    from ddpjob_trainer.checkpoints import dcp
    from ddpjob_trainer.errors import CheckpointError

    folder = _checkpoint_folder("dcp-manifests")
    manifest = folder / dcp.MANIFEST

    def read(data: bytes) -> None:
        try:
            recorded = json.loads(data)
        except (ValueError, RecursionError):
            recorded = None
        if isinstance(recorded, dict):
            _record(manifest, recorded)
        else:
            manifest.write_bytes(data)
        dcp.check(folder)
        dcp.contents(folder)
        dcp.read(folder)

    return Target(read, [manifest.read_bytes()], (CheckpointError, OSError))


def _cifar(binary: bool) -> Target:
    import numpy as np
    import torch
    from ddpjob_trainer.config.sections import DataConfig
    from ddpjob_trainer.data.cifar import open_cifar
    from ddpjob_trainer.errors import DataError

    root = scratch("cifar-binary" if binary else "cifar")
    folder = root / ("cifar-100-binary" if binary else "cifar-100-python")
    folder.mkdir(exist_ok=True)
    names = ("train.bin", "test.bin") if binary else ("train", "test")
    pixels = np.zeros((1, 3072), np.uint8)
    batch = {"data": pixels, "fine_labels": [3], "coarse_labels": [1], "filenames": ["a.png"], "batch_label": "b"}
    pickles = [pickle.dumps(batch, protocol=protocol) for protocol in (2, 4)]
    seeds = [b"\x01\x03" + bytes(3072)] if binary else pickles
    (folder / names[1]).write_bytes(seeds[0])
    config, device = DataConfig(name="cifar100", dir=root), torch.device("cpu")

    def read(data: bytes) -> None:
        (folder / names[0]).write_bytes(data)
        open_cifar(config, device)

    return Target(read, seeds, (DataError,))


def _cifar_pickles() -> Target:
    return _cifar(binary=False)


def _cifar_binary() -> Target:
    return _cifar(binary=True)


def _images() -> Target:
    """Fuzz an image of a data set: its size, a training crop and a test crop."""
    import numpy as np
    import torch
    from ddpjob_trainer.data import decode
    from PIL import Image

    torch.set_num_threads(1)
    noise = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)

    def encoded(kind: str, image: Image.Image = picture, **more: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **more)
        return buffer.getvalue()

    def read(data: bytes) -> None:
        refused = None
        for act in (
            lambda: decode.size_of(data),
            lambda: decode.middle(data, _SIDE),
            lambda: decode.crop(data, lambda height, width: decode.Box(0, 0, height, width), _SIDE),
        ):
            try:
                act()
            except decode.UnreadableImage as error:
                refused = error
        if refused is not None:
            raise refused

    seeds = [
        encoded("JPEG", quality=10), encoded("JPEG", quality=10, progressive=True),
        encoded("JPEG", picture.convert("L")), encoded("JPEG", picture.convert("CMYK"), quality=10), encoded("PNG"),
        encoded("PNG", Image.fromarray(noise[..., 0].astype(np.uint16) * 256)), encoded("PNG", picture.convert("P")),
        encoded("WEBP", quality=10), encoded("BMP"), encoded("GIF"), encoded("PPM"), encoded("TIFF"),
        encoded("TIFF", compression="tiff_lzw"), encoded("PNG", picture.convert("RGBA")),
    ]  # fmt: skip
    return Target(read, seeds, (decode.UnreadableImage,))


def _shards() -> Target:
    """Fuzz a tar of images with their class numbers."""
    from ddpjob_trainer.data import shard_index
    from ddpjob_trainer.errors import DataError

    def tar(kind: int) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
            for name, content in (("a/0001.jpg", b"x" * 20), ("a/0001.cls", b"3"), (f"a/{'b' * 120}.jpg", b"y")):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            entry = tarfile.TarInfo(f"a/{'b' * 120}.cls")
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"4"))
        return buffer.getvalue()[: 24 * 512]

    def read(data: bytes) -> None:
        list(shard_index._samples(io.BytesIO(data), "a.tar", "remedy"))

    # _scan converts the last two to DataError.
    return Target(read, [tar(tarfile.PAX_FORMAT), tar(tarfile.GNU_FORMAT)], (DataError, OSError, tarfile.TarError))


def _shard_indexes() -> Target:
    """Fuzz the index of shards, which may be in a bucket."""
    import numpy as np
    from ddpjob_trainer.data import shard_index
    from ddpjob_trainer.errors import DataError

    path = scratch("shard-indexes") / "index.npz"
    index = shard_index.Index(
        url="u", shards=["u/a.tar"], lengths=np.array([10240]), stamps=np.array(["x"]),
        shard=np.array([0], np.int32), offsets=np.array([512]), sizes=np.array([100], np.int32), labels=np.array([3]),
    )  # fmt: skip
    shard_index.save(index, path)

    def read(data: bytes) -> None:
        shard_index._load(io.BytesIO(data), "u")

    return Target(read, [path.read_bytes()], (DataError,))


PARSERS = (
    Parser("checkpoint-files", "the end of a checkpoint's file, with a correct checksum", Form.JSON, _checkpoint_files),
    Parser("weights", "any file as checkpoint.load", Form.BYTES, _weights),
    Parser("dcp-manifests", "the manifest of a checkpoint in parts, and its tensors", Form.JSON, _dcp_manifests),
    Parser("cifar", "a CIFAR batch, python version", Form.PICKLE, _cifar_pickles),
    Parser("cifar-binary", "a CIFAR batch, binary version", Form.BYTES, _cifar_binary),
    Parser("images", "an image, from its header to its pixels", Form.BYTES, _images),
    Parser("shards", "a tar of images", Form.BYTES, _shards),
    Parser("shard-indexes", "the index of shards", Form.BYTES, _shard_indexes),
)
