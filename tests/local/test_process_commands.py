"""Commands for local jobs from another terminal, and `Client`. The job's program is a shell
loop.
"""

from __future__ import annotations

import json
import threading

import pytest
import yaml
from ddpjob import Client
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.job_client import JobFailed
from ddpjob.local import processes
from process_harness import Machine, manifest

LOOP = ["bash", "-c", "while true; do echo at work; sleep 0.2; done"]


def test_commands_for_a_running_job_work_from_another_terminal(machine: Machine) -> None:
    run = machine.start(manifest(command=LOOP))
    run.until(lambda r: r.status.get("phase") == "Running")

    # a job's name instead of a pod's selects all its pods
    logs = machine.command("logs", "job", "--tail", "2")
    assert logs.returncode == 0 and "[0-0] at work" in logs.stdout and "[1-0] at work" in logs.stdout, logs.stderr
    assert machine.command("logs", "job-0-0", "--tail", "1").stdout == "at work\n"
    wrong = machine.command("logs", "job-7-0")
    assert (
        wrong.returncode == 2 and "job job has no pod job-7-0; its pods: " in wrong.stderr and "job-0-0" in wrong.stderr
    )

    assert "job trains on 2 nodes" in machine.command("why", "job").stdout
    assert machine.command("wait", "job", "--timeout", "1s").returncode == 124
    described = machine.command("describe", "job").stdout
    assert "GroupRuns" in described or "NodesRun" in described
    # The printed manifest can be validated again and applied to a cluster.
    printed = yaml.safe_load(machine.command("get", "job", "-o", "yaml").stdout)
    assert "local" not in printed and machine.write(printed, "printed.yaml")
    assert machine.command("validate", "printed.yaml").returncode == 0
    assert json.loads(machine.command("get", "-o", "json").stdout)["kind"] == "List"

    killed = machine.command("kill", "job-1-0")
    assert killed.stdout == f"pod job-1-0 killed ({machine.runs})\n"
    run.until(lambda r: any(pod.startswith("job-1-1") for pod in r.pods()))
    assert "Deleted" in machine.command("events", "job").stdout

    uid = run.record["metadata"]["uid"]
    assert machine.command("delete", "job").returncode == 0
    assert run.wait(20) != 0
    assert processes.find({"DDPJOB_UID": uid}) == []
    assert not (machine.runs / "job").exists()
    assert machine.command("get", "job").returncode == 2


def test_a_signal_is_reported_as_the_reason_of_a_suspension(machine: Machine) -> None:
    run = machine.start(manifest(command=LOOP))
    run.until(lambda r: r.status.get("phase") == "Running")
    assert machine.command("stop", "job").stdout == "job: stopped\n"
    assert run.wait(30) == 143
    assert "Suspended: stopped by SIGTERM" in run.output and "runPolicy.suspend is true" not in run.output
    why = machine.command("why", "job")
    assert why.returncode == 0 and "run it again" in why.stdout
    assert machine.command("wait", "job").returncode == 1


def test_a_script_written_by_ddpjob_init_survives_a_kill(machine: Machine) -> None:
    assert machine.command("init").returncode == 0
    job = yaml.safe_load((machine.folder / "job.yaml").read_text())
    job["spec"]["args"] = ["--epochs=20"]
    run = machine.start(job)
    run.until(lambda r: r.status.get("progress", {}).get("epoch", 0) >= 2)
    with run.frozen():
        assert machine.command("kill", "first-0-0").returncode == 0
    assert run.wait(120) == 0, run.output
    shown = run.status["progress"]
    assert shown["epoch"] == 20 and shown["metrics"]["accuracy"] > 0.9
    assert run.status["restarts"]["uncounted"] == 1


def test_the_python_client_works_with_local_jobs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(machine.runs))
    monkeypatch.chdir(machine.folder)
    client = Client("local")
    assert client.list() == ()
    ending = threading.Timer(0.0, lambda: None)
    try:
        job = client.submit(manifest("one", command=["bash", "-c", "echo done; sleep 1"]))
        assert job.name == "one" and job.spec.nodes == 2
        assert client.wait("one", timeout=120).phase == "Complete"
        assert {line for _, line in client.logs("one")} == {"done"}
        client.submit(manifest("two", command=LOOP))
        with pytest.raises(TimeoutError):
            client.wait("two", timeout=1)
        with pytest.raises(Mistake, match=r"spec\.nodes"):
            client.scale("two", 0)
        ending = threading.Timer(1.0, client.delete, ["two"])
        ending.start()
        with pytest.raises(JobFailed, match=r"two was deleted|two is Interrupted"):
            client.wait("two", timeout=60)
    finally:
        ending.join()
        for left in client.list():
            client.delete(left.name)


def test_a_finished_job_is_rerun_with_one_command(machine: Machine) -> None:
    """The job's program fails until a file exists. When the job is submitted a second time, a
    message reports what happens to the checkpoints.
    """
    script = (
        f"mkdir -p {machine.runs}/job/checkpoints; touch {machine.runs}/job/checkpoints/a; test -e {machine.folder}/go"
    )
    job = manifest(command=["bash", "-c", script], nodes=1, recovery={"maxRestarts": 0})
    assert machine.run(job).process.returncode == 1
    assert machine.command("pod", "job", "--index", "0").stdout == "job-0-0\n"
    assert machine.command("pod", "job").returncode == machine.command("pod", "job", "--index", "7").returncode == 2
    (machine.folder / "go").touch()
    again = machine.command("rerun", "job")
    assert again.returncode == 0, again.stderr
    assert "job started again (it was Failed); it resumes from job/checkpoints (--fresh starts" in again.stdout
    assert machine.command("wait", "job", "--timeout", "60s").returncode == 0
    file = str(machine.write(job))
    over = machine.command("submit", "--local", file, "--wait")
    assert over.returncode == 0 and "created, replacing the Complete job; it resumes from" in over.stdout, over.stderr
    fresh = machine.command("submit", "--local", "--fresh", file, "--wait")
    assert fresh.returncode == 0 and "replacing the Complete job; it starts from scratch" in fresh.stdout
    assert machine.command("submit", "--cluster", "--fresh", file).returncode == 2
    assert (
        "the next run with this name resumes from job/checkpoints, which is kept"
        in machine.command("delete", "job").stdout
    )
