"""The consequences of each kind of failure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from ddpjob.api.job_spec import Backoff, JobSpec
from ddpjob.api.job_status import Restart
from ddpjob.core.failures.classify import Cause
from ddpjob.core.failures.policy import Ruling, evaluate_rules, find_error_everywhere, find_lost_device, shell_code
from worlds import NOW


def spec(*rules: dict[str, Any]) -> JobSpec:
    return JobSpec.read({"image": "a", "recovery": {"rules": list(rules)}})


@pytest.mark.parametrize(
    ("cause", "counted"),
    [
        *(
            (c, True)
            for c in (Cause.WORKER_FAILED, Cause.EXIT_CODE, Cause.OOM_KILLED, Cause.STORAGE_EXCEEDED, Cause.HANG)
        ),
        *(
            (c, False)
            for c in (
                Cause.DISRUPTION,
                Cause.PREEMPTED,
                Cause.EVICTED,
                Cause.DELETED,
                Cause.NODE_LOST,
                Cause.RENDEZVOUS_LOST,
            )
        ),
        *((c, False) for c in (Cause.NODE_FAULT, Cause.START_ERROR, Cause.SCALED, Cause.JOINED, Cause.FENCED)),
    ],
)
def test_without_rules_the_default_policy_applies(cause: Cause, counted: bool) -> None:
    for trained in (True, False):
        assert evaluate_rules(spec(), cause, 1, trained=trained) == Ruling(counted)


def test_a_program_that_cannot_start_fails_a_job_that_never_completed_a_step() -> None:
    assert evaluate_rules(spec(), Cause.INIT_FAILURE, 78, trained=False).fails == "InitFailure"
    assert evaluate_rules(spec(), Cause.INIT_FAILURE, 78, trained=True) == Ruling(True)
    restart = spec({"cause": "InitFailure", "action": "Restart"})
    assert evaluate_rules(restart, Cause.INIT_FAILURE, 78, trained=False) == Ruling(True)


@pytest.mark.parametrize("cause", [Cause.WORKER_FAILED, Cause.EXIT_CODE])
def test_a_configuration_error_fails_a_job_that_never_completed_a_step(cause: Cause) -> None:
    for code in (2, 64, 70, 74, 76, 78):
        ruled = evaluate_rules(spec(), cause, code, trained=False)
        assert (ruled.fails, ruled.counted) == ("ConfigurationError", False)
        assert f"exit code {code}" in ruled.why
        assert evaluate_rules(spec(), cause, code, trained=True) == Ruling(True)
    for code in (1, 3, 63, 75, 79, 130, 137):
        assert evaluate_rules(spec(), cause, code, trained=False) == Ruling(True)
    again = spec({"cause": "ExitCode", "exitCodes": [2], "action": "Restart"})
    assert evaluate_rules(again, cause, 2, trained=False) == Ruling(True)


def test_the_first_matching_rule_applies() -> None:
    rules = spec(
        {"cause": "ExitCode", "exitCodes": [3, 137], "action": "Fail"},
        {"cause": "ExitCode", "exitCodes": [4], "action": "RestartUncounted"},
        {"cause": "OOMKilled", "action": "RestartUncounted"},
        {"cause": "Disruption", "action": "Restart"},
    )
    for cause in (Cause.WORKER_FAILED, Cause.EXIT_CODE):
        failed = evaluate_rules(rules, cause, 3, trained=True)
        assert (failed.fails, failed.why) == ("RuleFailed", "recovery.rules[0] (cause ExitCode) fails the job")
        assert evaluate_rules(rules, cause, 4, trained=True) == Ruling(False)
        assert evaluate_rules(rules, cause, 5, trained=True) == Ruling(True)
        assert evaluate_rules(rules, cause, None, trained=True) == Ruling(True)
    assert evaluate_rules(rules, Cause.OOM_KILLED, 137, trained=True) == Ruling(False), "the rule is only for ExitCode"
    for cause in (Cause.DISRUPTION, Cause.PREEMPTED, Cause.EVICTED):
        assert evaluate_rules(rules, cause, 143, trained=True) == Ruling(True)
    assert evaluate_rules(rules, Cause.NODE_LOST, None, trained=True) == Ruling(False)
    assert evaluate_rules(rules, Cause.DELETED, 143, trained=True) == Ruling(False)


@pytest.mark.parametrize(
    ("exit_code", "signal", "code"),
    [(3, None, 3), (-9, "SIGKILL", 137), (None, "SIGSEGV", 139), (None, None, None), (None, "SIGNOPE", None)],
)
def test_an_end_by_a_signal_gets_the_exit_code_that_a_shell_shows(
    exit_code: int | None, signal: str | None, code: int | None
) -> None:
    assert shell_code(exit_code, signal) == code


def test_backoff_doubles_from_the_second_failure_on() -> None:
    backoff = Backoff(initial=0.5, maximum=3)
    assert [backoff.seconds(n) for n in range(7)] == [0, 0, 0.5, 1, 2, 3, 3]
    assert backoff.seconds(10_000) == 3


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("pynvml.NVMLError_Unknown: Failed to initialize NVML: Unknown Error", True),
        ("RuntimeError: NVML_ERROR_GPU_IS_LOST", True),
        ("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.", True),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", True),
        ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment", True),
        ("RuntimeError: HIP error: no ROCm-capable device is detected", True),
        ("RuntimeError: No HIP GPUs are available", True),
        ("RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", True),
        ("RuntimeError: synStatus=8 [Device not found] Device acquire failed.", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 79.00 GiB", False),
        ("RuntimeError: CUDA error: invalid device ordinal", False),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234", False),
        ("RuntimeError: NCCL error: unhandled system error", False),
        ("ValueError: the device lost-and-found", False),
    ],
)
def test_messages_about_a_lost_device_are_recognized(message: str, lost: bool) -> None:
    job = JobSpec.read({"image": "i", "script": "s", "gpusPerNode": 1})
    assert bool(find_lost_device(job, f"rank 0 in pod p ended with exit code 1: {message}", trained=False)) is lost


def test_a_device_error_before_any_step_of_a_job_without_devices_is_no_lost_device() -> None:
    job = JobSpec.read({"image": "i", "script": "s", "gpusPerNode": 0})
    message = "RuntimeError: No CUDA GPUs are available"
    assert not find_lost_device(job, message, trained=False)
    assert find_lost_device(job, message, trained=True), "podTemplate may claim devices"


def error(at: float, message: str = "ValueError: bad 3", line: int = 7, **fields: Any) -> Restart:
    said = f"rank 1 in pod job-1-0 ended with exit code 1: {message}; waits 2 s"
    trace = f'Traceback (most recent call last):\n  File "train.py", line {line}, in <module>\n{message}'
    values = {
        "time": NOW + timedelta(seconds=at),
        "pod": "job-1-0",
        "reason": "WorkerFailed",
        "counted": True,
        **fields,
    }
    return Restart(message=f"{said}\n{trace}", **{"everywhere": True, **values})


@pytest.mark.parametrize(
    ("failures", "ends"),
    [
        ([error(0), error(11), error(22)], True),
        ([error(0, "ValueError: bad 3"), error(11, "ValueError: bad 4"), error(22, "ValueError: bad 12")], True),
        ([error(0), error(3), error(8), error(11), error(19), error(22)], True),
        ([error(0), error(3), error(8), error(19)], False),
        ([error(0), error(11)], False),
        ([error(0), error(11, everywhere=False), error(22)], False),
        ([error(0), error(11, line=8), error(22)], False),
        ([error(0), error(11, "ValueError: worse"), error(22)], False),
        ([error(0, counted=False), error(11), error(22)], False),
        ([error(0, reason="Hang"), error(11, reason="Hang"), error(22, reason="Hang")], False),
    ],
)
def test_an_error_that_repeats_everywhere_fails_the_job(failures: list[Restart], ends: bool) -> None:
    assert bool(find_error_everywhere(spec(), failures)) is ends
    if ends:
        ruled = spec({"cause": "ExitCode", "exitCodes": [1], "action": "Restart"})
        assert find_error_everywhere(ruled, failures) is None, "a rule in the spec takes precedence"


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB", True),
        ("AssertionError: batch size must be divisible by 3", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/network/labels.csv'", True),
        ("PermissionError: [Errno 13] Permission denied: '/data/labels.csv'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: 's3://data/labels.csv'", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/a' (after TimeoutError: timed out)", False),
        ("OSError: [Errno 116] Stale file handle: '/data/labels.csv'", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool", False),
        ("RuntimeError: server returned 503 Service Unavailable", False),
        ("torch.distributed.DistNetworkError: client socket has failed", False),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", False),
        ("RuntimeError: x (after TimeoutError: [Errno 110] Connection timed out)", False),
    ],
)
def test_errors_of_networks_disks_and_devices_are_considered_temporary(message: str, ends: bool) -> None:
    failures = [error(at, message) for at in (0, 11, 22)]
    assert bool(find_error_everywhere(spec(), failures)) is ends


def test_the_message_of_a_job_with_one_rank_does_not_name_several() -> None:
    failures = [error(at) for at in (0, 11, 22)]
    one, two = (JobSpec.read({"image": "i", "script": "s", "nodes": nodes, "gpusPerNode": 0}) for nodes in (1, 2))
    assert find_error_everywhere(one, failures) == "the same error 3 times before the first step"
    assert find_error_everywhere(two, failures) == "the same error in several ranks 3 times before the first step"
