"""`--spawn N`: ranks without torchrun find each other in three ways, train like one process, and
leave no processes or files behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from ddpjob_trainer.commands import spawn_ranks
from ddpjob_trainer.distributed import init_method
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, RendezvousError
from listening import beyond_loopback, listening
from machine import free_port, slowness
from ranks import TINY, final_losses, good, until

SHORT = [*TINY, "train.epochs=1", "train.threads=1"]


_launched: list[tuple[subprocess.Popen[str], Path]] = []


@pytest.fixture(autouse=True)
def _end_and_report() -> Iterator[None]:
    """Kill the processes of a failed test, and show their output. Ranks exit with their
    launcher.
    """
    yield
    while _launched:
        process, cwd = _launched.pop()
        print(f"exit code {process.poll()}\n{output(cwd)}")
        if process.poll() is None:
            process.kill()
            process.wait()


def launch(cwd: Path, *arguments: str, program: str = "") -> subprocess.Popen[str]:
    """Start the launcher. `program` is Python code that runs first, also in the ranks, because
    spawned processes import the main module again.
    """
    own = cwd / "own.py"
    own.write_text(
        f"{program}\nif __name__ == '__main__':\n    import sys, ddpjob_trainer.__main__ as m\n    sys.exit(m.main())\n"
    )
    prepared = [str(own)] if program else ["-m", "ddpjob_trainer"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_FOLDER": str(cwd)}
    with (cwd / "out.txt").open("w") as out:
        return subprocess.Popen(
            [sys.executable, *prepared, *arguments],
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )


def output(cwd: Path) -> str:
    return (cwd / "out.txt").read_text()


def processes_with(text: str) -> list[int]:
    """Return the living processes whose environment or command line contains `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if (
                    state != "Z"
                    and text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue  # the process ended in the meantime
    return found


@pytest.fixture(scope="module")
def single_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the loss curve of one process."""
    folder = tmp_path_factory.mktemp("single")
    good(1, [*SHORT, f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


@pytest.mark.parametrize("method", ["env", "file"])
def test_ranks_find_each_other_and_train_like_one_process(
    method: str, tmp_path: Path, single_losses: list[float]
) -> None:
    """Two ranks add numbers in a different order than one process. Over eight steps, float32
    rounding leads to relative differences of 1e-4.
    """
    meeting = tmp_path / "meet"
    where = {"env": "env://", "file": f"file://{meeting}"}[method]
    if method == "file":
        meeting.write_bytes(b"what an earlier launch left: a store that names dead ranks")
    checked = ["preflight.run=true"] if method == "file" else []  # the ranks of preflight use the same file
    process = launch(tmp_path, "--spawn", "2", f"--init={where}", *SHORT, *checked, f"checkpoint.dir={tmp_path / 'c'}")
    assert process.wait(120 * slowness()) == 0, output(tmp_path)
    assert "2 ranks on cpu, small_cnn with " in output(tmp_path)
    assert final_losses(tmp_path / "c" / "run") == pytest.approx(single_losses, rel=1e-4)
    assert len(list((tmp_path / "c" / "run" / "ledger").glob("rank-*.jsonl"))) == 2
    if method == "file":
        assert "a leftover of an earlier launch" in output(tmp_path)
        assert not meeting.exists() and not meeting.with_name("meet.lock").exists()
    until(lambda: not processes_with(str(tmp_path)), 10)


def test_two_nodes_with_one_rank_each_train_like_one_process(tmp_path: Path, single_losses: list[float]) -> None:
    """Two launchers, each with its own ranks, find each other by a tcp:// address."""
    where = f"tcp://127.0.0.1:{free_port()}"
    folders = [tmp_path / "a", tmp_path / "b"]
    nodes = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        place = ["--spawn=1", "--nodes=2", f"--node-rank={number}", "--init", where]
        nodes.append(launch(folder, *place, *SHORT, f"checkpoint.dir={tmp_path / 'c'}"))
    assert [node.wait(120 * slowness()) for node in nodes] == [0, 0], output(folders[0]) + output(folders[1])
    assert final_losses(tmp_path / "c" / "run") == pytest.approx(single_losses, rel=1e-4)


FAILS = """
from ddpjob_trainer.reporting import ledger
import os, signal
write = ledger.Ledger.step
def step(self, number, taken):
    write(self, number, taken)
    if number == 4 and os.environ["RANK"] == "1":
        {what}
ledger.Ledger.step = step
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "raise ZeroDivisionError('on purpose')",
            r"Traceback[\s\S]*ZeroDivisionError: on purpose\nrank 1 failed; the other ranks were stopped\n",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"rank 1 was terminated by SIGKILL; the kernel kills processes when memory is short",
        ),
    ],
)
def test_if_a_rank_fails_all_ranks_end_and_the_failure_is_reported(what: str, said: str, tmp_path: Path) -> None:
    arguments = [*SHORT, "train.epochs=400", f"checkpoint.dir={tmp_path / 'c'}"]
    process = launch(tmp_path, "--spawn=3", *arguments, program=FAILS.format(what=what))
    assert process.wait(120 * slowness()) == 1
    assert re.search(said, output(tmp_path)), output(tmp_path)
    assert "onnection" not in output(tmp_path), "the others' errors are consequences and are not reported"
    until(lambda: not processes_with(str(tmp_path)), 10)


def test_ctrl_c_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A terminal sends the signal to the launcher's whole process group."""
    process = launch(tmp_path, "--spawn=2", *SHORT, "train.epochs=4000", f"checkpoint.dir={tmp_path / 'c'}")
    metrics = tmp_path / "c" / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"event": "step"' in metrics.read_text(), 120)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30 * slowness()) == 75, output(tmp_path)
    assert '"event": "stop"' in metrics.read_text()
    assert list((tmp_path / "c").glob("step-*.pt"))
    assert "KeyboardInterrupt" not in output(tmp_path)
    until(lambda: not processes_with(str(tmp_path)), 10)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = launch(tmp_path, "--spawn=2", *SHORT, "train.epochs=4000", f"checkpoint.dir={tmp_path / 'c'}")
    metrics = tmp_path / "c" / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"event": "step"' in metrics.read_text(), 120)
    assert len(processes_with(str(tmp_path))) > 2
    process.kill()
    process.wait()
    until(lambda: not processes_with(str(tmp_path)), 30)
    assert '"event": "stop"' in metrics.read_text(), "the ranks saved before they exited"


def test_a_second_signal_ends_ranks_that_do_not_respond(tmp_path: Path) -> None:
    process = launch(tmp_path, "--spawn=2", *SHORT, "train.epochs=4000", f"checkpoint.dir={tmp_path / 'c'}")
    ledger = tmp_path / "c" / "run" / "ledger"
    until(lambda: len(list(ledger.glob("rank-*.jsonl"))) == 2, 120)
    (path,) = ledger.glob("rank-1-*.jsonl")
    os.kill(int(path.stem.split("-")[-2]), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    until(lambda: "SIGTERM: ranks save and exit; a second signal kills them" in output(tmp_path))
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20 * slowness()) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 15 * slowness(), "the grace period is 30 s"
    until(lambda: not processes_with(str(tmp_path)), 10)


def test_a_mistake_is_reported_before_ranks_are_started() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'optim.rl'; did you mean 'optim.lr'"):
        spawn_ranks.main(["--spawn=2", "optim.rl=1"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--spawn", "0"], r"--spawn=0: must be an integer of at least 1"),
        (["--spawn=x"], r"--spawn=x: must be an integer"),
        (["--spawn=10000"], r"--spawn=10000: must be at most \d+, which is this machine's limit"),
        (["--spawn"], r"--spawn: the value is missing"),
        (["--spawn=2", "--nodes=2", "--node-rank=2"], r"--node-rank 2: must be from 0 to 1 with --nodes 2"),
        (
            ["--spawn=2", "--init=udp://x"],
            r"init method 'udp://x' is unknown; use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH",
        ),
        (["--spawn=2", "--init=tcp://x"], r"init method 'tcp://x' is unknown"),
        (["--spawn=2", "--init=tcp://x:y"], r"init method 'tcp://x:y' is unknown"),
        (["--spawn=2", "--init=file://relative"], r"init method 'file://relative' is unknown"),
        (["--spawn=2", "--nodes=2"], r"MASTER_ADDR='' MASTER_PORT='': several ranks need both"),
    ],
)
def test_mistakes_on_the_command_line_are_reported(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=said):
        spawn_ranks.read(arguments)


def test_ranks_get_the_right_environment_variables() -> None:
    second = spawn_ranks.Launch(4, 3, 2, "tcp://h:1").environment(1)
    assert (second["RANK"], second["WORLD_SIZE"], second["LOCAL_RANK"], second["LOCAL_WORLD_SIZE"]) == (
        "9",
        "12",
        "1",
        "4",
    )
    assert second[init_method.INIT_METHOD] == "tcp://h:1"


def test_the_chosen_port_cannot_be_taken_by_an_outgoing_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 16000 <= init_method.free_port() < 20000
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken.getsockname()[1]])
        assert init_method.free_port() not in (0, taken.getsockname()[1]), (
            "if the whole range is in use, any other free port is chosen"
        )


def test_the_store_of_a_single_node_is_not_reachable_from_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", init_method.INIT_METHOD):
        monkeypatch.delenv(name, raising=False)
    reached = []
    # If LOCAL_WORLD_SIZE is 1, other ranks may be on other machines, although rank 0 gets the
    # loopback address.
    for host, local_world in (("127.0.0.1", 2), ("localhost", 2), ("127.0.0.1", 1)):
        port = free_port()
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", str(port))
        for fence in ("0.1", "0.2"):  # a later incarnation in the same process uses the same port
            monkeypatch.setenv("DDPJOB_FENCE", fence)
            init_method.open_store(Group(0, 2, 0, local_world), 30).set("key", fence)
        where = {each for each in listening([os.getpid()]) if each[1] == port}
        assert len(where) == 1
        reached.append(bool(beyond_loopback(where)))
    assert reached == [False, False, True]


def test_a_loopback_port_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(RendezvousError, match=r"cannot listen on 127.0.0.1:.*in use. Use a different port"):
            init_method.open_store(Group(0, 2, 0, 2), 30)


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with (
        pytest.raises(RendezvousError, match=r"No locks available.*; use a file on a file system that supports locks"),
        spawn_ranks._own_file(spawn_ranks.Launch(2, init=f"file://{tmp_path / 'meet'}")),
    ):
        pass


def test_a_lock_that_a_launch_removes_at_its_end_is_not_held_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier launch ends between the next launch's open and its flock."""
    launch, flock = spawn_ranks.Launch(2, init=f"file://{tmp_path / 'meet'}"), fcntl.flock
    removals = iter([(tmp_path / "meet.lock").unlink])

    def late(file: IO[str], operation: int) -> None:
        next(removals, lambda: None)()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        spawn_ranks._own_file(launch),
        pytest.raises(RendezvousError, match="another launch uses this file"),
        spawn_ranks._own_file(launch),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_in_use_and_a_stale_file_of_several_nodes_are_refused(tmp_path: Path) -> None:
    """Another launch holds a lock, or another node's ranks may already have opened the file."""
    where = f"file://{tmp_path / 'meet'}"
    with (tmp_path / "meet.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(RendezvousError, match="another launch uses this file"),
            spawn_ranks._own_file(spawn_ranks.Launch(2, init=where)),
        ):
            pass
    (tmp_path / "meet").touch()
    with (
        pytest.raises(RendezvousError, match="leftover of an earlier launch"),
        spawn_ranks._own_file(spawn_ranks.Launch(2, 2, 0, where)),
    ):
        pass
    with (
        pytest.raises(RendezvousError, match="choose a file in a writable folder"),
        spawn_ranks._own_file(spawn_ranks.Launch(2, init="file:///nowhere/f")),
    ):
        pass
