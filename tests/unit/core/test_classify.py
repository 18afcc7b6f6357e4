"""How the reason why a pod ended is determined, and whether the end counts against the budget."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from ddpjob.api.job_spec import JobSpec
from ddpjob.core.failures.classify import (
    Cause,
    explain_end,
    explain_vanished,
    find_stuck,
    find_wrong_platform,
    is_about_platform,
    names_entry_point,
)
from ddpjob.core.failures.policy import evaluate_rules
from ddpjob.core.status.messages import event_text
from ddpjob.core.world import ContainerView, HostView, PodView, Role
from ddpjob_runtime.protocol import log_line

TOLD = json.dumps({"kind": "Error", "message": "ValueError: lunch", "traceback": "Traceback\nValueError: lunch"})


def pod(main: ContainerView | None = None, **fields: Any) -> PodView:
    return PodView(name="job-0-0", uid="uid", role=Role.NODE, containers={"trainer": main} if main else {}, **fields)


def ended(exit_code: int, reason: str = "Error", message: str = "") -> ContainerView:
    return ContainerView(exit_code=exit_code, reason=reason, message=message)


@pytest.mark.parametrize(
    ("view", "cause", "counts"),
    [
        (pod(ended(1, message=TOLD)), Cause.EXIT_CODE, True),
        (pod(ended(137, "OOMKilled")), Cause.OOM_KILLED, True),
        (pod(ended(78, message=TOLD)), Cause.INIT_FAILURE, True),
        (pod(ended(79)), Cause.FENCED, False),
        (pod(ended(80, message=TOLD)), Cause.PREFLIGHT_FAILED, False),
        (pod(ended(128, "StartError", "no python3")), Cause.START_ERROR, False),
        (pod(ended(255, "Unknown")), Cause.NODE_FAULT, False),
        (pod(ended(255)), Cause.EXIT_CODE, True),
        (pod(ended(137, "ContainerStatusUnknown", "was not found")), Cause.NODE_FAULT, False),
        (pod(ended(76)), Cause.RENDEZVOUS_LOST, False),
        (pod(ended(143), deleted_at=datetime(2026, 1, 1, tzinfo=UTC)), Cause.DELETED, False),
        (pod(ended(1), deleted_at=datetime(2026, 1, 1, tzinfo=UTC)), Cause.DELETED, False),
        (pod(ended(137), disruption="PreemptionByScheduler"), Cause.PREEMPTED, False),
        (pod(ended(1), disruption="EvictionByEvictionAPI"), Cause.EVICTED, False),
        (pod(disruption="DeletionByTaintManager"), Cause.DISRUPTION, False),
        (pod(disruption="DeletionByPodGC"), Cause.NODE_LOST, False),
        (pod(phase="Failed", status_reason="NodeLost"), Cause.NODE_LOST, False),
        *(
            (
                pod(ended(code, "Error"), phase="Failed", status_reason=reason, status_message=text),
                Cause.NODE_FAULT,
                False,
            )
            for code in (0, 137)
            for reason, text in (
                ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present"),
                ("NodeAffinity", "Pod was rejected: Predicate NodeAffinity failed"),
                ("OutOfnvidia.com/gpu", ""),
                ("AReasonOfALaterKubelet", "Pod was rejected: the device is gone"),
            )
        ),
        (pod(ended(137, "Error"), phase="Failed", status_reason="DeadlineExceeded"), Cause.EXIT_CODE, True),
        (pod(ended(255, "Error", "exec /usr/bin/python3: exec format error")), Cause.START_ERROR, False),
        (pod(phase="Failed", status_reason="Evicted", status_message="low on memory"), Cause.EVICTED, False),
        *(
            (pod(ended(137), phase="Failed", status_reason="Evicted", status_message=text), cause, counts)
            for text, cause, counts in (
                ('Container trainer exceeded its local ephemeral storage limit "1Gi". ', Cause.STORAGE_EXCEEDED, True),
                (
                    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
                    Cause.STORAGE_EXCEEDED,
                    True,
                ),
                ('Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ', Cause.STORAGE_EXCEEDED, True),
                (
                    "The node was low on resource: ephemeral-storage. Threshold quantity: 1, available: 0. "
                    "Container trainer was using 2Gi, request is 0, has larger consumption of ephemeral-storage. ",
                    Cause.EVICTED,
                    False,
                ),
            )
        ),
        *(
            (
                pod(phase="Failed", host="n1", status_reason=reason, status_message="Pod was rejected"),
                Cause.NODE_FAULT,
                False,
            )
            for reason in (
                "UnexpectedAdmissionError",
                "OutOfcpu",
                "OutOfnvidia.com/gpu",
                "TopologyAffinityError",
                "NodeAffinity",
            )
        ),
        (pod(phase="Failed"), Cause.NODE_FAULT, False),
        (pod(phase="Failed", init_containers={"prep": ended(3)}), Cause.EXIT_CODE, True),
        (
            pod(phase="Failed", init_containers={"prep": ended(128, "StartError", "no /bin/prep")}),
            Cause.START_ERROR,
            False,
        ),
    ],
)
def test_the_cause_is_read_from_the_pods_state(view: PodView, cause: Cause, counts: bool) -> None:
    end = explain_end(view)
    ruled = evaluate_rules(JobSpec.read({"image": "a"}), end.cause, end.exit_code, trained=True)
    assert (end.cause, ruled.counted) == (cause, counts)
    assert "job-0-0" in end.message, "the message names the pod"


@pytest.mark.parametrize(
    ("code", "by_launcher"),
    [
        (76, Cause.RENDEZVOUS_LOST),
        (77, Cause.DELETED),
        (78, Cause.INIT_FAILURE),
        (79, Cause.FENCED),
        (80, Cause.PREFLIGHT_FAILED),
    ],
)
def test_only_exit_codes_of_a_launcher_are_read_as_the_launchers_codes(code: int, by_launcher: Cause) -> None:
    assert explain_end(pod(ended(code))).cause is by_launcher
    assert explain_end(pod(ended(code)), launcher=False).cause is Cause.EXIT_CODE


@pytest.mark.parametrize(
    ("message", "command", "named"),
    [
        ('OCI runtime create failed: exec: "python3": executable file not found in $PATH: unknown', (), True),
        ("'/usr/bin/python3.11' in /: No such file or directory", (), True),
        ('exec: "/opt/train": stat /opt/train: no such file or directory', ("/opt/train", "--fast"), True),
        ('exec: "nvidia-container-runtime": executable file not found in $PATH', (), False),
        ("nvidia-container-cli: initialization error: driver not loaded", (), False),
    ],
)
def test_a_missing_entry_point_is_distinguished_from_a_missing_runtime(
    message: str, command: tuple[str, ...], named: bool
) -> None:
    assert names_entry_point(explain_end(pod(ended(128, "StartError", message))), command) is named


def test_messages_of_the_launcher_are_parsed() -> None:
    end = explain_end(pod(ended(1, message=TOLD)))
    assert end.message == "pod job-0-0 ended with exit code 1: ValueError: lunch"
    assert end.traceback == "Traceback\nValueError: lunch"
    assert "last words" in explain_end(pod(ended(3, message="first\nlast words"))).message, (
        "the line may come from any program"
    )


def launcher_line(text: str) -> str:
    return log_line(datetime(2026, 11, 30, tzinfo=UTC), "ddpjob", text)


@pytest.mark.parametrize(
    ("log", "said", "traceback"),
    [
        (["ValueError: early", launcher_line("restarting workers: rank 1 failed: ValueError: early")], "Error", ""),
        ([launcher_line("restarting workers: rank 1 failed"), "loading", "loss 0.5"], "loss 0.5", "loading\nloss 0.5"),
        ([launcher_line("restarting workers: rank 1 failed"), "Killed"], "Killed", ""),
        ([launcher_line("exits with code 78 (InitFailure): a.py is missing")], "exits with code 78 (InitFailure)", ""),
        (["2026-11-30 epoch 3", "2026-11-30T00:00:00.000Z other: fatal"], "other: fatal", "2026-11-30 epoch 3"),
    ],
)
def test_the_launchers_report_of_an_earlier_failure_is_not_the_cause(log: list[str], said: str, traceback: str) -> None:
    end = explain_end(pod(ended(137, message="\n".join(log))))
    assert end.message.startswith("pod job-0-0 ended with exit code 137 (128 + SIGKILL): ")
    assert said in end.message and "early" not in end.message
    assert end.traceback.startswith(traceback) and bool(traceback) is bool(end.traceback)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (152, "exit code 152 (128 + SIGXCPU): Error"),
        (137, "exit code 137 (128 + SIGKILL): Error"),
        (128, "exit code 128: Error"),
        (3, "exit code 3: Error"),
        (250, "exit code 250: Error"),
    ],
)
def test_the_signal_that_ended_a_program_is_reported(code: int, how: str) -> None:
    assert explain_end(pod(ended(code)), launcher=False).message == f"pod job-0-0 ended with {how}"


def waiting(reason: str, message: str = "") -> PodView:
    return pod(ContainerView(waiting_reason=reason, waiting_message=message))


@pytest.mark.parametrize(
    ("view", "has_run", "final"),
    [
        (waiting("ErrImagePull", "rpc error: not found"), False, False),
        (waiting("ErrImagePull", "no match for platform in manifest sha256:1: not found"), False, False),
        (
            waiting("ErrImagePull", "failed to resolve image: no match for platform in manifest sha256:1: not found"),
            False,
            False,
        ),
        (
            waiting("ErrImagePull", "failed to copy: httpReadSeeker: content at https://m/v2/1 not found: not found"),
            False,
            False,
        ),
        (waiting("ErrImagePull", "failed to resolve image: r/i:1: not found"), False, True),
        (waiting("ErrImagePull", "i/o timeout"), False, False),
        (waiting("ImagePullBackOff", "i/o timeout"), False, False),
        (waiting("ImagePullBackOff", "unexpected status from HEAD request: 429 Too Many Requests"), False, False),
        (waiting("ImagePullBackOff", "unexpected status from HEAD request: 404 Not Found"), False, False),
        (
            waiting("ErrImagePull", "pull access denied, repository does not exist or may require authorization"),
            False,
            False,
        ),
        (waiting("ErrImagePull", "401 unauthorized: authentication required"), False, False),
        (waiting("ImagePullBackOff", 'failed to resolve reference "r/i:1": r/i:1: not found'), False, True),
        (waiting("ErrImagePull", "manifest unknown: no such tag"), False, True),
        (waiting("ErrImageNeverPull"), False, False),
        (waiting("RunContainerError"), False, False),
        (waiting("ImagePullBackOff", "not found"), True, False),
        (waiting("InvalidImageName"), False, True),
        (waiting("CreateContainerConfigError", 'secret "x" not found'), False, False),
    ],
)
def test_a_pod_that_will_never_start_is_stuck(view: PodView, has_run: bool, final: bool) -> None:
    found = find_stuck(view, has_run=has_run)
    assert found is not None and found.final is final
    assert "container trainer of pod job-0-0" in found.message


def test_a_pod_that_is_starting_is_not_stuck() -> None:
    assert find_stuck(waiting("ContainerCreating"), has_run=False) is None


def test_a_failed_init_container_is_reported_with_its_last_lines() -> None:
    end = explain_end(
        pod(phase="Failed", init_containers={"fine": ended(0), "prep": ended(3, message="one\nno such bucket")})
    )
    assert end.message == "init container prep of pod job-0-0 ended with exit code 3: no such bucket"


def test_a_sidecar_stopped_after_a_failed_init_container_is_not_blamed_for_it() -> None:
    containers = {"logger": ended(137), "prep": ended(3, message="no such bucket"), "later": ContainerView()}
    end = explain_end(pod(phase="Failed", init_containers=containers))
    assert end.message == "init container prep of pod job-0-0 ended with exit code 3: no such bucket"
    assert end.exit_code == 3


def test_an_init_container_that_ran_out_of_memory_is_reported_as_such() -> None:
    containers = {"prep": ended(137, reason="OOMKilled")}
    end = explain_end(pod(phase="Failed", init_containers=containers))
    assert end.cause is Cause.OOM_KILLED
    assert end.message == "init container prep of pod job-0-0 ended with exit code 137: OOMKilled"


def test_a_waiting_init_container_is_reported_until_the_trainer_runs() -> None:
    pulling = {"prep": ContainerView(waiting_reason="ErrImagePull", waiting_message="not found")}
    held = find_stuck(pod(ContainerView(waiting_reason="PodInitializing"), init_containers=pulling), has_run=False)
    assert held is not None
    assert held.message.startswith("container prep of pod job-0-0: ErrImagePull")
    started = ContainerView(started=datetime(2026, 1, 1, tzinfo=UTC))
    assert (
        find_stuck(
            pod(started, init_containers={"side": ContainerView(waiting_reason="CrashLoopBackOff")}), has_run=True
        )
        is None
    )


def test_a_program_that_exits_with_0_on_a_node_shutdown_has_not_succeeded() -> None:
    assert pod(ended(0), phase="Succeeded").succeeded
    assert not pod(ended(0), phase="Failed", status_reason="Evicted").succeeded
    assert not pod(ended(0), disruption="EvictionByEvictionAPI").succeeded


def test_a_taint_means_a_lost_node_only_if_the_node_is_not_ready() -> None:
    down = {"n1": HostView(name="n1", ready=False, since=None, out_of_service=False)}
    view = pod(host="n1", disruption="DeletionByTaintManager")
    assert explain_end(view, down).cause is Cause.NODE_LOST
    deleted = {"n1": HostView(name="n1", ready=False, since=None, out_of_service=False, deleted=True)}
    assert explain_end(view, deleted).cause is Cause.NODE_LOST
    assert explain_end(view, {}).cause is Cause.DISRUPTION, "nothing is known about the node"
    assert (
        explain_end(view, {"n1": HostView(name="n1", ready=True, since=None, out_of_service=False)}).cause
        is Cause.DISRUPTION
    )
    assert explain_vanished("job-0-0", "n1", down).cause is Cause.NODE_LOST
    assert explain_vanished("job-0-0", "n1", None).cause is Cause.DELETED


def test_a_lone_surrogate_in_a_termination_message_is_escaped() -> None:
    """Python writes a lone surrogate for a byte of a file name that is not UTF-8, and no event can
    contain it.
    """
    written = json.dumps({"kind": "Error", "message": "no file caf\udce9", "traceback": "open('caf\udce9')"})
    end = explain_end(pod(ended(1, message=written)))
    assert end.message.endswith("no file caf\\udce9") and end.traceback == "open('caf\\udce9')"
    event_text(end.message, "counts")


SHARED_MEMORY = "unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)"


@pytest.mark.parametrize("end", [ended(135), ended(1, message=f"RuntimeError: {SHARED_MEMORY}")])
def test_a_full_dev_shm_is_reported_with_the_advice_to_enlarge_it(end: ContainerView) -> None:
    assert "; /dev/shm was probably full: raise storage.sharedMemory" in explain_end(pod(end)).message
    assert "/dev/shm" not in explain_end(pod(ended(134))).message


@pytest.mark.parametrize(
    "said",
    [
        'failed to pull and unpack image "docker.io/a:1": no match for platform in manifest sha256:1: not found',
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
        'choosing image instance: no image found in manifest list for architecture "arm64", OS "linux"',
        'choosing image instance: no image found in image index for architecture "arm64", OS "linux"',
        'image operating system "windows" cannot be used on this platform',
    ],
)
def test_an_image_for_a_wrong_platform_is_recognized_for_each_container_runtime(said: str) -> None:
    waits = waiting("ErrImagePull", said)
    end, why = find_wrong_platform(waits), find_stuck(waits, has_run=False)
    assert end is not None and (end.cause, is_about_platform(end)) == (Cause.START_ERROR, True)
    assert end.message.startswith(
        "the image of pod job-0-0 was not built for the architecture or operating system of Kubernetes node "
    ) and end.message.endswith(said)
    assert why is not None and not why.final
    assert find_wrong_platform(waiting("ErrImagePull", "manifest unknown")) is None


def rank_failed(**fields: Any) -> str:
    written = {"kind": "RankFailed", "rank": 3, "exitCode": 2, "message": "SystemExit: 2", "traceback": "Traceback"}
    return json.dumps({**written, **fields})


TABLE = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node
  rank      : 5 (local_rank: 1)
  exitcode  : -11 (pid: 77)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 77
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (rank_failed(), (Cause.WORKER_FAILED, 3, 2, "rank 3 in pod job-0-0 ended with exit code 2: SystemExit: 2")),
        (
            rank_failed(exitCode=1, init=True, message="SyntaxError: x"),
            (Cause.INIT_FAILURE, 3, 1, "the entry point of pod job-0-0 cannot start: SyntaxError: x"),
        ),
        (
            rank_failed(exitCode=1, message=f"RuntimeError: {SHARED_MEMORY}"),
            (
                *(Cause.WORKER_FAILED, 3, 1),
                f"rank 3 in pod job-0-0 ended with exit code 1: RuntimeError: {SHARED_MEMORY}"
                "; /dev/shm was probably full: raise storage.sharedMemory",
            ),
        ),
        (TABLE, (Cause.WORKER_FAILED, 5, 139, "rank 5 in pod job-0-0 ended with exit code 139 (128 + SIGSEGV)")),
        (rank_failed(rank=-1), (Cause.EXIT_CODE, None, 1, "pod job-0-0 ended with exit code 1: SystemExit: 2")),
        (rank_failed(rank=True), (Cause.EXIT_CODE, None, 1, "pod job-0-0 ended with exit code 1: SystemExit: 2")),
        (rank_failed(exitCode="2"), (Cause.EXIT_CODE, None, 1, "pod job-0-0 ended with exit code 1: SystemExit: 2")),
        ("[" * 4000, (Cause.EXIT_CODE, None, 1, "pod job-0-0 ended with exit code 1: " + "[" * 4000)),
    ],
    ids=[
        "a rank",
        "cannot start",
        "shared memory",
        "torchrun's table",
        "no rank",
        "a boolean rank",
        "no exit code",
        "hostile",
    ],
)
def test_a_failed_rank_of_torchrun_in_a_command_is_reported(message: str, expected: tuple[Any, ...]) -> None:
    end = explain_end(pod(ended(1, message=message)), launcher=False)
    assert (end.cause, end.rank, end.exit_code, end.message) == expected


def test_only_in_a_job_with_command_is_a_failed_rank_read_from_the_pod() -> None:
    assert explain_end(pod(ended(1, message=rank_failed()))).rank is None
    gone = pod(ended(1, message=rank_failed()), deleted_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert explain_end(gone, launcher=False).cause is Cause.DELETED
