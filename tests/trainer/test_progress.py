"""Progress reaches the coordinator, the metrics log and the picture, and a coordinator that is gone delays nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ddpjob_trainer import plot
from ddpjob_trainer.coordinator import CoordinatorLink
from ddpjob_trainer.errors import TrainerError
from ranks import TINY, good, metrics, run, stop_at


@pytest.fixture
def coordinator() -> Any:
    """A real HTTP server on loopback that keeps what it gets."""
    posts: list[tuple[str, str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posts.append((self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1], posts
    server.shutdown()


def test_rank_0_posts_progress_with_the_token(coordinator: Any, tmp_path: Path) -> None:
    port, posts = coordinator
    env = {"DDPJOB_COORDINATOR": f"127.0.0.1:{port}", "DDPJOB_TOKEN": "secret", "DDPJOB_ROUND": "5"}
    good(2, [*TINY, f"checkpoint.dir={tmp_path}"], env=lambda rank: env)
    path, authorization, last = posts[-1]
    assert (path, authorization) == ("/v1/progress", "Bearer secret")
    assert (last["epoch"], last["epochs"], last["step"], last["steps"], last["eta"]) == (2, 2, 16, 16, 0)
    assert last["samplesPerSecond"] > 0 and last["metrics"]["accuracy"] == metrics(tmp_path / "run", "eval")[-1]["accuracy"]
    assert {row["round"] for row in metrics(tmp_path / "run", "step")} == {5}


def test_posts_are_half_a_second_apart_and_the_newest_wins(coordinator: Any) -> None:
    port, posts = coordinator
    link = CoordinatorLink(f"127.0.0.1:{port}", "t")
    began = time.monotonic()
    while time.monotonic() - began < 1.2:
        link.post({"step": time.monotonic()})
        time.sleep(0.01)
    link.post({"step": -1})
    link.close()
    assert 2 <= len(posts) <= 5 and posts[-1][2] == {"step": -1}


def test_the_first_name_is_looked_up_by_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc reads the environment for it, and getenv in a thread crashes the process while another thread sets a variable."""
    lookers: list[threading.Thread] = []
    look = socket.getaddrinfo

    def looked(*arguments: Any, **more: Any) -> Any:
        lookers.append(threading.current_thread())
        return look(*arguments, **more)

    monkeypatch.setattr("socket.getaddrinfo", looked)
    link = CoordinatorLink("localhost:1", "token")
    link.post({"step": 1})
    link.close()
    assert lookers[0] is threading.main_thread() and len(lookers) > 1


def test_a_coordinator_that_is_gone_delays_nothing() -> None:
    link = CoordinatorLink("127.0.0.1:9", "t")
    began = time.monotonic()
    for step in range(1000):
        link.post({"step": step})
    assert time.monotonic() - began < 0.5
    link.close()
    assert time.monotonic() - began < 5


def test_the_log_survives_restarts_and_a_cut_line(tmp_path: Path) -> None:
    arguments = [*TINY, f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, arguments, prepare=stop_at(3))] == [75]
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"event": "step", "ti')
    good(1, arguments)
    history = plot.read(tmp_path / "run")
    assert [life["step"] for life in history.lives] == [0, 3] and [len(life) for life in history.steps] == [3, 13]
    assert len(history.gaps) == 1
    picture = tmp_path / "out.png"
    subprocess.run([sys.executable, "-m", "ddpjob_trainer", "plot", str(tmp_path / "run"), "-o", str(picture)], check=True)
    from PIL import Image

    pixels = Image.open(picture).convert("RGB")
    assert pixels.size == (1500, 1275)
    colours = {colour for _, colour in pixels.getcolors(10**6)}
    assert {(0x25, 0x63, 0xEB), (0xEA, 0x58, 0x0C), (0x0D, 0x94, 0x88), (0xB9, 0x1C, 0x1C)} <= colours, (
        "all lines and the restart are drawn"
    )


def test_plot_of_nothing_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="name the folder of a run"):
        plot.read(tmp_path)


def test_an_exploding_loss_stops_the_run(tmp_path: Path) -> None:
    (ended,) = run(1, [*TINY, "optim.lr=1e30", f"checkpoint.dir={tmp_path}"])
    assert ended.code == 1 and "the loss is nan" in ended.error and "lower optim.lr" in ended.error
