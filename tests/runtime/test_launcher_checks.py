"""The launcher's checks before anything starts, and its cleanup at the end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ddpjob_runtime
import pytest
from ddpjob_runtime import protocol
from ddpjob_runtime.coordinator import standstill
from ddpjob_runtime.launcher import __main__ as launcher
from ddpjob_runtime.launcher import import_torchrun, stacks
from ddpjob_runtime.launcher.check_entrypoint import InitFailure, check_command, check_module, check_script
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.launcher.fetch_data import Unfit
from ddpjob_runtime.launcher.s3_reader import BucketRefusal
from ddpjob_runtime.log_lines import Log
from ddpjob_runtime.protocol import Mode
from ddpjob_runtime.termination_log import write_termination_log
from machine import slowness
from runtime_harness import RUNTIME


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in {
        "train.py": "", "pkg/__init__.py": "raise RuntimeError('must not be imported')", "pkg/train.py": "",
        "pkg/sub/deep.py": "",
        "runnable/__init__.py": "", "runnable/__main__.py": "", "spaces/one/two.py": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    "option",
    [
        *("n", "nn", "no", "nproc", "m", "ma", "max", "master", "r", "rd", "rdzv"),
        *("l", "log", "logs", "local", "s", "start", "t"),
    ],
)
@pytest.mark.parametrize("program", [("a.py",), ("-m", "a")])
def test_arguments_of_a_script_are_not_mistaken_for_options_of_torchrun(option: str, program: tuple[str, ...]) -> None:
    """Each argument is a prefix of one or two torchrun options. argparse rejects a prefix of two
    options as ambiguous.
    """
    pytest.importorskip("torch")
    run = import_torchrun.import_torchrun()
    given = [f"--{option}=1", f"--{option}", "x", "--", f"-{option}"]
    parsed = launcher.parse(run, ["--nnodes=2", *program[:-1], "--", program[-1], *given])
    assert (parsed.nnodes, parsed.training_script, parsed.training_script_args) == ("2", program[-1], given)
    assert parsed.module == (len(program) == 2)


def test_the_message_about_a_refused_option_does_not_repeat_other_arguments() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rdzv-conf")
    parser.add_argument("program", nargs="*")
    with pytest.raises(InitFailure) as refused:
        launcher.parse(SimpleNamespace(get_args_parser=lambda: parser), ["--rdzv-conf=a=1", "--bad", "--", "train.py"])
    message = "torchrun rejects its arguments: unrecognized arguments: --bad; correct spec.torchrunArgs"
    assert str(refused.value) == message


def test_the_number_of_processes_is_read_only_from_options_before_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launcher", "--nproc-per-node=2", "--", "a.py", "--nproc-per-node=8"])
    assert launcher.processes_per_node() == 2


def test_a_launcher_raises_the_limit_of_open_files() -> None:
    code = """
import resource, sys
from ddpjob_runtime.launcher import __main__ as launcher
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
launcher.Shutdown = lambda grace: sys.exit(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 128)
launcher.main()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(ddpjob_runtime.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_log_without_a_reader_drops_lines_instead_of_blocking_writers() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        log = Log("coordinator", stream)
        writing = threading.Thread(target=lambda: [log("x" * 600) for _ in range(1000)], daemon=True)
        writing.start()
        writing.join(60)
        assert not writing.is_alive(), "a write waits for a reader"
        read = os.read(reader, 1 << 20)
        log("the reader is back")
        assert read.count(b"coordinator: xxx") > 50
        read += os.read(reader, 1 << 20)
    os.close(reader)
    assert re.search(rb"\n\(9\d\d lines are missing here, .*\)\n\S+ coordinator: the reader is back\n$", read)


def test_a_signal_that_pid_1_does_not_handle_does_not_end_the_node() -> None:
    """The kernel ignores such a signal only for PID 1. If PID 1 forwarded it, the launcher would be
    killed.
    """
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot create a PID namespace")
    code = (
        f"import sys; sys.path.insert(0, {str(RUNTIME.parent)!r})\n"
        "import os, signal, time\n"
        "from ddpjob_runtime.launcher import pid1\n"
        "assert os.getpid() == 1\n"
        "pid1.become_init()\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2):\n    os.kill(1, number)\n"
        "time.sleep(0.3)\n"
        "os._exit(5)"
    )
    assert subprocess.run([*unshare, sys.executable, "-c", code]).returncode == 5


def test_folders_with_stacks_are_removed_at_exit_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv(stacks.ENVIRONMENT, raising=False)
    left = tmp_path / "tmp" / (stacks.PREFIX + "of-a-killed-one")
    left.mkdir()
    (left / "0.txt").touch()
    used = tmp_path / "tmp" / (stacks.PREFIX + "of-one-that-runs")
    used.mkdir()
    descriptor = stacks._lock(used)
    stacks.prepare()
    own = Path(os.environ[stacks.ENVIRONMENT])
    assert sorted((tmp_path / "tmp").iterdir()) == sorted([used, own])
    stacks.remove()
    assert list((tmp_path / "tmp").iterdir()) == [used] and stacks.ENVIRONMENT not in os.environ
    os.close(descriptor)


def test_a_launcher_does_not_remove_the_folder_of_one_that_starts_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv(stacks.ENVIRONMENT, raising=False)
    make = tempfile.mkdtemp

    def interrupted(prefix: str) -> str:
        own = make(prefix=prefix)
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        stacks.prepare()  # the other launcher's
        return own

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    stacks.prepare()
    assert len(list(folder.glob(stacks.PREFIX + "*"))) == 2 == len(list(folder.iterdir()))
    assert Path(os.environ[stacks.ENVIRONMENT]).is_dir()


def test_existing_scripts_and_modules_pass_the_check() -> None:
    check_script("train.py")
    check_script(str(Path.cwd() / "pkg/train.py"))
    check_script("runnable")
    for name in ("train", "pkg.train", "pkg.sub.deep", "runnable", "spaces.one.two", "json.tool"):
        check_module(name)
    check_command("sh")
    check_command(sys.executable)


def test_a_script_in_a_folder_that_the_user_cannot_open_is_reported(tmp_path: Path) -> None:
    closed = tmp_path / "root"
    closed.mkdir()
    (closed / "train.py").write_text("")
    closed.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(InitFailure, match=r"train\.py.* cannot be read by user"):
            check_script(str(closed / "train.py"))
    finally:
        os.seteuid(user)
        closed.chmod(0o700)


@pytest.mark.parametrize(
    ("check", "name", "why"),
    [
        (check_script, "missing.py", "does not exist"),
        (check_script, "pkg", "folder without __main__.py"),
        (check_module, "missing", "no module named 'missing'"),
        (check_module, "pkg.missing", "no module named 'pkg.missing'"),
        (check_module, "train.inner", "'train' is not a package"),
        (check_module, "pkg", "without __main__.py"),
        (check_command, "no-such-command", "nor on PATH"),
    ],
)
def test_a_missing_program_is_reported_with_the_searched_paths(check: object, name: str, why: str) -> None:
    with pytest.raises(InitFailure) as caught:
        check(name)  # type: ignore[operator]
    assert why in str(caught.value)
    if check is not check_command:
        assert str(Path.cwd()) in str(caught.value)


def test_the_termination_log_keeps_the_end_of_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "end"
    monkeypatch.setenv("DDPJOB_TERMINATION_LOG", str(log))
    write_termination_log("Error", "message", "first line\n" + '\u00e4 "quoted"\n' * 3000 + "ValueError: the end")
    assert len(log.read_bytes()) <= 4096
    content = json.loads(log.read_text())
    assert (
        content["kind"] == "Error"
        and content["message"] == "message"
        and content["traceback"].endswith("ValueError: the end")
    )


def test_the_failure_of_all_ranks_of_a_node_is_kept_until_a_coordinator_receives_it() -> None:
    """The first failure may be the cause of the break."""
    client = MemberClient("host:1", "token", {}, Mode.FAST, 1.0, lambda *end: None)
    for rank in range(256):
        client.send("failure", rank=rank)
    assert [fields["rank"] for _, fields in client._unsent] == list(range(256))


def test_an_exception_in_the_client_ends_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, str, str]] = []

    def break_down() -> None:
        raise LookupError("unknown encoding: idna")

    client = MemberClient("host:1", "token", {}, Mode.STANDARD, 1.0, lambda *end: ends.append(end))
    monkeypatch.setattr(client, "_connect", break_down)
    client.start()
    client._thread.join(5)
    assert ends == [(1, "Error", "the connection to the coordinator has failed: LookupError: unknown encoding: idna")]


def test_the_first_name_lookup_happens_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc reads the environment for it, and getenv in a thread crashes if another thread sets a
    variable at the same time.
    """
    lookers: list[threading.Thread] = []
    client = MemberClient("host:1", "token", {}, Mode.STANDARD, 1.0, lambda *end: None)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: lookers.append(threading.current_thread()))
    monkeypatch.setattr(client, "_connect", lambda: client.close())
    client.start()
    client._thread.join(5)
    assert lookers[:1] == [threading.main_thread()]


def test_a_failure_that_waits_for_a_coordinator_keeps_its_original_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the next coordinator dated the failure to the moment when it received it."""
    client = MemberClient("host:1", "token", {}, Mode.FAST, 1.0, lambda *end: None)
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "_write", lambda data: written.append(json.loads(data)) or True)
    now = time.time()
    client.send("failure", round=1, message="ValueError: bug", time=now, sent=now)
    client.send("joined", round=2)
    monkeypatch.setattr("time.time", lambda: now + 30)
    client._on_welcome({"generation": 0})
    assert [line["t"] for line in written] == ["failure", "joined"] and "sent" not in written[1]
    assert written[0]["sent"] - written[0]["time"] == pytest.approx(30)


def test_lines_that_could_not_be_sent_wait_for_the_next_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    client = MemberClient("host:1", "token", {}, Mode.FAST, 1.0, lambda *end: None)
    written: list[str] = []
    client.send("failure", round=1, message="ValueError: bug")
    client.send("joined", round=2)
    monkeypatch.setattr(client, "_write", lambda data: False)
    client._on_welcome({"generation": 0})
    monkeypatch.setattr(client, "_write", lambda data: written.append(json.loads(data)["t"]) or True)
    client._on_welcome({"generation": 0})
    assert written == ["failure", "joined"]


def test_a_failure_is_sent_again_to_a_coordinator_that_may_have_missed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken link accepts lines that never arrive. A new coordinator might count the break a
    second time.
    """
    client = MemberClient("host:1", "token", {}, Mode.FAST, 1.0, lambda *end: None)
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "_write", lambda data: written.append(json.loads(data)) or True)
    client._socket, client.welcomed, client._place = object(), True, (0, 0)  # type: ignore[assignment]

    def fail() -> None:
        client.send("failure", round=1, message="ValueError: bug", traceback="t" * 9999, sent=time.time())
        client.note("Data", "")

    def said_after_a_welcome() -> list[str]:
        written.clear()
        client._on_welcome({"generation": 0})
        return [line["t"] for line in written]

    fail()
    client._ready = {"after": 1, "host": "", "port": 0}
    assert said_after_a_welcome() == ["failure", "ready"] and written[0]["traceback"]
    assert said_after_a_welcome() == ["failure", "ready"], (
        "the repeated line is short enough for a link that drops large packets"
    )
    assert written[0]["message"] == "ValueError: bug" and not written[0]["traceback"]
    assert said_after_a_welcome() == ["ready"]
    fail()
    client._place = (0, 1)
    assert said_after_a_welcome() == ["ready"]
    fail()
    client._on_go({"round": 2, "rank": 0, "world": 2})
    assert said_after_a_welcome() == []


TOKEN = "the job's token"
STRANGER: dict[str, object] = {}
"""The response of a coordinator with a different token: its proof."""
OLDER = {"t": "welcome", "generation": 1}
OURS = {"t": "welcome", "generation": 2}


@contextlib.contextmanager
def coordinator(*answers: dict[str, object], heard: list[dict[str, object]] | None = None) -> Iterator[str]:
    """Listen as a coordinator that sends one response per connection, and repeats the last one.
    Yields host:port.
    """

    def talk(connection: socket.socket, answer: dict[str, object]) -> None:
        with connection.makefile("rb") as lines:
            challenge = json.loads(lines.readline())
            token = TOKEN if answer else "another"
            place = {"generation": answer.get("generation", 2), "attempt": 0}
            proof = protocol.seal(token, "coordinator", challenge["nonce"], "N", *map(str, place.values()))
            connection.sendall(protocol.encode("proof", nonce="N", proof=proof, **place))
            line = lines.readline()
            if heard is not None:
                heard.extend([challenge, *([json.loads(line)] if line else [])])
            if line:
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def serve() -> None:
        pending = list(answers)
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                talk(connection, pending.pop(0) if len(pending) > 1 else pending[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def client_of(address: str, seconds: float, ends: list[tuple[int, str, str]]) -> MemberClient:
    identity = {"generation": 2, "pod": "job-0-0"}
    return MemberClient(address, TOKEN, identity, Mode.STANDARD, seconds, lambda *end: ends.append(end))


@pytest.mark.parametrize("first", [STRANGER, OLDER], ids=["of another job", "of an earlier generation"])
def test_a_launcher_that_reaches_the_wrong_coordinator_retries(first: dict[str, object]) -> None:
    """A stale name-server entry, or an address that now belongs to another pod, may lead to a
    different program for a while.
    """
    ends: list[tuple[int, str, str]] = []
    with coordinator(first, first, OURS) as address:
        client = client_of(address, 10.0, ends)
        client.start()
        assert client.wait_welcome(10)
        client.close()
    assert ends == []


@pytest.mark.parametrize(("only", "why"), [(STRANGER, "does not know this job's token"), (OLDER, "generation 2")])
def test_a_pod_that_never_finds_its_own_coordinator_gives_up(only: dict[str, object], why: str) -> None:
    ends: list[tuple[int, str, str]] = []
    with coordinator(only) as address:
        client = client_of(address, 0.5, ends)
        client.start()
        client._thread.join(10)
    [(code, kind, message)] = ends
    assert (code, kind) == (protocol.EXIT_RENDEZVOUS_LOST, "RendezvousLost") and why in message


def test_reconnecting_to_a_stranger_times_out_too() -> None:
    """Only a welcome resets the time limit for reconnecting."""
    ends: list[tuple[int, str, str]] = []
    with coordinator(OURS, STRANGER) as address:
        client = client_of(address, 10.0, ends)
        client._reconnect_seconds = 0.5
        client.start()
        client._thread.join(10)
    assert [code for code, _, _ in ends] == [protocol.EXIT_RENDEZVOUS_LOST]


@pytest.mark.parametrize(("number", "planned"), [(7, True), (7, False), (6, True)])
def test_a_new_coordinator_learns_whether_workers_are_saving(number: int, planned: bool) -> None:
    heard: list[dict[str, object]] = []
    with coordinator(OURS, heard=heard) as address:
        client = client_of(address, 10.0, [])
        client._on_restart({"t": "restart", "round": number, "why": "it grows", "planned": planned})
        client._position = {"round": 7, "rank": 0, "world": 2, "state": "Running"}
        client.start()
        assert client.wait_welcome(10)
        client.close()
    assert heard[1]["resume"] == {**client._position, "planned": number == 7 and planned}


def test_every_coordinator_receives_the_last_note_of_each_kind() -> None:
    """Regression: a later coordinator did not know of a pod's cold workers, because a broken link
    accepts lines that never arrive.
    """
    heard: list[dict[str, Any]] = []
    with coordinator(OURS, heard=heard) as address:
        client = client_of(address, 10.0, [])
        client.note(protocol.DATA, "1 of 2 files")
        client.note(protocol.COLD_WORKERS, "torch is too old " * 1000)
        client.note(protocol.DATA, "")
        client.start()
        assert client.wait_welcome(10)
        client.close()
    notes = heard[1]["notes"]
    assert notes[protocol.DATA] == "" and notes[protocol.COLD_WORKERS].startswith("torch is too old torch")
    assert notes.keys() == {protocol.DATA, protocol.COLD_WORKERS} and len(notes[protocol.COLD_WORKERS]) <= 1000


def test_a_stranger_receives_only_a_random_number() -> None:
    heard: list[dict[str, object]] = []
    with coordinator(STRANGER, OURS, heard=heard) as address:
        client = client_of(address, 10.0, [])
        client.start()
        assert client.wait_welcome(10)
        client.close()
    assert [message["t"] for message in heard[:3]] == ["challenge", "challenge", "hello"]
    assert set(heard[0]) == {"t", "nonce"} and heard[0] != heard[1] and TOKEN not in json.dumps(heard)


def test_a_stranger_that_never_ends_its_line_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a stranger may be silent or send without end. Neither may block the launcher or fill its
    memory.
    """
    monkeypatch.setattr(protocol, "SILENCE_SECONDS", 0.3)
    for flood in (b"", b"x" * 1_000_000):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = client_of(f"127.0.0.1:{listener.getsockname()[1]}", 10.0, [])
            began = time.monotonic()

            def accept(listener: socket.socket = listener, flood: bytes = flood) -> None:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError):
                    connection.sendall(flood)

            thread = threading.Thread(target=accept, daemon=True)
            thread.start()
            with pytest.raises(OSError):
                client._connect()
            assert time.monotonic() - began < 5 * slowness()
            thread.join(5)


@pytest.mark.parametrize("line", [b"[" * 4000 + b"\n", b"\xff\n", b"{}\n", b'{"t":"refused","why":"go"}\n'])
def test_no_line_from_a_stranger_can_make_a_launcher_exit(line: bytes) -> None:
    """A stranger may have the coordinator's address for a while."""
    ends: list[tuple[int, str, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = client_of(f"127.0.0.1:{listener.getsockname()[1]}", 10.0, ends)
        listener.settimeout(30)  # A connection that fails silently is dropped after SILENCE_SECONDS.
        client.start()
        for _ in range(2):
            connection, _ = listener.accept()
            connection.settimeout(30)
            with connection:
                connection.recv(1000)
                connection.sendall(line)
        listener.accept()[0].close()  # it tries again
        client._closing = True
    assert ends == []


def test_addresses_lines_and_shortened_strings_have_the_format_of_the_protocol() -> None:
    with pytest.raises(ValueError, match="host:port"):
        MemberClient("nowhere", "token", {}, Mode.STANDARD, 1.0, lambda *_: None)
    assert protocol.decode(protocol.encode("hello", pod="p")) == {"t": "hello", "pod": "p"}
    assert protocol.iso(protocol.time_of(0.25)) == "1970-01-01T00:00:00.250Z"
    assert protocol.clip("abcdefgh", 6) == "a...gh", "the start of a message and the end of a traceback are kept"


@pytest.mark.skipif(sys.version_info >= (3, 10), reason="torch uses importlib.metadata from Python 3.10 on")
def test_torch_finds_an_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_torchrun.importlib.util, "find_spec", lambda name: None)
    with import_torchrun._backport():
        from importlib_metadata import entry_points

        found = entry_points(group="console_scripts")
    assert [point.name for point in found if point is found["pytest"]] == ["pytest"]
    assert not list(entry_points(group="torchrun.handlers"))
    assert import_torchrun.BACKPORT not in sys.modules


def test_stacks_are_assigned_to_the_right_ranks_after_one_has_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WRITING_SECONDS", 0.0)
    monkeypatch.setenv(stacks.ENVIRONMENT, str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for rank in range(2):
        (tmp_path / f"{rank}.txt").touch()
    monkeypatch.setattr(stacks.os, "kill", _writes_its_stack(tmp_path / "1.txt"))
    monkeypatch.setattr(stacks, "catches", lambda pid, number: True)
    found = stacks.collect({0: ended.pid, 1: os.getpid()})
    assert found == {0: "(this rank has ended)", 1: "a stack"}


def test_stacks_are_collected_while_the_checkpoint_volume_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "WRITING_SECONDS", 0.1)
    monkeypatch.setenv(stacks.ENVIRONMENT, str(tmp_path))
    monkeypatch.setenv("DDPJOB_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.delenv("DDPJOB_FENCE", raising=False)
    hanging = tmp_path / stacks.FOLDER / "round-0.0-rank-0.txt"
    hanging.parent.mkdir()
    os.mkfifo(hanging)  # It hangs when it is opened.
    found: list[dict[int, str]] = []
    looks = [threading.Thread(target=lambda: found.append(stacks.collect({0: 2**22})), daemon=True) for _ in range(3)]
    for look in looks:
        look.start()
        look.join(10 * slowness())
    assert found == [{0: protocol.RANK_ENDED}] * 3
    writers = [thread for thread in threading.enumerate() if thread.name == "ddpjob-keep-stacks"]
    assert len(writers) == 1, "at most one thread waits for the volume"
    with hanging.open() as file:
        assert protocol.RANK_ENDED in file.read()
    writers[0].join()


def test_a_stack_shows_only_the_frames_of_the_script() -> None:
    ours = [f'  File "{RUNTIME / name}", line 7 in run\n' for name in ("worker.py", "launcher/forkserver.py")]
    runpy = '  File "<frozen runpy>", line 88 in _run_code\n'
    script = 'Stack (most recent call first):\n  File "/job/train.py", line 3 in step\n'
    assert stacks.strip_runtime_frames(script + "".join(ours) + runpy) == script
    alone = "Stack (most recent call first):\n" + "".join(ours)
    assert stacks.strip_runtime_frames(alone) == alone, "the worker has not reached the script"


def test_strings_are_shortened_by_whole_lines() -> None:
    lines = [f'  File "/job/train.py", line {number} in step' for number in range(1000)]
    for short in (protocol.clip("\n".join(lines), 2000), protocol.last_lines("\n".join(lines), 2000)):
        assert 1500 < len(short) <= 2000
        assert {line for line in short.splitlines() if line != "..."} <= set(lines)
    assert protocol.clip("x" * 100, 40) == "x" * 10 + "..." + "x" * 27, "a line that is too long"
    assert protocol.last_lines("x" * 100, 40) == "x" * 40 and protocol.last_lines(" a\nb ", 40) == "a\nb"


def _writes_its_stack(file: Path) -> Callable[[int, int], None]:
    def kill(pid: int, number: int) -> None:
        if pid != os.getpid():
            raise ProcessLookupError
        file.write_text("a stack")

    return kill


@contextlib.contextmanager
def _worker(folder: Path, name: str, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a worker that runs this script, which creates the file `up` once it runs."""
    (folder / name).write_text(text)
    environment = {**os.environ, "RANK": "0", "DDPJOB_LAUNCHER_PID": str(os.getpid())}
    words = [sys.executable, "-u", str(RUNTIME / "worker.py"), "--script", str(folder / name)]
    with subprocess.Popen(words, env=environment) as worker:
        try:
            deadline = time.monotonic() + 30
            while not (folder / "up").exists():
                assert worker.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            yield worker
        finally:
            worker.kill()


WAITS = "def wait_for_ever():\n    open('up', 'w'); time.sleep(60)\n\nwait_for_ever()\n"


def test_a_check_reads_only_the_frames_of_a_workers_main_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's other threads keep running, and faulthandler would then crash a healthy
    process.
    """
    monkeypatch.setenv(stacks.ENVIRONMENT, str(tmp_path))
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    with _worker(tmp_path, "busy.py", f"import threading, time\n{thread}{WAITS}") as worker:
        text = stacks.collect({0: worker.pid})[0]
        assert worker.poll() is None
    assert text.startswith("Stack (most recent call first):\n") and "threading.py" not in text
    assert standstill.find_innermost(text) == f"wait_for_ever ({tmp_path / 'busy.py'}:4)"


def test_a_check_skips_a_worker_that_has_become_a_different_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's file still exists, but the new program has no signal handler, so the signal
    would kill it.
    """
    monkeypatch.setenv(stacks.ENVIRONMENT, str(tmp_path))
    (tmp_path / "again.py").write_text(f"import time\n{WAITS}")
    becomes = "import os, sys\nos.execv(sys.executable, [sys.executable, 'again.py'])\n"
    with _worker(tmp_path, "wrapper.py", becomes) as worker:
        assert (tmp_path / "0.txt").exists()
        assert stacks.collect({0: worker.pid}) == {0: "(this rank has written no stack)"}
        assert worker.poll() is None


def test_an_invalid_bucket_is_reported_as_an_error_in_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_DATA_URL", "ftp://bucket/folder")
    with pytest.raises(InitFailure, match=r"^storage.data: 'ftp://bucket/folder'.*must be s3://BUCKET/FOLDER"):
        launcher.data_to_fetch()


@pytest.mark.parametrize(
    ("error", "ends"),
    [(BucketRefusal("no"), "InitFailure: storage.data: no"), (Unfit("full"), f"SystemExit: {protocol.EXIT_UNFIT}")],
)
def test_after_a_failed_fetch_the_launchers_exit_code_shows_the_kind_of_failure(
    error: Exception, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        raise error

    def leave(code: int, kind: str, message: str) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("ddpjob_runtime.launcher.fetch_data.Fetch", lambda *_: SimpleNamespace(run=run))
    client, shutdown = SimpleNamespace(done=False, note=print), SimpleNamespace(begun=False, exit=leave)
    with pytest.raises((InitFailure, SystemExit)) as raised:
        launcher.fetch_data(None, client, shutdown)  # type: ignore[arg-type]
    assert f"{raised.type.__name__}: {raised.value}" == ends


@pytest.mark.parametrize("program", ["launcher", "coordinator"])
def test_a_signal_before_pid_1_has_imported_anything_is_not_lost(program: str) -> None:
    """Regression: the kernel drops signals for PID 1 that have no handler, so the pod stayed for
    its whole grace period.
    """
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot create a PID namespace")
    code = (
        "import importlib, os, runpy, signal, sys\n"
        "real = importlib.import_module\n"
        "def slow(name):\n"
        "    if 'ddpjob_runtime.' in name:\n"
        "        os.kill(1, signal.SIGTERM)\n"
        "    return real(name)\n"
        "importlib.import_module = slow\n"
        f"sys.argv = [{str(RUNTIME)!r}, {program!r}, '--port=0', '--nodes=2']\n"
        "sys.path.insert(0, '')\n"
        f"runpy.run_path({str(RUNTIME)!r}, run_name='__main__')\n"
    )
    # This address does not answer, so the launcher would wait for minutes.
    env = {**os.environ, "DDPJOB_COORDINATOR": "127.0.0.1:1", "DDPJOB_TOKEN": "t", "DDPJOB_POD": "job-0-0"}
    env |= {"DDPJOB_INDEX": "0", "DDPJOB_ATTEMPT": "0", "DDPJOB_GENERATION": "0", "DDPJOB_RECOVERY": "Standard"}
    command = [*unshare, sys.executable, "-c", code]
    ended = subprocess.run(command, env=env, capture_output=True, timeout=60 * slowness())
    assert ended.returncode == 143, ended.stderr
