"""Stores checkpoints in an object store, where every reader sees a whole checkpoint or none.

    complete/TERM-STEP.json     manifest, written last: one checkpoint's files, sizes and checksums
    data/TERM-STEP-RANDOM/FILE  files that a manifest lists, or leftovers of a failed upload
    terms/TERM                  one per incarnation of a job, numbered in order
    scores.json                 the evaluations of one metric, which determine the best checkpoint

A checkpoint is a file or a folder. Terms order checkpoints by incarnation, without a clock. If a
process was partitioned and reconnects, its checkpoints rank below those of the incarnation that
replaced it, even if its steps are higher.

Example: incarnation 1 has stored steps 100 and 200 and is partitioned. Incarnation 2 continues from
200 and stores 250 (2-250). The old process then stores 300 (1-300), which is superseded, because
the later term 2 has a lower step. Readers get 2-250, 1-200 and 1-100, and `sweep` deletes 1-300.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_COMPLETE, _DATA, _TERMS, _SCORES = "complete", "data", "terms", "scores.json"
_VANISHED = "vanished"
"""Name of an object that marks a checkpoint as one that will never be complete. The object is
stored next to the files of a checkpoint that several processes upload.
"""
_MANIFEST = re.compile(rf"{_COMPLETE}/(\d{{9}})-(\d{{9}})\.json")
_NAME = re.compile(r"(?!\.{1,2}$)[-A-Za-z0-9_.=+@,]{1,200}")
_MANIFEST_BYTES = 2**20
MOST_FILES = 5000
_PIECE = 2**20
_REQUEST_SECONDS = 100
"""Maximum number of seconds for a whole request, even if bytes are still being transferred. The
value must be less than 120 s, because a rank that waits longer for a server counts as hung.
"""
_RANGE = 64 * 2**20
"""Maximum number of bytes that one request reads from a file."""
_LARGEST_PARTS, _SMALLEST_PART = 9000, 5 * 2**20
"""S3 accepts at most 10000 parts per object. Every part except the last must have at least
_SMALLEST_PART bytes."""
_TRIES = 100
"""Maximum number of times that `join` tries to start a new incarnation. An attempt fails if another
incarnation starts at the same time.
"""
URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?|file:///[^?#]+")


class BucketError(Exception):
    """An operation on the bucket failed. The message gives the object's URL and the reason."""


class LibraryMissing(BucketError):
    """The obstore package is not installed in the image."""


class Damaged(BucketError):
    """An object is missing, or differs from the uploaded file. Retrying would not help."""


class Vanished(BucketError):
    """A file of a checkpoint was removed from the disk before it was uploaded."""


@dataclass(frozen=True, order=True)
class Stored:
    """A complete checkpoint in the bucket. Later checkpoints compare as greater."""

    term: int
    step: int

    @property
    def key(self) -> str:
        return f"{_COMPLETE}/{self.term:09d}-{self.step:09d}.json"


@dataclass(frozen=True)
class File:
    """One file of a checkpoint. `path` is relative to the parent folder of the checkpoint."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CopyManifest:
    """The list of a checkpoint's files.

    `name` is the name of the checkpoint's file or folder. `data` is the key prefix of the files in
    the bucket.
    """

    name: str
    data: str
    files: tuple[File, ...]
    epoch: int | None = None

    def written(self, step: int) -> bytes:
        """Return the JSON text of the manifest, as it is stored in the bucket."""
        files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in self.files]
        whole = {"step": step, "epoch": self.epoch, "name": self.name, "data": self.data, "files": files}
        return json.dumps(whole).encode()

    @classmethod
    def read(cls, text: bytes, entry: Stored) -> CopyManifest | None:
        """Parse text from `written`; return None if it is not a valid manifest of `entry`."""
        try:
            read = json.loads(text)
            files = tuple(File(f["path"], f["size"], f["sha256"]) for f in read["files"])
            found = cls(read["name"], read["data"], files, read.get("epoch"))
            good = read["step"] == entry.step and _NAME.fullmatch(found.name) and 0 < len(files) <= MOST_FILES
            mine = re.fullmatch(rf"{_DATA}/{entry.term:09d}-{entry.step:09d}-[0-9a-f]{{8}}", found.data)
            epoch = found.epoch is None or type(found.epoch) is int
            if good and mine and epoch and all(_is_of(found.name, file) for file in files):
                return found
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return None


class Bucket:
    """The checkpoints under one URL of an object store.

    `store` is any obstore store. Methods raise BucketError with the URL and the reason.
    """

    def __init__(self, store: Any, url: str) -> None:
        import obstore

        self._obs, self._store, self.url = obstore, store, url
        self.term = 0
        self._slow = False
        self._failed = set[str]()
        """Key prefixes of uploads that failed and will not be continued. `sweep` deletes the
        objects under these prefixes. Each attempt to upload has its own prefix.
        """

    @classmethod
    def open(cls, url: str, *, endpoint: str = "", region: str = "") -> Bucket:
        """Open the bucket at a URL of the form s3://BUCKET/PREFIX or file:///FOLDER.

        Credentials, endpoint and region come from the AWS environment variables (AWS_ACCESS_KEY_ID,
        AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION) and from the pod's service account.
        `endpoint` and `region` are used only where the environment does not set them.

        Raises:
            LibraryMissing: obstore is not installed.
            BucketError: the URL is invalid, half of the credentials are missing, or the folder
                cannot be created.
        """
        if not URL.fullmatch(url):
            raise BucketError(f"{url}: must be s3://BUCKET/PREFIX or file:///FOLDER")
        try:
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, S3Store
        except ImportError:
            raise LibraryMissing(
                f"{url} needs the package obstore, which this image lacks; add `pip install obstore` to the image"
            ) from None
        options: dict[str, Any] = {"client_options": {"connect_timeout": "10s", "timeout": f"{_REQUEST_SECONDS}s"}}
        options["retry_config"] = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=60)}
        known = os.environ.get
        if endpoint and not known("AWS_ENDPOINT_URL"):
            options["endpoint"] = endpoint
        if region and not (known("AWS_REGION") or known("AWS_DEFAULT_REGION")):
            options["region"] = region
        for option in ("access_key_id", "secret_access_key", "session_token"):
            if (given := known(f"AWS_{option.upper()}", "")) != given.strip():
                # Secrets often end with a newline, which makes obstore panic.
                options[option] = given.strip()
        endpoint = known("AWS_ENDPOINT_URL", "") or endpoint
        if endpoint.startswith("http://"):
            options["client_options"]["allow_http"] = True
        try:
            local = url.startswith("file:")
            store = LocalStore(url[len("file://") :], mkdir=True) if local else S3Store.from_url(url, **options)
        except (BaseError, OSError) as error:
            raise BucketError(f"{url} cannot be opened: {_first_line(error)}") from None
        return cls(store, url)

    # --- reading

    def entries(self) -> list[Stored]:
        """Return the complete checkpoints in the bucket, newest first.

        Superseded checkpoints are left out. A checkpoint is superseded if a later incarnation has
        stored a checkpoint with the same or a lower step.
        """
        return _in_order(self._listed())

    def _listed(self) -> list[Stored]:
        matches = [_MANIFEST.fullmatch(key) for key in self._keys(_COMPLETE)]
        return [Stored(int(m[1]), int(m[2])) for m in matches if m]

    def _keys(self, prefix: str) -> list[str]:
        return list(self._sizes(prefix))

    def fetch(self, entry: Stored, folder: Path) -> Path:
        """Download a checkpoint into the folder, either completely or not at all.

        An existing checkpoint with the same name is replaced. Raises BucketError, OSError.
        """
        manifest = self.manifest(entry)
        target = folder / manifest.name
        temporary = folder / f".{manifest.name}.{os.getpid()}.fetch.tmp"
        replaced = folder / f".{manifest.name}.{os.getpid()}.old.tmp"
        try:
            for file in manifest.files:
                to = Path(str(temporary) + file.path[len(manifest.name) :])
                to.parent.mkdir(parents=True, exist_ok=True)
                self._download(f"{manifest.data}/{file.path}", to, file)
            if temporary.is_dir() or target.is_dir():
                if target.exists():
                    target.rename(replaced)
                try:
                    temporary.rename(target)
                except OSError:
                    if replaced.exists():
                        replaced.rename(target)
                    raise
            else:
                temporary.replace(target)
        finally:
            discard(temporary)
            discard(replaced)
        return target

    def manifest(self, entry: Stored) -> CopyManifest:
        """Download the manifest of a checkpoint.

        Raises Damaged if the manifest is malformed. Raises BucketError for other failures.
        """
        found = CopyManifest.read(self._get(entry.key), entry)
        if found is None:
            raise Damaged(f"{self.url}/{entry.key} is not a checkpoint's manifest")
        return found

    def fetch_file(self, manifest: CopyManifest, file: File, to: Path) -> None:
        """Download one file of a checkpoint to the path `to`.

        Raises BucketError and OSError. After an error, an incomplete file may be left at `to`.
        """
        self._download(f"{manifest.data}/{file.path}", to, file)

    def _download(self, key: str, to: Path, expected: File) -> None:
        digest, size = hashlib.sha256(), 0
        with to.open("wb") as file:

            def pieces() -> None:
                nonlocal size
                whole = expected.size <= _RANGE
                while True:
                    before, end = size, min(size + _RANGE, expected.size)
                    found = self._obs.get(self._store, key, options=None if whole else {"range": (before, end)})
                    if found.meta["size"] != expected.size:
                        size = -1
                        return
                    for piece in found.stream(min_chunk_size=_PIECE):
                        size += len(piece)
                        digest.update(piece)
                        file.write(piece)
                    if size >= expected.size or size == before:
                        return

            self._try("read", key, pieces)
            file.flush()
            os.fsync(file.fileno())
        if size != expected.size or digest.hexdigest() != expected.sha256:
            raise Damaged(f"{self.url}/{key} differs from the uploaded file in size or checksum")

    def size_of(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist. Raises BucketError."""
        try:
            return int(self._try("read", key, lambda: self._obs.head(self._store, key)["size"]))
        except Damaged:
            return None

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return {key: size in bytes} of the objects under a prefix. Raises BucketError."""
        return self._sizes(prefix)

    def read_end(self, key: str, most: int) -> bytes:
        """Return the last `most` bytes of an object. Raises BucketError."""

        def read() -> bytes:
            size = self._obs.head(self._store, key)["size"]
            if not size:
                return b""
            return bytes(self._obs.get_range(self._store, key, start=max(0, size - most), end=size))

        found: bytes = self._try("read", key, read)
        return found

    def scores(self, metric: str) -> dict[int, float]:
        """Return {step: score} as stored by `put_scores`; empty if none are stored for this metric.

        Raises BucketError if the bucket does not respond. If a missing response were treated as "no
        scores", the best checkpoint could be deleted.
        """
        try:
            found = json.loads(self._get(_SCORES))
            of_metric = found["scores"].items() if found.get("metric") == metric else ()
            return {int(step): math.nan if value is None else float(value) for step, value in of_metric}
        except (Damaged, ValueError, KeyError, TypeError, AttributeError):
            return {}

    # --- writing

    def take_term(self) -> int:
        """Become the newest incarnation of the job, and return its term.

        From now on, `publish` stores checkpoints under this term. If two incarnations start at the
        same time, the second one gets the next term.
        """
        self.term = self._highest_term() + 1
        while not self._create(f"{_TERMS}/{self.term:09d}", b""):
            self.term += 1
        return self.term

    def join(self, job: str, order: tuple[int, ...]) -> Stored | None:
        """Join an incarnation of `job`, and return the checkpoint that all ranks continue from.

        The first rank that joins chooses the checkpoint, and records it with a conditional write.
        The server rejects the same write from other ranks, and they read the first rank's record
        instead. So the ranks need no connection to each other. `order` is the position of this
        incarnation among all incarnations of the job, and is equal on all ranks.

        The result is the newest complete checkpoint that the first rank found in the bucket; None
        if there was none. Raises BucketError, for example if a later incarnation of the job has
        started.
        """
        for _ in range(_TRIES):
            highest = self._highest_term()
            begun = self._begun(highest)
            others = begun.get("order")
            if begun.get("job") == job and isinstance(others, list) and all(type(number) is int for number in others):
                if tuple(others) == order:
                    self.term = highest
                    return self._source(begun)
                if tuple(others) > order:
                    raise BucketError(
                        f"{self.url}: a newer attempt of this job is writing to this folder, so this process exits"
                    )
            whole = self.entries()
            source = [whole[0].term, whole[0].step] if whole else None
            text = json.dumps({"job": job, "order": order, "from": source}).encode()
            if self._create(f"{_TERMS}/{highest + 1:09d}", text):
                self.term = highest + 1
                return whole[0] if whole else None
        raise BucketError(
            f"{self.url}/{_TERMS} keeps changing, because several jobs write to it; use one folder per job"
        )

    def _highest_term(self) -> int:
        taken = [int(key.rpartition("/")[2]) for key in self._keys(_TERMS) if key.rpartition("/")[2].isdecimal()]
        return max([*taken, *(one.term for one in self._listed())], default=0)

    def _begun(self, term: int) -> dict[str, Any]:
        key = f"{_TERMS}/{term:09d}"
        if key not in self._keys(_TERMS):
            return {}
        try:
            read = json.loads(self._get(key) or b"{}")
        except ValueError:
            return {}
        return read if isinstance(read, dict) else {}

    def _source(self, begun: dict[str, Any]) -> Stored | None:
        source = begun.get("from")
        if source is None:
            return None
        try:
            term, step = source
            return Stored(int(term), int(step))
        except (TypeError, ValueError):
            raise BucketError(f"{self.url}/{_TERMS}/{self.term:09d} does not name a checkpoint") from None

    def _create(self, key: str, text: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        def create() -> bool:
            try:
                self._obs.put(self._store, key, text, mode="create")
            except AlreadyExistsError:
                return False
            return True

        return bool(self._try("created", key, create))

    def publish(self, path: Path, step: int, epoch: int | None = None) -> Stored:
        """Upload a checkpoint (a file or a folder), and then its manifest.

        Readers ignore a checkpoint without a manifest, so they never see an incomplete checkpoint.
        Raises Vanished, BucketError, OSError.
        """
        data, local = self.data_of(step, secrets.token_hex(4)), [path]
        try:
            local = files_of(path)
            files = tuple(self._published(data, file, path.parent) for file in local)
            return self._complete(step, CopyManifest(path.name, data, files, epoch))
        except (BucketError, OSError):
            self._failed.add(data)  # `sweep` keeps the files if the manifest was written after all
            self._check_there(local)
            raise

    def _published(self, data: str, file: Path, above: Path) -> File:
        """Upload a file, and return its entry for the manifest.

        The entry's path is relative to the folder `above`. Raises BucketError, OSError.
        """
        below, before = file.relative_to(above).as_posix(), _signature(file)
        digest = sha256_of(file)
        self._put(f"{data}/{below}", file)
        if _signature(file) != before:
            raise BucketError(
                f"{file} changed while it was being copied to {self.url}; write each checkpoint under a"
                " temporary name, then rename it with os.replace"
            )
        return File(below, before[0], digest)

    def data_of(self, step: int, mark: str) -> str:
        """Return the key prefix under which this incarnation uploads a checkpoint's files.

        `mark` is a string of 8 hexadecimal digits that distinguishes several attempts to upload the
        same step.
        """
        return f"{_DATA}/{self.term:09d}-{step:09d}-{mark}"

    def upload(self, path: Path, data: str, names: Iterable[str]) -> None:
        """Upload the files `names` in the folder `path`, except those that are already in the
        bucket.

        `commit` later completes the checkpoint. Raises BucketError and OSError. Raises Vanished if
        one of the files was removed. In that case, `lacking` raises Vanished in the other processes
        too, so that they do not wait for the file.
        """
        there, names = self._sizes(data), tuple(names)
        try:
            for name in names:
                key = f"{data}/{path.name}/{name}"
                if there.get(key) != (path / name).stat().st_size:
                    self._put(key, path / name)
        except (BucketError, OSError):
            try:
                self._check_there([path / name for name in names])
            except Vanished:
                mark = f"{data}/{_VANISHED}"
                self._try("written", mark, lambda: self._obs.put(self._store, mark, b""))
                raise
            raise

    def _check_there(self, files: Iterable[Path]) -> None:
        """Raise Vanished if a file was removed, because retrying its upload would be useless."""
        for file in files:
            try:
                file.stat()
            except FileNotFoundError:
                raise Vanished(f"{file} was removed before it was uploaded to {self.url}") from None

    def lacking(self, manifest: CopyManifest) -> list[str]:
        """Return the paths of a checkpoint's files that are not in the bucket at their full size.

        An object appears in the bucket only once its upload is complete. Raises Vanished if a file
        will never be uploaded.
        """
        there = self._sizes(manifest.data)
        if f"{manifest.data}/{_VANISHED}" in there:
            self._failed.add(manifest.data)
            raise Vanished(
                f"another node removed a part of {manifest.name} before that part was uploaded to {self.url}"
            )
        return [file.path for file in manifest.files if there.get(f"{manifest.data}/{file.path}") != file.size]

    def commit(self, step: int, manifest: CopyManifest) -> Stored:
        """Complete a checkpoint whose files were uploaded by several processes.

        Raises BucketError if a file is missing.
        """
        if lacking := self.lacking(manifest):
            raise BucketError(f"{self.url}/{manifest.data}/{lacking[0]} has not been uploaded")
        return self._complete(step, manifest)

    def _complete(self, step: int, manifest: CopyManifest) -> Stored:
        entry = Stored(self.term, step)
        text = manifest.written(step)
        if len(text) > _MANIFEST_BYTES or len(manifest.files) > MOST_FILES:
            raise BucketError(
                f"{self.url}/{entry.key} would list {len(manifest.files)} files in {len(text)} bytes, but"
                f" readers accept at most {MOST_FILES} files in {_MANIFEST_BYTES} bytes"
            )
        self._try("written", entry.key, lambda: self._obs.put(self._store, entry.key, text))
        return entry

    def put_file(self, key: str, file: Path, watch: Callable[[int], None]) -> None:
        """Upload one file that is not part of a checkpoint.

        During the upload, `watch` is called with the number of bytes that have been read from the
        file. Raises BucketError, OSError.
        """
        self._put(key, file, watch)

    def _put(self, key: str, file: Path, watch: Callable[[int], None] | None = None) -> None:
        size = file.stat().st_size
        piece = max(_SMALLEST_PART, size // _LARGEST_PARTS)

        def put(**options: Any) -> None:
            with _Watched(file, watch) if watch else contextlib.nullcontext(file) as source:
                self._obs.put(self._store, key, source, chunk_size=piece, **options)

        began = time.monotonic()
        try:
            self._try("written", key, partial(put, max_concurrency=1) if self._slow else put)
        except BucketError:
            # By default, twelve parts of a file are uploaded at the same time, each within the time
            # limit of a request. On a slow connection, none of the parts would be complete in time.
            # From now on, upload one part at a time.
            if self._slow or size <= piece or time.monotonic() - began < _REQUEST_SECONDS:
                raise
            self._slow = True
            self._put(key, file, watch)

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Return {key: size in bytes} of the objects under a prefix."""

        def listed() -> dict[str, int]:
            return {item["path"]: item["size"] for page in self._obs.list(self._store, prefix) for item in page}

        found: dict[str, int] = self._try("listed", prefix, listed)
        if not found and self.url.startswith("s3:"):
            self._check_server(prefix)
        return found

    def _check_server(self, prefix: str) -> None:
        """Raise BucketError if the server returns an object that was never written.

        Without this check, a login page could count as an empty bucket, because obstore reads any
        well-formed XML without objects as an empty listing.
        """
        page = None
        with contextlib.suppress(BucketError):
            page = self._get(f"{prefix}/never-written")
        if page is not None:
            raise BucketError(
                f"{self.url}/{prefix} cannot be listed: the server does not speak S3, because it sends"
                f" {page[:100]!r} for an object that does not exist; check the endpoint"
            )

    def put_scores(self, scores: dict[int, float], metric: str) -> None:
        """Store the scores of all steps, and the metric's name.

        An infinite or undefined score becomes null, because JSON cannot represent it.
        """
        of_step = {str(step): value if math.isfinite(value) else None for step, value in scores.items()}
        text = json.dumps({"metric": metric, "scores": of_step}).encode()
        self._try("written", _SCORES, lambda: self._obs.put(self._store, _SCORES, text))

    def remove(self, entries: Iterable[Stored]) -> None:
        """Delete checkpoints from the bucket.

        The manifest of a checkpoint is deleted first. Without a manifest, readers ignore the
        remaining files.
        """
        for entry in entries:
            self._delete([entry.key])
            self._delete(self._of(entry))

    def sweep(self) -> None:
        """Delete leftovers from earlier incarnations and from failed calls to `publish`.

        Leftovers are the files of interrupted uploads, and superseded checkpoints. This method must
        not run while `publish` is running.
        """
        # Do not list the bucket again below, because a second listing could include newer
        # checkpoints.
        listed = self._listed()
        whole = _in_order(listed)
        self.remove(set(listed) - set(whole))
        named = set[str]()
        for entry in whole:
            try:
                named.add(self.manifest(entry).data)
            except BucketError:
                # If a manifest cannot be read, the files of its checkpoint are unknown.
                return
        for key in self._keys(_DATA):
            folder = "/".join(key.split("/")[:2])
            term = re.fullmatch(rf"{_DATA}/(\d{{9}})-.*", folder)
            if term and (int(term[1]) < self.term or folder in self._failed) and folder not in named:
                self._delete([key])
        self._failed.clear()
        self._delete(key for key in self._keys(_TERMS) if key < f"{_TERMS}/{self.term:09d}")

    def _of(self, entry: Stored) -> list[str]:
        start = f"{_DATA}/{entry.term:09d}-{entry.step:09d}-"
        return [key for key in self._keys(_DATA) if key.startswith(start)]

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._try("deleted", key, partial(self._obs.delete, self._store, key))

    def _get(self, key: str) -> bytes:
        def get() -> bytes:
            found = self._obs.get(self._store, key)
            if found.meta["size"] > _MANIFEST_BYTES:
                raise Damaged(f"{self.url}/{key} is too large to be valid")
            return bytes(found.bytes())

        read: bytes = self._try("read", key, get)
        return read

    def _try(self, what: str, key: str, act: Callable[[], Any]) -> Any:
        from obstore.exceptions import BaseError, NotFoundError

        try:
            return act()
        except (BaseError, FileNotFoundError, PermissionError) as error:
            kind = Damaged if isinstance(error, (NotFoundError, FileNotFoundError)) else BucketError
            raise kind(f"{self.url}/{key} cannot be {what}: {type(error).__name__}: {_first_line(error)}") from None
        except BaseException as error:
            # A Rust panic is not a subclass of Exception, so it would end a thread that catches
            # only Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise BucketError(f"{self.url}/{key} cannot be {what}: obstore panicked: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:500]


def _in_order(listed: Iterable[Stored]) -> list[Stored]:
    """Return the checkpoints, newest first, without superseded ones.

    A checkpoint is superseded if a later incarnation has stored a checkpoint with the same or a
    lower step.
    """
    found: list[Stored] = []
    for one in sorted(listed, reverse=True):
        if not found or one.step < found[-1].step:
            found.append(one)
    return found


def files_of(path: Path) -> list[Path]:
    """Return the paths of the files of a checkpoint (a file or a folder).

    Raises BucketError if a file cannot be stored, or if the folder has no files or too many files.
    """
    found = [path] if path.is_file() else sorted(f for f in path.rglob("*") if not f.is_dir() or f.is_symlink())
    if not found or len(found) > MOST_FILES:
        raise BucketError(
            f"{path} contains {len(found)} files; a checkpoint must be a file, or a folder of 1 to {MOST_FILES} files"
        )
    for file in found:
        names = file.relative_to(path.parent).parts
        if file.is_dir():  # A copy of the checkpoint would lack the files in the linked folder.
            raise BucketError(f"{file}: links to folders cannot be copied; replace the link with a copy of the folder")
        if not file.is_file() or not all(_NAME.fullmatch(name) for name in names):
            raise BucketError(
                f"{file}: cannot be copied; use regular files, named with only letters, digits and -_.=+@,"
            )
    return found


class _Watched(io.FileIO):
    """A file that calls `watch` after each read, with the number of bytes read so far."""

    def __init__(self, path: Path, watch: Callable[[int], None]) -> None:
        super().__init__(path)
        self._watch = watch

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(-1 if size is None else size)
        self._watch(self.tell())
        return found or b""


def _is_of(name: str, file: File) -> bool:
    """Whether `publish` could have written this manifest entry for a checkpoint named `name`."""
    parts = file.path.split("/")
    named = parts[0] == name and all(_NAME.fullmatch(part) for part in parts)
    return named and type(file.size) is int and file.size >= 0 and isinstance(file.sha256, str)


def _signature(file: Path) -> tuple[int, int, int]:
    state = file.stat()
    return state.st_size, state.st_mtime_ns, state.st_ino


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def discard(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
