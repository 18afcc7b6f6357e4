"""`ddpjob plot` and `ddpjob top`: how they draw metrics and a status, even if these contain hostile
values.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddpjob.api.job_status import utc_now
from ddpjob.cli import top
from ddpjob.cli.main import main
from ddpjob.cli.places import Place
from ddpjob.cli.terminal_curves import chart, curves, draw, points, sparkline
from ddpjob.client.backends.backend import METRICS, METRICS_BYTES, Mistake, PodLine
from ddpjob.client.backends.cluster_backend import _METRICS_MARK, _METRICS_PROBE, ClusterBackend
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.texts.metric_series import read_metrics
from ddpjob.dashboard.fleet import Fleet
from ddpjob.dashboard.gate import FleetView
from ddpjob.dashboard.web_server import _curves_now
from ddpjob.local.paths import job_folder
from ddpjob.local.record import write_record
from rich.console import Console

EVIL = "\x1b]0;owned\x07"


def row(event: str, step: object, **values: Any) -> str:
    return json.dumps({"event": event, "step": step, "time": 1.0, **values})


LINES = [
    'ut": 1}',
    row("start", 0),
    row("step", 1, loss=8.0),
    row("step", 2, loss=7.0),
    row("start", 1),
    row("step", 2, loss=4.0),
    row("eval", 2, accuracy=0.5),
    row("step", 3, loss=1.0),
    row("eval", 3, accuracy=0.9),
    *(row("step", "4", loss=1), row("step", 4, loss="x"), row("step", 5), row("step", 6, loss=None), "[1]", "1", ""),
    '{"event": "step", "step": 7, "loss": NaN}',
    "[" * 100_000,
    *(row("step", number, loss=10**400) for number in (8, 9)),
    row("eval", 8, accuracy=-(10**400)),
    row("step", 10, loss=1e308),
    row("step", 11, loss=True),
]


def test_a_repeated_step_counts_once_and_invalid_lines_are_ignored() -> None:
    assert points(read_metrics("\n".join(LINES))) == ([8.0, 4.0, 1.0], [0.5, 0.9], 1)


def test_a_curve_spans_the_range_of_its_values() -> None:
    assert chart([0.0, 1.0, 2.0], 3, 2) == [" ▁█", "▁██"]
    assert sparkline([1.0, 1.0], 9) == "▁▁" and sparkline([], 9) == ""
    assert len(sparkline([float(number) for number in range(1000)], 60)) == 60


def test_curves_are_plotted_in_the_terminal() -> None:
    lines = list(curves("\n".join(LINES), "j"))
    assert lines[0] == "j: 1 restart" and lines[1] == "loss" and lines[2].lstrip().startswith("8 █")
    assert lines[-1].split() == ["now", "90.00%,", "from", "50.00%", "to", "90.00%"]
    assert list(curves(row("step", 1, loss=100.0) + "\n" + row("step", 2, loss=0.1), "j"))[1].endswith("scale")
    with pytest.raises(Mistake, match="j: its metrics contain no step yet"):
        list(curves("", "j"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    return tmp_path


def status(**values: Any) -> dict[str, Any]:
    progress = {"step": 3, "steps": 6, "percent": 50, "display": f"epoch 1/2 50 %{EVIL}", "loss": 0.5,
                "lossDisplay": "0.5", "samplesPerSecond": 10.0, "speedDisplay": "10/s",
                "metrics": {"accuracy": 0.75}}  # fmt: skip
    restart = {"time": "2026-01-01T00:00:10Z", "pod": "j-1-0", "reason": "OOMKilled", "counted": True, "seconds": 2.5,
               "message": f"rank 1{EVIL}\nmore"}  # fmt: skip
    running = {"type": "Running", "status": "True", "reason": "GroupRuns", "message": "a",
               "lastTransitionTime": "2026-01-01T00:00:12Z"}  # fmt: skip
    return {"phase": "Running", "conditions": [running], "progress": progress, "startTime": "2026-01-01T00:00:00Z",
            "restarts": {"counted": 1, "total": 1, "allowed": 10, "recent": [restart]},
            "slots": [{"attempt": 0, "state": "Running"}, {"attempt": 1, "state": "Running"}], **values}  # fmt: skip


def written(**values: Any) -> None:
    folder = job_folder("j")
    folder.checkpoints.joinpath("run").mkdir(parents=True, exist_ok=True)
    spec = {"image": "a", "script": "x.py", "nodes": 2, "procsPerNode": 4}
    pods = [{"name": f"j-{number}-0", "role": "node", "state": "Running"} for number in (0, 1)]
    write_record(folder, {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "j", "uid": "1"},
                          "spec": spec, "status": status(**values),
                          "local": {"run": "1", "pods": pods}})  # fmt: skip


def test_plot_reads_the_metrics_of_a_job_on_this_machine(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written()
    assert main(["--local", "plot", "j"]) == 2
    assert "scripts that call ddpjob_report.report(step=...)" in capsys.readouterr().err
    (job_folder("j").checkpoints / METRICS).write_bytes(b"x" * METRICS_BYTES + "\n".join(LINES).encode() + b"\xff")
    assert main(["--local", "plot", "j"]) == 0
    note = "the beginning is not shown, because only the last 8 MiB of run/metrics.jsonl are read"
    assert capsys.readouterr().out.startswith(f"j: at least 2 restarts; {note}\nloss\n")
    monkeypatch.setattr("ddpjob.cli.terminal_curves.draw", lambda texts, output, by: None)
    assert main(["--local", "plot", "j", "-o", "j.png"]) == 0
    assert capsys.readouterr() == ("wrote j.png\n", f"{note}\n")
    (job_folder("j").checkpoints / METRICS).write_text("\n".join(LINES))
    assert main(["--local", "plot", "j"]) == 0
    assert capsys.readouterr().out.startswith("j: 1 restart\nloss\n")


def test_plot_draws_a_picture_with_the_trainers_program(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the trainer draws the picture, and needs torch")

    def ran(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "ddpjob_trainer", "plot"] and command[5:] == ["--output", "x.png"]
        folder = Path(command[4])
        assert folder.parts[-2:] == ("j", "run") and (folder / "metrics.jsonl").read_text() == "text"
        return subprocess.CompletedProcess(command, 1, "", "warning\nerror: no folder\n")

    monkeypatch.setattr("ddpjob.cli.terminal_curves.subprocess.run", ran)
    with pytest.raises(Mistake, match=r"^error: no folder$"):
        draw([("j", "text")], Path("x.png"))
    monkeypatch.setattr("ddpjob.cli.terminal_curves.importlib.util.find_spec", lambda name: None)
    with pytest.raises(Mistake, match=r"requires the built-in trainer: pip install '\.\[trainer\]'"):
        draw([("j", "text")], Path("x.png"))


def test_plot_reads_metrics_from_the_pod_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / METRICS
    file.parent.mkdir()
    file.write_text(row("step", 1, loss=2.0))
    pods = [PodLine(f"j-{number}-0", "node", number, "Running") for number in (0, 1)]

    def run_in(backend: ClusterBackend, pod: PodLine, code: str) -> str:
        environment = {"DDPJOB_CHECKPOINT_DIR": str(tmp_path if pod.index else tmp_path / "empty")}
        made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return made.stdout

    assert _METRICS_MARK.strip() in _METRICS_PROBE
    monkeypatch.setattr(ClusterBackend, "run_in", run_in)
    monkeypatch.setattr(ClusterBackend, "pods", lambda backend, name: pods)
    backend = ClusterBackend(api=None, namespace="ml")  # type: ignore[arg-type]
    assert points(read_metrics(backend.metrics("j")))[0] == [2.0]
    del pods[1]
    with pytest.raises(Mistake, match=r"no pod has run/metrics\.jsonl"):
        backend.metrics("j")
    pods.clear()
    with pytest.raises(Mistake, match="j: no pod is running"):
        backend.metrics("j")


def test_the_screen_shows_a_jobs_progress_restarts_and_pods(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written()
    monkeypatch.setattr("ddpjob.client.backends.process_backend.runner", lambda folder: 1)
    assert main(["--local", "top", "j"]) == 0, "without a terminal, it is printed once"
    out = capsys.readouterr().out
    for part in ("j   Running   nodes", "ranks 8", "epoch 1/2 50 %", "0.5", "10/s", "75.00%",
                 "Restarts: 1 of 10 counted, 0 not counted", "OOMKilled: rank 1", "(counted, ran again after 2.5 s)",
                 "0-1       Running"):  # fmt: skip
        assert part in out, part
    assert not set(out) & set("\x1b\x07")
    assert main(["--local", "top", "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("j      Running")


def test_the_screen_is_redrawn_until_the_job_has_ended(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written()
    looks = 0

    def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert seconds == 0.5
        losses = {"progress": {"step": looks, "loss": float(looks), "lossDisplay": str(looks)}}
        ended = {"type": "Failed", "status": "True", "reason": "BudgetSpent", "message": "over",
                 "lastTransitionTime": "2026-01-01T00:00:20Z"}  # fmt: skip
        written(**losses, **({"phase": "Failed", "conditions": [ended]} if looks == 3 else {}))

    monkeypatch.setattr("ddpjob.client.backends.process_backend.runner", lambda folder: 1)
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=pause))  # other threads keep the real time module
    console = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(top, "Console", lambda **options: console)
    top.show(Place(None, None, None, True).backend(), "j", once=False, seconds=0.5)
    assert looks == 3
    assert "j failed: BudgetSpent" in console.export_text()


def test_a_warning_is_shown_if_no_loss_is_finite() -> None:
    text = "\n".join([row("start", 0), row("step", 1, loss=float("nan")), row("step", 2, loss=float("inf")),
                      row("eval", 2, accuracy=0.5)])  # fmt: skip
    lines = list(curves(text, "first"))
    assert lines[1] == "loss: not finite (NaN or infinite) at 2 steps, most recently step 2"
    assert lines[-1] == f"{'now':>10} 50.00%, from 50.00% to 50.00%"


def test_a_loss_that_became_nan_is_not_shown_as_the_last_finite_one() -> None:
    nan = row("step", 2, loss=float("nan"))
    note = "loss: not finite (NaN or infinite) at 1 step, most recently step 2"
    assert list(curves("\n".join([row("step", 1, loss=1.0), nan]), "first"))[-1] == note
    again = "\n".join([row("step", 1, loss=1.0), nan, row("start", 1), row("step", 2, loss=0.5)])
    assert note not in list(curves(again, "first"))


def test_a_warning_is_shown_if_all_losses_are_unknown() -> None:
    text = "\n".join(
        [row("start", 0), row("step", 1, loss=None), row("step", 2, loss=None), row("eval", 2, accuracy=0.5)]
    )
    lines = list(curves(text, "first"))
    assert lines[1] == "loss: not finite (NaN or infinite) at 2 steps, most recently step 2"
    assert "test accuracy" in lines


def test_a_script_without_a_loss_is_not_mistaken_for_one_that_diverges() -> None:
    lines = list(curves("\n".join([row("start", 0), row("step", 1, lr=0.1), row("step", 2, lr=0.1)]), "first"))
    assert lines[1] == "loss: not reported at 2 steps, most recently step 2"


def test_steps_without_a_loss_do_not_count_as_losses_that_are_not_finite() -> None:
    steps = [row("step", step, **({"loss": 1 / step} if step % 10 == 0 else {})) for step in range(1, 38)]
    lines = [row("start", 0), *steps]
    assert not any("reported" in line or "finite" in line for line in curves("\n".join(lines), "first"))
    lines += [row("step", step) for step in range(38, 42)]
    note = "loss: no longer reported at 11 steps, most recently step 41"
    assert note in list(curves("\n".join(lines), "first"))


def test_a_warning_is_shown_if_the_loss_becomes_unknown_after_finite_values(runs: Path) -> None:
    unknown = [row("step", 2, loss=None), row("step", 3, loss=None)]
    text = "\n".join([row("start", 0), row("step", 1, loss=1.0), *unknown])
    note = "loss: not finite (NaN or infinite) at 2 steps, most recently step 3"
    assert list(curves(text, "first"))[-1] == note
    assert read_metrics(f"{text}\n{row('step', 3, loss=0.5)}").after_last_loss() == ""
    assert read_metrics(f"{text}\n{row('step', 4, loss=0.5)}").after_last_loss() == ""
    written()
    (job_folder("j").checkpoints / METRICS).write_text(text)
    backend = ProcessBackend()
    with Fleet(backend) as fleet:
        assert _curves_now(FleetView(fleet, lambda namespace: backend, ""), ("default", "j"), False)["note"] == note


def test_the_screen_draws_steps_per_second_if_a_job_does_not_count_samples(runs: Path) -> None:
    screen, console = top.JobScreen(), Console(width=100, record=True)
    for step in (1, 2):
        written(progress={"step": step, "speedDisplay": f"{step} steps/s", "metrics": {"stepsPerSecond": float(step)}})
        console.print(screen.frame(ProcessBackend().job("j"), [], utc_now()))
    [line] = [line for line in console.export_text().splitlines() if "2 steps/s" in line]
    assert line.split() == ["speed", "2", "steps/s", "▁█"]


@pytest.mark.parametrize("step", [10**4000, -(10**4000), 2**63, True])
def test_a_step_beyond_64_bits_is_ignored(step: int) -> None:
    series = read_metrics(f"{row('start', step)}\n{row('step', step, loss=0.5)}\n{row('eval', step, accuracy=0.5)}")
    assert series.steps == series.evaluations == {} and series.starts == [0]
    assert not series.after_last_loss()


def test_an_undocumented_picture_format_is_refused() -> None:
    with pytest.raises(Mistake, match=r"--output x\.gif: must end in \.png, \.svg, \.pdf"):
        draw([("j", "text")], Path("x.gif"))


def run_of(name: str, *rows: str) -> None:
    folder = job_folder(name)
    (folder.checkpoints / "run").mkdir(parents=True)
    (folder.checkpoints / METRICS).write_text("\n".join(rows))
    body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": name, "uid": name},
            "spec": {"image": "a", "script": "x.py"}, "status": status()}  # fmt: skip
    write_record(folder, {**body, "local": {"run": "1", "pods": []}})


def timed(event: str, step: int, time: float, **values: Any) -> str:
    return json.dumps({"event": event, "step": step, "time": time, **values})


def test_plot_draws_several_jobs_in_one_chart(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("one", 1.0), ("two", 2.0)):
        steps = [timed("step", n, 100.0 + n * loss, epoch=1 + n // 11, loss=loss / n) for n in range(1, 21)]
        run_of(name, timed("start", 0, 100.0), *steps, timed("eval", 20, 130.0, accuracy=loss / 4))
    assert main(["--local", "plot", "one", "two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["a one: 20 steps, loss 0.05, accuracy 25.00%", "b two: 20 steps, loss 0.1, accuracy 50.00%"]
    assert lines[2] == "loss, on a logarithmic scale" and lines[3].split() == ["2", "b"] and "a" in lines[10]
    assert "test accuracy" in lines and lines[-1].split() == ["0", "20", "steps"]
    for by, end in (("time", "40s"), ("epoch", "2 epochs")):
        assert main(["--local", "plot", "one", "two", "--by", by]) == 0
        assert capsys.readouterr().out.rstrip().endswith(end)
    assert main(["--local", "plot", "one", "three"]) == 2
    assert "no job three was run in" in capsys.readouterr().err
    assert main(["--local", "plot", "one", "two", "-o", "x.jpg"]) == 2
    assert "must end in .png, .svg, .pdf" in capsys.readouterr().err
    assert main(["--local", "plot", *(f"j{number}" for number in range(9))]) == 2
    assert "9 jobs: at most 8 can be drawn in different colors" in capsys.readouterr().err
    run_of("bare", timed("start", 0, 100.0), timed("step", 1, 101.0, loss=1.0))
    assert main(["--local", "plot", "one", "bare", "--by", "epoch"]) == 2
    assert "--by epoch: the metrics of bare do not contain epoch; use --by step" in capsys.readouterr().err


RESTARTED = [
    timed("start", 0, 0.0),
    *(timed("step", n, float(n), epoch=1 + (n - 1) // 10, loss=1.0) for n in range(1, 26)),
    timed("eval", 10, 10.5, accuracy=0.1),
    timed("eval", 20, 20.5, accuracy=0.2),
    timed("start", 15, 90.0),
    *(timed("step", n, 75.0 + n, epoch=1 + (n - 1) // 10, loss=2.0) for n in range(16, 22)),
    timed("eval", 20, 95.5, accuracy=0.3),
]


def test_no_curve_is_connected_across_a_restart() -> None:
    series = read_metrics("\n".join(RESTARTED))
    steps = series.positions("step")
    losses = series.stretches(series.steps["loss"], steps)
    assert [(part[0][0], part[-1][0]) for part in losses] == [(1, 15), (16, 21), (22, 25)], (
        "steps 22 to 25 were taken before the restart"
    )
    assert series.stretches(series.evaluations["accuracy"], steps) == [[(10, 0.1)], [(20, 0.3)]]
    over_time = series.stretches(series.steps["loss"], series.positions("time"))
    assert [(part[0][0], part[-1][0]) for part in over_time] == [(1, 15), (22, 25), (91, 96)]
    assert series.restarts_at(series.positions("time")) == [91.0]


def test_a_value_from_before_a_restart_is_not_drawn_between_newer_steps() -> None:
    rows = [timed("start", 0, 0.0), *(timed("step", n, float(n), loss=1.0) for n in (1, 2, 3, 4))]
    rows += [timed("start", 1, 9.0), *(timed("step", n, 9.0 + n, loss=2.0) for n in (2, 4))]
    series = read_metrics("\n".join(rows))
    assert series.stretches(series.steps["loss"], series.positions("step")) == [[(1, 1.0)], [(2, 2.0), (4, 2.0)]]


@pytest.mark.parametrize(
    ("epochs", "positions"),
    [
        ([(5, 1), (10, 1), (15, 2), (20, 2), (25, 3)], [0.5, 1.0, 1.5, 2.0, 2.5]),
        ([(25, 3), (30, 3), (40, 4)], [2.0 + 1 / 6, 3.0, 4.0]),
        ([(5, 0.25), (10, 0.5)], [0.25, 0.5]),
        ([(5, -3), (10, 10**400)], [-3.0]),
    ],
)
def test_each_step_has_a_position_in_epochs(epochs: list[tuple[int, float]], positions: list[float]) -> None:
    rows = [timed("start", 0, 0.0), *(timed("step", step, 1.0, epoch=epoch, loss=1.0) for step, epoch in epochs)]
    assert list(read_metrics("\n".join(rows)).positions("epoch")[0].values()) == pytest.approx(positions)


def test_curves_that_lack_early_steps_say_where_they_begin() -> None:
    rows = [timed("start", 30, 0.0), timed("step", 31, 1.0, loss=1.0), timed("step", 32, 2.0, loss=1.0)]
    note = "the curves start after step 30, where training continued from a checkpoint"
    assert note in list(curves("\n".join(rows), "j"))
    assert note not in list(curves("\n".join(RESTARTED), "j"))


def test_a_job_that_continues_an_earlier_job_is_not_drawn_as_restarted() -> None:
    starts = [row("start", 0, run="a"), row("step", 1, loss=1.0), row("start", 1, run="a"), row("step", 2, loss=1.0)]
    text = "\n".join([*starts, row("start", 2, run="b"), row("step", 3, loss=1.0)])
    assert next(iter(curves(text, "j"))) == "j: 1 restart"
