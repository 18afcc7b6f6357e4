"""`python -m ddpjob_trainer shards FOLDER OUT [--size 256MB] [--max-side 500]` packs an image
folder (train/CLASS, val/CLASS) into tar shards, with large images scaled down if `--max-side` is
given.

The assignment of images to shards is decided before the first byte is written, and each shard is
written under a temporary name and renamed. An interrupted run therefore continues where it stopped,
and any existing shard is complete. The assignment uses the sizes of the original files, so shards
of scaled images are usually smaller than `--size`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from ddpjob_trainer.atomic_files import replacing, write_atomically
from ddpjob_trainer.data.decode import UnreadableImage, shrink
from ddpjob_trainer.data.imagefolder import Folder, open_folders
from ddpjob_trainer.data.randomness import derive
from ddpjob_trainer.data.shard_index import FILE, Index, cached_index, save, stamp_of
from ddpjob_trainer.data.shards import CLASSES, classes_file
from ddpjob_trainer.errors import ConfigError, DataError

_PLAN = "plan.json"
_BLOCK = tarfile.BLOCKSIZE
_QUALITY = 90
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Scaling:
    """How large images are scaled: their maximum side in pixels, and their JPEG quality."""

    side: int
    quality: int


@dataclass(frozen=True)
class PackedImage:
    """An image to pack: its file, size and label, its key in the shard, and the offset of its
    bytes.
    """

    path: str
    size: int
    label: int
    key: str
    offset: int

    @property
    def image_name(self) -> str:
        """The image's file name in the tar if the image is packed unchanged."""
        return f"{self.key}{Path(self.path).suffix.lower()}"


def main(arguments: list[str]) -> int:
    """Pack the shards, and return 0.

    Raises DataError or ConfigError with a message for the user.
    """
    parser = argparse.ArgumentParser(prog="python -m ddpjob_trainer shards", description=__doc__)
    parser.add_argument("folder", type=Path, help="contains train/ and val/ with one folder of images per class")
    parser.add_argument("out", type=Path, help="receives train/ and val/ with tar files, their index, and classes.txt")
    parser.add_argument("--size", default="256MB", help="maximum size of a shard (default 256MB)")
    parser.add_argument(
        "--max-side",
        type=int,
        metavar="N",
        help="scale larger images down to N pixels on their longer side, such as 500, and save them as JPEG;"
        " all other images are packed unchanged",
    )
    parser.add_argument(
        "--quality", type=int, metavar="Q", help=f"JPEG quality of scaled images, 1 to 100 (default {_QUALITY})"
    )
    options = parser.parse_args(arguments)
    pack(options.folder, options.out, _bytes(options.size), _scaling(options.max_side, options.quality))
    return 0


def _scaling(side: int | None, quality: int | None) -> Scaling | None:
    if side is None:
        if quality is not None:
            raise ConfigError(
                f"--quality={quality}: applies only to scaled images; set --max-side=500, or leave out --quality"
            )
        return None
    if side < 1:
        raise ConfigError(f"--max-side={side}: must be at least 1; write a number of pixels such as 500")
    if not 1 <= (chosen := _QUALITY if quality is None else quality) <= 100:
        raise ConfigError(f"--quality={quality}: must be from 1 to 100; {_QUALITY} is usual")
    return Scaling(side, chosen)


def pack(folder: Path, out: Path, size: int, scaling: Scaling | None = None) -> None:
    """Pack the training and test images of a folder into shards. Raises DataError.

    A shard of unchanged images has at most `size` bytes. A shard of scaled images is usually
    smaller.
    """
    train, test = open_folders(folder)
    classes = classes_file(train.classes)
    try:
        for part, images in (("train", train), ("val", test)):
            (out / part).mkdir(parents=True, exist_ok=True)
            _pack_set(images, out / part, size, scaling)
        write_atomically(out / CLASSES, classes)
    except OSError as error:
        raise DataError(
            f"{error.filename or out}: {error.strerror}; free some space or repair the volume, then run the "
            "command again to continue"
        ) from error


def _pack_set(images: Folder, out: Path, size: int, scaling: Scaling | None) -> None:
    planned = plan(images, size)
    _keep_plan(out / _PLAN, planned, scaling)
    for leftover in out.glob(".shard-*.tmp"):
        leftover.unlink()
    names = [f"shard-{number:06d}.tar" for number in range(len(planned))]
    waiting = [(out / name, shard) for name, shard in zip(names, planned, strict=True) if not (out / name).exists()]
    print(f"{out}: {len(images.labels)} images in {len(planned)} shards, {len(waiting)} to write", flush=True)
    with ThreadPoolExecutor(4) as threads:
        for done, path in enumerate(threads.map(lambda pair: _write(pair[0], pair[1], scaling), waiting), 1):
            print(f"{path} ({done} of {len(waiting)})", flush=True)
    if scaling is None:
        save(_index(out, names, planned), out / FILE)
    else:
        # Scaling has changed the sizes of images, so read their offsets from the shards.
        cached_index(str(out), None, "run the command again")


def plan(images: Folder, size: int) -> list[list[PackedImage]]:
    """Return the images in a fixed random order, divided into shards of at most `size` bytes.

    Without the random order, a reader that takes shards in sequence would see one class at a time.
    """
    order = np.random.Generator(np.random.Philox(derive(0, len(images.labels)))).permutation(len(images.labels))
    shards: list[list[PackedImage]] = []
    offset = size
    for key, number in enumerate(order.tolist()):
        path = images.name(number)
        length = Path(path).stat().st_size
        needs = 3 * _BLOCK + _rounded(length)
        if offset + needs + 2 * _BLOCK > size:
            shards.append([])
            offset = 0
        shards[-1].append(PackedImage(path, length, int(images.labels[number]), f"{key:08d}", offset + _BLOCK))
        offset += needs
    return shards


def _keep_plan(path: Path, planned: list[list[PackedImage]], scaling: Scaling | None) -> None:
    """Record the plan. Raises DataError if the folder holds shards from a different plan.

    Plans differ if the images, the shard size or the scaling differ.
    """
    text = json.dumps([[(entry.path, entry.size, entry.label) for entry in shard] for shard in planned])
    text += "" if scaling is None else json.dumps([scaling.side, scaling.quality])
    digest = hashlib.sha256(text.encode()).hexdigest()
    if path.exists() and _digest_in(path) != digest:
        raise DataError(
            f"{path.parent} contains shards made from other images, or with a different --size, --max-side or"
            " --quality; remove this folder, or choose a different one"
        )
    write_atomically(path, json.dumps({"sha256": digest}).encode())


def _digest_in(path: Path) -> str:
    """Return the digest of the plan that an earlier run recorded. Raises DataError, OSError."""
    try:
        return str(json.loads(path.read_bytes())["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}), so the images in its shards are unknown; remove {path.parent}, or"
            " choose a different folder"
        ) from error


def _write(path: Path, shard: list[PackedImage], scaling: Scaling | None) -> Path:
    with replacing(path) as raw:
        file = io.BufferedWriter(cast(io.RawIOBase, raw), 1 << 20)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for entry in shard:
                content = Path(entry.path).read_bytes()
                if len(content) != entry.size:
                    raise DataError(f"{entry.path} changed while it was being packed; run the command again")
                scaled = None if scaling is None else _scaled(content, scaling)
                _add(archive, *((entry.image_name, content) if scaled is None else (f"{entry.key}.jpg", scaled)))
                _add(archive, f"{entry.key}.cls", str(entry.label).encode())
        file.flush()
        file.detach()
    return path


def _scaled(content: bytes, scaling: Scaling) -> bytes | None:
    """Return the image scaled down to a JPEG, or None if it must be packed unchanged.

    Small images are packed unchanged. So are unreadable images, because training should report them
    (data.corrupt).
    """
    try:
        return shrink(content, scaling.side, scaling.quality)
    except UnreadableImage:
        return None


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _index(out: Path, names: list[str], planned: list[list[PackedImage]]) -> Index:
    entries = [entry for shard in planned for entry in shard]
    files = [(out / name).stat() for name in names]
    return Index(
        url=str(out),
        shards=[str(out / name) for name in names],
        lengths=np.array([file.st_size for file in files], dtype=np.int64),
        stamps=np.array([stamp_of({"mtime": file.st_mtime}) for file in files]),
        shard=np.repeat(np.arange(len(planned), dtype=np.int32), [len(shard) for shard in planned]),
        offsets=np.array([entry.offset for entry in entries], dtype=np.int64),
        sizes=np.array([entry.size for entry in entries], dtype=np.int32),
        labels=np.array([entry.label for entry in entries], dtype=np.int64),
    )


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.upper())
    if match is None or not (size := int(float(match[1]) * _UNITS[match[2] or ""])):
        raise ConfigError(f"--size: {text!r} is not a size, such as 256MB")
    return size
