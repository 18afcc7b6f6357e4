"""Lists the images below a folder of classes. This happens once per node, and later starts reuse
the list.

Listing ImageNet's 1.3 million names takes seconds on an idle disk and minutes on a network file
system. Without the list, every rank would need that time at every start. Adding, removing or
renaming a file changes its folder's times, so one stat per folder is enough if all times are
unchanged.
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
"""Flag bit of an encrypted member of a zip file. zipfile would ask for its password."""
_MOST_ARRAYS = 16
_SETTLED_NS = 2_000_000_000
"""A listing is kept only if the newest change to a folder was at least this many nanoseconds ago. A
folder that has just changed may change again without getting a new modification time.
"""


@dataclass(frozen=True)
class Listing:
    """The folders below a root and the images in them, sorted by class and then by path.

    The first of `folders` is the root itself. `changed` has the modification time and the change
    time of each folder in ns, (n, 2). Both are needed, because tar resets modification times.
    `owner` is the class of each folder, or -1 for the root. `names` are the file names of all
    images, and `counts` is the number of images in each folder.
    """

    folders: npt.NDArray[np.bytes_]
    changed: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    classes: npt.NDArray[np.bytes_]
    names: npt.NDArray[np.bytes_]

    def paths(self, root: Path) -> npt.NDArray[np.bytes_]:
        """Return the paths of all images.

        The paths are in one array. With a list, each worker would copy the list's memory when the
        worker updates reference counts.
        """
        prefixes = [os.fsencode(root / os.fsdecode(folder)) + b"/" for folder in self.folders.tolist()]
        return np.char.add(np.repeat(np.array(prefixes), self.counts), self.names)

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the class number of each image."""
        return np.repeat(self.owner, self.counts)


def user_cache() -> Path:
    """Return the user's cache folder, for data that is prepared only once per node.

    Raises RuntimeError if the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpjob_trainer"


def listing(root: Path, kept_in: Path | None) -> Listing:
    """Return the images below `root`. Raises OSError.

    If no folder has changed since an earlier start, that start's listing is used. Listings are kept
    in the folder `kept_in`; None means the user's cache. If the folder is not writable, each start
    lists the images again.
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
            # The ranks of a node start at the same time. The lock lets one of them create the
            # listing.
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return _walk(root)
        if (kept := _read_kept(path, root)) is not None:
            return kept
        began = time.time_ns()
        found = _walk(root)
        settled = found.changed[:, 0].max() < began - _SETTLED_NS
        # If the times of all folders are equal, the file system may not record times at all. In
        # that case, the listing is not kept.
        if settled and (found.changed != found.changed[0]).any():
            _keep(path, found)
        return found


def _walk(root: Path) -> Listing:
    """List the folders below `root` and the images in them.

    The times of a folder are read before its content. If the folder changes in between, the next
    start finds newer times, and does not use this listing.
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
    """Return the kept listing, or None if it cannot be used.

    A listing cannot be used if it is missing or unreadable, or if a folder has changed since the
    listing was made.
    """
    try:
        with path.open("rb") as file:
            saved = read_arrays(file)
        kept = Listing(**{name: saved[name] for name in Listing.__dataclass_fields__})
        return kept if np.array_equal(_changed(root, kept.folders), kept.changed) else None
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile):
        return None


def read_arrays(file: IO[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a numpy.savez file by name, if they have integers or strings.

    numpy.load is not safe for files that may be damaged or malicious. It would unpack compressed
    data to a thousand times the file's size. It would also allocate the size that an array's header
    claims before it looks for the content. Raises ValueError, KeyError, EOFError,
    NotImplementedError, zipfile.BadZipFile.
    """
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        plain = all(part.compress_type == zipfile.ZIP_STORED and not part.flag_bits & _ENCRYPTED for part in parts)
        if not plain or len(parts) > _MOST_ARRAYS:
            raise ValueError("it has too many arrays, or they are compressed or encrypted")
        return {part.filename.removesuffix(".npy"): _array(archive.read(part)) for part in parts}


def _array(content: bytes) -> npt.NDArray[Any]:
    """Return the array in `content`, which is in version 1.0 or 2.0 of numpy's format.

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
