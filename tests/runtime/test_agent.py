"""The agent's work between the end of one round's workers and the start of the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from ddpjob_runtime import protocol
from ddpjob_runtime.launcher import agent as agent_module
from ddpjob_runtime.launcher.shutdown import Shutdown
from ddpjob_runtime.protocol import Mode


class SlowlyDying:
    """A worker that takes a long time to exit after SIGKILL, like one with a lot of memory or a
    device.
    """

    returncode = -9

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.until = pid, time.monotonic() + seconds

    def poll(self) -> int | None:
        return None if time.monotonic() < self.until else self.returncode


class Exits:
    """The methods of the launcher's shutdown that the agent uses."""

    begun, grace_seconds = False, 1.0

    def exit(self, code: int, kind: str, message: str) -> None:
        raise SystemExit(message)


def closed(*workers: SlowlyDying) -> Any:
    """Close a context with these workers as torch does, which gives up after the grace period."""
    handlers = {rank: SimpleNamespace(proc=worker, close=lambda death_sig: None) for rank, worker in enumerate(workers)}
    pids = {rank: 2**22 + worker.pid for rank, worker in enumerate(workers)}  # higher than any process id

    def close(death_sig: object, timeout: float) -> None:
        """Stand in for torch's own close, which waits indefinitely in some versions."""
        assert all(worker.poll() is not None for worker in workers), (
            "torch's close runs only after all workers have ended"
        )

    return close_with(SimpleNamespace(close=close, subprocess_handlers=handlers, pids=lambda: pids))


def bare_agent(client: Any, shutdown: Any) -> Any:
    """Return an agent that torchrun has not set up."""
    agent = object.__new__(agent_module.CoordinatedAgent)
    agent._client, agent._node_shutdown, agent._mode = client, shutdown, Mode.FAST
    return agent


def close_with(context: Any) -> Any:
    agent = bare_agent(SimpleNamespace(), Exits())
    agent._grace, agent._ended = 0.0, {}
    agent._wrap_close(context)
    context.close(None)
    return agent


def test_a_new_coordinator_never_resets_the_number_of_restarts() -> None:
    rounds = [1, 2, 5, 1_000_001, 1_000_002, 2_000_001]
    assert [agent_module.restarts_before(number) for number in rounds] == [0, 1, 4, 1000, 1001, 2000]


def test_the_agent_returns_when_all_workers_are_gone() -> None:
    began = time.monotonic()
    workers = SlowlyDying(1, 0.1), SlowlyDying(2, 0.4)
    closed(*workers)
    assert time.monotonic() - began >= 0.4
    assert [worker.poll() for worker in workers] == [-9, -9]


def test_a_node_that_shuts_down_does_not_wait_for_a_worker_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "LAST_SECONDS", 0.2)
    monkeypatch.setattr(Exits, "begun", True)
    began = time.monotonic()
    closed(SlowlyDying(1, 60))
    assert time.monotonic() - began < 30


def test_a_worker_that_survives_sigkill_makes_its_node_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "GONE_SECONDS", 0.2)
    with pytest.raises(SystemExit, match=r"worker processes \[1\] are still running"):
        closed(SlowlyDying(1, 60), SlowlyDying(2, 0.0))


FAMILY = """
import os, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=4096)
if (child := os.fork()) == 0:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(shared.name, os.getpid(), flush=True)
time.sleep(60)
"""


def test_killed_workers_leave_no_children_or_shared_memory_behind() -> None:
    """This includes children with their own process group, and children that ignore SIGTERM."""
    command = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        name, child = process.stdout.readline().split()
        handler = SimpleNamespace(proc=process, close=lambda death_sig: None)
        context = SimpleNamespace(
            close=lambda *_: None, subprocess_handlers={0: handler}, pids=lambda: {0: process.pid}
        )
        close_with(context)
        assert not Path(f"/dev/shm/{name.decode()}").exists()
        assert not agent_module._processes_of({process.pid}) and not Path(f"/proc/{child.decode()}/exe").exists()


PARENT = """
import signal, subprocess, sys, time
if sys.argv[1] == "handles":
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(60)"])
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["handles", "ignorant"])
def test_sigterm_is_sent_to_a_worker_that_handles_it_but_not_to_its_children(kind: str, tmp_path: Path) -> None:
    """The worker saves after a step that still needs the loaders' processes. A SIGTERM from
    torchrun to all of them would break that step.
    """
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), kind], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "child\n"
        [child] = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        handler = SimpleNamespace(proc=parent, close=lambda death_sig: os.killpg(parent.pid, death_sig))
        agent_module._ask_to_end(handler, signal.SIGTERM)
        try:
            if kind == "handles":
                assert parent.stdout.readline() == "asked\n"
                time.sleep(0.5)  # belongs to a child that was also asked to stop
                assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
                assert parent.poll() is None
            else:
                assert parent.wait(30) == -signal.SIGTERM
                assert parent.stdout.read() == "", "the child, which also held the pipe, has ended"
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)


CHILD = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("child", flush=True)
time.sleep(30)
"""


def test_sigterm_is_sent_to_a_shell_that_handles_it_and_to_its_children(tmp_path: Path) -> None:
    """The shell runs its trap only after the training has ended, so with --no-python the training
    itself must be asked to save.
    """
    (tmp_path / "child.py").write_text(CHILD)
    wrapper = ["bash", "-c", 'trap "echo asked" TERM; "$@"; echo ends', "wrapper"]
    with subprocess.Popen(
        [*wrapper, sys.executable, str(tmp_path / "child.py")], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            assert shell.stdout is not None and shell.stdout.readline() == "child\n"
            handler = SimpleNamespace(proc=shell, close=lambda death_sig: os.killpg(shell.pid, death_sig))
            agent_module._ask_to_end(handler, signal.SIGTERM)
            assert shell.stdout.read() == "saved\nasked\nends\n"
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_a_shutdown_does_not_wait_for_a_round_that_is_about_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the shutdown needed a lock that the agent held while it waited for the process to
    exit.
    """
    shutdown, reached = Shutdown(1.0), threading.Event()
    agent = bare_agent(SimpleNamespace(), shutdown)
    agent._round = 1

    def asked_to_end() -> int:
        shutdown.begun = True
        reached.set()
        return 0

    monkeypatch.setattr(agent_module.oom, "oom_kills", asked_to_end)
    monkeypatch.setenv("DDPJOB_FENCE", "")
    group = SimpleNamespace(spec=SimpleNamespace(max_restarts=10))
    threading.Thread(target=agent._start_workers, args=(group,), daemon=True).start()
    assert reached.wait(20)
    time.sleep(0.1)
    assert shutdown.starting.acquire(timeout=20)


@pytest.mark.parametrize(
    ("code", "written", "message"),
    [
        (
            -signal.SIGABRT,
            "",
            "killed by signal SIGABRT: a library aborted the process; the reason is at the end of the pod's log",
        ),
        (-signal.SIGABRT, '{"message": {"message": "AcceleratorError: CUDA error"}}', "AcceleratorError: CUDA error"),
        (-signal.SIGSEGV, "", "killed by signal SIGSEGV"),
        (-37, "", "killed by signal 37"),
        (3, "", "ended with exit code 3"),
    ],
)
def test_a_failure_without_a_traceback_points_to_the_log(code: int, written: str, message: str, tmp_path: Path) -> None:
    """When NCCL's watchdog aborts, only the log has its message."""
    error_file, sent = tmp_path / "error.json", list[dict[str, Any]]()
    if written:
        error_file.write_text(written)
    client: Any = SimpleNamespace(send=lambda _, **fields: sent.append(fields))
    agent_module.send_failure(client, 1, 0, 0, 17, code, str(error_file), kernel_killed=False)
    assert sent[0]["message"].startswith(message) and ("library" in sent[0]["message"]) is ("library" in message)


@pytest.mark.parametrize(
    ("code", "written", "oom"),
    [
        (-signal.SIGKILL, "", True),
        (1, "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", True),
        (1, "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly", True),
        (1, "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. ", False),
        (1, "ValueError: bug", False),
    ],
)
def test_a_data_loader_process_killed_by_the_memory_limit_is_reported_as_such(
    code: int, written: str, oom: bool, tmp_path: Path
) -> None:
    error_file, sent = tmp_path / "error.json", list[dict[str, Any]]()
    if written:
        error_file.write_text(json.dumps({"message": {"message": written, "extraInfo": {}}}))
    client: Any = SimpleNamespace(send=lambda _, **fields: sent.append(fields))
    for killed in True, False:
        agent_module.send_failure(client, 1, 0, 0, 17, code, str(error_file), kernel_killed=killed)
    assert [fields["oom"] for fields in sent] == [oom, False]
    assert ("memory limit" in sent[0]["message"]) is oom and "memory limit" not in sent[1]["message"]


@pytest.mark.parametrize("character", ["\U0001f600", "\u4e00", "\0"])
def test_a_failure_with_any_characters_fits_into_a_line(character: str, tmp_path: Path) -> None:
    """Otherwise, the coordinator would close the connection and report the loss of the node."""
    error_file, lines, long = tmp_path / "error.json", list[bytes](), character * protocol.MAX_TRACEBACK
    error_file.write_text(json.dumps({"message": {"message": long, "extraInfo": {"py_callstack": long}}}))
    client: Any = SimpleNamespace(send=lambda verb, **fields: lines.append(protocol.encode(verb, **fields)))
    agent_module.send_failure(client, 1, 0, 0, 17, 1, str(error_file), kernel_killed=False)
    assert protocol.MAX_LINE // 2 < len(lines[0]) <= protocol.MAX_LINE


def test_a_failure_is_reported_without_the_bold_words_of_a_terminal(tmp_path: Path) -> None:
    text = "UnpicklingError: two options, \x1b[1mdo those steps\x1b[0m \x1b[38;5;9monly\x1b[m if"
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": text, "extraInfo": {"py_callstack": text}}}))
    error = agent_module.read_error_file(str(file))
    assert error.message == error.traceback == "UnpicklingError: two options, do those steps only if"


def test_only_ranks_that_have_exited_or_are_about_to_exit_are_reported(tmp_path: Path) -> None:
    """The ranks are 10 to 14. The first lost its peers. The second raised an exception before that
    and waits for one of its threads. The third exited with 0, the fourth has caught its error, and
    the fifth trains.
    """
    sent, lost, raised, caught = list[dict[str, Any]](), *(tmp_path / f"{name}.json" for name in ("0", "1", "3"))
    lost.write_text('{"message": {"message": "gloo", "extraInfo": {"ddpjob_exit": 1}}}')
    raised.write_text('{"message": {"message": "ValueError: bug", "extraInfo": {"ddpjob_exit": 3}}}')
    caught.write_text('{"message": {"message": "KeyError: caught", "extraInfo": {}}}')
    client: Any = SimpleNamespace(send=lambda _, **fields: sent.append(fields))
    agent = bare_agent(client, Exits())
    agent._oom_kills = 1 << 60
    codes = dict(enumerate((1, None, 0, None, None)))
    context = SimpleNamespace(
        error_files={rank: str(tmp_path / f"{rank}.json") for rank in codes},
        pids=lambda: dict.fromkeys(codes, 17),
        subprocess_handlers={
            rank: SimpleNamespace(proc=SimpleNamespace(poll=lambda code=code: code, returncode=code))
            for rank, code in codes.items()
        },
    )
    agent._note_ended(context)
    agent._report(context, 1, {rank: 10 + rank for rank in codes})
    said = {fields["rank"]: (fields["localRank"], fields["exitCode"], fields["message"]) for fields in sent}
    assert said == {10: (0, 1, "gloo"), 11: (1, 3, "ValueError: bug"), 12: (2, 0, "ended with exit code 0")}
    sent.clear()
    agent._ended, agent._ending = dict.fromkeys(codes, 0), {}
    agent._report(context, 1, {rank: 10 + rank for rank in codes})
    assert sent == [], "the node has finished"


def test_a_worker_killed_by_its_own_alarm_reports_its_programs_exit_code(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    client: Any = SimpleNamespace(send=lambda kind, **fields: sent.append(fields))
    errors = tmp_path / "error.json"
    errors.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"ddpjob_exit": 3}}}))
    for path in (errors, tmp_path / "none"):
        agent_module.send_failure(client, 1, 0, 0, 77, -signal.SIGALRM, str(path), kernel_killed=False)
    assert [(fields["exitCode"], fields["signal"]) for fields in sent] == [(3, None), (-14, "SIGALRM")]
    assert sent[0]["message"] == f"ValueError: x{agent_module.STAYED}"


WORKERS = {
    "waits for its peers": ("import time; time.sleep(1000)", True),
    "makes short steps": ("import time\nwhile True: time.sleep(0.005)", False),
    "computes": ("while True: pass", False),
    "waits for a process that works": (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])", False,
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_that_used_no_cpu_since_the_last_check_counts_as_idle(kind: str) -> None:
    code, idle = WORKERS[kind]
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as worker:
        try:
            activity, seen = agent_module.stacks.Activity(), list[Any]()
            assert activity.idle(worker.pid) is None
            deadline = time.monotonic() + 60
            while idle not in seen and time.monotonic() < deadline:  # Starting Python counts as work too.
                activity.remember([worker.pid])
                time.sleep(1.0)
                seen.append(activity.idle(worker.pid))
            assert seen[-1] is idle, seen
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
    assert activity.idle(worker.pid) is None
