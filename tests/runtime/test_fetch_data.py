"""Fetching storage.data.url: signatures, hostile servers and names, checksums, the lock, and
content of an earlier fetch.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from ddpjob_runtime.launcher import fetch_data, s3_reader
from ddpjob_runtime.launcher.fetch_data import (
    Fetch,
    FetchAbandoned,
    FetchSettings,
    Sums,
    Unfit,
    check_names,
    why_not_a_file,
)
from ddpjob_runtime.launcher.s3_reader import Away, BucketPlace, BucketRefusal, Credentials, Keys, Reader, Remote, sign
from runtime_harness import RUNTIME

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """A server that answers as S3 does, unless `answer` is set. `content` maps names below the
    prefix p/ to bytes.
    """

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.answer: Callable[[str, dict[str, list[str]]], Answer | None] = lambda path, query: None
        self.requests: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Otherwise each response waits 40 ms for the acknowledgement of its headers.
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                split = urlsplit(self.path)
                query = parse_qs(split.query)
                status, headers, body = outer.answer(split.path, query) or outer.honest(split.path, self.headers)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if "Content-Length" in headers:
                    self.close_connection = True

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def etag(self, name: str) -> str:
        return self.etags.get(name) or hashlib.md5(self.content[name]).hexdigest()

    def honest(self, path: str, headers: object) -> Answer:
        if path == "/bucket":
            return 200, {}, listing([(f"p/{n}", len(c), self.etag(n)) for n, c in sorted(self.content.items())])
        name = next((n for n in self.content if quote(f"/bucket/p/{n}", safe="/-_.~") == path), None)
        if name is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        asked, whole = headers.get("Range", ""), self.content[name]  # type: ignore[attr-defined]
        if headers.get("If-Match") != f'"{self.etag(name)}"':  # type: ignore[attr-defined]
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        if asked:
            start = int(asked[len("bytes=") : -1])
            return 206, {"Content-Range": f"bytes {start}-{len(whole) - 1}/{len(whole)}", **self.headers}, whole[start:]
        return 200, self.headers, whole

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def listing(objects: list[tuple[str, int, str]], more: str = "") -> bytes:
    contents = "".join(
        f"<Contents><Key>{quote(key)}</Key><Size>{size}</Size><ETag>&quot;{etag}&quot;</ETag></Contents>"
        for key, size, etag in objects
    )
    start = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
    return f"{start}{contents}{more}</ListBucketResult>".encode()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_data, "LONGEST_PAUSE", 0.05)


def test_pods_that_fail_together_do_not_retry_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_data, "LONGEST_PAUSE", 60.0)
    pauses = [fetch_data.pause_after(3) for _ in range(100)]
    assert len(set(pauses)) > 90 and 2 <= min(pauses) < 3 and 5 < max(pauses) <= 6
    assert 30 <= fetch_data.pause_after(10**6) <= 90


def settings(server: Server, folder: Path) -> FetchSettings:
    place = BucketPlace.read("s3://bucket/p", server.url, "")
    return FetchSettings(
        place, Credentials({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}, "us-east-1"), folder
    )


def fetch(server: Server, folder: Path, cancelled: Callable[[], bool] = lambda: False) -> list[str]:
    reported: list[str] = []
    Fetch(settings(server, folder), cancelled, reported.append).run()
    return reported


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".ddpjob-"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def test_the_signature_matches_the_example_in_awss_documentation() -> None:
    keys = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    headers = {"Host": "examplebucket.s3.amazonaws.com", "Range": "bytes=0-9"}
    moment = time.strptime("20130524T000000Z", "%Y%m%dT%H%M%SZ")
    signed = sign(keys, "us-east-1", "/test.txt", "", headers, moment)["Authorization"]
    assert signed.endswith("Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")
    assert "SECRET" not in repr(keys) and "wJal" not in repr(keys)


def test_the_buckets_content_is_fetched_and_a_second_fetch_only_lists(server: Server, tmp_path: Path) -> None:
    server.content = {"a b/ü+%": b"x" * 3_000_000, "empty": b"", "z/y/x": b"1"}
    fetch(server, tmp_path / "d")
    assert files(tmp_path / "d") == server.content
    asked = len(server.requests)
    fetch(server, tmp_path / "d")
    assert len(server.requests) == asked + 1, "only a listing"
    assert not list((tmp_path / "d").glob(".ddpjob-part-*"))


def test_a_connection_is_reused_for_consecutive_objects(server: Server) -> None:
    """Regression: every second object waited a second for a new connection, whatever the server
    answered.
    """
    server.content = {f"{n}": b"x" * n for n in (0, 1, 5, 3_000_000)}
    place = BucketPlace.read("s3://bucket/p", server.url, "")
    reader = Reader(place, Credentials({}, place.region))
    for _ in range(2):
        for remote in list(reader.objects()):
            _, pieces = reader.open(remote, 0)
            assert b"".join(pieces) == server.content[remote.name]
            assert reader._connection is not None and reader._connection.sock is not None
            connection = reader._connection.sock
    assert reader._connection is not None and reader._connection.sock is connection
    reader.close()


def test_changed_objects_are_fetched_again_and_deleted_ones_are_removed(server: Server, tmp_path: Path) -> None:
    server.content = {"same": b"s", "other": b"1", "f/gone": b"g", "edited": b"e", "was/a": b"folder"}
    fetch(server, tmp_path)
    (tmp_path / "edited").write_bytes(b"E")
    (tmp_path / "nobody's").write_bytes(b"n")
    del server.content["f/gone"], server.content["was/a"]
    server.content.update({"other": b"2", "was": b"now a file"})
    before = len(server.requests)
    fetch(server, tmp_path)
    assert files(tmp_path) == {**server.content, "nobody's": b"n"} and not (tmp_path / "f").exists()
    asked = {path.rpartition("/")[2] for path in server.requests[before:] if "list-type" not in path}
    assert asked == {"other", "was", "edited"}, "a request may be repeated on a busy machine"


def test_an_interrupted_download_is_continued(server: Server, tmp_path: Path) -> None:
    server.content = {"big": os.urandom(1_000_000)}
    whole, cut = server.content["big"], True

    def answer(path: str, query: object) -> Answer | None:
        nonlocal cut
        if path.endswith("/big") and cut:
            cut = False
            return 200, {"Content-Length": str(len(whole))}, whole[:600_000]
        return None

    server.answer = answer
    offsets: list[int] = []
    opened = Reader.open

    def noted(self: Reader, remote: Remote, offset: int) -> object:
        offsets.append(offset)
        return opened(self, remote, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "open", noted)
        fetch(server, tmp_path)
    assert files(tmp_path) == server.content and offsets == [0, 600_000]


def test_a_partial_file_of_another_version_or_boot_is_not_continued(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = {"big": b"b" * 1000}
    remote = Remote("big", 1000, server.etag("big"))
    names = [Fetch(settings(server, tmp_path), lambda: False, print)._part(remote)]
    names.append(Fetch(settings(server, tmp_path), lambda: False, print)._part(Remote("big", 1000, "other")))
    monkeypatch.setattr(fetch_data, "_read_boot_id", lambda: "another")
    names.append(Fetch(settings(server, tmp_path), lambda: False, print)._part(remote))
    assert len(set(names)) == 3
    for path in names[:2]:
        path.write_bytes(b"?" * 500)
    fetch(server, tmp_path)
    assert files(tmp_path) == server.content and not any(path.exists() for path in names)


@pytest.mark.parametrize("kind", ["md5", "sha256", "crc32"])
def test_fetched_data_with_a_wrong_checksum_is_never_used(server: Server, tmp_path: Path, kind: str) -> None:
    server.content, server.etags = {"a": b"content"}, {"a": "0" * 32 if kind == "md5" else "abc-2"}
    if kind != "md5":
        server.headers = {f"x-amz-checksum-{kind}": base64.b64encode(b"no").decode()}
    with pytest.raises(
        BucketRefusal, match=r"p/a is damaged in the bucket: its (MD5|SHA256|CRC32) is .* \(after 3 downloads\)"
    ):
        fetch(server, tmp_path)
    assert files(tmp_path) == {}


def test_checksums_of_multipart_and_encrypted_objects_are_ignored() -> None:
    md5, crc = hashlib.md5(b"x").hexdigest(), base64.b64encode(zlib.crc32(b"x").to_bytes(4, "big")).decode()
    for etag, headers, good in (
        (md5, {}, True),
        ("0" * 32, {"x-amz-server-side-encryption": "AES256"}, False),
        ("0" * 32, {"x-amz-server-side-encryption": "aws:kms"}, True),
        ("0" * 32, {"x-amz-server-side-encryption-customer-algorithm": "AES256"}, True),
        ("0" * 32 + "-3", {}, True),
        (md5, {"x-amz-checksum-crc32": crc}, True),
        (md5, {"x-amz-checksum-crc32": "AAAAAA==-2"}, True),
        (md5, {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"}, True),
        (md5, {"x-amz-checksum-crc32": "AAAAAA=="}, False),
    ):
        sums = Sums(Remote("a", 1, etag))
        sums.update(b"x")
        sums.expect(headers)
        assert (sums.problem() == "") is good, (etag, headers)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../x", "a/./x", "a//x", "/x", "x/", "a\0b", "a\nb", "a\\b", "C:x", "b" * 256, "ü" * 128, ".ddpjob-lock",
     ".ddpjob-x/y", ".."],
)  # fmt: skip
def test_the_name_of_an_object_cannot_point_outside_of_the_folder(server: Server, tmp_path: Path, name: str) -> None:
    assert why_not_a_file(name)
    server.content = {"good": b"1"}
    server.answer = lambda path, query: (
        (200, {}, listing([("p/good", 1, "e"), (f"p/{name}", 1, "e")])) if path == "/bucket" else None
    )
    with pytest.raises(BucketRefusal, match="cannot be stored as a file"):
        fetch(server, tmp_path / "d")
    assert files(tmp_path) == {}, "nothing is fetched from such a bucket"


def test_object_names_that_would_give_the_same_file_are_refused() -> None:
    for names, says in ((["a", "a"], "twice"), (["a", "a/b"], "the folder of"), ([], "contains no objects")):
        with pytest.raises(BucketRefusal, match=says):
            check_names([Remote(name, 1, "e") for name in names], "s3://b/p")
    check_names([Remote(name, 1, "e") for name in ("a", "a.b", "b/a", "...", "b/...x")], "s3://b/p")


CONTINUED = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>not S3</html>", "does not speak S3: its response is <html>, not <ListBucketResult>"),
        (b"{}", "is not S3 XML"),
        (b'<!DOCTYPE x [<!ENTITY a "aaaa">]><ListBucketResult/>', "entities"),
        (listing([("other/a", 1, "e")]), "does not speak S3"),
        (listing([("p/a", -1, "e")]), "does not speak S3"),
        (listing([("p/a", 2**61, "e")]), "does not speak S3"),
        (listing([("p/a", 1, "")]), "does not speak S3"),
        (listing([("p/a", 1, "e\r\nHost: x")]), "does not speak S3"),
        (listing([("p/" + "a/" * 600, 1, "e")]), "does not speak S3"),
        (listing([], "<IsTruncated>true</IsTruncated>"), "lacks NextContinuationToken"),
        pytest.param(
            listing([("p/a", 1, "e"), ("p/b", 1, "e")], CONTINUED), "more than 1000 objects", marks=pytest.mark.slow
        ),
        pytest.param(listing([], CONTINUED), "does not end", marks=pytest.mark.slow),
    ],
)
def test_a_hostile_listing_of_a_bucket_ends_the_fetch(
    server: Server, tmp_path: Path, body: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_reader, "MOST_OBJECTS", 1000)
    monkeypatch.setattr(s3_reader, "_MOST_PAGES", 600)
    server.answer = lambda path, query: (200, {}, body)
    with pytest.raises(BucketRefusal, match=says):
        fetch(server, tmp_path)


def test_a_listing_above_the_size_limit_is_not_read(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_reader, "_PAGE_BYTES", 1000)
    server.answer = lambda path, query: (200, {}, b"<a>" + b" " * 2000)
    with pytest.raises(BucketRefusal, match="too large"):
        fetch(server, tmp_path)


def test_a_listing_that_breaks_off_is_retried(server: Server, tmp_path: Path) -> None:
    server.content = {"a": b"1"}
    cut, whole = [1], listing([("p/a", 1, server.etag("a"))])

    def answer(path: str, query: object) -> Answer | None:
        return (
            (200, {"Content-Length": str(len(whole))}, whole[:-30]) if path == "/bucket" and cut and cut.pop() else None
        )

    server.answer = answer
    fetch(server, tmp_path)
    assert files(tmp_path) == {"a": b"1"}


def test_a_bucket_that_is_reachable_again_is_no_longer_reported_unreachable(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = {"a": b"1" * 1000}
    cut, seen, real = [1], list[str](), Reader.open

    def answer(path: str, query: object) -> Answer | None:
        return (200, {"Content-Length": "1000"}, b"1" * 400) if path.endswith("/a") and cut and cut.pop() else None

    def watched(self: Reader, remote: Remote, offset: int) -> tuple[Mapping[str, str], Iterator[bytes]]:
        headers, pieces = real(self, remote, offset)
        return headers, (piece for piece in pieces if seen.append(f"{offset} {made._problem}") is None)

    server.answer = answer
    monkeypatch.setattr(Reader, "open", watched)
    made = Fetch(settings(server, tmp_path), lambda: False, print)
    made.run()
    assert files(tmp_path) == server.content and seen[0] == "0 " and seen[-1] == "400 "


def test_an_object_that_is_longer_than_listed_is_not_stored(server: Server, tmp_path: Path) -> None:
    server.content = {"a": b"1"}
    server.answer = lambda path, query: (200, {}, b"1" * 10_000_000) if path.endswith("/a") else None
    with pytest.raises(BucketRefusal, match="keeps changing while it is listed"):
        fetch(server, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000


def test_a_bucket_that_changes_during_the_fetch_is_listed_again(server: Server, tmp_path: Path) -> None:
    server.content = {"a": b"1"}

    def answer(path: str, query: object) -> Answer | None:
        if path.endswith("/a") and server.content["a"] == b"1":
            server.content["a"] = b"2"
        return None

    server.answer = answer
    fetch(server, tmp_path)
    assert files(tmp_path) == {"a": b"2"}


@pytest.mark.parametrize(
    ("status", "headers", "code", "says"),
    [
        (403, {}, "AccessDenied", "storage.data.secretName"),
        (404, {}, "NoSuchBucket", "NoSuchBucket .*check the URL, endpoint and region in storage.data"),
        (301, {"x-amz-bucket-region": "eu-west-1"}, "PermanentRedirect", "set storage.data.region to eu-west-1"),
        (400, {}, "ExpiredToken", "ExpiredToken"),
    ],
)
def test_an_error_that_no_retry_can_fix_ends_the_fetch_immediately(
    server: Server, tmp_path: Path, status: int, headers: dict[str, str], code: str, says: str
) -> None:
    server.answer = lambda path, query: (status, headers, f"<Error><Code>{code}</Code></Error>".encode())
    with pytest.raises(BucketRefusal, match=says):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, ""), (429, ""), (400, "RequestTimeout"), (403, "RequestTimeTooSkewed")],
)
def test_requests_to_a_busy_server_are_retried(server: Server, tmp_path: Path, status: int, code: str) -> None:
    server.content = {"a": b"1"}
    busy = [1] * 6
    server.answer = lambda path, query: (
        (status, {}, f"<Error><Code>{code}</Code></Error>".encode()) if busy and busy.pop() else None
    )
    fetch(server, tmp_path)
    assert files(tmp_path) == {"a": b"1"}


def test_a_cancelled_fetch_stops_retrying(server: Server, tmp_path: Path) -> None:
    server.answer = lambda path, query: (500, {}, b"")
    with pytest.raises(FetchAbandoned):
        fetch(server, tmp_path, lambda: len(server.requests) > 3)


def test_a_full_disk_is_reported_before_anything_is_fetched(server: Server, tmp_path: Path) -> None:
    server.answer = lambda path, query: (200, {}, listing([("p/a", 2**59, "e")]))
    with pytest.raises(Unfit, match=r"512.0 .*TiB|524288.0 TiB must still be fetched from s3://bucket/p"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


def test_a_disk_without_file_locks_is_reported(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre, for example, does not support locks unless it is mounted with -o flock."""

    def without_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(Unfit, match=r"does not support file locks .*; set storage.data.cache to a folder on a disk"):
        fetch(server, tmp_path)


def test_entries_of_the_record_that_others_have_written_are_harmless(server: Server, tmp_path: Path) -> None:
    server.content = {"a": b"1"}
    (tmp_path / "outside").write_text("mine")
    folder = tmp_path / "d"
    folder.mkdir()
    lines = [["../outside", "e", 1, 1], {"a": 1, "b": 2, "c": 3, "d": 4}, "abcd", ["a", 1, [], {}], None, ["a"]]
    lines.append(["\ud800", "e", 1, 1])
    text = "".join(json.dumps(line) + "\n" for line in lines) + 16_000 * "[" + '\n["a", "cut'
    (folder / ".ddpjob-fetched.jsonl").write_text(text)
    fetch(server, folder)
    assert files(folder) == {"a": b"1"} and (tmp_path / "outside").read_text() == "mine"


HOLDER = """
import sys
from pathlib import Path
from ddpjob_runtime.launcher.fetch_data import Fetch
import time
class Held:
    folder = Path(sys.argv[1])
    class place: url = "s3://bucket/p"
with Fetch(Held, lambda: False, print)._hold_lock():
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_fetches_at_a_time_and_a_killed_one_releases_the_lock(server: Server, tmp_path: Path) -> None:
    server.content = {"a": b"1"}
    command, env = [sys.executable, "-c", HOLDER, str(tmp_path)], {**os.environ, "PYTHONPATH": str(RUNTIME.parent)}
    holder = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    other = threading.Thread(target=fetch, args=(server, tmp_path))
    other.start()
    time.sleep(1)
    assert not server.requests and other.is_alive()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    other.join(10)
    assert not other.is_alive() and files(tmp_path) == {"a": b"1"}


def test_progress_is_reported_on_each_change_and_withdrawn_at_the_end(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.content = {f"{n}": b"x" * 1000 for n in range(20)}
    assert fetch(server, tmp_path / "quick") == [], "a fetch that takes no time is not reported"
    monkeypatch.setattr(fetch_data, "FIRST_NEWS_SECONDS", 0.0)
    server.answer = lambda path, query: time.sleep(0.3)
    reported = fetch(server, tmp_path / "slow")
    assert (
        reported[-1] == "" and len(reported) >= 3 and all(text.startswith("fetching data ") for text in reported[:-1])
    ), reported
    assert all("of 19.5 KiB" in text for text in reported[:-1])


def test_an_unreadable_certificate_authority_fails_immediately(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    place = BucketPlace.read("s3://bucket/p", "https://127.0.0.1:1", "us-east-1")
    for name in ("no-such.pem", "empty.pem"):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / name))
        with pytest.raises(BucketRefusal, match=rf"^AWS_CA_BUNDLE=/.*/{name} cannot be used: ."):
            list(Reader(place, Credentials({}, place.region)).objects())


def test_the_keys_of_the_bucket_are_removed_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("URL", "s3://b/p"), ("DIR", str(tmp_path)), ("AWS_ACCESS_KEY_ID", "k\n"),
                        ("AWS_SECRET_ACCESS_KEY", "s")):  # fmt: skip
        monkeypatch.setenv(f"DDPJOB_DATA_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-checkpoints")
    taken = FetchSettings.take()
    assert taken is not None and taken.credentials.keys() == Keys("k", "s")
    assert not [name for name in os.environ if name.startswith("DDPJOB_DATA_AWS")]
    assert taken.place.server == "https://s3.us-east-1.amazonaws.com"


@pytest.mark.parametrize("begun", [False, True])
def test_an_object_that_google_decompresses_during_transfer_is_reported(server: Server, begun: bool) -> None:
    """An object uploaded by `gcloud storage cp --gzip-local` is always longer than its listing."""
    server.content = {"a": b"packed"}
    server.answer = lambda path, query: (
        (200, {"x-goog-stored-content-encoding": "gzip"}, b"what was packed") if path.endswith("/a") else None
    )
    place = BucketPlace.read("s3://bucket/p", server.url, "")
    reader = Reader(place, Credentials({}, place.region))
    with pytest.raises(BucketRefusal, match=r"/p/a is stored with Content-Encoding gzip.*store the object without"):
        reader.open(next(reader.objects()), 3 if begun else 0)


def test_an_object_with_a_weak_etag_is_refused_and_named(server: Server) -> None:
    server.answer = lambda path, query: (200, {}, listing([("p/a", 1, "x")]).replace(b"&quot;x", b"W/&quot;x"))
    place = BucketPlace.read("s3://bucket/p", server.url, "")
    with pytest.raises(BucketRefusal, match=r'has weak ETags \(W/"x"\), .*use a server with strong ETags'):
        list(Reader(place, Credentials({}, place.region)).objects())


@pytest.mark.parametrize(
    ("there", "missing"),
    [("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")],
)
def test_half_of_a_key_pair_is_reported(there: str, missing: str) -> None:
    """Regression: if one of the two values in the Secret was empty, requests were sent unsigned, as
    to a public bucket.
    """
    with pytest.raises(BucketRefusal, match=f"{there} is set, but {missing} is missing or empty; set both"):
        Credentials({there: "x"}, "r").keys()


def test_keys_of_a_service_accounts_role_are_renewed_when_they_expire(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("web-token\n")
    texts = iter(("2020-01-01T00:00:00Z", "2099-01-01T00:00:00.123456789Z"))  # MinIO writes the second form.

    def answer(path: str, query: object) -> Answer:
        body = f"<SecretAccessKey>s</SecretAccessKey><Expiration>{next(texts)}</Expiration>"
        return 200, {}, f"<R><AccessKeyId>id</AccessKeyId><SessionToken>t</SessionToken>{body}</R>".encode()

    server.answer = answer
    variables = {"AWS_ROLE_ARN": "arn:r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}
    known = Credentials({**variables, "AWS_ENDPOINT_URL_STS": server.url}, "us-east-1")
    for _ in range(3):
        keys = known.keys()
        assert keys is not None and (keys.access, keys.secret, keys.token) == ("id", "s", "t")
    assert len(server.requests) == 2, "the first keys had expired"
    with pytest.raises(BucketRefusal, match="cannot read the service account's token"):
        Credentials({**variables, "AWS_WEB_IDENTITY_TOKEN_FILE": "/no"}, "r").keys()


def test_keys_come_from_pod_identity_if_the_pod_has_one(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    until = "2099-01-01T00:00:00Z"
    body = {"AccessKeyId": "i", "SecretAccessKey": "s", "Token": "t", "Expiration": until}
    server.answer = lambda path, query: (200, {}, json.dumps(body).encode())
    variables = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.url}/v1/credentials"}
    variables["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = str(tmp_path / "token")
    keys = Credentials(variables, "r").keys()
    assert keys is not None and (keys.access, keys.token) == ("i", "t")
    assert Credentials({}, "r").keys() is None
    server.answer = lambda path, query: (403, {}, b"no")
    with pytest.raises(BucketRefusal, match="EKS Pod Identity: HTTP 403"):
        Credentials(variables, "r").keys()


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        ((400, {}, b"<Error><Code>Throttling</Code></Error>"), Away, "HTTP 400"),
        ((400, {}, b'{"__type": "ThrottlingException"}'), Away, "HTTP 400"),
        ((200, {"Content-Length": "99"}, b'{"AccessKeyId": "i"'), Away, "the response is incomplete"),
        ((503, {"Transfer-Encoding": "chunked", "Content-Length": "9"}, b"ff\r\n<Error>"), Away, "IncompleteRead"),
        ((200, {}, b"<html>"), BucketRefusal, "the response contains none"),
        ((400, {}, b"<Error><Code>InvalidIdentityToken</Code></Error>"), BucketRefusal, "HTTP 400"),
    ],
)
def test_a_temporary_failure_to_get_keys_is_retried(
    server: Server, answer: Answer, kind: type[Exception], says: str
) -> None:
    server.answer = lambda path, query: answer
    known = Credentials({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.url}/v1/credentials"}, "r")
    with pytest.raises(kind, match=says):
        known.keys()


def test_keys_that_a_server_rejects_as_expired_are_renewed_early(server: Server, tmp_path: Path) -> None:
    """This node's clock is slow, so the node considered the keys valid for another hour."""
    server.content = {"a": b"1"}
    asked, expired = list[str](), [1]

    def answer(path: str, query: object) -> Answer | None:
        if path == "/keys":
            asked.append(path)
            return 200, {}, json.dumps({"AccessKeyId": "i", "SecretAccessKey": "s", "Token": "t", **until}).encode()
        return (400, {}, b"<Error><Code>ExpiredToken</Code></Error>") if expired and expired.pop() else None

    until, server.answer = {"Expiration": "2099-01-01T00:00:00Z"}, answer
    known = Credentials({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.url}/keys"}, "r")
    Fetch(FetchSettings(BucketPlace.read("s3://bucket/p", server.url, ""), known, tmp_path), lambda: False, print).run()
    assert files(tmp_path) == {"a": b"1"} and len(asked) == 2


def test_a_proxy_receives_the_user_name_and_password_in_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, got = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            got.append(connection.recv(65536))
            connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    monkeypatch.setenv("https_proxy", f"http://team:p%40ss@127.0.0.1:{listening.getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "")
    place = BucketPlace.read("s3://bucket/p", "", "")
    with pytest.raises(Away, match="502"):
        list(Reader(place, Credentials({}, place.region)).objects())
    thread.join()
    listening.close()
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"team:p@ss") in got[0]
