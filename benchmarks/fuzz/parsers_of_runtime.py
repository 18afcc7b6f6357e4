"""The runtime's parsers for the coordinator's port, buckets, and other programs' indexes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import io
import itertools
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from benchmarks.fuzz.mutate import Form
from benchmarks.fuzz.parsers_of_operator import PROGRESS, as_json, loads
from benchmarks.fuzz.watch import Parser, Target, scratch

_TOKEN = "a token"
_START = 1.7e9


class _Call:
    """A call that is due at a certain time unless it is cancelled."""

    def __init__(self, when: float, act: Callable[[], Any]) -> None:
        self.when, self.act = when, act

    def cancel(self) -> None:
        self.act = lambda: None


class _Time:
    """A clock that is advanced manually."""

    def __init__(self) -> None:
        self.now = _START
        self._calls: list[_Call] = []

    def later(self, seconds: float, act: Callable[..., Any], *arguments: Any) -> _Call:
        self._calls.append(_Call(self.now + seconds, lambda: act(*arguments)))
        return self._calls[-1]

    def pass_by(self, seconds: float) -> None:
        """Advance the clock.

        At most a hundred calls are made, because some schedule the next one.
        """
        until = self.now + seconds
        for _ in range(100):
            due = min((call for call in self._calls if call.when <= until), key=lambda call: call.when, default=None)
            if due is None:
                break
            self._calls.remove(due)
            self.now = max(self.now, due.when)
            due.act()
        self.now = until


def _server(coordinator: Any) -> Any:
    """Return the coordinator's port without a socket.

    Instead of logging a failed connection, it raises an AssertionError with the message.
    """
    from ddpjob_runtime.coordinator import server

    class Strangers(server.Strangers):
        def complain(self, text: str) -> None:
            assert ":\nTraceback" not in text, text

    made = object.__new__(server.Server)
    made.token, made.store_ready, made.strangers = _TOKEN, True, Strangers()
    made._change, made._stood_still, made.coordinator = asyncio.Event(), float("-inf"), coordinator
    made.renew()
    return made


def _check_report(coordinator: Any, now: float) -> None:
    """Check that the operator can read the coordinator's report, and Prometheus its metrics."""
    from ddpjob.engine.coordinator_client import read_report
    from ddpjob_runtime import protocol
    from ddpjob_runtime.coordinator import http_api, metrics

    text = http_api._report(coordinator.report()).encode(errors="backslashreplace")
    metrics.render(coordinator.report(), coordinator.rounds.incidents.counts).encode(errors="backslashreplace")
    assert len(text) <= protocol.MAX_REPORT, f"a report of {len(text)} bytes"
    try:
        read_report(text, datetime.fromtimestamp(now, UTC), 2)
    except ValueError as error:
        raise AssertionError(f"the operator refuses this report: {error}") from error


def _members() -> Target:
    """Fuzz lines from pods that have the token.

    In each line, `from` (0 to 3) is the sender, and `wait` is the time since the previous line in
    seconds.
    """
    from ddpjob_runtime import protocol
    from ddpjob_runtime.coordinator.coordinator import Coordinator
    from ddpjob_runtime.coordinator.settings import CoordinatorSettings

    nonces = ("ours", "theirs")
    proof = protocol.seal(_TOKEN, "member", *nonces)

    def number(row: dict[str, Any], name: str, most: float) -> float:
        value = row.pop(name, 0)
        return min(max(value, 0), most) if isinstance(value, int | float) and value == value else 0

    def read(data: bytes) -> None:
        time, members = _Time(), dict[int, Any]()
        settings = CoordinatorSettings(nodes=2, min_nodes=1, mode=protocol.Mode.FAST, hang_after=300.0)
        coordinator = Coordinator(
            settings, lambda: time.now, time.later, lambda: None, lambda text: None, lambda member: member.index != 1
        )
        server = _server(coordinator)
        for line in data.splitlines()[:200]:
            with contextlib.suppress(ValueError, RecursionError):
                row = protocol.decode(line)
                who = int(number(row, "from", 3))
                time.pass_by(number(row, "wait", 3600))
                if row["t"] == "hello":
                    hello = protocol.encode(row.pop("t"), **{**row, "proof": proof})
                    members[who] = server._admit(hello, nonces, lambda verb, fields: protocol.encode(verb, **fields))
                elif row["t"] == "lost" and members.get(who):
                    coordinator.lost(members[who], "its connection ended")
                elif row["t"] == "stop":
                    coordinator.stop(row.get("ok") is True, "the operator reports it")
                elif members.get(who):
                    members[who].hear(time.now)
                    server._on_message(members[who], row, lambda verb, fields: protocol.encode(verb, **fields))
        time.pass_by(1)
        _check_report(coordinator, time.now)

    return Target(read, [b"\n".join(map(as_json, story)) for story in _stories()], ())


def _stories() -> list[list[dict[str, Any]]]:
    """Return histories of a two-node job: a failure and a new round, a takeover, a stop, a silent
    host.
    """
    hellos = [
        {"t": "hello", "from": i, "pod": f"a-{i}-0", "index": i, "attempt": 0, "pid": 5, "generation": 0, "grace": 30}
        for i in range(2)
    ]
    ready = [{"t": "ready", "from": i, "after": 0, "host": "10.0.0.1", "port": 5000, "check": 3} for i in range(2)]
    joined = [{"t": "joined", "from": i, "round": 1} for i in range(2)]
    failure = {
        "t": "failure", "from": 0, "round": 1, "rank": 0, "localRank": 0, "pid": 5, "exitCode": 1, "signal": None,
        "message": "KeyError: 'x'", "traceback": "Traceback", "time": 1.0, "sent": 2.0, "oom": False, "init": False,
    }  # fmt: skip
    again = [{**line, "after": 1, "wait": 2} for line in ready]
    others = [
        {"t": "hb", "from": 0}, {"t": "note", "from": 1, "kind": "Data", "why": "x"},
        {"t": "stacks", "from": 0, "round": 1, "rank": 0, "text": "x", "wait": 400},
        {"t": "looked", "from": 0, "round": 1, "ranks": [
            {"rank": 0, "text": "x", "digest": "x", "seconds": 5.0, "cpu": 0.1, "bytes": 9, "wait": "stopped"}]},
        {"t": "init_failure", "from": 1, "message": "x"}, {"t": "leaving", "from": 1, "why": "x"},
        {"t": "replaced", "from": 0, "generation": 0, "attempt": 1}, {"t": "lost", "from": 1, "wait": 1},
    ]  # fmt: skip
    resume = {"round": 3, "rank": 0, "world": 2, "state": "Running", "planned": False}
    resumed = [
        {**hello, "resume": {**resume, "rank": i}, "notes": {"Data": "x"}, "wait": 1} for i, hello in enumerate(hellos)
    ]
    spare = [{**hellos[1], "from": 2, "pod": "a-2-0", "index": 2}, {**ready[1], "from": 2, "watch": 5001}]
    silent = {"t": "neighbour", "from": 0, "round": 1, "rank": 1, "silent": True}
    finished = [{"t": "finished", "from": i, "round": 1} for i in range(2)]
    return [
        [*hellos, *ready, *joined, failure, *again, *({**line, "round": 2} for line in joined), *others],
        [*hellos, *ready, *joined, *finished],
        [*resumed, *({**line, "round": 3} for line in finished)],
        [*hellos, *ready, *joined, {"t": "stop", "from": 0, "ok": False}, *finished],
        [*hellos, *ready, *joined, *spare, silent, {**silent, "wait": 1}, {**silent, "silent": False}, again[0]],
    ]


def _greetings() -> Target:
    """Fuzz arbitrary bytes sent to the port through which neighbours watch a node."""
    from ddpjob_runtime import protocol
    from ddpjob_runtime.launcher.neighbours import GREETING, Neighbours, RingPlace, _Link

    place = RingPlace(0, 1, 1, 3, None)
    node: Any = object.__new__(Neighbours)
    node._token, node._links = _TOKEN, []

    def read(data: bytes) -> None:
        stream: Any = _Writer()
        link = _Link(stream, 0.0)
        link.received = data
        accepted = node._read_greeting(link, place)
        assert (link.rank is None or accepted) and bool(stream.sent) is (link.rank is not None)

    proof = place.seal(_TOKEN, "connects", 0, "nonce")
    return Target(read, [protocol.encode(GREETING, rank=0, nonce="nonce", proof=proof)], ())


class _Writer:
    """The other end of a connection, which discards everything."""

    transport = property(lambda self: self)

    def __init__(self) -> None:
        self.sent = b""

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else ("10.0.0.9", 4711)

    def setsockopt(self, *arguments: Any) -> None:
        """Do nothing, because there is no socket."""

    def write(self, content: bytes) -> None:
        self.sent += content

    send = write

    async def drain(self) -> None:
        """Do nothing, because nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Close the connection."""

    abort = close


def _connections() -> Target:
    """Fuzz all bytes of a connection to the coordinator's port. The peer may know the token."""
    from ddpjob_runtime import protocol
    from ddpjob_runtime.coordinator.coordinator import Coordinator
    from ddpjob_runtime.coordinator.settings import CoordinatorSettings

    async def serve(data: bytes) -> None:
        time = _Time()
        coordinator = Coordinator(
            CoordinatorSettings(nodes=2, min_nodes=1, mode=protocol.Mode.FAST),
            lambda: time.now,
            time.later,
            lambda: None,
            lambda text: None,
        )
        reader = asyncio.StreamReader(limit=protocol.MAX_LINE)
        reader.feed_data(data)
        reader.feed_eof()
        await _server(coordinator).serve(reader, _Writer())
        time.pass_by(1)
        _check_report(coordinator, time.now)

    def request(method: str, path: str, body: Any = None) -> bytes:
        content = b"" if body is None else as_json(body)
        head = f"{method} {path} HTTP/1.1\r\nHost: a:29401\r\nAuthorization: Bearer {_TOKEN}\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    seeds = [
        request("GET", "/healthz"), request("GET", "/metrics"), request("GET", "/status?after=3&news=1&wait=60"),
        request("POST", "/v1/progress", {k: v for k, v in PROGRESS.items() if k != "updatedAt"}),
        request("POST", "/v1/gone", {"pods": ["a-0-0"], "why": "x"}),
        request("POST", "/v1/size", {"nodes": 3, "minNodes": 1}),
        request("POST", "/v1/patience", {"backoff": [1.0, 60.0], "hangAfter": 30, "hangs": "End"}),
        request("POST", "/v1/order", {"pods": ["a-1-0", "a-0-0"]}),
        request("POST", "/v1/stop", {"ok": True, "why": "x"}), request("POST", "/v1/exit", {"why": "x", "before": 1}),
        b'{"t":"challenge","nonce":"ab"}\n{"t":"hello","proof":"x","pod":"a-0-0","index":0,"attempt":0,"pid":5}\n',
    ]  # fmt: skip
    return Target(lambda data: asyncio.run(serve(data)), seeds, ())


def _progress() -> Target:
    from ddpjob_runtime.coordinator import progress

    good = {k: v for k, v in PROGRESS.items() if k != "updatedAt"}
    more = {"round": "0.1", "activity": "evaluating", "ungrouped": True, "epochs": 2}
    return Target(lambda data: progress.check(loads(data)), [as_json({**good, **more})], (ValueError,))


_LISTING = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated><Contents><Key>p/a%20b</Key><Size>3</Size>"
    b'<ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag></Contents></ListBucketResult>'
)


class _Connection:
    """An HTTP connection with one response, which also serves as its own socket."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def request(self, *arguments: Any, **more: Any) -> None:
        """Accept any request."""

    def getresponse(self) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self)  # type: ignore[arg-type]
        response.begin()
        return response

    def makefile(self, *arguments: Any) -> io.BytesIO:
        return io.BytesIO(self._answer)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def _answers() -> Target:
    """Fuzz a bucket's HTTP responses: a listing, an object, an error."""
    from ddpjob_runtime.launcher import s3_reader
    from ddpjob_runtime.launcher.fetch_data import check_names

    place = s3_reader.BucketPlace.read("s3://b/p", "http://127.0.0.1:1", "")
    remote = s3_reader.Remote("a b", 3, "d41d8cd98f00b204e9800998ecf8427e")
    keys = s3_reader.Credentials({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "r")

    class Reader(s3_reader.Reader):
        def __init__(self, answer: bytes) -> None:
            super().__init__(place, keys)
            self._answers = iter([_Connection(answer)])

        def _request(self, *arguments: Any) -> http.client.HTTPResponse:
            self._connection = next(self._answers, None) or _Connection(b"")  # type: ignore[assignment]
            return super()._request(*arguments)

    def read(data: bytes) -> None:
        found = list(Reader(data).objects())
        check_names(found, "u")
        for each in found:
            assert ".." not in each.name.split("/") and not each.name.startswith("/"), each
        _, pieces = Reader(data).open(remote, 0)
        for _ in pieces:
            pass

    denied = b"<Error><Code>AccessDenied</Code><Message>No</Message></Error>"
    seeds = [
        _answer(_LISTING), _answer(_LISTING.replace(b"false", b"true"), more="ETag: x\r\n"),
        _answer(denied, "403 Forbidden", "x-amz-bucket-region: eu-west-1\r\n"), _answer(b"", "503 Slow Down"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(_LISTING), _LISTING),
    ]  # fmt: skip
    return Target(read, seeds, (s3_reader.BucketRefusal, s3_reader.Away, s3_reader.Changed))


def _answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def _listings() -> Target:
    """Fuzz a bucket's responses with a correct header."""
    answers = _answers()
    return replace(answers, read=lambda data: answers.read(_answer(data)), seeds=[_LISTING])


def _bucket_manifests() -> Target:
    """Fuzz a bucket's list of the files in a checkpoint."""
    from ddpjob_bucket import CopyManifest, Stored

    def read(data: bytes) -> None:
        found = CopyManifest.read(data, Stored(1, 7))
        if found is None:
            raise ValueError("no writer produces this")
        for file in found.files:
            assert ".." not in file.path.split("/") and not file.path.startswith("/"), file

    files = [{"path": f"step-000000007.dcp/{name}", "size": 3, "sha256": "0" * 64} for name in "ab"]
    data = "data/000000001-000000007-0000abcd"
    good = {"step": 7, "epoch": 1, "name": "step-000000007.dcp", "data": data, "files": files}
    return Target(read, [as_json(good)], (ValueError,))


def _code_archives() -> Target:
    """Fuzz the tar file in an archive of code. Files may be written only below the folder."""
    from ddpjob_runtime.launcher.fetch_code import BadArchive, unpack

    above = scratch("code-archives")
    archive, folders = above / "archive.tar.gz", itertools.cycle(above / str(number) for number in range(500))

    def read(data: bytes) -> None:
        folder = next(folders)  # Removing it would count as `act`.
        folder.mkdir(exist_ok=True)
        archive.write_bytes(gzip.compress(data, 1))
        try:
            unpack(archive, folder, most=2**20, most_files=100)
        finally:
            assert all(path.name.isdecimal() or path == archive for path in above.iterdir())
            assert not any(path.is_symlink() for path in folder.rglob("*"))

    seeds = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=kind) as tar:
            long = "lib/" + "x" * (90 if kind == tarfile.USTAR_FORMAT else 120)
            for path, type_, link in (
                ("a.py", tarfile.REGTYPE, ""), ("lib", tarfile.DIRTYPE, ""), (long, tarfile.REGTYPE, ""),
                ("link", tarfile.SYMTYPE, "../up"), ("hard", tarfile.LNKTYPE, "a.py"),
            ):  # fmt: skip
                member = tarfile.TarInfo(path)
                member.type, member.linkname, member.size = type_, link, 3 if type_ == tarfile.REGTYPE else 0
                if not link or kind == tarfile.GNU_FORMAT:
                    tar.addfile(member, io.BytesIO(b"abc"))
        seeds.append(made.getvalue()[:8192])
    return Target(read, seeds, (BadArchive,))


class _StorageInfo:
    """Stands for torch's class with this name in a pickle."""

    def __init__(self, name: str) -> None:
        self.relative_path, self.offset, self.length = name, 0, 10


def _script_indexes() -> Target:
    """Fuzz torch's index of a user script's checkpoint, which is read without torch."""
    from ddpjob_report import copies

    folder = scratch("script")
    (folder / "__0_0.distcp").write_bytes(b"x")
    made = pickle.dumps({"storage_data": {"a": _StorageInfo("__0_0.distcp")}, "planner": [1, "x", (2.5, None)]})

    def read(data: bytes) -> None:
        (folder / ".metadata").write_bytes(data)
        copies._check_parts(folder)

    return Target(read, [made], (ValueError,))


PARSERS = (
    Parser("members", "lines from pods that know the token, and the resulting report", Form.LINES, _members),
    Parser("connections", "HTTP and lines from anybody on the coordinator's port", Form.TEXT, _connections),
    Parser("greetings", "the first line of a connection between neighbours", Form.LINES, _greetings),
    Parser("progress", "POST /v1/progress", Form.JSON, _progress),
    Parser("code-archives", "an archive of code, uncompressed", Form.BYTES, _code_archives),
    Parser("bucket-answers", "a data bucket's HTTP responses, including headers", Form.TEXT, _answers),
    Parser("bucket-listings", "the listing of such a bucket", Form.TEXT, _listings),
    Parser("bucket-manifests", "the list of a checkpoint in a bucket", Form.JSON, _bucket_manifests),
    Parser("script-indexes", "torch's index of a script's checkpoint", Form.PICKLE, _script_indexes),
)
