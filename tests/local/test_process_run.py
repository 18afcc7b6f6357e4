"""`ddpjob run` with real processes: to completion, through losses and failures, and without
leftovers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ddpjob.local.paths import JobFolder
from ddpjob.local.record import ask
from machine import slowness
from process_harness import ENDLESS, FAST, Json, Machine, manifest
from strategy_jobs import held, let_go

HANG = ["bash", "-c", "trap '' TERM; setsid sleep 1000 & (sleep 1000 &) ; sleep 1000"]
"""A command that ignores SIGTERM and has children in their own sessions."""


def test_a_job_runs_to_completion(machine: Machine) -> None:
    run = machine.run(manifest(args=["--steps=5"]))
    assert run.process.returncode == 0, run.everything()
    assert run.condition("Complete")["status"] == "True"
    run.assert_ledger(5)
    run.assert_nothing_left()
    listed = machine.command("get").stdout.splitlines()
    assert listed[0].split() == ["NAME", "STATE", "NODES", "PROGRESS", "LOSS", "SPEED", "RESTARTS", "AGE"]
    assert listed[1].split()[:2] == ["job", "Complete"]
    assert "of 2 begins at step 0" in machine.command("logs", "job-1-0").stdout


def test_digits_train_despite_the_loss_of_a_node(machine: Machine) -> None:
    small = ["train.epochs=6", "data.batch=128", "model.width=8", "checkpoint.every_seconds=0.3"]
    arguments = ["--config", "digits", "train.ledger=true", *small]
    run = machine.start(manifest("digits", **held(arguments, {})))
    run.until(lambda r: r.status.get("progress", {}).get("percent", 0) >= 10, seconds=120)
    assert machine.command("kill", "digits-0-0").returncode == 0
    let_go(run.folder / "checkpoints")
    assert run.wait() == 0, run.everything()
    restarts = run.status["restarts"]
    assert (restarts["counted"], restarts["uncounted"]) == (0, 1)
    assert restarts["recent"][0]["reason"] == "Deleted"
    assert 0 < restarts["recent"][0]["seconds"] < 60
    assert run.status["slots"][0]["attempt"] == 1
    assert run.status["progress"]["percent"] == 100
    assert run.status["progress"]["metrics"]["accuracy"] > 0.5
    ledger = [sys.executable, "-m", "ddpjob_trainer", "ledger", str(run.folder / "checkpoints" / "run")]
    checked = subprocess.run(ledger, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    run.assert_nothing_left()
    shown = machine.command("show", str(run.folder / "checkpoints")).stdout
    assert "State:     Complete: every node has finished" in shown and "Rounds:    2, with 1 break" in shown
    assert "PeerLost (pod digits-0-0" in shown and "test accuracy" in shown


def test_the_end_of_a_job_is_recorded_in_its_checkpoint_folder(machine: Machine) -> None:
    bug = "import os\n\ndef fails():\n    raise TypeError(f'bug in rank {os.environ[\"RANK\"]}')\n\nfails()\n"
    (machine.folder / "bug.py").write_text(bug)
    rule = {"maxRestarts": 1, "backoff": {"initialSeconds": 1, "maxSeconds": 1}}
    run = machine.run(manifest(script=str(machine.folder / "bug.py"), recovery=rule))
    assert run.process.returncode == 1, run.everything()
    shown = machine.command("show", str(run.folder)).stdout
    assert "State:     Stopped: RestartBudgetSpent" in shown and "Rounds:    2, with 2 breaks" in shown, shown
    assert shown.count("    | TypeError: bug in rank ") == 2 and "in fails" in shown
    assert machine.command("delete", "job").returncode == 0 and not run.folder.exists()


@pytest.mark.parametrize(("mode", "budget"), [("Standard", 0), ("Fast", 1)])
def test_a_job_fails_when_its_budget_is_used_up(machine: Machine, mode: str, budget: int) -> None:
    run = machine.run(manifest(args=["--raise-at=2"], recovery={"mode": mode, "maxRestarts": budget}))
    assert run.process.returncode == 1, run.everything()
    failed = run.condition("Failed")
    assert failed["reason"] == "RestartBudgetSpent"
    assert run.status["restarts"]["counted"] == budget + 1
    assert "ValueError: made to fail at step 2" in failed["message"]
    assert 'raise ValueError(f"made to fail at step {step}")' in run.output
    run.assert_nothing_left()


def test_no_process_is_started_if_the_script_is_missing(machine: Machine) -> None:
    refused = machine.command("run", str(machine.write(manifest(script="not-there.py"))))
    assert refused.returncode == 2 and not machine.runs.exists()
    assert f"not-there.py is not in {machine.folder}" in refused.stderr and "--workdir" in refused.stderr


@pytest.mark.parametrize(
    ("what", "said"), [({"module": "not_there"}, "not_there"), ({"command": ["no-such-program"]}, "no-such-program")]
)
def test_a_program_that_does_not_exist_fails_immediately(machine: Machine, what: Json, said: str) -> None:
    run = machine.run(manifest(**what), seconds=40)
    assert run.process.returncode == 1, run.everything()
    assert run.condition("Failed")["reason"] == "InitFailure"
    assert said in run.output and (said in what.get("command", ()) or str(machine.folder) in run.output)
    assert run.status["restarts"]["counted"] <= 2
    run.assert_nothing_left()


def test_a_script_that_raises_an_error_is_run_three_times(machine: Machine) -> None:
    (machine.folder / "wrong.py").write_text("print(undefined)\n")
    run = machine.run(manifest(script="wrong.py"), seconds=60)
    assert run.process.returncode == 1, run.everything()
    failed = run.condition("Failed")
    assert failed["reason"] == "ProgramError" and run.status["restarts"]["counted"] == 3
    assert "NameError: name 'undefined' is not defined" in failed["message"] and "wrong.py" in failed["message"]
    shown = machine.command("why", "job").stdout
    assert "Correct the script" in shown, shown
    run.assert_nothing_left()


def test_an_invalid_trainer_argument_fails_the_job_immediately_with_its_message(machine: Machine) -> None:
    arguments = ["--config", "digits", "train.epoch=3"]
    run = machine.run(manifest(module="ddpjob_trainer", args=arguments), seconds=60)
    assert run.process.returncode == 1, run.everything()
    failed = run.condition("Failed")
    assert failed["reason"] == "ConfigurationError"
    assert "unknown key 'train.epoch'; did you mean 'train.epochs'?" in failed["message"]
    assert run.status["restarts"]["counted"] == 0 and not run.status.get("avoidedNodes")
    run.assert_nothing_left()


def test_a_machine_is_not_avoided_if_it_is_the_only_one(machine: Machine) -> None:
    """Repeated failures on a host count against it only if there is another host."""
    (machine.folder / "fails.py").write_text(
        "import time, ddpjob_report\nddpjob_report.report(step=1, steps=9)\ntime.sleep(1)\nraise SystemExit(3)\n"
    )
    recovery = {"maxRestarts": 3, "backoff": {"initialSeconds": 0.1, "maxSeconds": 0.1}}
    job = manifest(command=[sys.executable, "fails.py"], nodes=1, recovery=recovery)
    run = machine.run(job, seconds=90)
    assert run.process.returncode == 1 and run.status["restarts"]["counted"] == 4, run.everything()
    assert "step" in run.status["progress"], "this job has trained"
    assert not run.status.get("avoidedNodes") and "NodeAvoided" not in run.output, run.output


def test_a_job_that_ignores_signals_is_ended_by_its_deadline(machine: Machine) -> None:
    template = {"spec": {"terminationGracePeriodSeconds": 1}}
    run = machine.run(manifest(command=HANG, runPolicy={"activeDeadlineSeconds": 2}, podTemplate=template), seconds=40)
    assert run.process.returncode == 1, run.everything()
    assert run.condition("Failed")["reason"] == "DeadlineExceeded"
    run.assert_nothing_left()


def test_a_lost_coordinator_is_replaced(machine: Machine) -> None:
    run = machine.start(manifest(args=ENDLESS))
    run.until(lambda r: r.steps() >= 3)
    assert machine.command("kill", "job-coordinator-0").returncode == 0
    run.until(lambda r: r.status["rendezvous"]["generation"] == 1)
    run.finish()
    assert run.status["rendezvous"]["generation"] == 1
    assert run.status["restarts"]["counted"] == 0


def test_after_ctrl_c_the_job_is_saved_and_nothing_is_left_behind(machine: Machine) -> None:
    run = machine.start(manifest(args=ENDLESS))
    run.until(lambda r: r.steps() >= 3)
    assert len(run.processes()) >= 4
    run.signal(signal.SIGINT)
    assert run.wait(40) == 130
    run.assert_nothing_left(0.5)
    assert "Interrupted by SIGINT" in run.output
    steps = run.steps()
    again = machine.start(manifest(args=[f"--steps={steps + 3}"]))
    assert again.wait() == 0, again.everything()
    assert f"begins at step {steps}" in again.log("job-0-0")
    again.assert_ledger(steps + 3)


@pytest.mark.parametrize(
    ("output", "sent", "code"),
    [("pipe", signal.SIGINT, 130), ("pipe", None, 141), ("terminal", signal.SIGHUP, 129)],
    ids=["Ctrl-C ends tee as well", "head has read enough", "the terminal is closed"],
)
def test_after_its_output_is_closed_the_job_is_saved_and_nothing_is_left_behind(
    machine: Machine, output: str, sent: signal.Signals | None, code: int
) -> None:
    """Otherwise a failed write to the output would keep the signal from reaching the job, which
    would continue to train or would die without saving.
    """
    reader, writer = os.openpty() if output == "terminal" else os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK)
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the tests inherit that it is ignored
    run = machine.start(manifest(args=ENDLESS, recovery=FAST), stdout=writer)
    signal.signal(signal.SIGHUP, inherited)
    os.close(writer)
    run.until(lambda r: r.steps() >= 3)
    os.close(reader)
    if sent is None:
        machine.command("scale", "job", "3")  # writes a line
    else:
        run.signal(sent)
    assert run.wait(40) == code, run.everything()
    run.assert_nothing_left(0.5)
    assert "Traceback" not in run.output and "Exception" not in run.output, run.output
    assert run.status["phase"] == "Suspended"


@pytest.mark.parametrize(
    ("wrapper", "shown"),
    [(["env", "PYTHONIOENCODING=ascii"], "sch\\xf6n"), (["bash", "-c", 'exec "$@" >&-', "run"], "note: ")],
    ids=["without umlauts", "closed"],
)
def test_an_output_that_cannot_show_a_message_does_not_end_the_job(
    machine: Machine, wrapper: list[str], shown: str
) -> None:
    """Neither a character that the terminal's encoding lacks nor an output closed by `>&-` may end
    it.
    """
    job = manifest(nodes=1, command=["bash", "-c", "echo schön; exit 3"], recovery={"maxRestarts": 0})
    run = machine.start(job, wrapper=wrapper)
    assert run.wait(30) == 1, run.everything()
    assert shown in run.output and "Traceback" not in run.output, run.output
    assert "schön" in run.condition("Failed")["message"]


def test_a_message_cannot_control_the_terminal(machine: Machine) -> None:
    """The script prints colors and cleared screens before it fails."""
    clears = ["bash", "-c", r"printf 'before\n\033[2J\033[31mred\a'; exit 3"]
    run = machine.run(manifest(nodes=1, command=clears, recovery={"maxRestarts": 0}), seconds=30)
    assert run.process.returncode == 1 and "\033" in run.condition("Failed")["message"], run.everything()
    assert "red" in run.output and not {"\033", "\a"} & set(run.output), run.output


def test_a_run_under_nohup_survives_its_terminal(machine: Machine) -> None:
    run = machine.start(manifest(args=ENDLESS, recovery=FAST), wrapper=["nohup"])
    run.until(lambda r: r.steps() >= 3)
    run.signal(signal.SIGHUP)
    steps = run.steps()
    run.until(lambda r: r.steps() >= steps + 20)
    run.signal(signal.SIGTERM)
    assert run.wait(40) == 143


def test_training_continues_while_files_cannot_be_written(machine: Machine) -> None:
    """Folders temporarily take the place of the files, which simulates a full disk."""
    run = machine.start(manifest(args=ENDLESS, recovery=FAST))
    run.until(lambda r: r.steps() >= 3)
    folder = Path(run.record["local"]["folder"])
    for path in (run.folder / "status.json", folder / "events.jsonl"):
        while not path.is_dir():  # the run may write the file again in between
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
    assert ask(JobFolder(run.folder), "kill", "job-1-0")  # without a record, the command cannot be used
    run.until(lambda r: "2 nodes train again" in r.output)
    assert run.output.count("status.json: Is a directory; training continues") == 1, run.output
    (run.folder / "status.json").rmdir()
    run.until(lambda r: "job-1-1" in r.pods())
    run.signal(signal.SIGTERM)
    assert run.wait(40) == 143
    assert run.status["phase"] == "Suspended"


@pytest.mark.parametrize(("code", "state"), [(0, "Complete"), (3, "Failed")])
def test_removing_the_folder_during_the_run_does_not_end_the_job(machine: Machine, code: int, state: str) -> None:
    ends = ["bash", "-c", f"while [ ! -e go ]; do sleep 0.1; done; exit {code}"]
    run = machine.start(manifest(command=ends, nodes=1, recovery={"maxRestarts": 0}))
    run.until(lambda r: r.status.get("phase") == "Running")
    shutil.rmtree(machine.runs)
    (machine.folder / "go").touch()
    assert run.wait(30) == (0 if state == "Complete" else 1), run.output
    assert f"State:       {state}" in run.output and "Logs: " in run.output and "Unclosed" not in run.output, run.output


def test_a_job_whose_folder_was_removed_cannot_be_run_twice(machine: Machine) -> None:
    """The lock was removed with the folder. Regression: two groups wrote the same checkpoints, and
    the record alternated between the two runs.
    """
    first = machine.start(manifest(command=["sleep", "600"], nodes=1))
    first.until(lambda r: r.status.get("phase") == "Running")
    shutil.rmtree(machine.runs)
    second = machine.command("run", str(machine.folder / "job.yaml"))
    assert second.returncode == 2 and f"run `kill {first.process.pid}` to stop it" in second.stderr, second
    first.signal(signal.SIGTERM)
    first.wait(30)
    again = machine.run(manifest(command=["true"], nodes=1), seconds=30)
    assert again.process.returncode == 0, again.everything()


def test_a_second_ctrl_c_ends_the_run_immediately(machine: Machine) -> None:
    run = machine.start(manifest(command=HANG))
    run.until(lambda r: r.status.get("phase") == "Running")
    run.signal(signal.SIGINT)
    run.until(lambda r: "a second signal" in r.output)
    run.signal(signal.SIGINT)
    assert run.wait(5) == 130
    run.assert_nothing_left(0.5)


@pytest.mark.parametrize("signals", [1, 2])
def test_the_record_of_a_stopped_run_shows_no_terminating_pods(machine: Machine, signals: int) -> None:
    """Nothing corrects the record later. Regression: the record said that a pod was still
    terminating, or that the job was running.
    """
    run = machine.start(manifest(command=["sleep", "600"], nodes=1))
    run.until(lambda r: r.status.get("phase") == "Running")
    for number in (signal.SIGINT, signal.SIGTERM)[:signals]:  # two pending signals of the same kind count as one
        run.signal(number)
    assert run.wait(10) in (130, 143), run.everything()
    assert run.condition("Suspended")["message"].startswith("no pods are running"), run.status


def test_a_terminal_that_closes_after_another_signal_leaves_time_to_save(machine: Machine) -> None:
    """This happens at a logout and a shutdown: systemd sends SIGHUP right after SIGTERM."""
    saves = ["bash", "-c", "trap 'sleep 1; touch saved; exit 143' TERM; touch up; while :; do sleep 0.1; done"]
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    run = machine.start(manifest(command=saves, nodes=1))
    signal.signal(signal.SIGHUP, inherited)
    run.until(lambda r: (machine.folder / "up").exists() and r.status.get("phase") == "Running")
    run.signal(signal.SIGTERM)
    run.until(lambda r: "a second signal" in r.output)
    run.signal(signal.SIGHUP)
    assert run.wait(30) == 143
    assert (machine.folder / "saved").exists(), run.everything()


def test_a_request_that_cannot_be_carried_out_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the commands printed `scaled to 3 nodes` on a machine with one GPU, and `resumed`
    for a job that was ending.
    """
    tool = machine.write("#!/bin/sh\necho 0\n", "nvidia-smi")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine.folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patient = {"spec": {"terminationGracePeriodSeconds": 600}}  # the commands are slow on a busy machine
    run = machine.start(manifest(command=HANG, nodes=1, gpusPerNode=1, podTemplate=patient))
    run.until(lambda r: r.status.get("phase") == "Running")
    scaled = machine.command("scale", "job", "3")
    assert (scaled.returncode, scaled.stderr) == (2, "3 nodes need 3 GPUs, but this machine has 1\n"), scaled
    run.signal(signal.SIGINT)
    run.until(lambda r: "a second signal" in r.output)
    resumed = machine.command("resume", "job")
    assert (resumed.returncode, resumed.stderr) == (2, "job job is being stopped by SIGINT\n"), resumed
    assert not list((run.folder / "requests").iterdir())
    run.signal(signal.SIGINT)
    assert run.wait(5) == 130


@pytest.mark.parametrize("victim", ["torchrun", "hang"])
def test_kill_9_of_the_runner_leaves_nothing_behind(machine: Machine, victim: str) -> None:
    run = machine.start(manifest(args=ENDLESS) if victim == "torchrun" else manifest(command=HANG))
    run.until((lambda r: r.steps() >= 1) if victim == "torchrun" else (lambda r: len(r.processes()) >= 8))
    run.signal(signal.SIGKILL)
    run.wait(5)
    run.assert_nothing_left(5)
    assert "Interrupted" in machine.command("get").stdout


def test_a_process_that_has_lost_the_jobs_environment_is_killed_too(machine: Machine) -> None:
    """Its environment was replaced, as sudo does, or overwritten, as by programs that set their
    title.
    """
    stray = 'env -i "$(which setsid)" "$(which sleep)" 1000 & echo $! > $DDPJOB_POD'
    run = machine.start(manifest(command=["bash", "-c", f"{stray}; until [ -e looked ]; do sleep 0.1; done"], nodes=1))

    def sleeps(pod: str) -> bool:
        file = machine.folder / pod
        pid = file.read_text().strip() if file.exists() else ""
        with contextlib.suppress(OSError):
            return bool(pid) and Path("/proc", pid, "cmdline").read_bytes().split(b"\0")[1:2] == [b"1000"]
        return False

    run.until(lambda _: sleeps("job-0-0"))
    assert machine.command("kill", "job-0-0").returncode == 0
    run.until(lambda _: sleeps("job-0-1"))
    assert not sleeps("job-0-0"), "it must not run next to the pod that replaces its own"
    (machine.folder / "looked").touch()
    assert run.wait() == 0, run.everything()
    assert not sleeps("job-0-1") and "could not be killed" not in run.output


def test_stop_ends_a_hanging_job(machine: Machine) -> None:
    run = machine.start(manifest(command=HANG))
    run.until(lambda r: len(r.processes()) >= 8)
    began = time.monotonic()
    assert machine.command("stop", "--now", "job").returncode == 0
    assert time.monotonic() - began < 10 * slowness()
    run.assert_nothing_left(0.1)
    assert run.wait(5) == 143


def test_stop_gives_a_run_suspended_by_ctrl_z_time_to_save(machine: Machine) -> None:
    saves = ["bash", "-c", "trap 'touch saved; exit 143' TERM; touch up; while :; do sleep 0.1; done"]
    run = machine.start(manifest(command=saves, nodes=1))
    run.until(lambda r: (machine.folder / "up").exists() and r.status.get("phase") == "Running")
    run.signal(signal.SIGSTOP)
    assert machine.command("stop", "job").returncode == 0
    assert run.wait(5) == 143
    assert (machine.folder / "saved").exists(), run.everything()


def test_a_local_job_is_suspended_and_resumed(machine: Machine) -> None:
    run = machine.start(manifest(args=ENDLESS, recovery=FAST))
    run.until(lambda r: r.steps() >= 3)
    assert machine.command("suspend", "job").returncode == 0
    run.until(lambda r: r.status["phase"] == "Suspended" and not r.processes())
    assert machine.command("resume", "job").returncode == 0
    run.finish()


def test_a_job_cannot_run_twice_but_two_jobs_can_run_side_by_side(machine: Machine) -> None:
    first = machine.start(manifest(command=["sleep", "600"]))
    first.until(lambda r: r.status.get("phase") == "Running")
    second = machine.command("run", str(machine.write(manifest(command=["sleep", "1"]))))
    assert second.returncode == 2 and "is already running" in second.stderr
    other = machine.run(manifest("other", command=["sleep", "1"]), seconds=30)
    assert other.process.returncode == 0, other.everything()
    assert machine.command("stop", "job").returncode == 0
