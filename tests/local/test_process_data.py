"""storage.data.url on this machine, with a real S3 server that is slow or unreachable, or whose
content changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import FAST, SCRIPTS, Json, Machine, Run, manifest
from s3_server import BUCKET, Server, SlowLine, serving

pytest.importorskip("obstore", reason="pip install obstore")
SCRIPT = str(SCRIPTS / "process_data.py")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path / "server") as running:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, running.environment()[name])
        yield running


class Line(SlowLine):
    """A slow connection that also counts and delays the bytes from the server."""

    def __init__(self, port: int, answers_per_second: float | None = None) -> None:
        self.answers_per_second, self.received = answers_per_second, 0
        super().__init__(port)

    def _pump(self, source, sink, upwards):  # type: ignore[no-untyped-def]
        if upwards:
            return super()._pump(source, sink, upwards)
        with contextlib.suppress(OSError):
            while (piece := source.recv(16384)) and not self.cut:
                self.received += len(piece)
                if self.answers_per_second:
                    time.sleep(len(piece) / self.answers_per_second)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(2)
        return None


def fill(server: Server, sizes: dict[str, int]) -> str:
    """Upload objects below datasets/a, and return what process_data.py prints about them."""
    from obstore import put
    from obstore.store import S3Store

    environment = server.environment()
    store = S3Store(
        BUCKET, endpoint=environment["AWS_ENDPOINT_URL"], region="us-east-1", client_options={"allow_http": True},
        access_key_id=environment["AWS_ACCESS_KEY_ID"], secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    digest = hashlib.sha256()
    for name, size in sorted(sizes.items()):
        content = os.urandom(size)
        put(store, f"datasets/a/{name}", content, use_multipart=False)
        digest.update(name.encode() + content)
    return digest.hexdigest()


def job(port: int, name: str = "job", **spec: object) -> Json:
    place = {"url": f"s3://{BUCKET}/datasets/a", "endpoint": f"http://127.0.0.1:{port}", "secretName": "keys"}
    return manifest(name, script=SCRIPT, storage={"data": place}, recovery=FAST, **spec)


def logs(run: Run) -> str:
    return "\n".join(run.log(pod) for pod in run.pods())


def files(run: Run) -> Path:
    [folder] = (run.folder / "data").iterdir()
    return folder


SIZES = {"train/a b+c.bin": 3_000_000, "train/ü%.bin": 2_000_000, "empty": 0, "deep/er/x.bin": 1_000}


def test_two_nodes_on_one_machine_fetch_data_once_and_later_only_changes(server: Server, machine: Machine) -> None:
    line, expected = Line(server.port), fill(server, SIZES)
    run = machine.run(job(line.port))
    assert run.process.returncode == 0, run.everything()
    assert logs(run).count(f"has 4 files, {expected}, keys []") == 2, run.everything()
    assert sum(SIZES.values()) < line.received < 1.2 * sum(SIZES.values()), "once"
    assert logs(run).count("all were present") == 1 and logs(run).count("fetched in") == 1

    run = machine.run(job(line.port))
    assert run.process.returncode == 0 and logs(run).count("all were present") == 2, run.everything()
    assert line.received < 1.3 * sum(SIZES.values())

    # One object was replaced, one deleted, one changed on this machine, and one file is unknown.
    target = files(run)
    (target / "mine").write_text("mine")
    (target / "deep" / "er" / "x.bin").write_text("broken")
    (server.folder / "datasets" / "a" / "empty").unlink()
    fill(server, {"train/a b+c.bin": 1_500_000})
    before = line.received
    run = machine.run(job(line.port))
    assert run.process.returncode == 0, run.everything()
    assert not (target / "empty").exists() and (target / "mine").read_text() == "mine"
    assert (target / "train" / "a b+c.bin").stat().st_size == 1_500_000
    there = (server.folder / "datasets" / "a" / "deep" / "er" / "x.bin").read_bytes()
    assert (target / "deep" / "er" / "x.bin").read_bytes() == there
    assert line.received - before < 1_600_000
    line.close()


def test_the_next_fetch_continues_a_killed_one_and_a_slow_fetch_is_not_abandoned(
    server: Server, machine: Machine
) -> None:
    size = 8_000_000
    expected = fill(server, {"one.bin": size, "two.bin": 1000})
    line = Line(server.port, answers_per_second=500_000)
    run = machine.start(job(line.port))
    run.until(lambda r: line.received > 2_500_000)
    run.until(lambda r: "fetching data" in r.condition("Running").get("message", ""))
    assert "MiB of 7.6 MiB" in run.condition("Running")["message"]
    [holder] = [pod for pod in run.pods() if "objects from s3://" in run.log(pod) and "job-" in pod]
    assert machine.command("kill", holder).returncode == 0
    before = line.received
    assert run.wait(seconds=120) == 0, run.everything()
    assert line.received - before < size - 1_500_000, "the fetch continues in the middle of an object"
    assert logs(run).count(expected) == 2, run.everything()
    assert run.status["restarts"].get("counted", 0) == 0
    line.close()


def test_a_job_waits_for_an_unreachable_bucket_without_counting_a_restart(server: Server, machine: Machine) -> None:
    expected = fill(server, SIZES)
    line = SlowLine(server.port)
    line.cut = True
    run = machine.start(job(line.port))
    run.until(lambda r: "waiting for the bucket with the data" in r.condition("Running").get("message", ""))
    line.cut = False
    assert run.wait(seconds=120) == 0, run.everything()
    assert logs(run).count(expected) == 2
    assert run.status["restarts"].get("total", 0) == 0
    line.close()


def test_an_object_with_a_wrong_checksum_is_never_used(server: Server, machine: Machine) -> None:
    fill(server, {"one.bin": 100_000})
    damaged = server.folder / "datasets" / "a" / "one.bin"
    moment = damaged.stat()
    content = bytearray(damaged.read_bytes())
    content[50_000] ^= 1
    damaged.write_bytes(content)
    os.utime(damaged, ns=(moment.st_atime_ns, moment.st_mtime_ns))
    run = machine.run(job(server.port))
    assert run.process.returncode == 1
    failed = run.condition("Failed")
    assert failed["reason"] == "InitFailure", failed
    assert "one.bin" in failed["message"] and "its MD5 is" in failed["message"], failed
    assert not (files(run) / "one.bin").exists()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"url": "s3://no-such-bucket/a"}, "NoSuchBucket"),
        ({"url": f"s3://{BUCKET}/nothing/here"}, "contains no objects; check storage.data.url"),
    ],
)
def test_a_bucket_that_does_not_exist_fails_the_job_immediately(
    server: Server, machine: Machine, place: Json, says: str
) -> None:
    body = job(server.port)
    body["spec"]["storage"]["data"].update(place)
    run = machine.run(body)
    assert run.process.returncode == 1
    failed = run.condition("Failed")
    assert failed["reason"] == "InitFailure" and says in failed["message"], failed
    assert "storage.data" in failed["message"] and run.status["restarts"].get("counted", 0) == 0


def test_invalid_keys_fail_the_job_immediately(
    server: Server, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-9f3e")
    run = machine.run(job(server.port))
    failed = run.condition("Failed")
    assert failed["reason"] == "InitFailure" and "storage.data.secretName" in failed["message"], failed
    assert "HTTP 403" in failed["message"] and "wrong-secret-9f3e" not in run.everything()


def test_data_from_the_command_line_replaces_data_from_the_bucket(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    run = machine.run(job(1), "--data", str(tmp_path / "mine"))
    assert run.process.returncode == 0 and logs(run).count("has 1 files") == 2, run.everything()
