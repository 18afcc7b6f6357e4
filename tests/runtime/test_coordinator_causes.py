"""How the coordinator chooses the root cause of a break."""

from __future__ import annotations

import pytest
from coordinator_world import RESET, World, formed
from ddpjob_runtime.coordinator import first_cause


def test_the_first_exception_is_the_cause_even_if_its_consequence_arrives_first() -> None:
    world, first, second = formed()
    world.fail(first, RESET)
    assert "restart" not in world.verbs(second)  # it may still be writing a traceback
    world.pass_time(0.2)
    world.fail(second, "ValueError: bug", ago=0.6)
    world.pass_time(2)
    assert world.incidents() == [("WorkerFailed", "job-1-0", 1)]


@pytest.mark.parametrize(
    "message",
    [
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on"
        " one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished"
        " execution.",
        "RuntimeError: eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
    ],
)
def test_errors_of_other_libraries_about_a_lost_peer_are_consequences(message: str) -> None:
    world, first, second = formed()
    world.fail(first, message)
    world.pass_time(0.3)
    assert world.incidents() == []
    world.lose(second)
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-1-0", 1)]


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1016",
        "ValueError: no successful episode to learn from",
        "AcceleratorError: CUDA error: an illegal memory access was encountered",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 214 'uncorrectable ECC error encountered'",
    ],
)
def test_a_device_error_is_the_cause_of_its_peers_earlier_errors(message: str) -> None:
    """Writing its traceback takes longer than the peers take to notice the closed connections."""
    world, first, second = formed()
    world.fail(first, RESET, ago=0.1)
    world.fail(second, message)
    world.ready(first, second)
    world.pass_time(2)
    assert world.incidents() == [("WorkerFailed", "job-1-0", 1)]


def test_a_device_error_caused_by_a_lost_peer_is_a_consequence() -> None:
    world, first, second = formed()
    world.fail(first, "DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5")
    world.pass_time(0.3)
    assert world.incidents() == []
    world.lose(second)
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-1-0", 1)]


def test_a_hang_is_reported_even_if_the_only_known_errors_are_connection_errors() -> None:
    world, first, second = formed()
    world.fail(first, RESET)
    world.ready(first)
    world.pass_time(0.51)
    assert world.verbs(second)[-1] == "restart" and world.incidents() == []  # this member may yet be the cause
    world.ready(second)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 0)]  # no better cause is known


def test_an_early_connection_error_is_a_consequence_of_the_silent_peer() -> None:
    world, first, second = formed()
    world.silent.add(second.pod)
    world.pass_time(1)
    world.fail(first, RESET)
    world.ready(first)
    world.pass_time(5)
    world.lose(second, "silent for 6 s")
    world.pass_time(1)
    assert world.incidents() == [("PeerLost", "job-1-0", 1)]


def test_a_scripts_own_error_that_a_silent_peer_caused_is_a_consequence() -> None:
    world, first, second = formed()
    world.silent.add(second.pod)
    world.pass_time(3)
    world.fail(first, "RuntimeError: training step failed")  # the script wrapped the connection error
    world.ready(first)
    world.pass_time(3)
    assert world.incidents() == []
    world.lose(second, "silent for 6 s")
    world.pass_time(1)
    assert world.incidents() == [("PeerLost", "job-1-0", 1)]


def test_a_failing_worker_restarts_the_others_immediately() -> None:
    world, first, second = formed()
    world.fail(first)
    assert world.last(second) == (
        "restart",
        {"round": 1, "why": "a worker in job-0-0 failed: ValueError: bug", "planned": False},
    )
    assert world.report()["state"] == "Restarting"
    world.pass_time(0.6)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 0)]


def test_a_failure_after_the_request_to_stop_is_not_a_cause() -> None:
    world, first, second = formed()
    world.fail(first, RESET)
    world.pass_time(0.51)
    world.pass_time(0.3)
    world.fail(second, "killed by signal SIGKILL", code=-9)
    world.ready(first, second)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 1)]


def test_a_lost_peers_consequences_are_not_causes() -> None:
    world, _, second, third = formed(3)
    world.lose(second)
    world.fail(third, "RuntimeError: training step failed", ago=-0.02)  # the script wrapped the connection error
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-1-0", 1)]


def test_a_worker_killed_together_with_its_pod_counts_as_a_lost_pod() -> None:
    world, first, _ = formed()
    world.fail(first, "killed by signal SIGKILL", code=-9)
    world.lose(first)
    world.pass_time(1.01)
    assert world.incidents() == [("PeerLost", "job-0-0", 1)]


def test_a_killed_worker_whose_pod_stays_counts_as_a_failure() -> None:
    world, first, second = formed()
    world.fail(first, "killed by signal SIGKILL", code=-9)
    world.fail(second, RESET)
    world.pass_time(1.01)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 1)]
    assert world.report()["incidents"][0]["signal"] == "SIGKILL"


def test_a_worker_killed_by_the_memory_limit_is_the_cause_of_its_pods_loss() -> None:
    world, first, second = formed()
    world.fail(second, RESET)
    world.fail(first, "killed by the kernel", code=-9, oom=True, ago=0.1)
    world.lose(first)
    world.pass_time(1.01)
    assert world.incidents() == [("OOMKilled", "job-0-0", 2)]


def test_an_import_error_is_reported_as_an_init_failure_with_its_traceback() -> None:
    world, first, second = formed()
    world.fail(second, "ModuleNotFoundError: No module named 'nccl'", init=True)
    world.fail(first, RESET, ago=0.1)
    world.pass_time(1.01)
    assert world.incidents() == [("InitFailure", "job-1-0", 1)]
    assert world.report()["incidents"][0]["traceback"] == "Traceback ..."


def test_a_member_that_finished_first_is_the_cause_of_connection_errors() -> None:
    world, first, second = formed()
    world.coordinator.finished(second, 1)
    world.pass_time(1)
    world.fail(first, RESET)
    world.ready(first)
    world.pass_time(0.6)
    assert world.last(second)[0] == "restart"
    world.ready(second)
    incident = world.report()["incidents"][0]
    assert (incident["kind"], incident["pod"], incident["exitCode"]) == ("WorkerFailed", "job-1-0", 0)
    assert (
        incident["message"] == "the workers of pod job-1-0 (group rank 1) ended with exit code 0 before the other ranks"
    )


def test_a_rank_that_exited_with_0_is_the_cause_of_errors_on_its_own_node_too() -> None:
    """One of eight ranks may call sys.exit(), for example because a loss is not finite."""
    world, only = formed(1)
    world.fail(only, RESET)
    world.fail(only, "ended with exit code 0", code=0)
    world.pass_time(5)
    assert world.incidents() == [], "no rank's own error is known yet"
    world.ready(only)
    incident = world.report()["incidents"][0]
    assert incident["kind"] == "WorkerFailed"
    assert (incident["rank"], incident["localRank"], incident["exitCode"]) == (0, 0, 0)
    assert (incident["message"], incident["consequences"]) == ("ended with exit code 0 before the other ranks", 1)


def test_a_rank_that_exits_with_0_neither_breaks_the_round_nor_hides_an_error() -> None:
    world, first, second = formed(2)
    world.fail(first, "ended with exit code 0", code=0)
    world.pass_time(5)
    assert world.report()["state"] == "Running" and "restart" not in world.verbs(second)
    world.fail(first, "ValueError: bug")
    world.pass_time(1)
    assert world.report()["incidents"][0]["message"] == "ValueError: bug"


def test_a_scripts_own_error_counts_even_if_another_member_has_finished() -> None:
    world, first, second = formed()
    world.coordinator.finished(second, 1)
    world.fail(first, "ValueError: bug")
    world.pass_time(1)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 0)]


def test_an_exception_reported_before_its_pod_is_lost_is_the_cause() -> None:
    world, first, _ = formed()
    world.fail(first, "ValueError: bug")
    world.pass_time(0.3)
    world.lose(first)
    world.pass_time(1)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 1)]


def test_a_round_breaks_only_once_no_matter_how_many_failures_follow() -> None:
    world, first, second, third = formed(3)
    world.pass_time(59)
    world.fail(first)
    world.pass_time(0.3)
    world.fail(second, RESET)
    world.lose(third)
    assert world.round.broken_at == 1059.0 and world.report()["recovery"]["downSince"] == "1970-01-01T00:17:39.000Z"
    world.ready(first, second, world.hello(2, attempt=1))
    assert world.incidents() == [("WorkerFailed", "job-0-0", 2)]


def test_each_broken_round_adds_one_incident_and_old_incidents_are_dropped() -> None:
    world, *members = formed()
    for number in range(60):
        world.coordinator.report_progress({"step": number})
        world.fail(members[0], f"ValueError: {number}")
        world.ready(*members)
        world.join(*members)
    incidents = world.report()["incidents"]
    assert len(incidents) == 50 and incidents[-1]["id"] == 60
    assert world.coordinator.rounds.incidents.counts == {"WorkerFailed": 60}


def test_a_late_report_of_an_old_round_changes_nothing() -> None:
    world, first, second = formed()
    world.fail(first)
    world.ready(first, second)
    world.join(first, second)
    second.round = 1
    world.fail(second, RESET)
    second.round = 2
    world.pass_time(5)
    assert world.incidents() == [("WorkerFailed", "job-0-0", 0)] and world.report()["state"] == "Running"


def test_an_init_failure_that_all_nodes_share_is_reported_once() -> None:
    world = World()
    for index in range(2):
        world.coordinator.init_failure(world.hello(index), "no such file: train.py")
    assert world.incidents() == [("InitFailure", "job-0-0", 1)]


def test_each_failure_is_searched_for_its_error_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of a thousand nodes, every rank can fail with the same error at once."""
    marked: list[str] = []

    def mark(message: str, traceback: str) -> tuple[str, str]:
        marked.append(message)
        return message, traceback

    monkeypatch.setattr(first_cause, "error_mark", mark)
    world, *members = formed(4)
    for member in members:
        world.fail(member, "ValueError: bad config")
        world.fail(member, "ValueError: bad config")
    world.ready(*members)
    assert world.report()["incidents"] and len(marked) == 4
