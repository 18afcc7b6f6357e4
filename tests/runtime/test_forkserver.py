"""Workers are forked from a process that has imported torch. A program must not notice this, except
that it starts sooner.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ddpjob_runtime.coordinator.member_lines import read_failure
from ddpjob_runtime.launcher import __main__ as launcher
from ddpjob_runtime.launcher import forkserver, late_environment, torch_parts
from ddpjob_runtime.launcher.check_entrypoint import InitFailure
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.protocol import Mode
from machine import slowness
from runtime_harness import RUNTIME, SCRIPTS
from torch_names import replaced_names

torch: Any = pytest.importorskip("torch")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

PROBE = """
import json, logging.config, sys, os, random, tempfile, threading, time
os.environ["TMPDIR"] = os.getcwd()
logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})
mine = logging.getLogger("torch.mine")
began = time.process_time()
import torch, numpy
torchs = logging.getLogger("torch.distributed.distributed_c10d")
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path0": sys.path[0], "torch_seconds": time.process_time() - began,
    "siblings": sorted({"client", "forkserver", "protocol", "shutdown", "worker"} & set(sys.modules)),
    "random": [random.random(), float(numpy.random.rand()), float(torch.rand(()))], "threads": threading.active_count(),
    "main": sys.modules["__main__"].__dict__ is globals(), "group": os.getpgid(0) == os.getpid(),
    "loggers": [mine.parent.name, torchs is torch.distributed.distributed_c10d.logger, torchs.disabled],
    "temporary": tempfile.gettempdir(), "sigterm": __import__("signal").getsignal(15).name,
    "torch_threads": torch.get_num_threads(),
}))
"""
OWN_MODULES = "import client\nprint(client.NAME)\n"
LOADERS = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for kind in ("fork", "spawn"):
        loader = DataLoader(list(range(20)), batch_size=5, num_workers=2, multiprocessing_context=kind)
        print(kind, sum(int(batch.sum()) for batch in loader))
"""
FAILS = "def f():\n    raise ValueError('made to fail')\nf()\n"
EXITS = "import atexit, sys\natexit.register(lambda: print('at exit'))\nsys.exit(7)\n"
SAYS = "import sys\nsys.exit('a word')\n"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
NO_MODULE = "import no_such_module\n"


def outcomes(folder: Path, *texts: str, **env: str) -> list[dict[str, Any]]:
    names = []
    for number, text in enumerate(texts):
        (folder / f"script{number}.py").write_text(text)
        names.append(f"script{number}.py")
    command = [sys.executable, str(SCRIPTS / "forked_workers.py"), str(folder), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120 * slowness(), cwd=folder, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_forked_worker_sees_the_same_environment_as_a_fresh_process(tmp_path: Path) -> None:
    first, second = (json.loads(o["out"]) for o in outcomes(tmp_path, PROBE, PROBE, OMP_NUM_THREADS="1"))
    assert first["argv"] == ["script0.py", "--flag"] and first["name"] == "__main__" and first["main"]
    assert first["path0"] == str(tmp_path)
    assert first["siblings"] == [] and first["threads"] == 1 and first["group"] and first["sigterm"] == "SIG_DFL"
    assert first["torch_threads"] == 1
    assert first["temporary"] == str(tmp_path) and first["loggers"] == ["torch", True, False]
    assert first["torch_seconds"] < 0.5, "torch was imported already"
    shared = [one for one, other in zip(first["random"], second["random"]) if one == other]
    assert not shared, "no two workers share a stream of random numbers"


def test_the_exit_of_a_worker_is_reported(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text("NAME = 'the script has a module called client'\n")
    own, loaders, fails = outcomes(tmp_path, OWN_MODULES, LOADERS, FAILS)
    assert (own["code"], own["out"]) == (0, "the script has a module called client\n")
    assert (loaders["code"], loaders["out"]) == (0, "fork 190\nspawn 190\n")
    error = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (fails["code"], error["message"]) == (1, "ValueError: made to fail")
    assert "in f" in error["extraInfo"]["py_callstack"] and "forkserver.py" not in error["extraInfo"]["py_callstack"]
    assert "ValueError: made to fail" in (tmp_path / "err").read_text()
    exits, says, killed, init = outcomes(tmp_path, EXITS, SAYS, KILLED, NO_MODULE)
    assert (exits["code"], exits["out"]) == (7, "at exit\n")
    assert [says["code"], killed["code"], init["code"]] == [1, -9, 1]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["ddpjob_init"] is True


TRAINS = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
assert "activate_meta" in vars(sys.modules["torch._meta_registrations"]), "which the launcher of Standard does without"
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.path[0]}/group", rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def train():
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
def kept():  # the function that torch calls instead
    return vars(torch.optim.Optimizer.add_param_group.__wrapped__).get("__dynamo_disable")
train()
print("sympy" in sys.modules, kept() is torch.optim.Optimizer.add_param_group.__wrapped__)
import torch._dynamo.config as settings
dynamo = sys.modules["torch._dynamo"]
print("sympy" in sys.modules, settings is sys.modules["torch._dynamo.config"] is dynamo.config, dynamo is torch._dynamo)
print(settings is sys.modules["torch._dynamo.convert_frame"].config)  # the settings that the compiler reads
print(type(dynamo).__name__, settings.__spec__.loader.__class__.__name__, settings.optimize_ddp, kept())
print(dynamo.utils.istype(1, int), dynamo.graph_break.__module__)
train()
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
print(kept() is not None and kept() is not torch.optim.Optimizer.add_param_group.__wrapped__)
print(torch.compile(model, backend="eager")(torch.zeros(1, 2)).shape, dynamo.utils.counters["frames"]["ok"] > 0)
torch.distributed.destroy_process_group()
"""


def make_archive(folder: Path, *packages: str) -> None:
    """Put packages of the runtime into an archive, as in job pods."""
    with zipfile.ZipFile(folder / "ddpjob_runtime", "w") as archive:
        for package in packages:
            for path in RUNTIME.with_name(package).rglob("*.py"):
                archive.write(path, path.relative_to(RUNTIME.parent))


def started_cold(folder: Path, text: str) -> str:
    """Run code in a separate process through worker.py with the runtime in an archive, as in job
    pods, and return its output.
    """
    (folder / "script.py").write_text(text)
    make_archive(folder, "ddpjob_runtime", "ddpjob_pod")
    shutil.copy(RUNTIME / "worker.py", folder)
    command = [sys.executable, "-u", "worker.py", "--script", "script.py"]
    environment = {**os.environ, "DDPJOB_COORDINATOR": "127.0.0.1:1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120 * slowness(), cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORTS_REPORT = """
import json, os, sys
executed = []
def note(event, arguments):
    if event == "exec" and "ddpjob_" in arguments[0].co_filename:
        executed.append(os.path.basename(arguments[0].co_filename))
sys.addaudithook(note)
seen = [name for name in sys.modules if name.startswith(("ddpjob_report", "ddpjob_runtime"))]
import ddpjob_report, inspect
from ddpjob_report import huggingface, link
import ddpjob_runtime.protocol
is_same, has_source = link.protocol is ddpjob_runtime.protocol, len(inspect.getsource(ddpjob_report)) > 100
print(json.dumps([seen, executed, is_same, has_source]))
"""


def test_a_forked_worker_finds_the_report_imported_once_its_program_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    [outcome] = outcomes(tmp_path, IMPORTS_REPORT)
    assert outcome["code"] == 0, (tmp_path / "err").read_text()
    # The fork server has imported all modules except those that only the integration needs.
    seen, executed, *rest = json.loads(outcome["out"])
    assert seen == [] and rest == [True, True]
    assert {"huggingface.py"} <= set(executed) <= {"huggingface.py", "node_memory.py", "resume.py"}


SHARES_MODULES = """
import sys
{first}
import ddpjob_pod.own_work
from ddpjob_pod import own_work, snapshot_store
from ddpjob_pod.snapshot_store import SnapshotStore
import ddpjob_report
print(own_work is ddpjob_pod.own_work is sys.modules["ddpjob_pod.own_work"] is ddpjob_report.own_work)
print(snapshot_store.SnapshotStore is SnapshotStore is sys.modules["ddpjob_pod.snapshot_store"].SnapshotStore)
"""


@pytest.mark.parametrize("first", ["import ddpjob_report", "import ddpjob_pod.outbox", "from ddpjob_pod import outbox"])
def test_no_module_of_the_pod_exists_twice_in_a_forked_worker(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies would have separate states, and a patch would change only one of them."""
    monkeypatch.setenv("DDPJOB_COORDINATOR", "127.0.0.1:1")
    [outcome] = outcomes(tmp_path, SHARES_MODULES.replace("{first}", first))
    assert outcome["code"] == 0, (tmp_path / "err").read_text()
    assert outcome["out"].splitlines() == ["True", "True"]


@pytest.mark.parametrize("mode", ["Standard", "Fast"])
def test_torchs_compiler_is_imported_only_when_something_needs_it(tmp_path: Path, mode: str) -> None:
    if mode == "Standard":
        lines = started_cold(tmp_path, TRAINS).splitlines()
    else:
        [outcome] = outcomes(tmp_path, TRAINS)
        assert outcome["code"] == 0, (tmp_path / "err").read_text()
        lines = outcome["out"].splitlines()
    if TORCH < (2, 9) and lines[0] == "True False":
        # DistributedDataParallel of older versions imports the compiler itself, with or without the
        # fork server.
        assert lines[-1] == "torch.Size([1, 1]) True"
        return
    assert lines == [
        "False True",
        "True True True",
        "True",
        "module SourceFileLoader True None",
        "True torch._dynamo.decorators",
        "True",
        "torch.Size([1, 1]) True",
    ]


ASKED = (
    "dir(torch._dynamo).index('explain')", "torch._dynamo.explain", "torch._dynamo.utils.counters",
    "torch._dynamo.disable(print)", "setattr(torch._dynamo, 'own', 1)", "exec('from torch._dynamo import *')",
    "exec('from torch import _dynamo; _dynamo.reset()')",
)  # fmt: skip


def test_any_use_of_torchs_compiler_imports_it() -> None:
    code = f"""
import os, sys; sys.path.insert(0, {str(RUNTIME.parent)!r})
from ddpjob_pod import late_dynamo
import torch, inspect
late_dynamo.put_off()
inspect.getmodule(late_dynamo), hasattr(torch._dynamo, "__warningregistry__")
for ask in {ASKED!r}:
    if os.fork() == 0:
        put_off = late_dynamo.is_put_off()
        eval(ask)
        hooks = [hook for hook in sys.meta_path if type(hook).__module__ == late_dynamo.__name__]
        print(put_off, late_dynamo.is_put_off(), torch._dynamo.config.optimize_ddp, hooks, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300 * slowness())
    assert done.stdout == "True False True []\n" * len(ASKED), done.stderr


def test_an_idle_fork_server_imports_the_compiler_and_tests_a_fork(tmp_path: Path) -> None:
    code = (
        f"import sys, threading, time; sys.path.insert(0, {str(RUNTIME.parent)!r})\n"
        "from ddpjob_pod import late_dynamo\n"
        "from ddpjob_runtime.launcher import forkserver\n"
        "forkserver.IDLE_SECONDS, load = 0.1, late_dynamo.load\n"
        "def load_with_a_thread():\n"
        "    load(); threading.Thread(target=time.sleep, args=(99,), name='poller', daemon=True).start()\n"
        "late_dynamo.load = load_with_a_thread\n"
        "forkserver.preload()\n"
        "server = forkserver.ForkServer()\n"
        "assert server.why_not() == ''\n"
        "while not server.refusal(): time.sleep(0.01)\n"
        "class Base:\n    def _popen(self, args, env): return 'cold'\n"
        "handler = forkserver.handler_class(Base, server, 'worker.py', print)()\n"
        "print(handler._popen([sys.executable, '-u', 'worker.py'], {}), flush=True)\n"
        "import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120 * slowness())
    why = (
        "threads are started (poller) when torch._dynamo is imported in this image, so workers cannot be forked safely"
    )
    assert done.stdout == f"{why}\ncold\n", done.stderr


NO_MORE_FORKS = """
import errno, os, sys, time
sys.path.insert(0, {runtime!r})
from ddpjob_pod import late_dynamo
from ddpjob_runtime.launcher import forkserver
fork, flag = os.fork, {flag!r}
def refuse():
    asks = sys._getframe(1).f_code.co_name
    if asks == "_fork" and os.path.exists(flag) or asks == "_find_obstacle" and not late_dynamo.is_put_off():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork, forkserver.IDLE_SECONDS = refuse, {idle}
forkserver.preload()
server = forkserver.ForkServer()
assert server.why_not() == ""
environment = dict(os.environ, DDPJOB_LAUNCHER_PID=str(server.pid))
worker = server.spawn(["--script", {script!r}], environment, None, None)
open(flag, "w").close()
"""
"""A fork server with one worker, whose pod has reached its limit of processes."""


@pytest.mark.parametrize("idle", [0.1, 600.0])
def test_a_pod_at_its_process_limit_keeps_its_workers_and_reports_the_problem(tmp_path: Path, idle: float) -> None:
    """Regression: the check that torch's compiler survives a fork killed the fork server, and with
    it all workers.
    """
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    code = NO_MORE_FORKS.format(
        runtime=str(RUNTIME.parent), flag=str(tmp_path / "flag"), script=str(tmp_path / "sleeps.py"), idle=idle
    )
    if idle < 1:
        code += "while not server.refusal(): time.sleep(0.01)\nprint(server.refusal())\n"
    else:
        code += "try: server.spawn([], {}, None, None)\nexcept OSError as error: print(error)\n"
    code += "print(worker.poll(), flush=True)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120 * slowness())
    what = (
        "it is unknown whether workers can be forked safely after torch._dynamo is imported"
        if idle < 1
        else "cannot fork a worker"
    )
    assert done.stdout == f"{what}: [Errno 11] Resource temporarily unavailable\nNone\n", done.stderr


def test_a_fork_that_fails_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round retries, so leaked descriptors would leave the fork server none for its workers'
    pipes.
    """

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    launcher_end, orders = socket.socketpair()
    with launcher_end, orders:
        before = set(Path("/proc/self/fd").iterdir())
        forkserver._fork({"number": 1}, orders, (-1, -1))
        assert set(Path("/proc/self/fd").iterdir()) == before
        assert "Resource temporarily unavailable" in launcher_end.recv(4096).decode()


STARTS_THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), name='poller', daemon=True).start()\n"
)
INITIALIZES_CUDA = (
    "import torch\ntorch._C._cuda_getDeviceCount()\n"  # as torch.cuda.is_available() does if it does not ask NVML
)
OPENS_A_DEVICE = "import os\nfile = os.open('/dev/zero', os.O_RDONLY)\n"


def why_not(folder: Path, preloaded: str, **modules: str) -> tuple[str, str]:
    """Return (why a fork server with these modules refuses, its log)."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(RUNTIME.parent)!r})\n"
        "from ddpjob_runtime.launcher import forkserver\n"
        "forkserver.DEVICES = (*forkserver.DEVICES, '/dev/zero')\n"
        "forkserver.preload()\n"
        f"print(forkserver.ForkServer({preloaded!r}).why_not(30.0), flush=True)\n"
        "import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120 * slowness(), cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (STARTS_THREAD, "threads are started (poller) when own_b is imported, so workers cannot be forked "
         "safely; remove own_b from DDPJOB_PRELOAD"),
        (INITIALIZES_CUDA, "CUDA is initialized when own_b is imported, so workers cannot be forked safely; "
         "remove own_b from DDPJOB_PRELOAD"),
        (OPENS_A_DEVICE, "CUDA is initialized when own_b is imported, so workers cannot be forked safely; "
         "remove own_b from DDPJOB_PRELOAD"),
        ("1 / 0", "importing own_b (DDPJOB_PRELOAD) fails: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "importing own_b (DDPJOB_PRELOAD) fails: SystemExit: 3"),
        ("import os; os.abort()", "importing own_b (DDPJOB_PRELOAD) ended the process"),
    ],
)  # fmt: skip
def test_a_preloaded_module_that_does_not_survive_a_fork_is_reported(tmp_path: Path, text: str, why: str) -> None:
    assert why_not(tmp_path, "own_a, own_b", own_a="", own_b=text)[0] == why


def test_harmless_modules_are_preloaded_and_missing_ones_logged(tmp_path: Path) -> None:
    # numpy's OpenBLAS has threads, which it ends for a fork.
    asks = "import torch, numpy\nnumpy.ones((300, 300)) @ numpy.ones((300, 300))\nimport os\n"
    asks += "assert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n"
    why, log = why_not(tmp_path, "own_a, no_such_module_anywhere", own_a=asks)
    assert why == "" and "no_such_module_anywhere cannot be imported" in log


def test_workers_run_cold_if_the_images_python_starts_threads(tmp_path: Path) -> None:
    why, _ = why_not(tmp_path, "", sitecustomize=STARTS_THREAD)
    assert why == "in this image, Python starts threads at startup (poller), so workers cannot be forked safely"


def test_a_hanging_import_is_abandoned(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    server = object.__new__(forkserver.ForkServer)
    server._socket, server._buffer, server._lock = ours, b"", threading.RLock()
    server._importing, server._ready, server._refusal = "", False, ""
    server.pid = os.fork()
    if server.pid == 0:
        os.execvp("sleep", ["sleep", "60"])
    theirs.sendall(b'{"importing": "slow"}\n')
    assert server.why_not(0.3) == "importing slow (DDPJOB_PRELOAD) took more than 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_settings_of_torch_whose_source_is_missing_stay_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModuleType("torch.own.config")
    settings.__dict__.update(_config={"a": None}, __file__="/no/such/folder/config.py")
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    late_environment.read_configurations(["TORCHINDUCTOR_OWN"])
    assert settings._config == {"a": None}


def test_exit_handlers_of_c_libraries_do_not_run_in_workers(tmp_path: Path) -> None:
    libc = "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    registers = "@ctypes.CFUNCTYPE(None)\ndef last(): os.write(1, b'by C')\nlibc.__cxa_atexit(last, None, None)\n"
    [outcome] = outcomes(tmp_path, libc + registers + "print('end')\n")
    assert (outcome["code"], outcome["out"]) == (0, "end\n")


def test_a_worker_that_torchrun_starts_with_a_different_program_is_reported(tmp_path: Path) -> None:
    class Base:
        def _popen(self, args: list[str], env: dict[str, str]) -> str:
            return "cold"

    reasons: list[str] = []
    handler = forkserver.handler_class(Base, None, "worker.py", reasons.append)()
    assert handler._popen(["numactl", "--physcpubind=0", sys.executable, "-u", "worker.py"], {}) == "cold"
    assert reasons == ["torchrun starts workers through numactl; remove --numa-binding or PYTHON_EXEC"]


@pytest.mark.parametrize("seam", ["get_subprocess_handler", "SubprocessHandler._popen"])
def test_workers_run_cold_if_this_torch_starts_them_differently(monkeypatch: pytest.MonkeyPatch, seam: str) -> None:
    import torch
    import torch.distributed.elastic.multiprocessing.api as processes
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    if seam == "get_subprocess_handler":
        monkeypatch.delattr(processes, seam)
    else:
        monkeypatch.delattr(subprocess_handler.SubprocessHandler, "_popen")
    assert torch.__version__ in launcher.warm_workers(None, print)


@pytest.mark.parametrize(
    ("module", "name", "lacks"),
    [
        ("agent.server.api", "SimpleElasticAgent._exit_barrier", "SimpleElasticAgent._exit_barrier"),
        ("multiprocessing.api", "_terminate_process_handler", "_terminate_process_handler"),
        ("rendezvous.api", "RendezvousStoreInfo.build", "RendezvousStoreInfo.build with 4 arguments"),
        ("multiprocessing.api", "PContext.__init__", "PContext.error_files"),
    ],
)
def test_a_torch_without_a_function_that_the_launcher_needs_is_refused(
    module: str, name: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch_parts.missing() == []
    monkeypatch.delattr(f"torch.distributed.elastic.{module}.{name}")
    with pytest.raises(InitFailure, match=r"torch .* is not supported, because it lacks ") as refused:
        launcher.require_torchrun()
    assert f"{torch.__version__} is not supported, because it lacks torch.distributed.elastic.{module}.{lacks};" in str(
        refused.value
    )


REPLACED: list[tuple[str, Callable[[], object]]] = [
    ("torch.distributed.launcher.api.LocalElasticAgent", lambda: torch_parts.use_agent(print)),
    ("torch.distributed.run.config_from_args", lambda: torch_parts.wrap_configuration(lambda own: own)),
    (
        "torch.distributed.elastic.multiprocessing.api._terminate_process_handler",
        lambda: torch_parts.use_signal_handler(print),
    ),
    (
        "torch.distributed.elastic.multiprocessing.errors.ProcessFailure.__post_init__",
        torch_parts.tolerate_error_files,
    ),
]


@pytest.mark.parametrize(("name", "replace"), REPLACED)
def test_replacing_a_name_that_this_torch_lacks_raises_an_error(
    name: str, replace: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("torch.distributed.run")
    monkeypatch.delattr(name)
    with pytest.raises(RuntimeError, match=f"this version of torch has no {re.escape(name)}; use an earlier version"):
        replace()


def test_only_one_module_of_the_launcher_replaces_functions_of_torch(tmp_path: Path) -> None:
    assert replaced_names(RUNTIME) == [], "replace it in torch_parts.py, which checks that the name exists"
    (tmp_path / "patch.py").write_text("import torch.distributed as dist\ndist.Work.wait = None\n")
    assert replaced_names(tmp_path) == ["patch.py:2"]


@pytest.mark.parametrize(
    ("kills", "said"), [(2, "has ended"), (3, "killed by the kernel: the container reached its memory")]
)
def test_a_fork_server_killed_by_the_memory_limit_is_reported_as_such(
    kills: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver.oom, "oom_kills", lambda: kills)
    server = object.__new__(forkserver.ForkServer)
    server._socket, theirs = socket.socketpair()
    server.pid, server._buffer, server._lock, server._ended, server._oom_kills = 7, b"", threading.RLock(), {}, 2
    theirs.close()
    with pytest.raises(forkserver.ForkServerEnded, match=said) as raised:
        server.exit_code(17)
    assert raised.value.out_of_memory is (kills == 3)
    client = MemberClient("host:1", "token", {}, Mode.FAST, 1.0, lambda *end: None)
    client._position = {"round": 4}
    client.ran_out_of_memory(str(raised.value))
    [(verb, fields)] = client._unsent
    failure = read_failure(SimpleNamespace(source=None, heard=0.0), fields)  # type: ignore[arg-type]
    assert (verb, fields["round"], failure.kind, failure.message) == ("failure", 4, "OOMKilled", str(raised.value))


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_fork_server_killed_before_it_reads_an_order_is_reported_as_such(
    is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel resets the connection because of the unread order."""
    kills = iter([2, 3])
    monkeypatch.setattr(forkserver.oom, "oom_kills", lambda: next(kills))
    server = object.__new__(forkserver.ForkServer)
    server._socket, theirs = socket.socketpair()
    server.pid, server._buffer, server._lock, server._number, server._started = 7, b"", threading.RLock(), 0, {}

    def end() -> None:
        if is_sent:
            theirs.recv(1, socket.MSG_PEEK)
        theirs.close()

    killed = threading.Thread(target=end)
    killed.start()
    if not is_sent:
        killed.join()
    with pytest.raises(forkserver.ForkServerEnded, match="the container reached its memory limit"):
        server.spawn(["script"], {}, None, None)
    killed.join()


def test_the_exit_of_an_earlier_worker_with_the_same_pid_is_ignored() -> None:
    ours, theirs = socket.socketpair()
    server = object.__new__(forkserver.ForkServer)
    server._socket, server._buffer, server._lock, server._number = ours, b"", threading.RLock(), 0
    server._started, server._ended, server._oom_kills = {}, {}, 0
    theirs.sendall(b'{"pid": 77, "code": -9}\n{"number": 1, "pid": 77}\n')
    worker = server.spawn(["script"], {}, None, None)
    assert worker.poll() is None
    theirs.sendall(b'{"pid": 77, "code": 3}\n')
    assert worker.wait(5 * slowness()) == 3


@pytest.mark.parametrize("unread", [b"", b'{"pid": 7, "code": 0}\n'])
def test_the_fork_server_exits_silently_when_the_launcher_dies(
    unread: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel resets a connection if its other end has not read everything."""
    ours, theirs = socket.socketpair()
    theirs.sendall(unread)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            forkserver._serve(theirs, [])
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(3)
    theirs.close()
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert capfd.readouterr().err == ""
