"""`ProcessBackend` reads the records of this machine's jobs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.main import main
from ddpjob.client.backends import process_backend
from ddpjob.client.backends.backend import LogOptions, Mistake
from ddpjob.client.backends.process_backend import ProcessBackend
from ddpjob.client.texts.job_text import why
from ddpjob.local.paths import JobFolder, job_folder
from ddpjob.local.record import held, write_record
from ddpjob.local.runner import prepare
from machine import slowness

DONE = {
    "type": "Complete",
    "status": "True",
    "reason": "a",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def recorded(runs: Path, monkeypatch: pytest.MonkeyPatch, **local: Any) -> JobFolder:
    """Create the folder of the job j in `runs`, with its record."""
    monkeypatch.setenv("DDPJOB_RUNS", str(runs))
    folder = job_folder("j")
    folder.path.mkdir()
    write_record(folder, {"metadata": {"name": "j", "uid": "u"}, "spec": {}, "status": {}, "local": local})
    return folder


def test_a_job_given_instead_of_a_pod_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, monkeypatch)
    with pytest.raises(Mistake, match=r"^j is a job; specify one of its pods, such as j-0-0 \(`ddpjob describe j`\)$"):
        ProcessBackend().kill("j")
    with pytest.raises(Mistake, match=r"^no job k was run in"):
        ProcessBackend().kill("k-0-0")


def test_a_job_that_ends_while_it_is_read_is_not_shown_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    record: dict[str, Any] = {"metadata": {"name": "j"}, "spec": {}, "status": {"phase": "Running"}, "local": {}}
    folder = job_folder("j")
    folder.path.mkdir()
    write_record(folder, record)
    backend = ProcessBackend()
    assert backend.job("j")["status"]["phase"] == "Interrupted"

    def ended(folder: JobFolder) -> None:
        write_record(folder, {**record, "status": {"phase": "Complete", "conditions": [DONE]}})

    monkeypatch.setattr(process_backend, "runner", ended)
    assert backend.job("j")["status"]["phase"] == "Complete"


def test_a_killed_run_leaves_no_job_that_looks_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record on disk is the last one that the killed run wrote."""
    pods = [{"name": "j-0-0", "state": "Running"}, {"name": "j-1-0", "state": "Error (1)"}]
    folder = recorded(tmp_path, monkeypatch, run="first", pods=pods)
    nodes = {"wanted": 2, "active": 1, "ready": 1, "spare": 0, "display": "1/2"}
    local = {"run": "first", "pods": pods}
    write_record(folder, {**ProcessBackend().job("j"), "status": {"nodes": nodes}, "local": local})
    backend = ProcessBackend()
    assert [(pod.state, pod.ended) for pod in backend.pods("j")] == [("Ended", True), ("Error (1)", True)]
    assert backend.job("j")["status"]["nodes"] == {**nodes, "active": 0, "ready": 0, "display": "0/2"}
    os.utime(folder.status, (0, 1.0))
    assert backend.job("j")["status"]["completionTime"] == "1970-01-01T00:00:01Z", "it does not run until now"
    with held(folder):
        assert [(pod.state, pod.ended) for pod in backend.pods("j")] == [("Running", False), ("Error (1)", True)]
        assert backend.job("j")["status"]["nodes"] == nodes


@pytest.mark.parametrize(
    ("runs", "stay"),
    [
        (["Retain"], True),
        (["Delete"], False),
        (["Delete", "Delete"], False),
        (["", "Delete"], True),
        (["Retain", "Delete", "Delete"], True),
        (["Delete", "Retain"], True),
        (["Delete", "", "Delete"], True),
        (["Delete", "Delete --fresh"], False),
        (["Retain", "Delete --fresh"], True),
        (["Delete", "Retain --fresh"], True),
        (["", " --fresh"], True),
    ],
)
def test_checkpoints_are_deleted_with_a_job_if_a_cluster_would_delete_its_claim(
    runs: list[str], stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, the job's folder stands in for the claim of a claimTemplate. A different
    template means a different claim.
    """
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    folder, now = job_folder("j"), datetime(2026, 1, 1, tzinfo=UTC)
    for number, words in enumerate(runs):
        when_deleted = words.split(" ")[0]
        template = {"claimTemplate": {"whenDeleted": when_deleted}} if when_deleted else {"claimName": "claim"}
        prepare(folder, fresh="--fresh" in words, now=now, disposable=when_deleted == "Delete")
        (folder.checkpoints / f"step-{number}.pt").write_text("weights")
        spec = {"storage": {"checkpoints": template}}
        write_record(folder, {"metadata": {"name": "j", "uid": "u"}, "spec": spec, "status": {}, "local": {}})
    ProcessBackend().delete("j")
    assert folder.path.exists() == stay
    left = [path.name for path in folder.path.rglob("*") if path.is_file()]
    retained = {f"step-{number}.pt" for number in range(len(runs) if stay else 0)}
    if runs == ["Retain", "Delete --fresh"]:
        retained = {"step-0.pt"}  # checkpoints in a claim that is kept
    assert set(left) == retained, "no other files are left"


def test_a_truncated_event_does_not_hide_other_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path, monkeypatch, run="r")
    folder.run("r").path.mkdir()
    line = '{"time": "2026-01-01T00:00:00Z", "warning": false, "reason": "Running", "message": "2 nodes train"}'
    folder.run("r").events.write_text(f"{line}\n{line[:40]}\n{line}\n")
    assert [event.reason for event in ProcessBackend().events("j")] == ["Running", "Running"]


def test_a_moved_folder_of_runs_keeps_its_logs_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projects are renamed, and runs are copied from other machines."""
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "before"))
    job = job_folder("j")
    run = prepare(job, fresh=False, now=datetime(2026, 1, 1, tzinfo=UTC))
    pod = {"name": "j-0-0", "role": "node", "state": "Completed", "created": "2026-01-01T00:00:00Z", "logs": []}
    local = {"run": run.name, "folder": str(run.path), "pods": [pod]}
    write_record(job, {"metadata": {"name": "j"}, "spec": {}, "status": {}, "local": local})
    run.log("j-0-0", "trainer").write_text("step 1\n")
    run.events.write_text('{"time": "2026-01-01T00:00:00Z", "warning": false, "reason": "Running", "message": "m"}\n')
    (tmp_path / "before").rename(tmp_path / "after")
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "after"))
    backend = ProcessBackend()
    [found] = backend.pods("j")
    assert found.created == datetime(2026, 1, 1, tzinfo=UTC)
    assert b"".join(backend.log(found, LogOptions())) == b"step 1\n"
    assert [event.reason for event in backend.events("j")] == ["Running"]


def test_a_run_that_does_not_start_in_time_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a second submission with this name would meet the first job."""
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "runs"))
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o700)
    monkeypatch.setattr(process_backend.sys, "executable", str(slow))
    monkeypatch.setattr(process_backend, "_STARTED_SECONDS", 3.0 * slowness())
    job = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "j"}}
    with pytest.raises(Mistake, match="was killed, because it recorded no job within"):
        ProcessBackend().create([{**job, "spec": {"image": "i", "script": "s.py"}}])
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_another_users_job_cannot_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path, monkeypatch)

    def refused(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.kill", refused)
    whose = rf"belongs to another user or runs elsewhere \(process {os.getpid()}\)"
    with held(folder), pytest.raises(Mistake, match=f"job j {whose}"):
        ProcessBackend().stop("j")


def test_a_request_to_a_run_that_is_ending_is_refused_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, monkeypatch, run="r", pods=[{"name": "j-0-0"}])
    with ExitStack() as holding:
        holding.enter_context(held(folder))
        ends = threading.Timer(0.3, holding.pop_all().close)
        ends.start()
        began = time.monotonic()
        with pytest.raises(Mistake, match="job j is not running"):
            ProcessBackend().kill("j-0-0")
        ends.join()
    assert time.monotonic() - began < 5 and not list(folder.requests.iterdir())


def test_a_progress_bar_counts_as_one_of_the_last_lines_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    job = job_folder("j")
    run = prepare(job, fresh=False, now=datetime(2026, 1, 1, tzinfo=UTC))
    local = {"run": run.name, "pods": [{"name": "j-0-0", "role": "node", "state": "Completed"}]}
    write_record(job, {"metadata": {"name": "j"}, "spec": {}, "status": {}, "local": local})
    bar = b"".join(b"\rstep %d/90" % step for step in range(90))
    run.log("j-0-0", "trainer").write_bytes(b"begins\nwarning\n" + bar + b"\ndone\n")
    backend = ProcessBackend()
    [pod] = backend.pods("j")
    assert b"".join(backend.log(pod, LogOptions(tail=3))) == b"warning\n" + bar + b"\ndone\n"

    # The command prints only the last state of a bar, unless it prints a pod's log as it is.
    assert main(["--local", "logs", "j", "--tail", "2"]) == 0
    assert main(["--local", "logs", "j-0-0", "--tail", "2"]) == 0
    mark = b"[0-0 rank 0] "
    assert capfdbinary.readouterr().out == mark + b"step 89/90\n" + mark + b"done\n" + bar + b"\ndone\n"


def test_a_job_of_another_machine_or_container_is_not_killed_by_its_process_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record may be in a folder that both machines see, so its process id may belong to any
    process here.
    """
    folder = recorded(tmp_path, monkeypatch)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        with held(folder):
            folder.lock.write_text(str(bystander.pid))
            with pytest.raises(Mistake, match=f"j runs on another machine .*, as process {bystander.pid}"):
                ProcessBackend().stop("j", now=True)
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_checkpoints_in_a_linked_folder_are_deleted_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: deleting the job raised an exception after its record was already deleted. Files
    behind links inside the folder are kept, because they do not belong to the job.
    """
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "runs"))
    (large := tmp_path / "large").mkdir()
    (data := tmp_path / "data").mkdir()
    (data / "images").touch()
    folder = job_folder("j")
    folder.path.mkdir(parents=True)
    folder.checkpoints.symlink_to(large)
    prepare(folder, fresh=False, now=datetime(2026, 1, 1, tzinfo=UTC), disposable=True)
    (large / "model.pt").touch()
    (large / "step").mkdir()
    (large / "data").symlink_to(data)
    spec = {"storage": {"checkpoints": {"claimTemplate": {"whenDeleted": "Delete"}}}}
    write_record(folder, {"metadata": {"name": "j", "uid": "u"}, "spec": spec, "status": {}, "local": {}})
    ProcessBackend().delete("j")
    assert not folder.path.exists() and not any(large.iterdir()) and (data / "images").exists()


def test_an_interrupted_deletion_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: files were deleted in directory order, and once the record was gone, the job was
    unknown.
    """
    folder = recorded(tmp_path, monkeypatch)
    folder.run("r").pods.mkdir(parents=True)
    rmtree, listed, fails = process_backend.shutil.rmtree, Path.iterdir, [True]

    def refused(path: Path) -> None:
        if fails:
            fails.pop()
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        rmtree(path)

    monkeypatch.setattr(process_backend.shutil, "rmtree", refused)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))
    with pytest.raises(Mistake, match="Permission denied"):
        ProcessBackend().delete("j")
    ProcessBackend().delete("j")
    assert not folder.path.exists()


def test_an_unreadable_log_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log may belong to a run with sudo. Regression: a thread printed a traceback."""
    folder = recorded(tmp_path, monkeypatch, run="r", pods=[{"name": "j-0-0", "state": "Completed"}])
    (log := folder.run("r").log("j-0-0", "trainer")).parent.mkdir(parents=True)
    log.write_text("step 1\n")

    opened = Path.open

    def refused(self: Path, *how: Any, **more: Any) -> Any:
        if self == log:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *how, **more)

    backend = ProcessBackend()
    [pod] = backend.pods("j")
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(Mistake, match=f"^{log}: Permission denied$"):
        list(backend.log(pod, LogOptions()))


def test_a_stopped_run_is_not_resumed_because_of_a_field_of_its_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, monkeypatch)
    said = "no pods are running; set runPolicy.suspend to false to resume"
    conditions = [{**DONE, "type": "Suspended", "message": said}, {**DONE, "type": "Running", "status": "False"}]
    status = {"conditions": conditions}
    write_record(folder, {**ProcessBackend().job("j"), "status": status, "local": {}})
    messages = [condition["message"] for condition in ProcessBackend().job("j")["status"]["conditions"]]
    assert messages == ["the job's `ddpjob run` was stopped; run the job again to resume", ""]
    with held(folder):
        assert ProcessBackend().job("j")["status"]["conditions"][0]["message"] == said


def test_the_second_of_two_simultaneous_submissions_finds_the_job_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the second run wrote to the first one's log and replaced its manifest."""
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    folder, started, running = job_folder("j"), list[Any](), ExitStack()

    class Started:
        """A `ddpjob run` that takes a long time to write its record."""

        pid, returncode = 1, None

        def __init__(self, words: list[str], **_: Any) -> None:
            started.append(json.loads(Path(words[-1]).read_text()))
            threading.Timer(0.5, self.begin).start()

        def begin(self) -> None:
            running.enter_context(held(folder))
            write_record(folder, {"metadata": {"name": "j", "uid": "u"}, "spec": {}, "status": {}, "local": {}})

        def poll(self) -> None:
            return None

    monkeypatch.setattr(process_backend.subprocess, "Popen", Started)
    spec = {"image": "i", "nodes": 1, "gpusPerNode": 0, "command": ["true"]}
    job = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "j"}, "spec": spec}
    said = list[str]()

    def submit(nodes: int) -> None:
        try:
            said.append(ProcessBackend().create([{**job, "spec": {**spec, "nodes": nodes}}]))
        except Mistake as mistake:
            said.append(str(mistake))

    threads = [threading.Thread(target=submit, args=(nodes,)) for nodes in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.close()
    assert sorted(said) == ["j", "job j is already running; run `ddpjob stop j` to stop it"]
    assert len(started) == 1 and json.loads((tmp_path / "j" / "submitted.json").read_text()) == started[0]


def test_a_job_whose_empty_checkpoint_folder_is_a_link_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link leads to a larger disk."""
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "runs"))
    (large := tmp_path / "large").mkdir()
    folder = job_folder("j")
    folder.path.mkdir(parents=True)
    folder.checkpoints.symlink_to(large)
    prepare(folder, fresh=False, now=datetime(2026, 1, 1, tzinfo=UTC))
    write_record(folder, {"metadata": {"name": "j", "uid": "u"}, "spec": {}, "status": {}, "local": {}})
    ProcessBackend().delete("j")
    assert not folder.path.exists() and large.is_dir()


def test_a_pods_job_is_read_correctly_from_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are jobs j and j-1, the pod j-1-0 is node 1 of j. Regression: the pod was mistaken
    for one of j-1.
    """
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path))
    for name in ("j", "j-1", "j-1-coordinator"):
        folder = job_folder(name)
        run = prepare(folder, fresh=False, now=datetime(2026, 1, 1, tzinfo=UTC))
        pods = [
            {"name": f"{name}-{end}", "role": "node", "state": "Completed"} for end in ("0-0", "1-0", "coordinator-0")
        ]
        write_record(
            folder, {"metadata": {"name": name}, "spec": {}, "status": {}, "local": {"run": run.name, "pods": pods}}
        )
        for pod in pods:
            run.log(pod["name"], "trainer").write_text(f"of {name}\n")
        run.log(f"{name}-0-0", "coordinator").write_text(f"of {name}\n")
    backend = ProcessBackend()
    for name in ("j", "j-1", "j-1-coordinator"):
        for pod in backend.pods(name):
            assert b"".join(backend.log(pod, LogOptions())) == f"of {name}\n".encode(), pod.name


def test_a_stopped_job_whose_image_comes_from_its_class_is_explained() -> None:
    body = {"metadata": {"name": "j"}, "spec": {"className": "gpu"}, "status": {"phase": "Interrupted"}}
    said = list(why(body, (), datetime(2026, 1, 1, tzinfo=UTC)))
    assert said[0] == "j: its `ddpjob run` was stopped before the job finished."


def test_an_error_of_the_disk_is_raised_as_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs expect no OSError from Client. The command prints the same line."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DDPJOB_RUNS", str(tmp_path / "file" / "runs"))
    job = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": "j"},
           "spec": {"image": "i", "script": "a.py"}}  # fmt: skip
    with pytest.raises(Mistake, match=f"^{tmp_path / 'file' / 'runs'}.*: Not a directory$"):
        ProcessBackend().create([job])
