"""A git server on loopback: git's own http-backend for a folder of repositories, optionally with a
password.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

PASSWORD = "a-token-of-the-test"


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, without the machine's settings, and return its output."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(folder: Path, files: dict[str, str], message: str = "x") -> str:
    """Commit files in a repository, which is created if necessary, and return the commit."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "-q")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD")


@dataclass
class GitServer:
    """Serves each repository of `root` as URL/NAME."""

    root: Path
    url: str = ""
    private: bool = False
    """Whether a request needs the user `git` with PASSWORD."""
    requests: list[str] = field(default_factory=list)
    authorized: list[str] = field(default_factory=list)


@contextlib.contextmanager
def serving(root: Path) -> Iterator[GitServer]:
    """Serve a folder of repositories."""
    if not (Path(subprocess.check_output(["git", "--exec-path"], text=True).strip()) / "git-http-backend").exists():
        pytest.skip("this git has no http-backend")
    made = GitServer(root)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            split, said = urlsplit(self.path), self.headers.get("Authorization", "")
            made.requests.append(f"{self.command} {self.path}")
            made.authorized.append(said)
            if made.private and said != "Basic " + base64.b64encode(f"git:{PASSWORD}".encode()).decode():
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            variables = {
                "GIT_PROJECT_ROOT": str(root), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": split.path,
                "QUERY_STRING": split.query, "REQUEST_METHOD": self.command, "GIT_CONFIG_GLOBAL": "/dev/null",
                "CONTENT_TYPE": self.headers.get("Content-Type", ""), "REMOTE_ADDR": "::1",
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "CONTENT_LENGTH": self.headers.get("Content-Length", ""),
            }  # fmt: skip
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            done = subprocess.run(
                ["git", "http-backend"], env={**os.environ, **variables}, input=body, capture_output=True, check=False
            )
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
