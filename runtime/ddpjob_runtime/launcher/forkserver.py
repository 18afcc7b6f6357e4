"""Forks workers from a process that has imported torch, so that workers do not wait for imports.

After a loss, the workers on surviving nodes are restarted too. A new interpreter spends 1.3 to 3 s
on `import torch`; forking a process that has imported it takes about 20 ms.

The launcher imports torch and forks the server from itself before it starts threads. The server
imports the modules of DDPJOB_PRELOAD, freezes the garbage collector so that workers share the
server's memory pages, and waits for orders to start workers. The server and the launcher exchange
JSON objects, one per line, over a pair of sockets:

    server -> launcher   {"importing": "timm"}                   to be named if the import hangs
    server -> launcher   {"ready": ""}                           or the reason for a refusal
    launcher -> server   {"number": 1, "words": [...], "environment": {...}, "stdout": FILE, ...}
    server -> launcher   {"number": 1, "pid": 4711}              or "problem": why it cannot fork
    server -> launcher   {"pid": 4711, "code": -9}               the worker's end

A fork copies only memory and one thread. Other threads and device contexts do not survive the fork,
so the server refuses to fork workers if an import starts threads or initializes CUDA. The launcher
then starts its workers cold, and a condition of the job shows the reason.

A worker must look like a fresh process (`_become`). It gets its own session, signals, environment,
output streams, random seeds and number of threads. torch is hidden from it, so that `import torch`
in the script makes torch reread the environment variables. At its end, a worker finalizes the
program's modules as the interpreter would. It does not finalize torch, because that would take a
second.

The server ends with the launcher, and the workers end with the server, because each process asks
the kernel to signal it when its parent dies.

Why: docs/decisions/0007. A table in docs/protocol.md lists what a script can notice.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddpjob_pod import late_dynamo

from ddpjob_runtime import worker
from ddpjob_runtime.launcher import oom
from ddpjob_runtime.launcher.import_torchrun import import_torchrun
from ddpjob_runtime.launcher.late_environment import hide_torch
from ddpjob_runtime.launcher.shutdown import ENDING_SIGNALS, die_with_parent, log

PRELOADED = ("torch", "torch.optim", "torch.nn.parallel", "torch.utils.data")
"""The modules that every DDP training script imports."""
IDLE_SECONDS = 30.0
"""If no order arrives for this many seconds, the fork server imports torch's compiler, which some
scripts need (see late_dynamo). An order that arrives during this import has to wait. The server
does not import the compiler sooner, because losses are common in a job's first seconds and are
followed by orders for new workers.
"""
SHARED_PACKAGES = ("ddpjob_report", "ddpjob_pod", "ddpjob_runtime")
"""DDPJob's own packages that a program can import. The fork server hides them until the program
imports them.
"""
SHARED_RUNTIME = ("ddpjob_runtime", "ddpjob_runtime.protocol")
"""The modules that both the launcher and `ddpjob_report` use."""
POLL_SECONDS = 0.002
PRELOAD_SECONDS = 300.0
"""Time limit in seconds for importing the modules in DDPJOB_PRELOAD. If the import takes longer,
workers are started cold and import these modules themselves, without a time limit.
"""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
TORCH_PATHS: list[str] = []
"""The paths that importing torch has added to sys.path. Up to version 2.8, torch adds a folder for
generated modules.
"""
DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")
"""Device files that a process has open if it has initialized CUDA or ROCm. Merely listing the
devices with NVML does not open these files.
"""


def preload() -> None:
    """Import the modules that every worker needs.

    Raises ImportError if torch is missing, or any other error if torch is broken.
    """
    with _remove_traces():
        import_torchrun()
        for name in PRELOADED:
            importlib.import_module(name)
    late_dynamo.put_off()


@contextlib.contextmanager
def _remove_traces() -> Iterator[None]:
    """Undo the changes that importing torch makes to the environment.

    Also record the paths that torch adds to sys.path.
    """
    before, paths = dict(os.environ), list(sys.path)
    try:
        with late_dynamo.uncollected():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        TORCH_PATHS.extend(path for path in sys.path if path not in paths)


class ForkServerEnded(RuntimeError):
    """The fork server has ended, and its workers with it.

    `out_of_memory` is true if the kernel killed the server to free memory.
    """

    def __init__(self, pid: int, out_of_memory: bool) -> None:
        why = f"was killed by the kernel: the container reached its memory limit ({oom.limit() or 'unknown'})"
        super().__init__(f"the process that starts workers (pid {pid}) {why if out_of_memory else 'has ended'}")
        self.out_of_memory = out_of_memory


class ForkServer:
    """The launcher's side of the fork server.

    `more` is a comma-separated list of additional modules for the server to import.
    """

    def __init__(self, more: str = "") -> None:
        ours, theirs = socket.socketpair()
        # Freeze the garbage collector. Without this, a collection in a worker would copy memory
        # pages that all workers share.
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _serve(theirs, [name for name in (word.strip() for word in more.split(",")) if name])
        theirs.close()
        self._socket, self._buffer, self._lock = ours, b"", threading.RLock()
        self._number, self._oom_kills = 0, oom.oom_kills()
        self._started: dict[int, int | str] = {}
        """Maps an order's number to the worker's pid, or to the reason why the worker could not be
        forked.
        """
        self._ended: dict[int, int] = {}
        self._importing, self._ready, self._refusal = "", False, ""
        if threads := _threads():
            self._refusal = (
                f"in this image, Python starts threads at startup ({threads}), so workers cannot be forked safely"
            )

    def why_not(self, seconds: float = PRELOAD_SECONDS) -> str:
        """Wait until the server has imported all modules.

        Return the reason why the server cannot fork workers; empty if it can.
        """
        deadline = time.monotonic() + seconds
        while not self._ready and not self._refusal:
            if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._refusal = f"importing {self._importing} (DDPJOB_PRELOAD) took more than {seconds:.0f} s"
                break
            try:
                self._hear(block=True)
            except ForkServerEnded:
                self._refusal = f"importing {self._importing or 'torch'} (DDPJOB_PRELOAD) ended the process"
        if self._refusal:
            self.close()
        return self._refusal

    def close(self) -> None:
        """End the fork server."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._socket.close()

    def spawn(
        self, words: Sequence[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None
    ) -> Worker:
        """Start a worker.

        `words` are the arguments of worker.py. `stdout` and `stderr` are the paths of the worker's
        output files; None means the launcher's own stream.

        Raises OSError if the worker cannot be forked at the moment.
        """
        with self._lock:
            self._number += 1
            number, self._oom_kills = self._number, oom.oom_kills()
            order = {
                "number": number,
                "words": list(words),
                "environment": dict(environment),
                "stdout": stdout,
                "stderr": stderr,
            }
            # If the server has ended, _hear raises ForkServerEnded.
            with contextlib.suppress(ConnectionError):
                self._socket.sendall((json.dumps(order) + "\n").encode())
            while number not in self._started:
                self._hear(block=True)
            pid = self._started.pop(number)
            if isinstance(pid, str):
                raise OSError(f"cannot fork a worker: {pid}")
            return Worker(self, pid, words)

    def refusal(self) -> str:
        """Return the reason why the server can no longer fork workers; empty if it can.

        The launcher learns the reason only after the server has reported it.
        """
        with self._lock:
            self._hear(block=False)
            return self._refusal

    def exit_code(self, pid: int) -> int | None:
        """Return the worker's exit code in the format of Popen.returncode; None while the worker
        runs.
        """
        with self._lock:
            if pid not in self._ended:
                self._hear(block=False)
            return self._ended.get(pid)

    def _hear(self, block: bool) -> None:
        if not block and not select.select([self._socket], [], [], 0)[0]:
            return
        try:
            data = self._socket.recv(65536)
        except ConnectionError:
            data = b""  # The server has ended without reading its last order.
        if not data:
            raise ForkServerEnded(self.pid, oom.oom_kills() > self._oom_kills)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "number" in event:
                self._started[event["number"]] = event.get("problem") or event["pid"]
                # The pid may have belonged to an earlier worker. Forget that worker's exit code.
                self._ended.pop(event["pid"], None)
            elif "importing" in event:
                self._importing = event["importing"]
            elif "ready" in event:
                self._ready, self._refusal = not event["ready"], event["ready"]
            else:
                self._ended[event["pid"]] = event["code"]


class Worker:
    """A forked worker, with the part of subprocess.Popen's interface that torchrun uses."""

    def __init__(self, fork_server: ForkServer, pid: int, args: Sequence[str]) -> None:
        self._server, self.pid, self.args = fork_server, pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the worker's exit code; None while the worker runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the worker to end, and return its exit code.

        Raises subprocess.TimeoutExpired if the worker is still running after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker if it is still running."""
        if self.poll() is None:
            os.kill(self.pid, number)


def handler_class(base: Any, fork_server: ForkServer, entry: str, on_cold: Callable[[str], None]) -> Any:
    """Return a subclass of torch's SubprocessHandler (`base`) whose workers are forked.

    A worker can be forked only if it runs the file `entry` (worker.py) in this Python. Any other
    worker is started as torchrun would start it, and `on_cold` is called with the reason.
    """

    class WarmHandler(base):  # type: ignore[misc]
        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            if list(args[:3]) != [sys.executable, "-u", entry]:
                why = f"torchrun starts workers through {args[0]}; remove --numa-binding or PYTHON_EXEC"
            else:
                why = fork_server.refusal()
            if why:
                on_cold(why)
                return super()._popen(args, env)
            files = [getattr(stream, "name", None) for stream in (self._stdout, self._stderr)]
            return fork_server.spawn(args[3:], env, files[0], files[1])

    return WarmHandler


# ---- in the forked process


def _serve(orders: socket.socket, modules: list[str]) -> NoReturn:
    """Import modules, fork workers on demand, and report the end of each worker.

    This process ends with the launcher.
    """
    die_with_parent()
    for number in ENDING_SIGNALS:
        # Only the launcher decides when this process ends, so ignore these signals.
        signal.signal(number, signal.SIG_IGN)
    _send(orders, ready=_import(modules, orders))
    import_report(worker.packages())
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    while True:
        ready, _, _ = select.select(
            [orders.fileno(), reader], [], [], IDLE_SECONDS if late_dynamo.is_put_off() else None
        )
        if not ready:
            _import_compiler(orders)
        if reader in ready:
            os.read(reader, 4096)
            _reap(orders)
        if orders.fileno() in ready:
            try:
                data = orders.recv(65536)
            except ConnectionError:  # The launcher died before reading all events.
                data = b""
            if not data:
                # Exiting ends the workers, too: the kernel signals them when their parent dies.
                os._exit(0)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                _fork(json.loads(line), orders, (reader, writer))


def import_report(place: str) -> None:
    """Import `ddpjob_report` for all workers, and hide it until their programs import it.

    If each restarted worker imported the package itself, the import would cost a tenth of a second
    of CPU time while the group waits. The package is hidden because an image may contain a
    different version of it, and that version needs its own modules.
    """
    spec = importlib.util.find_spec("ddpjob_report")
    if spec is not None and spec.origin != str(Path(place, "ddpjob_report", "__init__.py")):
        return
    before = set(sys.modules)
    sys.path.insert(0, place)
    try:
        importlib.import_module("ddpjob_report")
    finally:
        sys.path.remove(place)
    names = [name for name in sys.modules if name not in before and name.partition(".")[0] in SHARED_PACKAGES]
    worker.report_modules.update((name, sys.modules[name]) for name in (*names, *SHARED_RUNTIME))
    for name in names:
        del sys.modules[name]
        package, _, child = name.rpartition(".")
        # `from package import child` would find the hidden module if the parent package kept it as
        # an attribute.
        if package in sys.modules:
            delattr(sys.modules[package], child)


def _send(orders: socket.socket, **event: Any) -> None:
    try:
        orders.sendall((json.dumps(event) + "\n").encode())
    except ConnectionError:
        os._exit(0)  # the launcher has ended


def _import(modules: list[str], orders: socket.socket) -> str:
    """Import the modules in DDPJOB_PRELOAD, in order.

    Return the reason why workers must not be forked from this process; empty if they can be forked.
    """
    if why := _find_obstacle():
        return f"{why} when Python starts or torch is imported in this image, so workers cannot be forked safely"
    asked = os.environ.get(NVML_CHECK)
    # This variable makes torch.cuda.is_available() check for a GPU without initializing CUDA.
    os.environ[NVML_CHECK] = "1"
    for name in modules:
        _send(orders, importing=name)
        try:
            importlib.import_module(name)
        # Only log an import error, because the script might not need this module.
        except ImportError as error:
            log(f"DDPJOB_PRELOAD: {name} cannot be imported: {error}")
        except BaseException as error:
            return f"importing {name} (DDPJOB_PRELOAD) fails: {type(error).__name__}: {error}"
        if why := _find_obstacle():
            return (
                f"{why} when {name} is imported, so workers cannot be forked safely; remove {name} from DDPJOB_PRELOAD"
            )
    del os.environ[NVML_CHECK]
    if asked is not None:
        os.environ[NVML_CHECK] = asked
    return ""


def _import_compiler(orders: socket.socket) -> None:
    """Import torch's compiler while no worker is ordered.

    If the import makes it unsafe to fork this process, the server refuses to fork workers from then
    on.
    """
    try:
        with _remove_traces():
            late_dynamo.load()
    # Only log the error. A script that needs the compiler would fail in any case.
    except BaseException as error:
        log(f"torch._dynamo cannot be imported: {type(error).__name__}: {error}")
    gc.freeze()
    try:
        if why := _find_obstacle():
            _send(
                orders,
                ready=f"{why} when torch._dynamo is imported in this image, so workers cannot be forked safely",
            )
    # Fork failed because there are too many processes. Workers that are running must not end
    # because of this error.
    except OSError as error:
        _send(
            orders, ready=f"it is unknown whether workers can be forked safely after torch._dynamo is imported: {error}"
        )


def _find_obstacle() -> str:
    """Return the reason why this process cannot be forked safely; empty if it can.

    Raises OSError if the process cannot be forked at all.
    """
    # A fork makes some libraries, such as OpenBLAS, stop their threads, so fork before counting
    # threads.
    child = os.fork()
    if child == 0:
        code = 2
        try:
            torch = sys.modules["torch"]
            code = int(any(getattr(torch, name)._is_in_bad_fork() for name in ("cuda", "xpu") if hasattr(torch, name)))
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] or _open_devices():
        return "CUDA is initialized"
    threads = _threads()
    return f"threads are started ({threads})" if threads else ""


def _open_devices() -> bool:
    for file in Path("/proc/self/fd").iterdir():
        # The listing includes its own descriptor, which is closed by now.
        with contextlib.suppress(OSError):
            if str(file.readlink()).startswith(DEVICES):
                return True
    return False


def _threads() -> str:
    """Return the names of all threads except the main thread; empty if there are no others."""
    others = sum(1 for _ in Path("/proc/self/task").iterdir()) - 1
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return ", ".join(names) or (f"{others} of a library" if others else "")


def _reap(orders: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(orders, pid=pid, code=os.waitstatus_to_exitcode(status))


def _fork(order: dict[str, Any], orders: socket.socket, pipe: tuple[int, int]) -> None:
    parent = os.getpid()
    opened: tuple[int, ...] = ()
    try:
        reader, writer = opened = os.pipe()
        pid = os.fork()
    # There are too many processes. The launcher will give this as the reason why the node ends.
    except OSError as error:
        for end in opened:
            os.close(end)
        _send(orders, number=order["number"], pid=0, problem=str(error))
        return
    if pid == 0:
        os.setsid()  # Each worker that torchrun starts has its own session, too.
        signal.set_wakeup_fd(-1)
        for number in (*ENDING_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        orders.close()
        for end in (*pipe, reader, writer):
            os.close(end)
        _become(order, parent)
    os.close(writer)
    # Wait until the worker has its own session and handles signals, or has ended.
    os.read(reader, 1)
    os.close(reader)
    _send(orders, number=order["number"], pid=pid)


def _become(order: dict[str, Any], parent: int) -> NoReturn:
    """Turn this forked process into a worker, and run the worker's program.

    To worker.py, the process looks like a new interpreter in which torch is already imported.
    """
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment = dict(order["environment"], DDPJOB_LAUNCHER_PID=str(parent))
        os.environ.clear()
        os.environ.update(environment)
        if not (os.environ.get("PYTHONFAULTHANDLER") or "faulthandler" in sys._xoptions or sys.flags.dev_mode):
            # The launcher has enabled faulthandler. A new interpreter would enable it only on
            # request.
            faulthandler.disable()
        _redirect(order)
        _renew_libraries()
        shared = set(sys.modules)
        runtime = [sys.modules.pop(name) for name in shared if name.partition(".")[0] == __name__.partition(".")[0]]
        # worker.py calls `hide_torch` only after installing the hook in torch.optim that counts
        # steps.
        code = _exit_code_of(lambda: worker.run(order["words"], lambda: hide_torch(TORCH_PATHS)))
        _finalize(shared)
        del runtime  # This reference kept the hidden modules alive until now.
    finally:
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _redirect(order: dict[str, Any]) -> None:
    """Redirect the output to the files that the order names, and make the streams unbuffered.

    `python -u` makes the streams unbuffered in the same way.
    """
    for target, path in ((1, order["stdout"]), (2, order["stderr"])):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, target)
            os.close(opened)
    libc = ctypes.CDLL(None)
    # Make C's own streams unbuffered, too (2 is _IONBF).
    for name in ("stdin", "stdout", "stderr"):
        # Other C libraries may use different names for these streams.
        with contextlib.suppress(ValueError):
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 2, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if old is None:  # This stream was already closed when the launcher started.
            continue
        raw = io.FileIO(number, "wb", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            write_through=True,
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renew_libraries() -> None:
    """Renew state that forked workers would otherwise share, and state that depends on the
    environment.

    Python's own random generator needs no help, because it reseeds itself after a fork.
    """
    tempfile.tempdir = None  # The script may set TMPDIR before it first needs a temporary folder.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].random.default_generator.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))


def _exit_code_of(program: Callable[[], None]) -> int:
    """Run the program, and handle its exceptions as the interpreter does.

    Return the exit code. If the process should end with SIGINT, the code is -SIGINT.
    """
    try:
        program()
    except SystemExit as end:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    return 0


def _finalize(shared: set[str]) -> None:
    """Finalize the program and the modules that it has imported, as the interpreter does at exit.

    Leave out torch and the other modules in `shared`, because finalizing them would take a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    # Python 3.9 raises the last exception again, although that exception was already printed.
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    # An interpreter suspends daemon threads while it ends. Here, a long switch interval has the
    # same effect: no daemon thread runs after its modules have lost their globals.
    sys.setswitchinterval(1000.0)
    threading.excepthook = lambda _: None
    program = [sys.modules.pop(name) for name in list(sys.modules) if name not in shared or name == "__main__"]
    left = [weakref.ref(module) for module in reversed(program) if isinstance(module, ModuleType)]
    del program
    gc.collect()
    for reference in left:
        module = reference()
        if module is not None:
            for name in [n for n in vars(module) if n != "__builtins__"]:
                # Dropping the last reference to an open file flushes and closes the file.
                vars(module)[name] = None
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
