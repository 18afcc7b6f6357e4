"""Lists the images below a folder of classes. This happens once per node, and later starts reuse
the list.

Listing ImageNet's 1.3 million names takes seconds on an idle disk and minutes on a network file
system. Without a stored list, every rank would spend that time at every start. Adding, removing or
renaming a file changes the times of its folder. To validate the list, one stat per folder is
therefore enough.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ddpjob_trainer.atomic_files import replacing

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_ENCRYPTED = 1
"""Flag bit of an encrypted member of a zip file, which zipfile cannot read without a password."""
_MOST_ARRAYS = 16
_SETTLED_NS = 2_000_000_000
"""A listing is kept only if the latest change to a folder is at least this many nanoseconds old. If
a folder changes again immediately after a change, its modification time may stay the same.
"""


@dataclass(frozen=True)
class Listing:
    """The images below a root and their folders, sorted by class and then by path.

    The root itself is the first of `folders`. `changed` has each folder's modification time and
    change time in ns, (n, 2). Both are needed, because tar resets modification times. `owner` has
    each folder's class, or -1 for the root. `counts` has the number of images in each folder, and
    `names` has the file names of all images.
    """

    folders: npt.NDArray[np.bytes_]
    changed: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    classes: npt.NDArray[np.bytes_]
    names: npt.NDArray[np.bytes_]

    def paths(self, root: Path) -> npt.NDArray[np.bytes_]:
        """Return the paths of all images, as an array.

        With a list, each worker would copy the list's memory as soon as it updates reference
        counts.
        """
        prefixes = [os.fsencode(root / os.fsdecode(folder)) + b"/" for folder in self.folders.tolist()]
        return np.char.add(np.repeat(np.array(prefixes), self.counts), self.names)

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the class number of each image."""
        return np.repeat(self.owner, self.counts)


def user_cache() -> Path:
    """Return the user's cache folder, which holds data that is prepared only once per node.

    Raises RuntimeError if the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpjob_trainer"


def listing(root: Path, kept_in: Path | None) -> Listing:
    """Return the images below `root`. Raises OSError.

    If no folder has changed since an earlier start, the listing from that start is used. Listings
    are kept in the folder `kept_in`, or in the user's cache if `kept_in` is None. If listings
    cannot be written there, each start lists the images again.
    """
    try:
        kept_in = kept_in or user_cache()
        kept_in.mkdir(parents=True, exist_ok=True)
        path = kept_in / f"{hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]}-listing.npz"
        lock = (kept_in / f".{path.name}.lock").open("w")
    except (OSError, RuntimeError):
        return _walk(root)
    with lock:
        if (kept := _read_kept(path, root)) is not None:
            return kept
        try:
            # The ranks of a node start at the same time. The lock lets only one of them create the
            # listing.
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return _walk(root)
        if (kept := _read_kept(path, root)) is not None:
            return kept
        began = time.time_ns()
        found = _walk(root)
        settled = found.changed[:, 0].max() < began - _SETTLED_NS
        # Equal times on all folders may mean that the file system does not record times. Do not
        # keep the listing in that case.
        if settled and (found.changed != found.changed[0]).any():
            _keep(path, found)
        return found


def _walk(root: Path) -> Listing:
    """List the folders below `root` and the images in them.

    Each folder's times are read before its content. If a folder changes in between, the next start
    finds newer times and does not use this listing.
    """
    rows: list[tuple[int, str, tuple[int, int], list[bytes]]] = [(-1, "", _times_of(root), [])]
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    for number, name in enumerate(classes):
        below: list[tuple[int, str, tuple[int, int], list[bytes]]] = []
        waiting = [name]
        while waiting:
            folder = waiting.pop()
            changed, names = _times_of(root / folder), []
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        waiting.append(f"{folder}/{entry.name}")
                    elif entry.name.lower().endswith(EXTENSIONS):
                        names.append(entry.name)
            below.append((number, folder, changed, [os.fsencode(name) for name in sorted(names)]))
        rows += sorted(below, key=lambda row: row[1])
    return Listing(
        np.array([os.fsencode(folder) for _, folder, _, _ in rows], dtype=bytes),
        np.array([changed for _, _, changed, _ in rows], dtype=np.int64),
        np.array([number for number, _, _, _ in rows], dtype=np.int64),
        np.array([len(names) for _, _, _, names in rows], dtype=np.int64),
        np.array([os.fsencode(name) for name in classes], dtype=bytes),
        np.array([name for _, _, _, names in rows for name in names], dtype=bytes),
    )


def _changed(root: Path, folders: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
    """Return the current modification and change times of folders.

    Raises OSError if a folder is gone.
    """
    return np.array([_times_of(root / os.fsdecode(folder)) for folder in folders.tolist()], dtype=np.int64)


def _times_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ctime_ns


def _read_kept(path: Path, root: Path) -> Listing | None:
    """Return the kept listing, or None if it is missing, unreadable or stale.

    It is stale if a folder has changed since it was made.
    """
    try:
        with path.open("rb") as file:
            saved = read_arrays(file)
        kept = Listing(**{name: saved[name] for name in Listing.__dataclass_fields__})
        return kept if np.array_equal(_changed(root, kept.folders), kept.changed) else None
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile):
        return None


def read_arrays(file: IO[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a numpy.savez file by name. They must contain integers or strings.

    numpy.load is not safe for damaged or malicious files. It would unpack compressed data to a
    thousand times the size of the file. Before reading an array's content, it would also allocate
    whatever size the header claims. Raises ValueError, KeyError, EOFError, NotImplementedError,
    zipfile.BadZipFile.
    """
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        plain = all(part.compress_type == zipfile.ZIP_STORED and not part.flag_bits & _ENCRYPTED for part in parts)
        if not plain or len(parts) > _MOST_ARRAYS:
            raise ValueError("it has too many arrays, or they are compressed or encrypted")
        return {part.filename.removesuffix(".npy"): _array(archive.read(part)) for part in parts}


def _array(content: bytes) -> npt.NDArray[Any]:
    """Parse an array in version 1.0 or 2.0 of numpy's format.

    Raises ValueError.
    """
    stream = io.BytesIO(content)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in read:
        raise ValueError(f"an array has format version {version}")
    shape, by_columns, dtype = read[version](stream)
    if dtype.kind not in "iuUS" or not dtype.itemsize:
        raise ValueError("an array has neither integers nor strings")
    values = np.frombuffer(content, dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if by_columns else "C").copy()


def _keep(path: Path, found: Listing) -> None:
    try:
        with replacing(path) as file:
            np.savez(file, **{name: getattr(found, name) for name in Listing.__dataclass_fields__})
    except OSError:
        pass  # The next start lists the images again.
