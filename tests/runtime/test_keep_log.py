"""The tail of a pod's log outlives the pod. Keeping it never delays or changes the program."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_runtime import protocol
from ddpjob_runtime.launcher.keep_log import FileKeeper, Tail, surplus
from machine import slowness
from runtime_harness import RUNTIME, Job, until

UID = "0123abcd-0000-4000-8000-000000000000"
NAME = "job-1-4.0123abcd.log"


def environment(folder: Path, **more: str) -> dict[str, str]:
    fixed = {
        "DDPJOB_NAME": "job", "DDPJOB_POD": "job-1-4", "DDPJOB_INDEX": "1", "DDPJOB_UID": UID, "DDPJOB_LOGS_KEPT": "3",
        "DDPJOB_CHECKPOINT_DIR": str(folder),
    }  # fmt: skip
    return {**fixed, **more}


def started(folder: Path, code: str, **more: str) -> subprocess.Popen[bytes]:
    """Start a container whose launcher is `code`."""
    before = (
        f"import os, sys; sys.path.insert(0, {str(RUNTIME.parent)!r})\n"
        "from ddpjob_runtime.launcher import keep_log, pid1\n"
        "pid1.become_init(keep_log.KeptLog.prepare())\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", before + code],
        env={**os.environ, **environment(folder, **more)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ran(folder: Path, code: str, **more: str) -> tuple[int, bytes, bytes]:
    """Return the container's exit code, output and errors."""
    process = started(folder, code, **more)
    out, err = process.communicate(timeout=60 * slowness())
    return process.returncode, out, err


def kept(folder: Path, name: str = NAME) -> bytes:
    files = (folder / protocol.LOGS_FOLDER / (name + protocol.OLDER), folder / protocol.LOGS_FOLDER / name)
    return b"".join(file.read_bytes() for file in files if file.exists())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, nodes=1)
    yield job
    job.close()
    assert job.workers() == [], "processes were left behind"


def test_the_log_of_a_killed_launcher_and_its_killed_worker_is_kept(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "assert not sys.stdout.isatty()\n"
        "sys.stderr.write('to stderr\\n')\n"  # one write per line, because workers do not buffer their output
        "sys.stdout.write('last words of the worker\\n')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    job.start_coordinator()
    job.start_node(0, str(script), DDPJOB_LOGS_KEPT="3", DDPJOB_CHECKPOINT_DIR=str(checkpoints), DDPJOB_UID=UID)
    job.wait_until(lambda report: report["incidents"])
    [launcher] = (int(word) for word in children(job.processes["job-0-0"].pid))
    os.kill(launcher, signal.SIGKILL)
    assert job.wait_exit("job-0-0") == 128 + signal.SIGKILL
    text, shown = kept(checkpoints, "job-0-0.0123abcd.log"), job.log("job-0-0").read_bytes()
    assert {b"to stderr", b"last words of the worker"} <= set(text.splitlines())
    assert b"failed (exitcode: -9)" in text, "the launcher's own lines"
    assert sorted(text.splitlines()) == sorted(shown.splitlines()), "the pod's own log is complete"


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_kept_log_of_a_chatty_program_is_bounded_and_no_output_is_lost(tmp_path: Path) -> None:
    lines = 400_000
    code = f"for number in range({lines}):\n    sys.stdout.write(f'line {{number}} of many\\n')\nprint('end')\n"
    exit_code, out, err = ran(tmp_path, code + "sys.stdout.flush(); os._exit(7)")
    assert (exit_code, err) == (7, b"") and out.splitlines()[-2:] == [b"line 399999 of many", b"end"]
    assert out.count(b"\n") == lines + 1
    text = kept(tmp_path)
    assert 200_000 < len(text) <= protocol.MAX_KEPT_LOG and text.endswith(b"line 399999 of many\nend\n")
    [missing] = re.findall(rb"^\((\d+) bytes are missing here\)$", text, re.M)[-1:]
    assert int(missing) > 100_000
    assert out.endswith(text.rpartition(b"here)\n")[2]), "the lines after the note are contiguous"


def test_the_two_files_hold_the_newest_bytes_up_to_the_limit(tmp_path: Path) -> None:
    keeper = FileKeeper(tmp_path, NAME)
    whole = b""
    for number in range(300):
        piece = b"%d\n" % number * 1500
        whole += piece
        keeper.tail.add(piece)
        keeper.write()
        assert len(kept(tmp_path)) <= protocol.MAX_KEPT_LOG
    assert len(kept(tmp_path)) > protocol.MAX_KEPT_LOG // 2 and whole.endswith(kept(tmp_path))


def test_bytes_are_counted_as_missing_only_if_they_are_not_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    keeper = FileKeeper(folder, NAME)
    keeper.tail.add(b"0" * 9)
    keeper.write()  # The volume is not mounted yet.
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # A write ends there, as on a full volume.
    try:
        for _ in range(2):
            keeper.tail.add(b"1" * 40_000)
            with contextlib.suppress(OSError):
                keeper.write()
        keeper.tail.add(b"2" * 7)
        with pytest.raises(OSError, match="File too large"):
            keeper.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    keeper.tail.add(b"3" * 5)
    keeper.write()
    start, first, end = b"(9 bytes are missing here)\n", 40_000, b"(20034 bytes are missing here)\n33333"
    assert kept(folder) == start + b"1" * (60_000 - len(start)) + end
    assert 9 + 2 * first + 7 + 5 == kept(folder).count(b"1") + 9 + 20_034 + 5, (
        "each byte is in the file or counted as missing, exactly once"
    )


@pytest.mark.parametrize("obstacle", ["a file in the way", "a hung volume", "a volume that is not mounted"])
def test_a_failure_to_keep_the_log_has_no_other_effect(obstacle: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    if obstacle != "a volume that is not mounted":
        folder.mkdir()
    if obstacle == "a file in the way":
        (folder / protocol.LOGS_FOLDER).touch()
    elif obstacle == "a hung volume":
        (folder / protocol.LOGS_FOLDER).mkdir()
        os.mkfifo(folder / protocol.LOGS_FOLDER / NAME)  # It hangs when it is opened.
    began = time.monotonic()
    exit_code, out, err = ran(folder, "os.write(1, b'x' * 3_000_000); os._exit(3)")
    assert time.monotonic() - began < 15 * slowness()
    assert exit_code == 3 and out == b"x" * 3_000_000
    assert err.count(b"cannot save this pod's log to ") == (obstacle == "a file in the way")
    assert folder.exists() == (obstacle != "a volume that is not mounted")


def test_unread_output_and_a_hung_volume_together_delay_the_exit_by_three_seconds(tmp_path: Path) -> None:
    folder = tmp_path / protocol.LOGS_FOLDER
    folder.mkdir()
    os.mkfifo(folder / NAME)
    code = "os.write(1, b'x' * 150_000); os.write(2, b'end\\n'); os._exit(3)"
    with started(tmp_path, code) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.readline() == b"end\n"
        began = time.monotonic()
        assert process.wait(60 * slowness()) == 3
        assert time.monotonic() - began < 5.9, "three seconds for each would be six"


@pytest.mark.parametrize(
    ("written", "left"), [("30", "27.0"), ("600.5", "597.5"), ("4", "3.0"), ("0", "0.0"), ("", ""), ("x", "x")]
)
def test_the_launchers_grace_period_leaves_time_to_close_the_log(written: str, left: str, tmp_path: Path) -> None:
    code = "print(os.environ['DDPJOB_GRACE_SECONDS'], flush=True); os._exit(0)"
    assert ran(tmp_path, code, DDPJOB_GRACE_SECONDS=written)[1].decode() == f"{left}\n"
    assert ran(tmp_path, code, DDPJOB_GRACE_SECONDS=written, DDPJOB_LOGS_KEPT="0")[1].decode() == f"{written}\n"


@pytest.mark.parametrize("value", ["", "0", "x"])
def test_the_log_is_not_kept_unless_the_job_asks_for_it(value: str, tmp_path: Path) -> None:
    assert ran(tmp_path, "print('hello', flush=True); os._exit(0)", DDPJOB_LOGS_KEPT=value)[:2] == (0, b"hello\n")
    assert list(tmp_path.iterdir()) == []


def test_signals_reach_the_launcher_and_orphans_do_not_keep_the_pod_running(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "if os.fork() == 0:\n    os.write(1, b'orphan %d\\n' % os.getpid()); time.sleep(600)\n"  # a line is one write
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(5)))\n"
        "os.write(1, b'ready\\n')\n"
        "while True:\n    time.sleep(60)\n"
    )
    process = started(tmp_path, code)
    until(lambda: re.search(rb"orphan \d+\n", kept(tmp_path)) and b"ready\n" in kept(tmp_path))
    assert process.stdout is not None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60 * slowness()) == 5 and time.monotonic() - began < 10 * slowness()
    orphan = re.search(rb"orphan (\d+)", kept(tmp_path))
    assert orphan is not None and kept(tmp_path).endswith(b"saved\n")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(orphan[1]), signal.SIGKILL)
    process.stdout.close()


def test_lines_of_the_two_output_streams_are_not_interleaved(tmp_path: Path) -> None:
    code = "import time\nfor n in range(20):\n    os.write(1, b'out '); os.write(2, b'err '); time.sleep(0.002)\n"
    code += "    os.write(1, b'end\\n'); os.write(2, b'end\\n')\nos.write(1, b'no newline'); os._exit(0)"
    assert ran(tmp_path, code)[0] == 0
    assert set(kept(tmp_path).splitlines()) == {b"out end", b"err end", b"no newline"}


def test_a_buffer_that_nobody_empties_keeps_the_newest_bytes() -> None:
    tail = Tail(100)
    for number in range(1000):
        tail.add(b"%03d," % number)
    data, dropped, added = tail.read(take=True)
    assert data.endswith(b"998,999,") and len(data) == 100 and dropped + len(data) == added == 4000
    assert tail.read(take=True) == (b"", 0, 4000)


def test_only_the_newest_logs_of_the_pods_slot_are_kept() -> None:
    own, other = "0123abcd", "ffffffff"
    names = [f"job-1-{n}.{own}.log" for n in (0, 2, 3, 10)] + [f"job-1-{n}.{other}.log" for n in (1, 50)]
    names += [f"job-1-0.{own}.log.1", f"job-2-0.{own}.log", f"job-1-1-0.{own}.log", "job-1-0.txt", "../job-1-0", NAME]
    job = JobEnvironment.read(environment(Path("/c")))
    gone = {f"job-1-0.{own}.log", f"job-1-0.{own}.log.1", f"job-1-1.{other}.log", f"job-1-50.{other}.log"}
    assert set(surplus(names, job, 3)) == gone | {f"job-1-2.{own}.log"}
    assert set(surplus(names, job, 1)) == gone | {f"job-1-{n}.{own}.log" for n in (2, 3, 10)}
    assert surplus(names, job, 100) == []


def test_a_new_pod_removes_the_oldest_logs_above_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / protocol.LOGS_FOLDER
    folder.mkdir()
    for attempt in range(4):
        (folder / f"job-1-{attempt}.0123abcd.log").write_text("old")
    assert ran(tmp_path, "print('new', flush=True); os._exit(0)")[0] == 0
    assert sorted(file.name[:7] for file in folder.iterdir()) == ["job-1-2", "job-1-3", "job-1-4"]
