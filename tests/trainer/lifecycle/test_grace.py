"""How long a rank that was asked to stop waits for its peers. Its child processes still end on
SIGTERM.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ddpjob_trainer.checkpoints import folder, torch_file
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.lifecycle import signals
from ddpjob_trainer.lifecycle.signals import StopRequest, grace_from_env
from ddpjob_trainer.reporting.ledger import Ledger
from ddpjob_trainer.reporting.reporter import Reporter
from machine import slowness
from ranks import TINY, finish, metrics, start, stop_at, until


def test_a_rank_waits_for_peers_for_the_grace_period_minus_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grace_from_env() is None and StopRequest(Group())._patience() == 4.0
    for text, seconds in (("30", 27.0), ("600.5", 597.5), ("1", 0.5)):
        monkeypatch.setenv("DDPJOB_GRACE_SECONDS", text)
        assert StopRequest(Group())._patience() == seconds
    monkeypatch.setenv("DDPJOB_GRACE_SECONDS", "half a minute")
    with pytest.raises(ConfigError, match=r"DDPJOB_GRACE_SECONDS='half a minute': must be a number of seconds"):
        StopRequest(Group())


def test_a_rank_with_silent_peers_exits_before_its_pod_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The grace period is 9 s, so the pod ends 9 s after the signal. Without the grace period, the
    rank would have given up after 4 s.
    """
    ranks = start(
        2, [*TINY, "train.epochs=4000", f"checkpoint.dir={tmp_path}"], env=lambda rank: {"DDPJOB_GRACE_SECONDS": "9"}
    )
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and metrics(tmp_path / "run", "step"))
    stuck = ranks[1][0]
    try:
        os.kill(stuck.pid, signal.SIGSTOP)
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(ranks[0][0].pid, signal.SIGTERM)
        (end,) = finish(ranks[:1], 30)
        assert end.code == 143 and 5 < time.monotonic() - began < 9 * slowness()
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        stuck.join()
    said = capfd.readouterr().err
    assert "SIGTERM: rank 0 saves a checkpoint after one of the next steps, then exits" in said
    assert "the other ranks did not respond within 6.0 s, so rank 0 exits without a checkpoint" in said


def test_a_stop_waits_for_the_checkpoint_in_progress_and_then_saves_another(tmp_path: Path) -> None:
    """When the ranks exit with 75, both checkpoints are complete on disk and the metrics report the
    stop.
    """

    def prepare(rank: int) -> None:
        write = torch_file.write

        def slowly(*args: Any) -> None:
            time.sleep(1.0)
            write(*args)

        folder.torch_file.write = slowly  # type: ignore[assignment]
        stop_at(5)(rank)

    ranks = start(2, [*TINY, "checkpoint.every_steps=3", f"checkpoint.dir={tmp_path}"], prepare)
    assert [end.code for end in finish(ranks)] == [75, 75]
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == [3, 5]
    assert {path.name for path in tmp_path.glob("*.pt")} == {"step-000000003.pt", "step-000000005.pt"}
    assert [line["step"] for line in metrics(tmp_path / "run", "stop")] == [5]


def test_a_rank_waits_for_slow_peers_as_long_as_they_answer(tmp_path: Path) -> None:
    """Rank 1 is asked to stop in the step after rank 0 has begun to write. That step takes a long
    time on rank 0.
    """

    def prepare(rank: int) -> None:
        signals._PATIENCE_SECONDS = 0.3
        stop_at(5)(rank)
        step = Ledger.step

        def slowly(self: Ledger, number: int, taken: Any) -> None:
            step(self, number, taken)
            time.sleep(1.0 if rank == 0 and number in (4, 5) else 0.0)

        Ledger.step = slowly  # type: ignore[method-assign]

    ranks = start(2, [*TINY, "checkpoint.every_steps=3", f"checkpoint.dir={tmp_path}"], prepare)
    assert [end.code for end in finish(ranks)] == [75, 75]
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == [3, 5]


def test_without_a_deadline_a_started_checkpoint_is_completed(tmp_path: Path) -> None:
    """Writing takes 7 s, longer than a rank waits for a step. Rank 0 waits for the write at the end
    of an epoch, and rank 1 waits for rank 0.
    """

    def prepare(rank: int) -> None:
        write = torch_file.write

        def slowly(*args: Any) -> None:
            time.sleep(7.0)
            write(*args)

        folder.torch_file.write = slowly  # type: ignore[assignment]

    ranks = start(
        2, [*TINY, "checkpoint.every_steps=7", "checkpoint.keep_best=1", f"checkpoint.dir={tmp_path}"], prepare
    )
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run", "step")) == 8)
    time.sleep(0.3)
    for process, _ in ranks:
        os.kill(process.pid, signal.SIGTERM)
    assert [end.code for end in finish(ranks)] == [75, 75]
    assert {path.name for path in tmp_path.glob("step*")} >= {"step-000000007.pt", "step-000000008.pt"}


def test_an_error_in_training_does_not_interrupt_the_checkpoint_in_progress(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        write = torch_file.write

        def slowly(*args: Any) -> None:
            time.sleep(3.0)
            write(*args)

        folder.torch_file.write = slowly  # type: ignore[assignment]
        report = Reporter.report

        def fail_later(self: Reporter, **fields: Any) -> None:
            report(self, **fields)
            if fields["step"] == 5:
                raise TrainingError("the loss is not finite")

        Reporter.report = fail_later  # type: ignore[method-assign]

    ends = finish(start(1, [*TINY, "checkpoint.every_steps=3", f"checkpoint.dir={tmp_path}"], prepare))
    assert ends[0].code == 1 and "not finite" in ends[0].error
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-000000003.pt"]


def test_sigterm_at_the_very_end_does_not_interrupt_the_last_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks no longer agree on anything at this point. The time limit for other ranks, here 0.5
    s, must not interrupt a slow last write.
    """

    def prepare(rank: int) -> None:
        end = CheckpointFolder.finish

        def signalled(self: CheckpointFolder, seconds: float | None = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.5)
            end(self, seconds)

        CheckpointFolder.finish = signalled  # type: ignore[method-assign]

    ranks = start(1, [*TINY, f"checkpoint.dir={tmp_path}"], prepare, env=lambda rank: {"DDPJOB_GRACE_SECONDS": "1"})
    assert [end.code for end in finish(ranks)] == [0]
    assert (
        metrics(tmp_path / "run", "end")
        and "rank 0 has finished, and only writes its last output" in capfd.readouterr().err
    )


HELPER = "import sys, time; print('ready', flush=True); time.sleep(60)"


def listening() -> tuple[StopRequest, Any]:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest(Group())
    stop.listen()
    return stop, before


@pytest.fixture
def stop() -> Any:
    """Yield the stop request of a rank that listens for signals, and restore the handlers
    afterwards.
    """
    made, before = listening()
    yield made
    made._agreed.set()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_a_child_of_a_rank_ends_on_sigterm_without_stopping_the_rank(how: str, stop: StopRequest) -> None:
    """A data-loader process may be terminated. If it inherited the rank's handler and pipe, it
    would survive, and the rank would stop instead.
    """
    if how == "fork":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        os.kill(child.pid or 0, signal.SIGTERM)
        child.join(30)
        code = child.exitcode
    else:
        process = subprocess.Popen([sys.executable, "-c", HELPER], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.terminate()
        code = process.wait(30)
    assert code == -signal.SIGTERM
    time.sleep(0.2)
    assert not stop.requested
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), (
        "no signal is blocked, because children would inherit that"
    )


def test_a_second_loop_in_a_process_leaves_no_signal_blocked_after_a_fork(stop: StopRequest) -> None:
    StopRequest(Group()).listen()
    child = os.fork()
    if child == 0:
        os._exit(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and blocked == set()


def test_sigterm_blocked_around_a_fork_is_blocked_in_the_child(stop: StopRequest) -> None:
    """Workers of the data loader start this way. The rank's own handling of a fork must not unblock
    the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        child = os.fork()
        if child == 0:
            os._exit(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_thread_in_sigwait_would_make_child_processes_ignore_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer does not use sigwait, because the block that it needs is inherited across fork
    and exec.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = subprocess.Popen([sys.executable, "-c", HELPER], stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.terminate()
    time.sleep(0.5)
    deaf = process.poll() is None
    process.kill()
    process.wait()
    assert deaf


def test_a_request_to_stop_is_noticed_while_the_main_thread_is_blocked(stop: StopRequest) -> None:
    """The main thread waits in C for a mutex, where Python's own handler cannot interrupt it. A
    collective blocks in the same way.
    """
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros mean unlocked; glibc needs 40 bytes
    seen: list[bool] = []

    def watch() -> None:
        time.sleep(0.2)  # until the main thread waits for the mutex
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(stop._requested.wait(20))
        libc.pthread_mutex_unlock(mutex)

    libc.pthread_mutex_lock(mutex)
    watcher = threading.Thread(target=watch)
    watcher.start()
    libc.pthread_mutex_lock(mutex)
    watcher.join()
    stop._agreed.set()
    assert seen == [True]
