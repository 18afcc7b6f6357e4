"""Runs the user's program in a worker process as if it had been started directly, and keeps what torchrun needs to know of its end.

    python3 -u entry.py --script FILE ARGUMENTS | --module NAME ARGUMENTS | --exec COMMAND ARGUMENTS

Adds three things: the process dies with its launcher; an exception is written to torchrun's error file (what @record does for scripts that
use it); on rank 0 the steps of optimizers are counted. Nothing of this file stays visible to the program: no sibling module is imported.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

STEPPED_ASIDE = 75
POST_SECONDS = 0.5


def main() -> None:
    """Take this file's own arguments away and become the program."""
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    run(sys.argv[1:])


def run(words: list[str]) -> None:
    """Become the program that `words` (this file's arguments) name."""
    mode, target = words[0], words[1]
    die_with_launcher()
    if mode == "--exec":
        replace_process(words[1:])
    sys.argv[:] = words[1:]
    show_stacks_on_signal()
    count_steps()
    run_recorded(mode, target)


def die_with_launcher() -> None:
    """Workers have a session of their own: only the kernel can end them when the launcher is killed."""
    import ctypes
    import os
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    launcher = os.environ.pop("DDPJOB_LAUNCHER_PID", "")
    if launcher and os.getppid() != int(launcher):
        os._exit(1)  # it died before the kernel was asked


def show_stacks_on_signal() -> None:
    """At a signal that nobody else uses, the stacks of all threads go to a file, even while the process is blocked in C++."""
    import os

    folder = os.environ.get("DDPJOB_STACKS_DIR")
    if not folder:
        return
    import faulthandler
    import signal

    file = open(os.path.join(folder, os.environ.get("RANK", "0") + ".txt"), "w")  # noqa: PTH118, PTH123, SIM115
    faulthandler.register(signal.SIGRTMIN + 7, file=file, all_threads=True)


def replace_process(command: list[str]) -> None:
    """Become the command, with the signals that Python ignores as they were."""
    import os
    import signal

    for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvp(command[0], command)


# ---- the program


def run_recorded(mode: str, target: str) -> None:
    """Run to the end. An exception is recorded, shown without this file's frames and ends the process with 1, as Python does."""
    import os

    process = os.getpid()
    try:
        if mode == "--module":
            run_module(target)
        else:
            run_script(target)
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        failed = end.code is not None and end.code != 0 and end.code != STEPPED_ASIDE
        if failed and os.getpid() == process:
            record(end, own_frames_removed(end))
        raise
    except BaseException as error:
        trace = own_frames_removed(error)
        if os.getpid() == process:
            record(error, trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def run_script(path: str) -> None:
    """`python PATH`: a file, or a folder or archive with a __main__.py."""
    import os

    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and is_archive(path)):  # noqa: PTH112
        sys.path.insert(0, os.path.abspath(path))  # noqa: PTH100
        run_module("__main__", new_path=path)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    import io
    from importlib.machinery import SourceFileLoader

    full = os.path.abspath(path)  # noqa: PTH100
    with io.open_code(full) as file:
        source = file.read()
    main_module = new_main()
    main_module.__file__ = full
    main_module.__loader__ = SourceFileLoader("__main__", full)
    main_module.__dict__["__cached__"] = None
    exec(compile(source, full, "exec", dont_inherit=True), main_module.__dict__)


def is_archive(path: str) -> bool:
    """Whether Python would run this file as a zip archive."""
    import zipfile

    return zipfile.is_zipfile(path)


def run_module(name: str, new_path: str | None = None) -> None:
    """`python -m NAME`."""
    import os
    import runpy

    if new_path is None and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    new_main()
    runpy._run_module_as_main(name, alter_argv=new_path is None)  # type: ignore[attr-defined]


def new_main() -> Any:
    """An empty __main__ for the program; this file's module goes on under another name."""
    import builtins
    from types import ModuleType

    sys.modules["__ddpjob_entry__"] = sys.modules["__main__"]
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    return module


# ---- errors


def own_frames_removed(error: BaseException) -> TracebackType | None:
    """The traceback from the program's first frame on. An error before that (a syntax error) has none."""
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def record(error: BaseException, trace: TracebackType | None) -> None:
    """Write torchrun's error file, in torch.distributed.elastic's own format."""
    import json
    import os
    import time
    import traceback

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = "".join(traceback.format_exception(type(error), error, trace))
    extra: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
    if isinstance(error, (ImportError, SyntaxError)) and not group_exists():
        extra["ddpjob_init"] = True
    try:
        with open(path, "w") as file:  # noqa: PTH123
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
    except OSError as problem:
        sys.stderr.write(f"ddpjob: cannot write the error file {path}: {problem}\n")


def group_exists() -> bool:
    """Whether the program has come so far as to form a process group."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized())


# ---- progress


def count_steps() -> None:
    """On rank 0: when the program imports torch's optimizers, count their steps and tell the coordinator."""
    import os

    if os.environ.get("RANK") != "0" or not os.environ.get("DDPJOB_COORDINATOR") or not os.environ.get("DDPJOB_TOKEN"):
        return
    loaded = sys.modules.get(OptimizerImport.name)
    if loaded is not None:
        StepCounter(loaded)
    else:
        sys.meta_path.insert(0, OptimizerImport())


class OptimizerImport:
    """Import hook for one module: a program without torch pays nothing, and none imports it earlier."""

    name = "torch.optim.optimizer"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Wrap the module's execution so that the step hook is there from the first optimizer on."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hook(module: Any) -> None:
            execute(module)
            if hasattr(module, "register_optimizer_step_post_hook"):
                StepCounter(module)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


class StepCounter:
    """Counts optimizer steps; a thread posts them at most twice a second. With several optimizers: the busiest one's."""

    def __init__(self, optimizer_module: Any) -> None:
        import os

        self.counts: dict[int, int] = {}
        self.process, self.posted = os.getpid(), 0
        self.address, self.token = os.environ["DDPJOB_COORDINATOR"], os.environ["DDPJOB_TOKEN"]
        counts = self.counts

        def count_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
            torch = sys.modules["torch"]
            if torch.compiler.is_compiling():  # a compiled step is left alone: counting would cost a graph break
                return
            if not counts:
                self.start()
            key = id(optimizer)
            counts[key] = counts.get(key, 0) + 1

        optimizer_module.register_optimizer_step_post_hook(count_step)

    def start(self) -> None:
        """At the first step: the posting thread, and a last post at the process' end."""
        import atexit
        import contextlib
        import encodings.idna  # noqa: F401  (the thread must not be the first to import what names are encoded by)
        import socket
        import threading

        with contextlib.suppress(OSError):
            # Nor the first to look a name up: glibc reads the environment then, and crashes when the script sets a variable meanwhile.
            socket.getaddrinfo("localhost", None)
        threading.Thread(target=self.run, name="ddpjob-progress", daemon=True).start()
        atexit.register(self.post, 0.0)

    def run(self) -> None:
        """Post the count while it grows."""
        import time

        before, then = 0, time.monotonic()
        while True:
            time.sleep(POST_SECONDS if before else 0.01)
            steps, now = max(self.counts.values(), default=0), time.monotonic()
            if steps > before:
                self.post((steps - before) / (now - then))
                before, then = steps, now

    def post(self, steps_per_second: float) -> None:
        """One report; one that cannot be delivered is dropped, the next one tells the same and more."""
        import json
        import os
        import socket

        steps = max(self.counts.values(), default=0)
        if steps == self.posted or os.getpid() != self.process:
            return
        report: dict[str, Any] = {"step": steps, "automatic": True}
        if steps_per_second:
            report["metrics"] = {"stepsPerSecond": round(steps_per_second, 3)}
        body = json.dumps(report).encode()
        head = "POST /v1/progress HTTP/1.1\r\nHost: coordinator\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as connection:
                connection.sendall(head.format(self.token, len(body)).encode() + body)
                connection.recv(1024)
            self.posted = steps
        except OSError:
            return


if __name__ == "__main__":
    main()
