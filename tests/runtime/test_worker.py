"""A program run through worker.py must not notice the difference. Every test compares it with
Python's own way to run it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from ddpjob_runtime import worker
from machine import slowness
from runtime_harness import RUNTIME

WORKER = str(RUNTIME / "worker.py")
PROBE = """
import json, sys
def f(): pass
seen = {
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path, "package": __package__, "doc": __doc__,
    "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(), "function": f.__module__,
    "names": sorted(n for n in globals() if n != "seen"), "runtime": [n for n in sys.modules if n.startswith("ddpjob")],
    "torch": "torch" in sys.modules, "loader": type(__loader__).__name__, "finders": len(sys.meta_path),
}
print(json.dumps(seen))
"""


def both(
    folder: Path, mode: str, *what: str, **env: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Return (the result under Python, the result under worker.py)."""
    python = {"--script": [], "--module": ["-m"]}[mode]
    run = [[sys.executable, "-u", *python, *what], [sys.executable, "-u", WORKER, mode, *what]]
    first, second = (
        subprocess.run(
            c, capture_output=True, text=True, cwd=folder, timeout=60 * slowness(), env={**os.environ, **env}
        )
        for c in run
    )
    return first, second


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def same(pair: tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]) -> None:
    direct, through = pair
    assert (through.returncode, through.stdout, through.stderr) == (direct.returncode, direct.stdout, direct.stderr)


def test_a_script_sees_the_same_environment_as_under_python(tmp_path: Path) -> None:
    script = write(tmp_path, "sub/probe.py", PROBE)
    pair = both(tmp_path, "--script", script, "--lr", "0.1")
    same(pair)
    assert json.loads(pair[1].stdout)["argv"] == ["sub/probe.py", "--lr", "0.1"]
    same(both(tmp_path, "--script", str(tmp_path / script)))


def test_modules_packages_folders_and_archives_run_as_under_python(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/probe.py", "from . import other\n" + PROBE)
    write(tmp_path, "pkg/other.py", "")
    write(tmp_path, "pkg/__main__.py", PROBE)
    write(tmp_path, "folder/__main__.py", PROBE)
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    same(both(tmp_path, "--module", "pkg.probe", "a"))
    same(both(tmp_path, "--module", "pkg"))
    same(both(tmp_path, "--script", "folder", "b"))
    same(both(tmp_path, "--script", "archive", "b"))


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('no')\nf()\n",
        "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise RuntimeError('because') from e\n",
        "def broken(:\n",
        "import sys\nsys.exit(3)\n",
        "import sys\nsys.exit('a message')\n",
        "import os\nos._exit(9)\n",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "import atexit, threading, time\natexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n",
        "import sys\nsys.excepthook = lambda *a: print('own hook', a[0].__name__)\nraise KeyError(1)\n",
        "import atexit\natexit.register(print, 'bye')\nraise SystemError('x')\n",
        "import os\nif os.fork() == 0:\n    raise ValueError('in a child')\nos.wait()\n",
    ],
)
def test_every_way_to_exit_gives_the_same_exit_code_as_under_python(tmp_path: Path, text: str) -> None:
    same(both(tmp_path, "--script", write(tmp_path, "ending.py", text)))


def test_ctrl_c_ends_the_program_with_sigint(tmp_path: Path) -> None:
    # A shell's background jobs ignore SIGINT, and the script would inherit that. So the test
    # restores the handler of a foreground job.
    lines = (
        "import os, signal, time",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "os.kill(os.getpid(), signal.SIGINT)",
    )
    script = write(tmp_path, "ctrlc.py", "\n".join([*lines, "time.sleep(5)"]))
    direct, through = both(tmp_path, "--script", script)
    assert through.returncode == direct.returncode == -2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("class E(Exception):\n    def __str__(self): return self.missing\nraise E", "E: <exception str() failed>"),
        (
            "import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr'); p.parse_args(['--lrr', '1'])",
            "SystemExit: 2: failing.py: error: unrecognized arguments: --lrr 1",
        ),
        ("import argparse, sys\ndef error(self): sys.exit(2)\nerror(argparse)", "SystemExit: 2"),
        ("import sys; sys.exit(0.0)", "SystemExit: 0.0"),
        ("import os; os.environ.clear(); raise ValueError('no')", "ValueError: no"),
        ("import sys\nclass A(list):\n    def __ne__(self, _): return 1 / 0\nsys.exit(A())", "SystemExit: []"),
        (
            "import argparse; p = argparse.ArgumentParser(); p.add_argument('--n', type=int); p.parse_args(['--n=x'])",
            "SystemExit: 2: failing.py: error: argument --n: invalid int value: 'x'",
        ),
        (
            "import sys\ntry:\n    1 / 0\nexcept Exception:\n    sys.exit(3)",
            "SystemExit: 3 (after ZeroDivisionError: division by zero)",
        ),
        (
            "try:\n    try:\n        1 / 0\n    except Exception as e:\n        raise ValueError('a') from e\n"
            "except Exception:\n    raise KeyError",
            "KeyError:  (after ValueError: a; ZeroDivisionError: division by zero)",
        ),
        ("try:\n    1 / 0\nexcept Exception:\n    raise ValueError('no') from None", "ValueError: no"),
        (
            "e = ValueError('no')\ne.__cause__ = KeyError('k')\ne.__cause__.__cause__ = e\nraise e",
            "ValueError: no (after KeyError: 'k')",
        ),
        ("import os\nos.environ.clear()\nraise ValueError('no')", "ValueError: no"),
        (
            "import json, os, sys\nkept = {'message': 'ValueError: no', 'extraInfo': {'py_callstack': 'failing.py', "
            "'timestamp': '1'}}\ntry:\n    raise ValueError('no')\nexcept Exception:\n"
            "    json.dump({'message': kept}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n    sys.exit(1)",
            "ValueError: no",
        ),
        (
            "raise ValueError('\\n\\n-- Process 1 terminated with the following error:\\n'"
            "'Traceback (most recent call last):\\n'"
            "'  File \"a.py\", line 1\\nOSError: no port\\n')",
            "ValueError: -- Process 1 terminated with the following error: OSError: no port\n"
            'Traceback (most recent call last):\n  File "a.py", line 1\nOSError: no port',
        ),
        (
            "raise ValueError('Caught it in process 0.\\nOriginal Traceback (most recent call last):\\n'"
            "' f\\nKeyError: 3')",
            "ValueError: Caught it in process 0: KeyError: 3\n"
            "Original Traceback (most recent call last):\n f\nKeyError: 3",
        ),
        ("import sys; sys.exit(75)", None),
        ("import sys; sys.exit(0)", None),
        ("import os\nif os.fork() == 0:\n    raise ValueError('in a child')\nos.wait()", None),
    ],
)
def test_an_error_is_recorded_without_the_decorator(tmp_path: Path, text: str, message: str | None) -> None:
    script, record = write(tmp_path, "failing.py", text), tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(record)}
    command = [sys.executable, WORKER, "--script", script]
    ended = subprocess.run(command, cwd=tmp_path, env=env, timeout=30 * slowness(), check=False)
    if message is None:
        assert not record.exists()
        return
    content = json.loads(record.read_text())["message"]
    assert content["message"] == message and int(content["extraInfo"]["timestamp"]) > 0
    assert content["extraInfo"]["ddpjob_exit"] == ended.returncode
    assert (
        "failing.py" in content["extraInfo"]["py_callstack"] and "worker.py" not in content["extraInfo"]["py_callstack"]
    )


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return i * i
if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
        print(method, [b.tolist() for b in loader])
"""


def test_an_error_raised_by_ddpjob_report_counts_as_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "refuse.py").write_text(
        "from ddpjob_report.resume import check_group\ncheck_group('the Trainer', 1, 'write use_cpu=True')\n"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "DDPJOB_COORDINATOR": "127.0.0.1:1", "DDPJOB_TOKEN": "t"}
    env |= {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "DDPJOB_LAUNCHER_PID": str(os.getpid())}
    command = [sys.executable, "-u", str(WORKER), "--script", "refuse.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 78 and "would train a separate model; write use_cpu=True" in ended.stderr
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["ddpjob_exit"] == 78


@pytest.mark.slow
def test_data_loader_workers_start_with_every_start_method(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = write(tmp_path, "loading.py", LOADER)
    through = subprocess.run(
        [sys.executable, WORKER, "--script", script], capture_output=True, text=True, cwd=tmp_path,
        timeout=100 * slowness(),
        env={**os.environ, "RANK": "0", "DDPJOB_COORDINATOR": "127.0.0.1:1", "DDPJOB_TOKEN": "t"},
    )  # fmt: skip
    assert through.returncode == 0, through.stderr
    assert through.stdout.splitlines() == [
        f"{m} [[0, 1, 4, 9], [16, 25, 36, 49]]" for m in ("spawn", "forkserver", "fork")
    ]
    assert through.stderr == ""


COUNTED = """
import sys, torch
connections = []
sys.addaudithook(lambda event, _: connections.append(event) if event == "socket.connect" else None)
net = torch.nn.Linear(4, 4)
first, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam(net.parameters())
for _ in range(5000):
    first.step()
second.step()
print(len(connections))
"""


@pytest.mark.slow
def test_counting_steps_makes_no_requests_even_without_a_coordinator(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script, connections = write(tmp_path, "counted.py", COUNTED), {}
    for rank in ("0", "1"):  # only rank 0 counts
        env = {
            **os.environ,
            "RANK": rank,
            "DDPJOB_COORDINATOR": "127.0.0.1:1",
            "DDPJOB_TOKEN": "t",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, WORKER, "--script", script]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100 * slowness(), env=env)
        assert ended.returncode == 0 and ended.stderr == "", ended.stderr
        connections[rank] = int(ended.stdout)
    assert connections["1"] == 0 and connections["0"] < 50, f"{connections} in 5,000 steps"


def test_a_command_keeps_its_signal_handling_and_dies_with_its_launcher(tmp_path: Path) -> None:
    command = [sys.executable, WORKER, "--exec", "sh", "-c", "grep SigIgn /proc/self/status; echo $0 $1", "a", "b"]
    ended = subprocess.run(command, capture_output=True, text=True)
    ignored = int(ended.stdout.split()[1], 16)
    assert ended.returncode == 0 and ended.stdout.splitlines()[1] == "a b" and not ignored & (1 << 12)
    start = f"subprocess.Popen([sys.executable, {WORKER!r}, '--exec', 'sleep', '60'], start_new_session=True)"
    launcher = f"import subprocess, sys, time; print({start}.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    while b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    for _ in range(200):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("the command outlived its launcher")


def test_a_program_in_python_exec_may_start_the_worker_if_its_launcher_lives(tmp_path: Path) -> None:
    """Regression: if PYTHON_EXEC was a program such as a profiler, the worker exited immediately
    and silently.
    """
    wrapper, script = tmp_path / "wrapper", write(tmp_path, "hello.py", "print('hello')\n")
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    command = [str(wrapper), "-u", WORKER, "--script", script]
    gone = subprocess.Popen(["true"])
    gone.wait()
    for launcher, code, said in (os.getpid(), 0, "hello\n"), (gone.pid, 1, ""):
        env = {**os.environ, "DDPJOB_LAUNCHER_PID": str(launcher)}
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (code, said), ended.stderr


# ---- packages of DDPJob that it may import

IMPORTS = """
import sys
import multiprocessing

def child():
    import ddpjob_report
    print(ddpjob_report.__name__)

if __name__ == "__main__":
    print([path for path in sys.path if path.endswith("mounted")])
    import ddpjob_report
    print(ddpjob_report.__file__)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""


def mounted(folder: Path) -> Path:
    return Path(shutil.copytree(RUNTIME.parent, folder / "mounted", ignore=shutil.ignore_patterns("__pycache__")))


def test_job_pods_find_ddpjob_report_next_to_the_runtime(tmp_path: Path) -> None:
    """The image contains no part of DDPJob. Processes spawned by multiprocessing find the package
    too.
    """
    folder = mounted(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(IMPORTS)
    worker = [sys.executable, "-S", "-u", str(folder / "ddpjob_runtime" / "worker.py"), "--script", str(script)]
    done = subprocess.run(
        worker, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "DDPJOB_COORDINATOR": "127.0.0.1:1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[]", str(folder / "ddpjob_report" / "__init__.py"), "ddpjob_report"], (
        done.stderr
    )


def test_a_package_of_the_image_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "ddpjob_report.py").write_text("OWN = True\n")
    script = tmp_path / "train.py"
    script.write_text("import ddpjob_report, sys\nprint(ddpjob_report.OWN, sys.path[-1].endswith('mounted'))\n")
    worker = [sys.executable, "-S", str(mounted(tmp_path) / "ddpjob_runtime" / "worker.py"), "--script", str(script)]
    done = subprocess.run(
        worker, capture_output=True, text=True, timeout=60, check=False, env={"DDPJOB_COORDINATOR": "127.0.0.1:1"}
    )
    assert done.stdout == "True False\n", done.stderr


BUILDER = """
import sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
print(baton.try_acquire(), flush=True)
if sys.argv[2] == "dies":
    time.sleep(1000)
if sys.argv[2] == "ends":
    baton.release()
"""


def test_an_extension_whose_builder_was_killed_is_built_again(tmp_path: Path) -> None:
    """Some releases of torch after 2.6 wait forever for a builder that is gone."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("needs torch")
    script, lock = write(tmp_path, "builder.py", BUILDER), tmp_path / "lock"
    write(tmp_path, "torch/__init__.py", "")  # Importing the rest of torch would take seconds.
    write(tmp_path, "torch/utils/__init__.py", "")
    shutil.copy(Path(torch.origin).parent / "utils" / "file_baton.py", tmp_path / "torch" / "utils")

    def start(what: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-u", WORKER, "--script", script, str(lock), what], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, env={**os.environ, "DDPJOB_COORDINATOR": "127.0.0.1:1"},
        )  # fmt: skip

    with start("dies") as builder:
        try:
            assert builder.stdout is not None and builder.stdout.readline() == "True\n"
            with start("looks") as other:
                assert other.communicate()[0] == "False\n", "slow is not dead"
        finally:
            builder.kill()
    assert lock.exists()
    with start("ends") as heir:
        assert heir.communicate()[0] == "True\n"
    assert not lock.exists()
    lock.touch()
    with start("looks") as other:
        assert other.communicate()[0] == "False\n", "a file of another program is left alone"


STAYING = {
    "an exit handler": "import atexit, time\natexit.register(time.sleep, 1000)\nraise ValueError('x')\n",
    "a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nraise ValueError('x')\n"
    ),
    "a library that holds the lock": (
        "import atexit, ctypes\natexit.register(ctypes.PyDLL(None).sleep, 1000)\nraise SystemExit(3)\n"
    ),
    "a program with alarms of its own": (
        "import atexit, signal, time\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "atexit.register(time.sleep, 1000)\nraise SystemExit(3)\n"
    ),
}


def short_of_patience(folder: Path) -> str:
    """Write a worker.py with a shorter time limit for the exit of a failed program, and return its
    path.
    """
    text = Path(WORKER).read_text()
    assert "STAY_SECONDS = 10.0" in text
    (folder / "worker.py").write_text(text.replace("STAY_SECONDS = 10.0", "STAY_SECONDS = 0.3"))
    return str(folder / "worker.py")


@pytest.mark.parametrize("kind", STAYING)
def test_a_process_that_does_not_exit_after_its_program_failed_is_killed(kind: str, tmp_path: Path) -> None:
    script, errors = write(tmp_path, "stays.py", STAYING[kind]), tmp_path / "error.json"
    command = [sys.executable, "-u", short_of_patience(tmp_path), "--script", script]
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(errors)}
    ended = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60 * slowness(), check=False
    )
    assert ended.returncode == -signal.SIGALRM, ended.stderr
    written = json.loads(errors.read_text())["message"]
    assert written["extraInfo"]["ddpjob_exit"] == (3 if "3" in STAYING[kind][-4:] else 1)


def test_a_process_that_does_not_exit_after_its_program_succeeded_is_left_alone(tmp_path: Path) -> None:
    """The process may still be uploading a checkpoint."""
    script = write(tmp_path, "stays.py", "import atexit, time\natexit.register(time.sleep, 1)\n")
    command = [sys.executable, "-u", short_of_patience(tmp_path), "--script", script]
    assert subprocess.run(command, cwd=tmp_path, timeout=60 * slowness(), check=False).returncode == 0


def of_torchrun(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run worker.py as torchrun starts it in a `command`, through PYTHON_EXEC. The file `end`
    receives the reason why the container ended.
    """
    given = {
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{env.get('RANK')}.json"),
        "DDPJOB_TERMINATION_LOG": str(folder / "end"),
        **env,
    }
    return subprocess.run(
        [sys.executable, WORKER, "-u", *words], env={**os.environ, **given}, cwd=folder, capture_output=True, text=True,
        timeout=60 * slowness(), check=False,
    )  # fmt: skip


def test_torchrun_in_a_command_starts_scripts_and_modules_with_their_arguments(tmp_path: Path) -> None:
    script = write(tmp_path, "pkg/probe.py", PROBE)
    as_script, as_module = of_torchrun(tmp_path, script, "-m", "x"), of_torchrun(tmp_path, "-m", "pkg.probe", "--", "y")
    assert json.loads(as_script.stdout)["argv"] == [script, "-m", "x"], as_script.stderr
    assert json.loads(as_module.stdout)["argv"][1:] == ["--", "y"], as_module.stderr
    direct = subprocess.run([sys.executable, "-u", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(direct.stdout)["path"] == json.loads(as_script.stdout)["path"]
    assert not (tmp_path / "end").exists()


def test_the_containers_end_is_explained_by_the_first_rank_that_failed_in_a_round(tmp_path: Path) -> None:
    script = write(tmp_path, "fails.py", "import os\nraise ValueError('x' * 5000 + os.environ['RANK'])\n")

    def reason(rank: str, restart: str) -> tuple[int, int]:
        of_torchrun(tmp_path, script, RANK=rank, TORCHELASTIC_RESTART_COUNT=restart)
        text = (tmp_path / "end").read_bytes()
        found = json.loads(text)
        assert len(text) <= 4096 and found["message"].startswith("ValueError: xxx") and found["exitCode"] == 1
        assert found["traceback"].rstrip().endswith(f"x{found['rank']}") and found["kind"] == "RankFailed"
        return found["rank"], found["restart"]

    assert reason("3", "0") == (3, 0)
    assert reason("1", "0") == (3, 0), "a later failure does not replace the first"
    assert reason("2", "1") == (2, 1), "torchrun has restarted its workers"
    (tmp_path / "end").write_text("[" * 3000)
    assert reason("5", "0") == (5, 0)


def test_a_rank_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    of_torchrun(tmp_path, write(tmp_path, "fails.py", "import no_such_module\n"), RANK="0")
    assert json.loads((tmp_path / "end").read_text())["init"] is True


def test_a_torch_whose_extension_lock_differs_is_left_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    worker.mend_baton(SimpleNamespace())
    assert "this version of torch has no FileBaton.try_acquire" in capsys.readouterr().err
