"""A real S3 server on loopback (versitygw on a folder), which is built once per machine into
~/.cache/ddpjob, and a slow connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from debian_packages import CACHE, refuse
from machine import free_port, slowness

PROGRAM = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BUCKET = "bucket"


@dataclass(frozen=True)
class Server:
    """The server's port, the folder of its only bucket, and the environment variables that clients
    need.
    """

    port: int
    folder: Path

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return AWS's variables. `port` may belong to a proxy in between."""
        return {
            "AWS_ACCESS_KEY_ID": "access",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }


def program() -> Path:
    """Return the server program, built by Go. Skips the test if it cannot be built; with CI=true,
    the test fails instead.
    """
    folder = CACHE / "s3" / PROGRAM.rpartition("@")[2]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:  # a process that waited for the lock finds it built
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "versitygw").exists():
            if shutil.which("go") is None:
                refuse("versitygw", "this machine has no Go to build the S3 server versitygw with")
            environment = {**os.environ, "GOBIN": str(folder)}
            done = subprocess.run(["go", "install", PROGRAM], env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                refuse("versitygw", f"`go install {PROGRAM}` failed: {done.stderr.strip()[-500:]}")
    return folder / "versitygw"


@contextlib.contextmanager
def serving(place: Path) -> Iterator[Server]:
    """Serve an empty bucket whose folder is below `place`."""
    folder, port = place / "s3" / BUCKET, free_port()
    folder.mkdir(parents=True)
    (place / "sidecar").mkdir()
    server = Server(port, folder)
    names = {"ROOT_ACCESS_KEY_ID": "access", "ROOT_SECRET_ACCESS_KEY": "a-secret-of-the-test"}
    command = [program(), "--port", f"127.0.0.1:{port}", "posix", "--sidecar", place / "sidecar", folder.parent]
    with (place / "s3.log").open("w") as log:
        running = subprocess.Popen(command, env={**os.environ, **names}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20 * slowness()
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if running.poll() is not None or time.monotonic() > deadline:
                raise AssertionError((place / "s3.log").read_text()[-2000:])
            time.sleep(0.05)
        yield server
    finally:
        running.kill()
        running.wait()


class SlowLine:
    """A TCP proxy to a port. It forwards at most `bytes_per_second` to the port (None means no
    limit), and nothing while it is `cut`.
    """

    def __init__(self, port: int, bytes_per_second: float | None = None) -> None:
        self._target, self.bytes_per_second, self.sent, self.cut = port, bytes_per_second, 0, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with contextlib.suppress(OSError):
            while (piece := source.recv(16384)) and not self.cut:
                if upwards:
                    self.sent += len(piece)
                    if self.bytes_per_second:
                        time.sleep(len(piece) / self.bytes_per_second)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
