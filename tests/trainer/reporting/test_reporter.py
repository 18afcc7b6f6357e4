"""Progress reaches the coordinator, the metrics log and the plot. An unreachable coordinator does
not delay training.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ddpjob_runtime.protocol import seal
from ddpjob_trainer.commands import plot_runs
from ddpjob_trainer.errors import TrainerError, TrainingError
from ddpjob_trainer.reporting import history, progress_client
from ddpjob_trainer.reporting.live_view import LiveView, sparkline
from ddpjob_trainer.reporting.progress_client import ProgressClient
from ddpjob_trainer.reporting.reporter import Reporter
from ddpjob_trainer.reporting.terminal import TrainingStatus
from machine import slowness
from ranks import TINY, finish, good, metrics, run, start, stop_at
from rich.console import Console


@pytest.fixture
def coordinator() -> Any:
    """Serve real HTTP on the loopback and keep what the coordinator accepts."""
    posts: list[tuple[str, str | None, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        instance = "number"

        def do_POST(self) -> None:
            body, given = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Authorization"]
            parts = ("request", self.instance, self.headers["DDPJob-Nonce"], "POST", self.path, body)
            known = self.headers["DDPJob-Proof"] == seal("secret", *parts)
            if known:
                posts.append((self.path, given, json.loads(body)))
            self.send_response(200 if known else 401)
            self.send_header("DDPJob-Instance", self.instance)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address[1], posts, Handler
    server.shutdown()


def test_rank_0_posts_progress_with_a_proof(coordinator: Any, tmp_path: Path) -> None:
    port, posts, _ = coordinator
    env = {"DDPJOB_COORDINATOR": f"127.0.0.1:{port}", "DDPJOB_TOKEN": "secret", "DDPJOB_ROUND": "5"}
    good(2, [*TINY, f"checkpoint.dir={tmp_path}"], env=lambda rank: env)
    path, authorization, last = [post for post in posts if "epoch" in post[2]][-1]
    assert (path, authorization) == ("/v1/progress", None)
    assert (last["epoch"], last["epochs"], last["step"], last["steps"], last["eta"]) == (2, 2, 16, 16, 0)
    assert (
        last["samplesPerSecond"] > 0
        and last["metrics"]["accuracy"] == metrics(tmp_path / "run", "eval")[-1]["accuracy"]
    )
    assert {row["round"] for row in metrics(tmp_path / "run", "step")} == {5}


def test_posts_are_half_a_second_apart_and_contain_the_newest_progress(coordinator: Any) -> None:
    port, posts, _ = coordinator
    link = ProgressClient(f"127.0.0.1:{port}", "secret")
    began = time.monotonic()
    while time.monotonic() - began < 1.2:
        link.post({"step": time.monotonic()})
        time.sleep(0.01)
    link.post({"step": -1})
    link.close()
    assert 2 <= len(posts) <= 5 and posts[-1][2] == {"step": -1}


def test_copies_are_posted_separately_and_do_not_displace_progress(coordinator: Any) -> None:
    port, posts, _ = coordinator
    link = ProgressClient(f"127.0.0.1:{port}", "secret")
    link.post_copies({"copyStep": 1})
    until = time.monotonic() + 20 * slowness()
    while not posts and time.monotonic() < until:
        time.sleep(0.02)
    link.post({"step": 3})
    link.post_copies({"copyStep": 2})
    link.close()
    assert [post[2] for post in posts] == [{"metrics": {"copyStep": 1}}, {"step": 3}, {"metrics": {"copyStep": 2}}]


def test_a_new_coordinator_also_receives_the_slow_ranks(coordinator: Any) -> None:
    """A new coordinator takes over the round in Fast mode, and the state of the previous one is
    lost.
    """
    port, posts, handler = coordinator
    link = ProgressClient(f"127.0.0.1:{port}", "secret")
    link.post_stragglers([{"rank": 1, "slowdown": 2.0}])
    for number, (instance, expected) in enumerate((("number", 2), ("number", 3), ("other", 5), ("other", 6))):
        handler.instance = instance
        link.post({"step": number})
        until = time.monotonic() + 30
        while len(posts) < expected and time.monotonic() < until:
            time.sleep(0.02)
    link.close()
    lag = {"stragglers": [{"rank": 1, "slowdown": 2.0}]}
    assert [post[2] for post in posts] == [{"step": 0}, lag, {"step": 1}, {"step": 2}, lag, {"step": 3}]


def test_each_post_contains_its_round(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port, posts, _ = coordinator
    monkeypatch.setenv("DDPJOB_FENCE", "2.17")
    link = ProgressClient(f"127.0.0.1:{port}", "secret")
    link.post_stragglers([{"rank": 1, "slowdown": 2.0}])
    link.post({"step": 1})
    link.close()
    lag = {"stragglers": [{"rank": 1, "slowdown": 2.0}]}
    assert [post[2] for post in posts] == [{"step": 1, "round": "2.17"}, {**lag, "round": "2.17"}]


def test_a_lasting_activity_is_posted_separately_and_ends_with_the_next_steps(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_client, "_BRIEF_SECONDS", 3.0)  # a busy machine can stall for a second
    port, posts, _ = coordinator
    link = ProgressClient(f"127.0.0.1:{port}", "secret")
    for activity in ("saving", None, "saving", None):
        link.post_activity(activity)
        time.sleep(0.05)
    time.sleep(4)
    assert posts == [], "the activity ended before it had to be reported"
    link.post({"step": 1})
    link.post_activity("evaluating")
    until = time.monotonic() + 20
    while len(posts) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    link.post_activity("evaluating", again=True)
    while len(posts) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    link.post_activity(None)
    while len(posts) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    link.close()
    assert [post[2] for post in posts] == [
        {"step": 1}, {"activity": "evaluating"}, {"activity": "evaluating"}, {"activity": None},
    ]  # fmt: skip


def test_a_long_evaluation_and_a_slow_save_are_reported(
    coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, posts, _ = coordinator
    monkeypatch.setenv("DDPJOB_COORDINATOR", f"127.0.0.1:{port}")
    monkeypatch.setenv("DDPJOB_TOKEN", "secret")
    slow = """
import time
from ddpjob_trainer import train
from ddpjob_trainer.checkpoints.writer import Writer
from ddpjob_trainer.reporting import reporter
reporter._ALIVE_SECONDS = 0.5
evaluate, wait = train.evaluate, Writer.wait
def evaluates(*arguments, alive, **more):
    for _ in range(12):
        time.sleep(0.3)
        alive()
    return evaluate(*arguments, alive=alive, **more)
slept = []
def waits(self, *arguments):
    if not slept:
        slept.append(time.sleep(1.7))
    return wait(self, *arguments)
train.evaluate, Writer.wait = evaluates, waits
"""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "slow_train.py").write_text(
        f"{slow}\nimport sys\nfrom ddpjob_trainer.__main__ import main\nsys.exit(main())\n"
    )
    arguments = [*TINY, "train.epochs=1", f"checkpoint.dir={tmp_path}", "train.backend=gloo"]
    done = subprocess.run(
        [sys.executable, folder / "slow_train.py", *arguments], capture_output=True, timeout=120 * slowness()
    )
    assert done.returncode == 0, done.stderr.decode()
    activities = [post[2]["activity"] for post in posts if "activity" in post[2]]
    assert activities.count("evaluating") >= 2, "the report is repeated while the activity makes progress"
    assert "saving a checkpoint" in activities


def test_a_job_with_nothing_left_to_train_shows_its_last_epoch(
    coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, posts, _ = coordinator
    monkeypatch.setenv("DDPJOB_COORDINATOR", f"127.0.0.1:{port}")
    monkeypatch.setenv("DDPJOB_TOKEN", "secret")
    good(1, [*TINY, f"checkpoint.dir={tmp_path}"])
    posts.clear()
    good(1, [*TINY, f"checkpoint.dir={tmp_path}"])
    [shown] = [post[2] for post in posts if "step" in post[2]]
    assert [shown[name] for name in ("epoch", "epochs", "step", "steps")] == [2, 2, 16, 16]


def test_the_first_name_lookup_happens_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc reads the environment during the lookup. getenv in a thread crashes the process if
    another thread sets a variable.
    """
    lookers: list[threading.Thread] = []
    look = socket.getaddrinfo

    def looked(*arguments: Any, **more: Any) -> Any:
        lookers.append(threading.current_thread())
        return look(*arguments, **more)

    monkeypatch.setattr("socket.getaddrinfo", looked)
    link = ProgressClient("localhost:1", "token")
    link.post({"step": 1})
    link.close()
    assert lookers[0] is threading.main_thread() and len(lookers) > 1


def test_an_unreachable_coordinator_does_not_delay_training() -> None:
    link = ProgressClient("127.0.0.1:9", "t")
    began = time.monotonic()
    for step in range(1000):
        link.post({"step": step})
    assert time.monotonic() - began < 0.5 * slowness()
    link.close()
    assert time.monotonic() - began < 5 * slowness()


def test_the_metrics_log_survives_restarts_and_an_incomplete_line(tmp_path: Path) -> None:
    arguments = [*TINY, f"checkpoint.dir={tmp_path}"]
    assert [end.code for end in run(1, arguments, prepare=stop_at(3))] == [75]
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"event": "step", "ti')
    good(1, arguments)
    reported = history.read(tmp_path / "run")
    assert [(incarnation["step"], incarnation["restarts"]) for incarnation in reported.incarnations] == [(0, 0), (3, 1)]
    assert [len(incarnation) for incarnation in reported.steps] == [3, 13]
    assert len(reported.gaps) == 1 and [world for _, _, world in reported.worlds] == [1, 1]
    assert plot_runs.main([str(tmp_path / "run")]) == 0
    from PIL import Image

    pixels = Image.open(tmp_path / "run" / "plot.png").convert("RGB")
    assert pixels.size == (1500, 1500)
    colours = {colour for _, colour in pixels.getcolors(10**6)}
    lines = {(0x25, 0x63, 0xEB), (0xEA, 0x58, 0x0C), (0x0D, 0x94, 0x88), (0x7C, 0x3A, 0xED), (0xB9, 0x1C, 0x1C)}
    assert lines <= colours, "all lines and the restart are drawn"
    both = tmp_path / "both.svg"
    assert plot_runs.main([str(tmp_path / "run"), str(tmp_path / "run"), "--by", "step", "-o", str(both)]) == 0
    assert both.read_text().count(f"<!-- {tmp_path.name}") == 2, "each run is in the legend"


def test_metrics_that_a_users_script_reports_are_drawn(tmp_path: Path) -> None:
    rows = [
        {"event": "start", "step": 4, "world": 2},
        {"event": "step", "step": 4, "loss": 2.0, "lr": 0.1},
        {"event": "eval", "step": 4, "accuracy": 0.5},
        {"event": "step", "step": 8, "loss": 1.0, "lr": 0.1},
        {"event": "eval", "step": 8, "accuracy": None},  # It was NaN.
    ]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps({"time": number, **row}) + "\n" for number, row in enumerate(rows)))
    target = tmp_path / "plot.svg"
    assert plot_runs.main([str(tmp_path), "-o", str(target)]) == 0
    drawn = target.read_text()
    assert "<!-- not reported -->" in drawn and "<!-- 50.00% -->" in drawn


@pytest.mark.parametrize(("run", "named"), [("d/run", "d"), ("runs/a", "runs/a/checkpoints"), ("runs/a", "runs/a")])
def test_the_metrics_of_a_run_are_found_in_each_of_its_folders(run: str, named: str, tmp_path: Path) -> None:
    for folder in (run, named):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    rows = [{"event": "start", "step": 0, "world": 1}, {"event": "step", "step": 1, "loss": 2.0}]
    lines = (json.dumps({**row, "time": float(number)}) for number, row in enumerate(rows))
    (tmp_path / run / "metrics.jsonl").write_text("\n".join(lines))
    assert len(history.read(tmp_path / named).steps[0]) == 1
    with pytest.raises(TrainerError, match=r"pass the run folder, which contains metrics.jsonl"):
        history.read(tmp_path)


def test_the_name_of_a_run_is_not_drawn_as_a_formula(tmp_path: Path) -> None:
    runs = [tmp_path / "$\\frac{1$", tmp_path / "b"]
    for folder in runs:
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(PLOTTED)
    for chosen in (runs, runs[:1]):
        assert plot_runs.main([*map(str, chosen), "-o", str(tmp_path / "plot.svg")]) == 0
        assert "<!-- $\\frac{1$" in (tmp_path / "plot.svg").read_text()


def test_no_accuracy_is_drawn_for_a_regression(tmp_path: Path) -> None:
    rows = [
        {"event": "start", "step": 0, "world": 1, "restarts": 0},
        {"event": "step", "step": 1, "loss": 2.0, "samplesPerSecond": 9.0},
        {"event": "eval", "step": 1, "loss": 2.0, "mae": 0.5, "rmse": 0.7},
    ]
    lines = [json.dumps({**row, "time": float(number)}) for number, row in enumerate(rows)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    for runs in ([tmp_path], [tmp_path, tmp_path]):
        assert plot_runs.main([*map(str, runs), "-o", str(tmp_path / "plot.svg")]) == 0
        assert "accuracy:" not in (tmp_path / "plot.svg").read_text()


def test_no_curve_of_a_plot_is_connected_across_a_restart(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [{"event": "start", "step": 0, "world": 1}]
    rows += [{"event": "step", "step": n, "epoch": 1, "loss": 2.0 / n} for n in (1, 2)]
    rows += [{"event": "eval", "step": n, "accuracy": 0.5, "loss": 1.0} for n in (1, 2)]
    rows += [{"event": "start", "step": 2, "world": 1}, {"event": "step", "step": 3, "epoch": 1, "loss": 0.5}]
    rows += [{"event": "step", "step": 4, "epoch": 2, "loss": None}, {"event": "step", "step": 5, "epoch": 2}]
    rows += [{"event": "eval", "step": 5, "accuracy": 0.75, "loss": 0.5}]
    folder = tmp_path / "first" / "checkpoints" / "run"
    folder.mkdir(parents=True)
    lines = [json.dumps({"time": float(number), **row}) for number, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    read = history.read(folder)
    assert read.title == "first"
    assert [row["epochs"] for part in read.steps for row in part] == pytest.approx(
        [1 / 3, 2 / 3, 1, 1 + 1 / 3, 1 + 2 / 3]
    )
    loss, accuracy = Figure().subplots(2, 1)
    plot_runs._loss(loss, read, lambda row: row["time"], ("blue", "red"), alone=True)
    plot_runs._accuracy(accuracy, read, lambda row: row["time"], "red", alone=True)
    assert [list(line.get_xdata()) for line in loss.lines] == [[1, 2], [6], [3, 4], [9]]
    assert [list(line.get_xdata()) for line in accuracy.lines] == [[3, 4], [9]]
    for by in ("time", "step", "epoch"):
        assert plot_runs.main([str(folder), "--by", by, "-o", str(tmp_path / "plot.svg")]) == 0
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<!-- samples/s -->" in drawn and "<!-- epochs -->" in drawn and "images/s" not in drawn


PLOTTED = (
    b'{"event": "start", "time": 1, "world": 2, "step": 0}\n'
    b'{"event": "step", "time": 2, "step": 1, "loss": 1.0, "samplesPerSecond": 3}\n'
)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "plot.txt",
            r"plot\.txt cannot be written \(Format 'txt' is not supported.*\); choose a different file with -o",
        ),
        ("none/plot.png", r"none/plot\.png cannot be written \(No such file or directory\)"),
    ],
)
def test_a_plot_that_cannot_be_written_is_reported(target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(PLOTTED)
    with pytest.raises(TrainerError, match=message):
        plot_runs.main([str(tmp_path), "-o", str(tmp_path / target)])


@pytest.mark.parametrize("line", [b"\xff\xfe", b"12", b'{"a": 1}', b'{"event": "step", "time": 3}'])
def test_lines_that_are_not_metrics_are_skipped(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(line + b"\n" + PLOTTED + line + b"\n")
    assert plot_runs.main([str(file), "-o", str(tmp_path / "plot.svg")]) == 0
    file.write_bytes(line + b"\n")
    with pytest.raises(TrainerError, match="has no steps yet"):
        plot_runs.main([str(file)])


def test_plot_without_arguments_names_the_missing_argument(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="pass the run folder"):
        history.read(tmp_path)


def test_a_run_is_found_by_its_folder_and_by_its_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "a" / "run" / "metrics.jsonl").write_bytes(PLOTTED)
    assert history.read(tmp_path / "a") == history.read(tmp_path / "a" / "run")


def test_an_exploding_loss_stops_the_run(tmp_path: Path) -> None:
    (ended,) = run(1, [*TINY, "optim.lr=1e30", f"checkpoint.dir={tmp_path}"])
    assert ended.code == 1 and "3 steps in a row were skipped" in ended.error and "Lower optim.lr" in ended.error


def test_log_lines_mention_anomalies_only_if_there_are_any() -> None:
    usual = TrainingStatus(
        epoch=1,
        epochs=2,
        step=3,
        steps=4,
        loss=0.5,
        learning_rate=0.1,
        samples_per_second=1234.5,
        eta=75,
        data_wait=0.031,
    )
    assert usual.line() == "epoch 1/2  step 3/4 (75%)  loss 0.5000  1,234 samples/s  data wait 3%  eta 1:15"
    odd = replace(usual, accuracy=0.981, gradient_norm=1.25, skipped_steps=2, corrupt_images=7)
    assert "accuracy 98.10%" in odd.line() and odd.line().endswith(
        "gradient norm 1.25  skipped steps 2  corrupt images 7"
    )


def test_the_live_view_shows_the_state_of_training() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)
    view = LiveView("digits", console)
    seen = time.time() - 61
    base = TrainingStatus(
        epoch=2,
        epochs=9,
        step=50,
        steps=100,
        loss=1.0,
        learning_rate=0.1,
        samples_per_second=900,
        eta=60,
        data_wait=0.5,
    )
    for step in range(1, 51):
        view.show(
            replace(
                base, step=step, loss=2 / step, accuracy=0.25 + step / 100, world=3, restarts=2, checkpoint_time=seen
            )
        )
    view.note("a [bold]note[/bold] stays as it is")
    with console.capture() as capture:
        console.print(view.render())
    view.close()
    shown = capture.get()
    for part in ("epoch 2/9", "50%  step 50/100  eta 1:00", "0.0400", "75.00%", "900", "data wait", "50%"):
        assert part in shown, part
    assert "ranks 3   restarts 2   checkpoint 1:01 ago" in shown
    assert "█" in shown and "▁" in shown, "the curve shows that the loss fell"
    assert "a [bold]note[/bold] stays as it is" in console.file.getvalue()  # type: ignore[attr-defined]


def test_sparklines_scale_values_to_eight_levels() -> None:
    assert sparkline([], 5) == "" and sparkline([3, 3], 5) == "▁▁"
    assert sparkline([0, 7], 5) == "▁█" and sparkline([7, 7], 5, from_zero=True) == "██"
    assert sparkline(list(range(16)), 8) == "▁▂▃▄▅▆▇█"


def test_the_live_view_is_shown_in_a_terminal(tmp_path: Path) -> None:
    """A real training runs on a real pseudo-terminal."""
    reader, writer = os.openpty()

    def on_terminal(rank: int) -> None:
        os.environ.update(TERM="xterm-256color", COLUMNS="120", LINES="40")
        sys.stdout = os.fdopen(writer, "w")

    (rank,) = start(1, [*TINY, f"checkpoint.dir={tmp_path}"], on_terminal)
    os.close(writer)
    shown = b""
    with contextlib.suppress(OSError):  # the other end of the terminal is closed
        while chunk := os.read(reader, 4096):
            shown += chunk
    os.close(reader)
    text = shown.decode()
    assert [end.code for end in finish([rank])] == [0], text
    assert "step 16/16" in text and "samples/s" in text and "ranks 1" in text and "epoch 2/2: test accuracy" in text


def test_the_terminal_is_restored_after_an_error(tmp_path: Path) -> None:
    """The live view hides the cursor, which the shell would not show again."""
    terminal, side = pty.openpty()

    def prepare(rank: int) -> None:
        os.dup2(side, 1)
        sys.stdout = os.fdopen(1, "w")

        def fail(*_: Any, **__: Any) -> None:
            raise TrainingError("the loss is not finite")

        Reporter.report = fail  # type: ignore[method-assign]

    ranks = start(1, [*TINY, f"checkpoint.dir={tmp_path}"], prepare, env=lambda rank: {"TERM": "xterm"})
    os.close(side)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 4096):
            said += part
    os.close(terminal)
    assert "not finite" in finish(ranks)[0].error
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l") >= 0
