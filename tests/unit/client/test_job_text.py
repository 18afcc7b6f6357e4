"""A job in words: its row in a list, its description with few or very many pods, and the
explanation of its state.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ddpjob.cli.top import JobScreen
from ddpjob.client.backends.backend import Happened, Mistake, PodLine
from ddpjob.client.job_client import Job
from ddpjob.client.texts.job_text import describe, gpu_hours, remedies, row, table, warnings, why
from rich.console import Console

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
Json = dict[str, Any]


def job(spec: Json | None = None, **status: Any) -> Json:
    meta = {"name": "j", "namespace": "ml", "uid": "1", "creationTimestamp": "2026-01-01T11:00:00Z"}
    return {
        "metadata": meta,
        "spec": {"image": "a", "script": "b.py", "nodes": 2, **(spec or {})},
        **({"status": status} if status else {}),
    }


def condition(kind: str, status: bool, reason: str, message: str = "m") -> Json:
    return {"type": kind, "status": str(status), "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-01T11:58:00Z"}  # fmt: skip


def text(body: Json, *pods: PodLine) -> str:
    return "\n".join(why(body, pods, NOW))


def test_a_job_whose_deletion_waits_for_a_finalizer_is_reported() -> None:
    body = job(phase="Running", conditions=[condition("Running", True, "GroupRuns")])
    assert "deleted" not in text(body)
    body["metadata"] |= {
        "deletionTimestamp": "2026-01-01T11:58:00Z",
        "finalizers": ["foregroundDeletion", "example.com/hold"],
    }
    assert "ignores it until the owner of the finalizer example.com/hold" in text(body)


def restarted(**fields: Any) -> Json:
    known = {"time": "2026-01-01T11:59:00Z", "pod": "j-0-0", "counted": True, "reason": "OOMKilled", "message": "m"}
    recent = [{**known, "round": 1, "seconds": 0.3, **fields}]
    return {"total": 1, "counted": 1, "repeatedSteps": fields.get("repeatedSteps", 0), "recent": recent}


def test_repeated_work_and_work_at_risk_are_shown_wherever_a_job_is_described() -> None:
    known = restarted(continuedFrom="memory", repeatedSteps=1, repeatedSeconds=0.4) | {"repeatedSeconds": 0.4}
    body = job(phase="Running", restarts=known, progress={"step": 9, "stepsAtRisk": 4})
    said = "\n".join(describe(body, [], [], NOW))
    assert "Repeated:   1 step, 0.4 s\nAt risk:    at most 4 steps\n" in said
    assert "ran again after 0.3 s); 1 step repeated (from memory)" in said and "unknown" not in said
    assert row(body, NOW, wide=True)[-2] == "4"
    console = Console(width=100)
    with console.capture() as shown:
        console.print(JobScreen().frame(body, [], NOW))
    assert "at risk  at most 4 steps" in shown.get()


def test_the_whole_remedy_is_shown_on_a_narrow_screen() -> None:
    body = job(conditions=[condition("Failed", True, "InitFailure")])
    console = Console(width=60)
    with console.capture() as shown:
        console.print(JobScreen().frame(body, [], NOW))
    assert "What to do: " in text(body) and " ".join(text(body).split()) in " ".join(shown.get().split())


def test_a_script_that_does_not_report_repeated_steps_gets_a_single_hint() -> None:
    body = job(phase="Running", restarts={**restarted(continuedFrom="unknown"), "unknownRepeats": 1})
    said = "\n".join(describe(body, [], [], NOW))
    assert said.count("unknown") == 2 and "Repeated:   unknown after 1 restart\n" in said
    assert "ddpjob_report.Snapshots reports this" in said and "0 steps" not in said
    assert "repeated (" not in said, "the script has not reported it"
    spoke = restarted(continuedFrom="storage") | {"unknownRepeats": 1}
    said = "\n".join(describe(job(phase="Running", restarts=spoke), [], [], NOW))
    assert "an unknown number of steps repeated (from a checkpoint)" in said and "Snapshots" not in said


def test_the_description_of_a_job_that_backs_off_names_the_failure() -> None:
    failed = {"time": "2026-01-01T11:59:00Z", "pod": "j-0-0", "counted": True}
    failed |= {"reason": "WorkerFailed", "message": "rank 0: no driver"}
    body = job(
        phase="Restarting",
        conditions=[condition("Running", False, "BackingOff"), condition("Restarting", True, "WorkerFailed")],
        restarts={"recent": [failed]},
    )
    assert "Last restart: 1m00s ago WorkerFailed: rank 0: no driver (counted)" in text(body)


def test_a_status_that_is_older_than_the_spec_is_marked() -> None:
    """If an admission policy refuses the status, only an event reports it."""
    body = job(phase="Running", conditions=[condition("Running", True, "GroupRuns")], observedGeneration=1)
    body["metadata"]["generation"] = 1
    assert "before its spec changed, because" not in text(body)
    body["metadata"]["generation"] = 2
    assert "before its spec changed, because" in text(body) and "`ddpjob events j`" in text(body)


@pytest.mark.parametrize(
    ("order", "line"),
    [
        ([], None),
        ([0, 2, 1, 3], "Ranks:      in this order: nodes 0, 2, 1, 3"),
        ([0, 1, 4, 5, 2, 3, 7], "Ranks:      in this order: nodes 0-1, 4-5, 2-3, 7"),
        ([*range(0, 64, 2), *range(1, 64, 2)], "Ranks:      in this order: nodes 0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_a_rank_order_that_differs_from_the_indices_is_shown(order: list[int], line: str | None) -> None:
    lines = [text for text in describe(job(rankOrder=order), [], [], NOW) if text.startswith("Ranks")]
    assert lines == ([line] if line else [])


def test_a_training_job_with_a_missing_pod_is_explained_by_a_missing_operator() -> None:
    """Regression: without an operator, a job with a killed pod was shown as healthy."""
    slots = [{"attempt": 0, "state": "Running"}, {"attempt": 2, "state": "Running"}]
    body = job(phase="Running", slots=slots, conditions=[condition("Running", True, "GroupRuns")])
    pods = [PodLine("j-0-0", "node", 0, "Running"), PodLine("j-1-2", "node", 1, "Running")]
    assert "does not exist" not in "\n".join(why(body, pods, NOW))
    said = "\n".join(why(body, pods[:1], NOW))
    assert (
        "Pod j-1-2 of slot 1 does not exist" in said
        and "no operator is acting on this job; run `ddpjob doctor`" in said
    )
    assert "does not exist" not in "\n".join(why(body, [], NOW)), "a user who may not list pods sees no pods"


def test_gpu_hours_are_shown_if_a_job_has_any() -> None:
    use = {"held": 16, "since": "2026-01-01T11:59:00Z"}
    body = job(phase="Running", gpuSeconds=44424, gpuUse=use)
    assert "GPU hours:  12.3 (44,424 GPU seconds), 16 GPUs held\n" in "\n".join(describe(body, [], [], NOW))
    assert row(body, NOW, wide=True)[-3] == "12.3"
    assert "GPU hours" not in "\n".join(describe(job(phase="Running"), [], [], NOW))
    assert [gpu_hours(seconds) for seconds in (0, 90, 35_999, 36_000, 36_000_000)] == [
        *("", "0.03", "10.00", "10.0", "10,000.0"),
    ]


def test_a_row_has_the_same_columns_as_in_kubectl() -> None:
    body = job(
        phase="Running",
        nodes={"display": "2/2 +1"},
        restarts={"display": "0/10 +1"},
        progress={"display": "epoch 1/3 40 %", "lossDisplay": "0.5", "speedDisplay": "12/s"},
        startTime="2026-01-01T11:30:00Z",
        conditions=[condition("Running", True, "GroupRuns")],
    )
    cells = ("j", "Running", "2/2 +1", "epoch 1/3 40 %", "0.5", "12/s", "0/10 +1", "1h00m")
    assert row(body, NOW) == cells
    assert row(body, NOW, wide=True, namespaces=True) == ("ml", *cells, "30m00s", "", "", "")
    assert table([("A", "BB"), ("CCC", "D")]) == ["A     BB", "CCC   D"]


def test_a_job_that_no_operator_has_handled_is_reported() -> None:
    assert "no operator has reconciled it" in text(job()) and "ddpjob doctor" in text(job())


def test_a_job_managed_by_another_controller_is_marked() -> None:
    theirs = "kueue.x-k8s.io/multikueue"
    assert text(job(spec={"managedBy": theirs})) == (
        f"j is managed by {theirs} (spec.managedBy), so DDPJob's operator ignores it."
    )


def test_a_job_in_a_queue_is_not_described_as_suspended_by_its_user() -> None:
    said = text(job(phase="Queued", conditions=[condition("Suspended", True, "Queued", "waits in queue team")]))
    assert said.startswith("j waits: Queued, for 2m00s.\n  waits in queue team")
    assert "ddpjob resume" not in said and "kubectl get workloads" in said


def test_a_failed_job_is_described_with_its_remedy() -> None:
    failed = condition("Failed", True, "RestartBudgetSpent", "the last one:\n  ValueError: x")
    said = text(job(phase="Failed", conditions=[failed, condition("Running", False, "Failed")]))
    assert said.startswith("j failed: RestartBudgetSpent, 2m00s ago.\n  the last one:\n    ValueError: x")
    assert "What to do: Correct the cause of the last failure" in said


@pytest.mark.parametrize(
    ("reason", "message", "remedy"),
    [
        ("Hang", "no step for 60 s", "Look for ranks that wait in different collectives."),
        ("OOMKilled", "rank 0 was killed", "`storage.sharedMemory`"),
        ("WorkerFailed", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "accumulate gradients"),
        (
            "WorkerFailed",
            "RuntimeError: [enforce fail at inline_container.cc:671] . unexpected pos",
            "The disk is full",
        ),
        ("WorkerFailed", "ValueError: x", "Read the traceback in the message."),
    ],
)
def test_a_spent_budget_is_explained_by_its_last_failure(reason: str, message: str, remedy: str) -> None:
    failed = condition("Failed", True, "RestartBudgetSpent", f"{reason}: {message} (2 failures)")
    last = {"time": "2026-01-01T00:00:00Z", "pod": "j-0-0", "index": 0, "reason": reason, "counted": True}
    eviction = {**last, "reason": "Evicted", "counted": False}
    body = job(phase="Failed", conditions=[failed], restarts={"recent": [{**last, "message": message}, eviction]})
    said = text(body)
    assert remedy in said and "recovery.maxRestarts" not in said
    assert "Next: correct the cause, and run `ddpjob rerun j`, which resumes from the last checkpoint." in said


def test_no_slot_of_a_finished_job_is_shown_as_running() -> None:
    """The status keeps the state of each slot at the time of the failure."""
    slots = [{"attempt": 0, "state": "Running", "node": "a"}, {"attempt": 0, "state": "Running", "node": "b"}]
    failed, running = condition("Failed", True, "RestartBudgetSpent"), condition("Running", True, "GroupRuns")
    ended = job(phase="Failed", conditions=[failed], slots=slots)
    assert "  0-1       Running until the end" in describe(ended, (), (), NOW)
    assert "  0-1       Running" in describe(job(phase="Running", conditions=[running], slots=slots), (), (), NOW)


def test_a_waiting_job_shows_the_cause_and_not_the_consequence() -> None:
    waits = [condition("Scheduled", False, "Unschedulable", "0/3 nodes"), condition("Running", False, "NodesMissing")]
    said = text(job(phase="Pending", conditions=waits))
    assert said.startswith("j waits: Unschedulable") and "0/3 nodes" in said and "request less" in said
    pulling = PodLine("j-0-0", "node", 0, "ImagePullBackOff", message="no such host")
    placed = [condition("Scheduled", True, "AllPlaced"), condition("Running", False, "NodesMissing")]
    assert "pod j-0-0 (ImagePullBackOff): no such host" in text(job(phase="Pending", conditions=placed), pulling)
    restarting = [condition("Restarting", True, "Deleted"), condition("Running", False, "NodesMissing")]
    assert text(job(phase="Restarting", conditions=restarting)).startswith("j restarts: Deleted")


def test_suspended_complete_running_and_interrupted_jobs_are_described() -> None:
    assert "`ddpjob resume j`" in text(job(phase="Suspended", conditions=[condition("Suspended", True, "Suspended")]))
    times = {"startTime": "2026-01-01T11:00:00Z", "completionTime": "2026-01-01T11:30:00Z"}
    done = job(phase="Complete", conditions=[condition("Complete", True, "Finished")], progress={"step": 9}, **times)
    assert text(done) == "j is complete: it ran for 30m00s."
    del done["status"]["startTime"]
    assert text(done) == "j is complete.", "the job was suspended at its last step"
    del done["status"]["progress"]
    assert "no step.\nRun `ddpjob logs j`" in text(done), "the script may have printed that it needs GPUs"
    done["spec"]["command"] = ["bash", "run.sh"]
    assert text(done) == "j is complete.", "the job's steps are not counted"
    apart = condition("Complete", True, "Finished", "all 2 nodes have finished, but the ranks did not form a group: x")
    said = text(job(phase="Complete", conditions=[apart], progress={"step": 9}))
    assert said.endswith("\nThe ranks did not form a group: x.")
    again = {"step": 9, "stepsBefore": 7, "resumed": "unknown"}
    done = job(phase="Complete", conditions=[condition("Complete", True, "Finished")], progress=again)
    assert "It is unknown whether the script continued from a checkpoint after the last restart" in text(done)
    running = job(phase="Running", nodes={"ready": 2, "spare": 1}, conditions=[condition("Running", True, "GroupRuns")])
    assert text(running) == "j trains on 2 nodes and 1 spare."
    for moment, quiet in {"11:59:31": False, "11:58:00": True}.items():
        running["status"]["progress"] = {"display": "step 7", "updatedAt": f"2026-01-01T{moment}Z"}
        assert text(running).startswith("j trains on 2 nodes and 1 spare. step 7")
        assert ("Its progress has not changed for 2m00s.\nRun `ddpjob stacks j` to see" in text(running)) == quiet
    running["status"]["progress"] = {**again, "resumed": "no"}
    assert "After the last restart the script seems to have started again from step 0, because" in text(running)
    assert "run it again, for example with `ddpjob rerun j`" in text(job(phase="Interrupted")), "a job of this machine"
    last = {"time": "2026-01-01T00:00:00Z", "pod": "j-0-0", "index": 0, "reason": "WorkerFailed", "counted": True}
    failed = text(job(phase="Interrupted", restarts={"recent": [{**last, "message": "ValueError: x"}]}))
    assert "Last restart: " in failed and "ValueError: x" in failed, (
        "the message may be the reason why the job was stopped"
    )
    assert "its end was not recorded" in text(job({"image": ""}, phase="Interrupted")), "only the job's folder is left"


def test_the_remedy_for_a_condition_comes_from_that_conditions_own_table() -> None:
    """The same reason may need different advice. For example, a registry that denies access is not
    a missing image.
    """
    pulling = condition("Running", False, "ImagePullBackOff", "container a of pod j-0-0: ImagePullBackOff: denied")
    said = text(job(phase="Pending", conditions=[condition("Scheduled", True, "AllPlaced"), pulling]))
    assert "imagePullSecrets" in said and "does not have the image" not in said
    lacks = condition("Running", False, "ErrImageNeverPull", "container trainer of pod j-0-0: ErrImageNeverPull")
    assert "load the image onto the machines" in text(job(phase="Pending", conditions=[lacks]))
    changed = condition("Scheduled", False, "InvalidPodTemplate")
    said = text(job(phase="Restarting", conditions=[changed, condition("Running", False, "NodesMissing")]))
    assert "Suspend the job, correct the field that the message names" in said and "No objects were created" not in said
    said = text(job(phase="Failed", conditions=[condition("Failed", True, "ImagePullBackOff")]))
    assert "The registry does not have the image" in said and "imagePullSecrets" not in said


@pytest.mark.parametrize("reason", ["ClassMissing", "ClassRefused"])
def test_a_job_without_its_class_waits_for_the_class(reason: str) -> None:
    """A new job has no other condition, and a resumed job would be described as suspended."""
    lacks = condition("ClassApplied", False, reason, "spec.className: why")
    for suspended in ([], [condition("Suspended", True, reason, "2 pods still terminating")]):
        said = text(job(phase="Suspended" if suspended else "Pending", conditions=[lacks, *suspended]))
        assert said.startswith(f"j waits: {reason}, for 2m00s.\n  spec.className: why")
        assert "to change the class" in said or "to add the class" in said
        assert "ddpjob resume" not in said
    asked = [condition("ClassApplied", False, "ClassExceeded"), condition("Suspended", True, "Suspended")]
    assert text(job(phase="Suspended", conditions=asked)).startswith("j is suspended")


def test_problems_of_a_training_job_are_shown_with_their_remedies() -> None:
    stalls = condition("Running", True, "StepOverdue", "the group completed no step: rank 0 in f\nrank 0:\nstack")
    said = text(job(phase="Running", nodes={"ready": 2}, conditions=[stalls]))
    assert said.startswith("j trains on 2 nodes.\nRunning is True: StepOverdue.\n  the group completed no step: rank")
    assert "\n  stack\nWhat it means: No rank makes progress" in said and "delete a pod" in said
    amiss = condition("CheckpointsCopied", False, "CopiesBehind", "none has reached the bucket")
    well = [condition("Running", True, "GroupRuns"), condition("NodesHealthy", True, "AllHealthy")]
    said = text(job(phase="Running", nodes={"ready": 2}, conditions=[*well, amiss]))
    assert "CheckpointsCopied is False: CopiesBehind.\n  none has reached the bucket" in said
    assert "GroupRuns" not in said and "AllHealthy" not in said


def test_a_restart_names_the_kubernetes_node_only_once() -> None:
    one = {"time": "2026-01-01T11:59:00Z", "pod": "j-0-0", "node": "gpu-7", "counted": True}
    recent = [
        one | {"reason": "WorkerFailed", "message": "rank 0 in pod j-0-0 ended with exit code 1: ValueError: x"},
        one | {"reason": "NodeLost", "message": "gpu-7"},
    ]
    body = job(phase="Pending", restarts={"total": 2, "recent": recent})
    shown = "\n".join(describe(body, (), (), NOW))
    assert "WorkerFailed on gpu-7: ValueError: x (rank 0 in pod j-0-0 ended with exit code 1) (counted)" in shown
    assert "NodeLost: gpu-7 (counted)" in shown


def test_the_description_of_a_job_with_a_thousand_nodes_fits_a_screen() -> None:
    running = {"attempt": 0, "state": "Running"}
    slots = [{**running, "count": 998}, {"attempt": 3, "state": "Planned", "reason": "OOMKilled"}, running]
    body = job(
        {"nodes": 1000, "args": ["x" * 200], "elastic": {"minNodes": 10}},
        phase="Restarting",
        slots=slots,
        conditions=[condition("Restarting", True, "OOMKilled")],
        restarts={"counted": 1, "uncounted": 50, "total": 51, "recent": [
            {"time": "2026-01-01T11:59:00Z", "pod": f"j-{n}-0", "reason": "OOMKilled", "message": "m", "counted": True}
            for n in range(50)]},
    )  # fmt: skip
    pods = [PodLine(f"j-{n}-0", "node", n, "Running", "h", created=NOW - timedelta(minutes=1)) for n in range(998)]
    pods += [PodLine(f"j-{n}-0", "node", n, "Pending") for n in range(998, 1020)]
    lines = list(describe(body, pods, [Happened(NOW, True, "OOMKilled", "m", 3)] * 100, NOW))
    shown = "\n".join(lines)
    assert len(lines) < 70 and max(map(len, lines)) < 140
    assert "  0-997     Running" in shown and "  998       Planned, attempt 3 (OOMKilled)" in shown
    assert "998 others: 998 Running" in shown and "and 14 more: 14 Pending" in shown
    assert "1 of 10 counted, 50 not counted" in shown and "elastic from 10" in shown
    assert "Recent restarts (last 8 of 51):" in shown and "Events (last 8 of 100):" in shown
    assert shown.count("OOMKilled: m (x3)") == 8


def test_the_remedies_in_the_package_match_the_page() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "generate_remedies.py"))
    page = script["PAGE"].read_text()
    assert script["FILE"].read_text() == script["render"](page), "run: python docs/generate_remedies.py"
    assert remedies()["ClaimNotFound"]["remedy"] == "Create the claim."
    assert len(remedies()) > 40


def test_a_link_in_a_remedy_becomes_plain_text_for_the_terminal() -> None:
    page = "| reason | what to do |\n| --- | --- |\n| `Hang` | Have it [report](own-scripts.md) during it. |\n"
    read_remedies = runpy.run_path(str(ROOT / "docs" / "generate_remedies.py"))["read_remedies"]
    assert read_remedies(page)["Hang"]["remedy"] == "Have it report (docs/own-scripts.md) during it."
    assert "](" not in str(remedies())


def test_an_unreadable_job_of_a_newer_release_is_one_line() -> None:
    """Regression: the error was a pydantic traceback, even for Client.list() with one such job
    among many.
    """
    body = {"metadata": {"name": "j", "uid": "1"},
            "spec": {"image": "a", "script": "s", "recovery": {"mode": "Turbo"}, "runPolicy": {"cleanPodPolicy": "x"}},
            "status": {"phase": "Running"}}  # fmt: skip
    says = (
        r"^j: this client cannot read spec\.recovery\.mode, spec\.runPolicy\.cleanPodPolicy, perhaps "
        r"because the operator is newer"
    )
    reads: tuple[Callable[[], object], ...] = (
        lambda: list(describe(body, (), (), NOW)), lambda: Job.read(body), lambda: JobScreen().frame(body, [], NOW),
    )  # fmt: skip
    for read in reads:
        with pytest.raises(Mistake, match=says):
            read()
    assert row(body, NOW)[1] == "Running"


def test_a_suspended_job_has_no_time_left() -> None:
    progress = {"display": "40 %", "eta": "3h05m"}
    for conditions, shown in (([], "40 %, eta 3h05m"), ([condition("Suspended", True, "Suspended")], "40 %")):
        lines = list(describe(job(progress=progress, conditions=conditions), [], [], NOW))
        assert f"Progress:   {shown}" in lines


def test_a_list_warns_of_jobs_whose_ranks_train_separately() -> None:
    apart = job(phase="Running", conditions=[condition("Running", True, "NoGroup")])
    ended = job(phase="Complete", conditions=[condition("Running", True, "NoGroup"), condition("Complete", True, "C")])
    (line,) = warnings([apart, ended, job(), job(conditions=[condition("Running", True, "GroupRuns")])])
    assert (
        line.startswith("warning: j: its ranks do not form a group (NoGroup), so each rank trains")
        and "ddpjob why j" in line
    )
    assert "init SCRIPT --check" in text(apart)
