"""Workers without the wait for imports: a process that has imported torch, and forks a worker in some milliseconds when asked.

It is forked from the launcher while that has one thread, and before anything touches a GPU. Launcher and it talk over a pair of sockets,
one JSON object a line. It dies with the launcher, its workers die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from departure import ENDING_SIGNALS, die_with_parent, say

HERE = Path(__file__).resolve().parent
# What every DDP script imports sooner or later; torch._dynamo is loaded by the first optimizer.
PRELOADED = ("torch", "torch.distributed.run", "torch._dynamo", "torch.optim", "torch.nn.parallel", "torch.utils.data")
POLL_SECONDS = 0.002


def preload(more: str) -> None:
    """Import what workers will need; `more` names further modules, separated by commas.

    Raises:
        ImportError: one of torch's is missing. One of `more` is only told of: the script may not need it.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    for name in filter(None, (word.strip() for word in more.split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            say(f"DDPJOB_PRELOAD: {name} cannot be imported: {error}")


class Nursery:
    """The launcher's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        gc.collect()
        gc.freeze()  # a collection in a worker would copy the pages that all of them share
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _serve(theirs)
        theirs.close()
        self._socket, self._buffer, self._lock = ours, b"", threading.RLock()
        self._number = 0
        self._started: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def spawn(self, words: Sequence[str], environment: Mapping[str, str], stdout: str | None, stderr: str | None) -> Worker:
        """Start a worker: `words` are entry.py's arguments, `stdout` and `stderr` files, None for the launcher's own."""
        with self._lock:
            self._number += 1
            number = self._number
            order = {"number": number, "words": list(words), "environment": dict(environment), "stdout": stdout, "stderr": stderr}
            self._socket.sendall((json.dumps(order) + "\n").encode())
            while number not in self._started:
                self._hear(block=True)
            return Worker(self, self._started.pop(number), words)

    def exit_code(self, pid: int) -> int | None:
        """As Popen.returncode; None while the worker runs."""
        with self._lock:
            if pid not in self._ended:
                self._hear(block=False)
            return self._ended.get(pid)

    def _hear(self, block: bool) -> None:
        if not block and not select.select([self._socket], [], [], 0)[0]:
            return
        data = self._socket.recv(65536)
        if not data:
            raise RuntimeError(f"the process that starts workers (pid {self.pid}) has ended")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            news = json.loads(line)
            if "number" in news:
                self._started[news["number"]] = news["pid"]
            else:
                self._ended[news["pid"]] = news["code"]


class Worker:
    """What torchrun uses of subprocess.Popen."""

    def __init__(self, nursery: Nursery, pid: int, args: Sequence[str]) -> None:
        self._nursery, self.pid, self.args = nursery, pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To the worker, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def handler_class(base: Any, nursery: Nursery, entry: str) -> Any:
    """torchrun's SubprocessHandler, with workers from the nursery where a worker is our entry point in this very Python."""

    class WarmHandler(base):  # type: ignore[misc]
        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            if list(args[:3]) != [sys.executable, "-u", entry]:
                return super()._popen(args, env)  # wrapped, by numactl for instance
            files = [getattr(stream, "name", None) for stream in (self._stdout, self._stderr)]
            return nursery.spawn(args[3:], env, files[0], files[1])

    return WarmHandler


# ---- in the forked process


def _serve(orders: socket.socket) -> NoReturn:
    """Fork workers on demand, tell of their ends, end with the launcher."""
    die_with_parent()
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the launcher decides
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    while True:
        ready, _, _ = select.select([orders.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _bury(orders)
        if orders.fileno() in ready:
            data = orders.recv(65536)
            if not data:
                os._exit(0)  # the kernel ends the workers
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                _fork(json.loads(line), orders, (reader, writer))


def _bury(orders: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        orders.sendall((json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}) + "\n").encode())


def _fork(order: dict[str, Any], orders: socket.socket, pipe: tuple[int, int]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        orders.close()
        for end in pipe:
            os.close(end)
        _become(order, parent)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has a session of its own already, or has ended
        os.setpgid(pid, pid)  # before the launcher signals its group
    orders.sendall((json.dumps({"number": order["number"], "pid": pid}) + "\n").encode())


def _become(order: dict[str, Any], parent: int) -> NoReturn:
    """The worker: as entry.py in a fresh interpreter would find it, with torch imported."""
    code = 1
    try:
        with contextlib.suppress(PermissionError):  # the parent has made it the leader of a group already
            os.setsid()
        for number in (*ENDING_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _redirect(order)
        environment = dict(order["environment"], DDPJOB_LAUNCHER_PID=str(parent))
        os.environ.clear()
        os.environ.update(environment)
        _renew_libraries()
        entry = _import_entry()
        code = _exit_code_of(lambda: entry.run(order["words"]))
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            import atexit

            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _redirect(order: dict[str, Any]) -> None:
    for target, path in ((1, order["stdout"]), (2, order["stderr"])):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, target)
            os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def _renew_libraries() -> None:
    """What a fork would share with its siblings, or has read from the environment too early. Python's random renews itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].random.default_generator.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))


def _import_entry() -> Any:
    """entry.py alone: a script may have modules of the same names as the launcher's."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent == HERE and name != "__main__":
            del sys.modules[name]
    sys.path.insert(0, str(HERE))
    entry = importlib.import_module("entry")
    sys.path.remove(str(HERE))
    del sys.modules["entry"]
    return entry


def _exit_code_of(program: Any) -> int:
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
        return 130
    return 0
