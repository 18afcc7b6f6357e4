"""The runtime as the operator ships it, and constants of its protocol that other files must
repeat.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from ddpjob.api.job import DDPJob
from ddpjob.objects.platform import Platform
from ddpjob.objects.pods import build_coordinator, build_node
from ddpjob.objects.service import build_runtime, holds_runtime, runtime_name
from ddpjob_runtime import protocol

ROOT = Path(__file__).parents[2]
PLATFORM = Platform(operator_key=b"key")
JOB = DDPJob.read(
    {
        "metadata": {"name": "job", "namespace": "space", "uid": "uid"},
        "spec": {"image": "image", "script": "train.py", "nodes": 2},
        "status": {"runtime": "job-runtime-12345678"},
    }
)


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """Create the runtime's files as the kubelet mounts them: as links, in a read-only folder."""
    (tmp_path / "..data").mkdir()
    for name, content in build_runtime(JOB)["binaryData"].items():
        (tmp_path / "..data" / name).write_bytes(b64decode(content))
        (tmp_path / name).symlink_to(Path("..data") / name)
    return tmp_path


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", env=own | environment)


@pytest.mark.parametrize("program", ["coordinator", "launcher"])
def test_the_mounted_files_form_a_working_program(mount: Path, program: str) -> None:
    pod = (
        build_coordinator(JOB, JOB.status, PLATFORM)
        if program == "coordinator"
        else build_node(JOB, JOB.status, PLATFORM, 0, 0)
    )
    [command] = [c["command"] for c in pod["spec"]["containers"]]
    assert command[0] == "python3" and command[1].startswith("/opt/ddpjob/") and command[2] == program
    done = python("-I", command[1].replace("/opt/ddpjob", str(mount)), *command[2:])
    expected = {
        "coordinator": "the following arguments are required: --port, --nodes",
        "launcher": "environment variables are missing: DDPJOB_COORDINATOR",
    }
    assert expected[program] in done.stderr and "Traceback" not in done.stderr


def test_a_pod_does_not_list_the_files_of_the_runtime() -> None:
    """Regression: the paths of all files were more than half of every pod, which the API server
    stores and sends to all watches.

    The files are executable, because the torchrun of a `command` starts one of them as its worker.
    """
    pod = build_node(JOB, JOB.status, PLATFORM, 0, 0)
    [volume] = [v for v in pod["spec"]["volumes"] if "configMap" in v]
    assert volume == {"name": "ddpjob-runtime", "configMap": {"name": JOB.status.runtime, "defaultMode": 0o555}}


def test_the_archive_and_the_worker_next_to_it_can_be_run_by_their_paths(mount: Path) -> None:
    """The coordinator starts the store by its path, and torchrun starts the workers by theirs."""
    words = "import sys; sys.path[:0] = sys.argv[1:]; import ddpjob_runtime as it; print(it.PROGRAM, it.WORKER)"
    found = python("-c", words, f"{mount}/ddpjob_runtime")
    program, worker = found.stdout.split()
    assert "usage: python3" in python("-I", program).stderr
    (mount / "script.py").write_text("import sys; print(sys.argv[1:], sys.path)")
    folder = str(mount / "script.py").rpartition("/")[0]
    done = python("-S", worker, "--script", f"{folder}/script.py", "x")
    assert done.stdout.startswith(f"['x'] ['{folder}', ") and done.stdout.count(folder) == 1


IMPORTS = """
import multiprocessing, sys
def child(queue):
    from ddpjob_report import link, resume
    queue.put((link.__name__, resume.__file__))
if __name__ == "__main__":
    assert not [path for path in sys.path if path.endswith("ddpjob_runtime")], sys.path
    import ddpjob_report
    from ddpjob_report import stop
    assert ddpjob_report.should_stop() is False and stop.__name__ == "ddpjob_report.stop", ddpjob_report
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
    process.start()
    print(*queue.get())
"""


@pytest.mark.parametrize("by", ["worker", "PYTHONPATH"])
def test_a_script_imports_ddpjob_report_of_the_archive(mount: Path, by: str) -> None:
    """Workers use the import hook, and programs of a job with `command` use PYTHONPATH. Both also
    work in child processes.
    """
    (mount / "own").mkdir()
    (mount / "own" / "script.py").write_text(IMPORTS)
    if by == "worker":
        arguments = [f"{mount}/ddpjob_worker.py", "--script", f"{mount}/own/script.py"]
        done = python("-S", *arguments, DDPJOB_COORDINATOR="127.0.0.1:1")
    else:
        done = python("-S", f"{mount}/own/script.py", PYTHONPATH=str(mount))
    assert "ddpjob_runtime/ddpjob_report/resume.py" in done.stdout, done.stderr


COMPILED = """
import collections, runpy, sys
files = collections.Counter()
sys.addaudithook(lambda name, arguments: files.update([arguments[1]] if name == "compile" else []))
sys.argv = [sys.argv[1], "coordinator"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    print(*(number for name, number in files.items() if "/ddpjob_runtime/coordinator/" in str(name)))
"""


def test_each_module_is_compiled_only_once_at_the_start(mount: Path) -> None:
    """Half of a coordinator's start is spent on compiling, and Python's own import from archives
    compiles twice.
    """
    numbers = python("-c", COMPILED, f"{mount}/ddpjob_runtime").stdout.split()
    assert len(numbers) > 10 and set(numbers) == {"1"}, numbers


def test_tracebacks_from_the_archive_show_source_lines(mount: Path) -> None:
    words = "import sys, traceback; sys.path[:0] = sys.argv[1:]; from ddpjob_runtime.protocol import Report"
    words += "\ntry: Report.read(None)\nexcept Exception: traceback.print_exc()"
    done = python("-c", words, f"{mount}/ddpjob_runtime")
    assert re.search(r'File ".*/ddpjob_runtime/ddpjob_runtime/protocol.py", line \d+, in \w+\n    \w+', done.stderr)


def test_the_archive_is_reproducible() -> None:
    command = [sys.executable, "-c", "from ddpjob.objects.service import runtime_name; print(runtime_name())"]
    moved = {**os.environ, "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1", "PYTHONHASHSEED": "7"}
    assert subprocess.check_output(command, text=True, env=moved).strip() == runtime_name()


def test_kubernetes_accepts_the_config_map_with_the_runtime() -> None:
    manifest = build_runtime(JOB)
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in manifest["binaryData"])
    assert sum(map(len, manifest["binaryData"].values())) < 2**20 / 2, "half of what a ConfigMap may hold"
    assert manifest["metadata"]["name"] == runtime_name() and re.fullmatch(
        r"ddpjob-runtime-[0-9a-f]{16}", runtime_name()
    )


def test_a_runtime_is_trusted_only_if_all_sixteen_digits_of_its_name_match() -> None:
    """A running job keeps using the name with which it started, so that an upgrade does not disturb
    it.
    """
    manifest = build_runtime(JOB)
    for name, trusted in (
        (runtime_name(), True),
        (runtime_name()[:-8], False),
        (runtime_name()[:-8] + "00000000", False),
        ("ddpjob-runtime-", False),
    ):
        assert holds_runtime({**manifest, "metadata": {"name": name}}) is trusted
    changed = {**manifest["binaryData"], "ddpjob_report.py": ""}
    assert not holds_runtime({**manifest, "binaryData": changed})


def constants(path: str) -> dict[str, Any]:
    """Return the constants of a module without importing it."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("trainer/ddpjob_trainer/lifecycle/signals.py", "EXIT_STEPPED_ASIDE"),
        ("trainer/ddpjob_trainer/lifecycle/fence.py", "EXIT_FENCED"),
        ("runtime/ddpjob_runtime/worker.py", "EXIT_STEPPED_ASIDE"),
    ],
)
def test_exit_codes_match_the_protocol(path: str, name: str) -> None:
    """The trainer and the worker's entry point do not import the protocol."""
    assert constants(path)[name] == getattr(protocol, name)


def test_progress_is_posted_to_the_path_that_the_coordinator_serves() -> None:
    posted = set(re.findall(r"/v1/\w+", (ROOT / "runtime/ddpjob_runtime/worker.py").read_text()))
    assert posted == {protocol.Command.PROGRESS.path}


def test_the_variables_of_a_job_are_read_in_one_place() -> None:
    """worker.py imports nothing before the user's program. fetch_data.py removes keys from
    the environment.
    """
    reads = re.compile(r"""environ(?:\.get\(|\.pop\(|\[)\s*f?["']DDPJOB_\w*["'{](?!.*\] = )""")
    places = {
        str(path.relative_to(ROOT))
        for top in ("runtime", "trainer")
        for path in (ROOT / top).rglob("*.py")
        if reads.search(path.read_text())
    }
    allowed = {
        "runtime/ddpjob_pod/job_environment.py",
        "runtime/ddpjob_runtime/worker.py",
        "runtime/ddpjob_runtime/launcher/fetch_data.py",
    }
    assert places == allowed, "read them by ddpjob_pod.job_environment"
