"""Fetching code.archive: verification before unpacking, hostile archives, limits, a second start,
and a missing bucket.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ddpjob_runtime.launcher import fetch_code, fetch_data
from ddpjob_runtime.launcher.fetch_code import BadArchive, CodeFetch, CodeSettings, unpack
from ddpjob_runtime.launcher.fetch_data import FetchAbandoned, Unfit
from ddpjob_runtime.launcher.s3_reader import BucketRefusal
from test_fetch_data import Answer, Server


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: object
) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, len(content)
    for key, value in more.items():
        setattr(made, key, value)
    return made, content


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for made, content in members:
            tar.addfile(made, io.BytesIO(content))
    return file.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".ddpjob-"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def unpacked(tmp_path: Path, archive: bytes, **limits: int) -> dict[str, bytes]:
    (tmp_path / "archive").write_bytes(archive)
    folder = tmp_path / "inside" / "code"
    folder.mkdir(parents=True, exist_ok=True)
    unpack(tmp_path / "archive", folder, **limits)
    return files(folder)


def header(**fields: int) -> bytes:
    """Return a gzipped tar with a single header, whose size Python would not write."""
    made = tarfile.TarInfo("a")
    block = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    size, kind = fields["size"], fields.get("kind", ord("0"))
    block[124:136] = bytes([0xFF if size < 0 else 0x80]) + (size & (2**88 - 1)).to_bytes(11, "big")
    block[156] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return gzip.compress(bytes(block) + b"x" * 1024)


# --- unpacking


def test_files_folders_and_modes_are_unpacked(tmp_path: Path) -> None:
    archive = packed(
        member("./", kind=tarfile.DIRTYPE), member("./train.py", b"1"), member("lib", kind=tarfile.DIRTYPE, mode=0o000),
        member("lib/ü" + "x" * 200, b"2"), member("run.sh", b"3", mode=0o4777, uid=12, gid=13),
    )  # fmt: skip
    assert unpacked(tmp_path, archive) == {"train.py": b"1", "lib/ü" + "x" * 200: b"2", "run.sh": b"3"}
    state = (tmp_path / "inside/code/run.sh").stat()
    assert state.st_mode & stat.S_IXUSR and not state.st_mode & (stat.S_ISUID | stat.S_IWOTH)
    assert state.st_uid == os.getuid()


HOSTILE = {
    "above": [member("../up", b"x")],
    "above, later": [member("lib/../../up", b"x")],
    "absolute": [member("/tmp/ddpjob-absolute", b"x")],
    "absolute folder": [member("/tmp/ddpjob-absolute/", kind=tarfile.DIRTYPE)],
    "symbolic link": [member("link", kind=tarfile.SYMTYPE, linkname="..")],
    "a file through a link": [member("l", kind=tarfile.SYMTYPE, linkname=".."), member("l/up", b"x")],
    "hard link": [member("link", kind=tarfile.LNKTYPE, linkname="../secret")],
    "device": [member("dev", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "block device": [member("dev", kind=tarfile.BLKTYPE)],
    "pipe": [member("pipe", kind=tarfile.FIFOTYPE)],
    "twice": [member("a", b"1"), member("./a", b"2")],
    "file and folder": [member("a", b"1"), member("a/b", b"2")],
    "folder and file": [member("a/b", b"1"), member("a", b"2")],
    "the marker": [member(".ddpjob-code-0", b"1")],
    "a Windows path": [member("C:\\a", b"1")],
    "a control character": [member("a\nb", b"1")],
    "a name that is too long": [member("x" * 300, b"1")],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_member_is_refused_and_nothing_is_written_outside(kind: str, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "secret").write_text("s")
    says = "neither a file nor a folder" if re.search("link|device|pipe", kind) else "cannot be unpacked|occurs twice"
    with pytest.raises(BadArchive, match=says):
        unpacked(tmp_path, packed(*HOSTILE[kind]))
    assert {path.name for path in (tmp_path / "inside").iterdir()} == {"secret", "code"}
    assert {path.name for path in tmp_path.iterdir()} == {"inside", "archive"}
    assert not Path("/tmp/ddpjob-absolute").exists()
    assert not [path for path in (tmp_path / "inside").rglob("*") if path.is_symlink()]


@pytest.mark.parametrize(
    "archive",
    [
        b"", b"no archive", gzip.compress(b""), gzip.compress(b"x" * 512), gzip.compress(b"x" * 10000),
        packed(member("a", b"x" * 100_000))[:-200], header(size=-512), header(size=2**60), header(size=-(2**40)),
        header(size=2**33, kind=ord("x")), header(size=-1024, kind=ord("x")), header(size=2**33, kind=ord("L")),
        header(size=512, kind=ord("S")),
    ],
    ids=lambda _: "archive",  # gzip writes the time, and all workers must collect the same names.
)  # fmt: skip
def test_a_malformed_archive_is_refused(archive: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadArchive):
        unpacked(tmp_path, archive)


def test_a_decompression_bomb_is_stopped_at_the_limits_of_bytes_and_files(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match=r"more than 1\.0 MiB"):
        unpacked(tmp_path, packed(member("a", bytes(900_000)), member("b", bytes(900_000))), most=2**20)
    with pytest.raises(BadArchive, match="more than 3 files"):
        unpacked(tmp_path, packed(*(member(f"f{n}", kind=tarfile.DIRTYPE) for n in range(4))), most_files=3)
    # Bytes that belong to no file count too.
    padding = gzip.compress(member("a", b"")[0].tobuf()) + gzip.compress(b"\0" * 512 + b"x" * 512 + bytes(5_000_000))
    with pytest.raises(BadArchive):
        unpacked(tmp_path, header(size=2_000_000)[:-8] + padding, most=2**20, most_files=10)


def test_a_header_that_would_exhaust_the_memory_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match="it has a header of 3"):
        unpacked(tmp_path, packed(member("a", pax_headers={"comment": "x" * 3_000_000})))


# --- fetching


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(fetch_data, "LONGEST_PAUSE", 0.02)
    made = Server()
    yield made
    made.close()


def serve(server: Server, content: bytes, status: int = 200) -> Callable[[bytes], None]:
    """Serve one object, and return a function that replaces it."""
    current = [content]

    def answer(path: str, query: object) -> Answer:
        assert path == "/bucket/code/a.tar.gz", "the bucket is not listed"
        return status, {}, current[0]

    server.answer = answer
    return lambda new: current.__setitem__(0, new)


@pytest.fixture
def settings(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], CodeSettings]:
    def take(content: bytes) -> CodeSettings:
        variables = {"URL": "s3://bucket/code/a.tar.gz", "DIGEST": f"sha256:{hashlib.sha256(content).hexdigest()}"}
        variables |= {"ENDPOINT": server.url, "DIR": str(tmp_path / "code"), "AWS_ACCESS_KEY_ID": "a"}
        for name, value in {**variables, "AWS_SECRET_ACCESS_KEY": "s"}.items():
            monkeypatch.setenv(f"DDPJOB_CODE_{name}", value)
        taken = CodeSettings.take()
        assert taken is not None
        return taken

    return take


def fetch(settings: CodeSettings, cancelled: Callable[[], bool] = lambda: False) -> None:
    CodeFetch(settings, cancelled, lambda text: None).run()


def test_an_archive_is_unpacked_only_once_and_files_that_the_program_wrote_are_kept(
    server: Server, settings: Callable[[bytes], CodeSettings], tmp_path: Path
) -> None:
    content = packed(member("train.py", b"print()"))
    serve(server, content)
    taken = settings(content)
    assert "DDPJOB_CODE_AWS_SECRET_ACCESS_KEY" not in os.environ
    fetch(taken)
    (tmp_path / "code" / "out.txt").write_text("written by the program")
    (tmp_path / "code" / "train.py").write_text("edited by the program")
    fetch(taken)
    assert len(server.requests) == 1
    assert files(tmp_path / "code") == {"out.txt": b"written by the program", "train.py": b"edited by the program"}


def test_a_wrong_digest_is_found_before_anything_is_unpacked(
    server: Server, settings: Callable[[bytes], CodeSettings], tmp_path: Path
) -> None:
    serve(server, packed(member("../up", b"x"), member("evil.py", b"x")))
    with pytest.raises(BucketRefusal, match=r"the SHA-256 of .* is [0-9a-f]{64} and differs from code\.digest"):
        fetch(settings(packed(member("train.py", b"1"))))
    assert files(tmp_path / "code") == {} and len(server.requests) == 3


def test_a_damaged_transfer_is_repeated(
    server: Server, settings: Callable[[bytes], CodeSettings], tmp_path: Path
) -> None:
    content = packed(member("train.py", b"1"))
    answers = [
        (503, {}, b"<Error/>"),
        (200, {}, b"?" + content[1:]),
        (200, {"Content-Length": str(len(content))}, b"cut"),
    ]
    server.answer = lambda path, query: answers.pop(0) if answers else (200, {}, content)
    fetch(settings(content))
    assert files(tmp_path / "code") == {"train.py": b"1"} and not answers


def test_the_next_start_completes_an_interrupted_one(
    server: Server, settings: Callable[[bytes], CodeSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = packed(member("a.py", b"1"), member("lib/b.py", b"2"), member("c.py", b"3"))
    serve(server, content)
    real, written = fetch_code._write, list[str]()

    def dying(folder: Path, name: str, *more: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        real(folder, name, *more)  # type: ignore[arg-type]
        written.append(name)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fetch_code, "_write", dying)
        fetch(settings(content))
    fetch(settings(content))
    assert files(tmp_path / "code") == {"a.py": b"1", "lib/b.py": b"2", "c.py": b"3"}


def test_the_files_are_on_the_disk_before_they_count_as_complete(
    server: Server, settings: Callable[[bytes], CodeSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the next start after a power failure could use truncated files."""
    content = packed(member("a.py", b"1"), member("lib/pkg/b.py", b"2"))
    serve(server, content)
    folder, synced = tmp_path / "code", set[str]()

    def fsync(descriptor: int) -> None:
        assert not list(folder.glob(f"{fetch_code._MARKER}*"))
        synced.add(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), folder))
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this file system cannot sync folders")

    monkeypatch.setattr(fetch_code.os, "fsync", fsync)
    fetch(settings(content))
    assert synced == {".", "a.py", "lib", "lib/pkg", "lib/pkg/b.py"}
    assert list(folder.glob(f"{fetch_code._MARKER}*"))


def test_an_archive_is_fetched_only_once_per_machine(server: Server, settings: Callable[[bytes], CodeSettings]) -> None:
    content = packed(member("train.py", b"1" * 100_000))
    serve(server, content)
    taken = settings(content)
    threads = [threading.Thread(target=fetch, args=(taken,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 1


def test_errors_about_a_missing_archive_or_rejected_keys_name_the_field(
    server: Server, settings: Callable[[bytes], CodeSettings]
) -> None:
    for status, body, said in (
        (404, b"<Error><Code>NoSuchKey</Code></Error>", "submit the job again"),
        (403, b"<Error><Code>AccessDenied</Code></Error>", r"check the keys in code\.secretName"),
    ):
        serve(server, body, status)
        with pytest.raises(BucketRefusal, match=said):
            fetch(settings(b"x"))


def test_a_request_to_stop_ends_the_wait_for_a_bucket(
    server: Server, settings: Callable[[bytes], CodeSettings]
) -> None:
    serve(server, b"<Error/>", 503)
    with pytest.raises(FetchAbandoned):
        fetch(settings(b"x"), lambda: len(server.requests) > 1)


def test_an_archive_that_is_too_large_is_not_downloaded(
    server: Server, settings: Callable[[bytes], CodeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, b"x" * 2000)
    monkeypatch.setattr(fetch_code, "MOST_CODE_BYTES", 1000)
    with pytest.raises(BucketRefusal, match="but the maximum is 1000 bytes"):
        fetch(settings(b"x" * 2000))


@pytest.mark.skipif(os.getuid() == 0, reason="root can write to any folder")
def test_a_folder_owned_by_another_user_is_reported_as_a_manifest_error(
    server: Server, settings: Callable[[bytes], CodeSettings], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir(mode=0o555)
    with pytest.raises(BucketRefusal, match="the container's user cannot write to "):
        fetch(settings(b"x"))


def test_a_full_disk_is_reported_as_a_fault_of_the_node(
    server: Server, settings: Callable[[bytes], CodeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    content = packed(member("train.py", b"1"))
    serve(server, content)
    monkeypatch.setattr(fetch_code, "unpack", full)
    with pytest.raises(Unfit, match="is full"):
        fetch(settings(content))
