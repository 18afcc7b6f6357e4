#!/usr/bin/env python3
"""Runs the user's program in a worker process as if Python had started it directly.

    python3 -u worker.py --script FILE ARGUMENTS | --module NAME ARGUMENTS | --exec COMMAND ARGUMENTS
    worker.py -u FILE ARGUMENTS | -u -m NAME ARGUMENTS

The launcher uses the first form. If a job's `command` runs torchrun, torchrun uses the second form:
PYTHON_EXEC names this file, and torchrun calls the program that PYTHON_EXEC names as it would call
Python. In that case no launcher reports errors, so this file also writes an error as the
container's termination message.

This file adds six features:

- The process ends with its launcher.
- An exception is written to torchrun's error file, as @record does for scripts that use it.
- On rank 0, the optimizers' steps are counted.
- torch's compiler is imported only when something needs it.
- If a rank is killed while building a torch extension, the extension can be built again.
- `import ddpjob_report` finds the package that comes with the runtime.

Apart from these features, the program runs as it would without this file. To keep this so, no other
runtime module is imported under its own name, and standard modules are imported only by the
functions that need them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

EXIT_STEPPED_ASIDE = 75
OF_COMMAND = "--of-command"
"""First argument of this file in workers that are started by the torchrun of a job's `command`.
Workers that the launcher starts do not get this argument.
"""
STAY_SECONDS = 10.0
"""How many seconds after the program's failure the kernel ends the process. Without this limit,
exit handlers, threads and destructors could keep the process alive.
"""
REASON_BYTES = 4096
"""Maximum size of a container's termination message in Kubernetes, in bytes."""
EXIT_REFUSED = 78
"""Exit code of a program that rejects its configuration. If a worker has not completed a training
step when it exits with this code, the job ends instead of restarting.
"""
MARK = b"ddpjob\n"
"""Content that worker.py writes to the lock file of a torch extension. The lock file exists while a
rank builds the extension.
"""
MOST_CAUSES, MOST_OF_A_CAUSE = 3, 1000
"""Maximum number of an exception's causes to record, and maximum length of each cause in
characters.
"""
POST_SECONDS = 0.5
STEPS_WITHOUT_GROUP = 10
"""Number of optimizer steps without a process group after which a program is assumed never to form
one.
"""
STEPS_OF_EXCHANGE = 3
"""The ranks count as training together if they exchange data in every optimizer step from step 2 to
step STEPS_OF_EXCHANGE.
"""
OTHER_EXCHANGES = ("horovod", "mpi4py", "torchft", "torch_xla", "hivemind", "byteps", "bagua", "ray")
"""Packages that let a program train with other ranks without a torch.distributed group."""


def main() -> None:
    """Run the program that the command line names, as if Python had started it instead of this
    file.
    """
    words = sys.argv[1:]
    if words[0] == "-u":
        become_worker(words[1:])
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of worker.py
    if words[0] == OF_COMMAND:
        del words[0]
        Reason.wanted = True
    run(words)


def become_worker(words: list[str]) -> None:
    """Start this file again with the Python that runs torchrun.

    This file's first line selects the first Python in PATH, which torchrun does not necessarily
    use.
    """
    import os
    import shutil

    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:  # noqa: PTH123
            python = os.fsdecode(file.read().partition(b"\0")[0])
    except OSError:
        python = ""
    if "python" not in os.path.basename(python) or shutil.which(python) is None:  # noqa: PTH119
        python = sys.executable
    program = ["--module", *words[1:]] if words[0] == "-m" else ["--script", *words]
    os.execvp(python, [python, "-u", __file__, OF_COMMAND, *program])


def run(words: list[str], hide: Callable[[], None] | None = None) -> None:
    """Run the user's program as if Python had started it instead of this file.

    `words` are this file's arguments. `hide` is called just before the program starts. A worker
    that was forked from a process that had imported torch uses `hide` to hide modules that the
    program should import itself.
    """
    mode, target = words[0], words[1]
    die_with_launcher()
    if mode == "--exec":
        replace_process(words[1:])
    sys.argv[:] = words[1:]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = [sys.executable, "-u", *(["-m"] if mode == "--module" else []), *words[1:]]
    show_stacks_on_signal()
    count_steps()
    put_compiler_off()
    build_again()
    offer_report()
    if hide is not None:
        hide()
    run_recorded(mode, target)


def die_with_launcher() -> None:
    """Make the kernel kill this worker when its launcher dies.

    A worker has its own session, so it would otherwise outlive the launcher.
    """
    import ctypes
    import os
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    launcher = os.environ.pop("DDPJOB_LAUNCHER_PID", "")
    if launcher and not descends_from(int(launcher)):
        # The launcher died before prctl was called, so the kernel will not end this process.
        os._exit(1)


def descends_from(launcher: int) -> bool:
    """Whether the launcher started this process, directly or through a PYTHON_EXEC program.

    A PYTHON_EXEC program is started by the launcher and starts this process itself.
    """
    import os

    process = os.getppid()
    while process not in (launcher, 0, 1):
        try:
            with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123
                process = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return False
    return process == launcher


def show_stacks_on_signal() -> None:
    """Make a signal write the main thread's stack to a file, even while C++ code runs.

    The launcher sends this signal to ranks that hang. No program is known to use the same signal.
    """
    import os

    folder = os.environ.get("DDPJOB_STACKS_DIR")
    if not folder:
        return
    import faulthandler
    import signal

    try:
        file = open(os.path.join(folder, os.environ.get("RANK", "0") + ".txt"), "w")  # noqa: PTH118, PTH123, SIM115
    except OSError:
        return  # Training without stack dumps is better than no training.
    # Write only the main thread's stack. Other threads keep running during the write, and reading
    # their frames could crash a healthy process.
    faulthandler.register(signal.SIGRTMIN + 7, file=file, all_threads=False)


def replace_process(command: list[str]) -> None:
    """Replace this process with a command.

    First restore the default handling of the signals that Python ignores.
    """
    import os
    import signal

    for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvp(command[0], command)


def offer_report() -> None:
    """Let a job's program import the runtime's `ddpjob_report` if the image has no such package."""
    import os

    if os.environ.get("DDPJOB_COORDINATOR"):
        sys.meta_path.insert(0, ReportImport())


class ReportImport:
    """Import hook that adds the folder of `ddpjob_report` to sys.path once a program imports
    `ddpjob_report`.

    If the image has its own `ddpjob_report`, the program gets that package, and sys.path does not
    change. If the fork server has already imported `ddpjob_report` from the same file, the program
    gets the imported module, and its code does not run again.

    The hook treats the modules of `ddpjob_pod` in the same way. If their code ran again for the
    trainer, the trainer and `ddpjob_report` would use different copies of these modules.

    The folder stays in sys.path after the import. Processes that multiprocessing spawns can find
    the modules only through sys.path.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find `ddpjob_report` in the image or, if the image has no such package, in this runtime.

        If the fork server has imported the module from the same file, its code does not run again.
        """
        ready = report_modules.get(name)
        if name != "ddpjob_report" and (ready is None or not name.startswith("ddpjob_pod.")):
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
            if spec is None and name == "ddpjob_report":
                sys.path.append(packages())
                spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and ready is not None and ready.__spec__.origin == spec.origin:
            spec.loader = ReadyModule(ready)  # type: ignore[assignment]
        return spec


class ReadyModule:
    """Loader for a module that the fork server has already imported."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def create_module(self, spec: Any) -> Any:
        """Return the module that is already imported, instead of creating a new one."""
        return self._module

    def exec_module(self, module: Any) -> None:
        """Put the modules that `ddpjob_report` uses into sys.modules, and call its `begin`.

        Without a fork server, importing `ddpjob_report` has the same effects.
        """
        if module.__name__ != "ddpjob_report":
            return
        for name, used in report_modules.items():
            revealed = sys.modules.setdefault(name, used)
            package, _, child = name.rpartition(".")
            if package:
                setattr(sys.modules[package], child, revealed)
        module.begin()


report_modules: dict[str, Any] = {}
"""Maps names to modules: `ddpjob_report` and the modules that it uses. The dict is empty unless the
fork server has imported `ddpjob_report` for its workers.
"""


def packages() -> str:
    """Return the sys.path entry from which the runtime's packages can be imported.

    In job pods, this entry is the archive next to this file. Elsewhere, it is the parent folder of
    this file's folder.
    """
    import os

    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    archive = os.path.join(folder, "ddpjob_runtime")  # noqa: PTH118
    return archive if os.path.isfile(archive) else os.path.dirname(folder)  # noqa: PTH113, PTH120


def put_compiler_off() -> None:
    """Delay the import of torch's compiler until the program needs it (see late_dynamo.py)."""
    import os

    if os.environ.get("DDPJOB_COORDINATOR") and "torch" not in sys.modules:
        sys.meta_path.insert(0, CompilerImport())


class CompilerImport:
    """Import hook that provides `torch._dynamo` as a module whose code has not run yet."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec that defers `torch._dynamo`; None for all other modules."""
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        if getattr(sys.modules["torch"].__spec__, "_initializing", False):
            # This version of torch needs the compiler while torch itself is being imported.
            return None
        return load_of_pod("late_dynamo").find()


def load_of_pod(name: str) -> Any:
    """Load a module of ddpjob_pod without adding it to sys.modules, so that the program does not
    see it.

    The module must not import other modules of ddpjob_pod.
    """
    import os
    from importlib.machinery import PathFinder
    from types import ModuleType

    spec: Any = PathFinder.find_spec(name, [os.path.join(packages(), "ddpjob_pod")])  # noqa: PTH118
    module = ModuleType(f"__ddpjob_{name}__")
    exec(spec.loader.get_code(name), vars(module))
    return module


def build_again() -> None:
    """Let torch build an extension again if the rank that was building it was killed."""
    import os

    if os.environ.get("DDPJOB_COORDINATOR"):
        after_import("torch.utils.file_baton", mend_baton)


def mend_baton(module: Any) -> None:
    """Make a rank that builds a torch extension hold a kernel lock on the extension's lock file.

    All but the newest versions of torch only check whether the lock file exists. If the rank that
    builds the extension is killed, for example by a restart of the group, the lock file stays, and
    all later ranks wait forever.

    The kernel releases a lock when the process that holds it ends. A lock file that contains MARK
    but is not locked was therefore left by a dead rank. The next rank removes this file and builds
    the extension itself.
    """
    import contextlib
    import fcntl
    import os

    acquire = getattr(getattr(module, "FileBaton", None), "try_acquire", None)
    if acquire is None:
        sys.stderr.write(
            "ddpjob: this version of torch has no FileBaton.try_acquire; if a build is killed, remove its lock file\n"
        )
        return

    def try_acquire(baton: Any) -> bool:
        path = baton.lock_file_path
        if not acquire(baton) and not (is_left_behind(path) and acquire(baton)):
            return False
        with contextlib.suppress(OSError):  # If the file system has no locks, behave as torch does.
            baton.held = open(path, "r+b", buffering=0)  # noqa: PTH123, SIM115 - as long as the baton
            fcntl.flock(baton.held, fcntl.LOCK_EX)
            baton.held.write(MARK)
        return True

    def is_left_behind(path: str) -> bool:
        with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:  # noqa: PTH123
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before this process locked the file, another rank may have removed it and created a
            # new one.
            if file.read() == MARK and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):  # noqa: PTH116
                os.remove(path)  # noqa: PTH107
                return True
        return False

    module.FileBaton.try_acquire = try_acquire


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the `name` module as soon as the program has imported that module.

    If the program never imports the module, `act` is not called.
    """
    loaded = sys.modules.get(name)
    if loaded is not None:
        act(loaded)
    else:
        sys.meta_path.insert(0, AfterImport(name, act))


class AfterImport:
    """Import hook that waits for the import of one module, and then calls a function with that
    module.
    """

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module, and wrap its loader so that `act` is called once the module's code has
        run.
        """
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: Any) -> None:
            execute(module)
            self.act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


# ---- the program


def run_recorded(mode: str, target: str) -> None:
    """Run the program until it ends.

    If the program raises an exception, write it to torchrun's error file, and print it without this
    file's frames. The process then exits with code 1, or with EXIT_REFUSED if ddpjob_report raised
    the exception because a restart would not help.
    """
    import os

    # Note the pid and the error file's path now. The program may fork, or clear its environment.
    process, errors = os.getpid(), os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    failure = None
    try:
        if mode == "--module":
            run_module(target)
        else:
            run_script(target)
    except KeyboardInterrupt as error:
        hide_own_frames(error)
        raise  # Python then ends this process with SIGINT.
    except SystemExit as end:
        # A program may call sys.exit with any object.
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code not in (0, EXIT_STEPPED_ASIDE) and os.getpid() == process:
            end_in_time()
            record(end, errors, code & 0xFF)
        raise
    except BaseException as error:
        failure = error
    # Show the error after the except block. Inside the block, Python would record it as the context
    # of any error in the excepthook.
    if failure is not None:
        code = EXIT_REFUSED if getattr(failure, "ddpjob_refusal", False) is True else 1
        if os.getpid() == process:
            end_in_time()
            record(failure, errors, code)
        show(failure)
        sys.exit(code)


def show(error: BaseException) -> None:
    """Print an exception with the program's own excepthook.

    If the hook itself fails, print both exceptions, as Python does.
    """
    trace = remove_own_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise
    except BaseException as problem:
        for title, shown in ("Error in sys.excepthook:", problem), ("\nOriginal exception was:", error):
            sys.stderr.write(f"{title}\n")
            trace = remove_own_frames(shown)
            sys.__excepthook__(type(shown), shown.with_traceback(trace), trace)


def hide_own_frames(error: BaseException) -> None:
    """Make the interpreter leave out this file's frames when it prints this exception."""
    hook, trace = sys.excepthook, remove_own_frames(error)

    def show(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def run_script(path: str) -> None:
    """Run PATH as `python PATH` does.

    PATH may be a source file or a bytecode file. It may also be a folder or an archive that
    contains a __main__.py.
    """
    import os

    if os.path.isdir(path) or (not path.endswith((".py", ".pyw")) and is_archive(path)):  # noqa: PTH112
        sys.path.insert(0, os.path.abspath(path))  # noqa: PTH100
        run_module("__main__", new_path=path)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    full = os.path.abspath(path)  # noqa: PTH100
    loader, code = load(full)
    main_module = new_main()
    main_module.__file__ = full
    main_module.__loader__ = loader
    main_module.__dict__["__cached__"] = None
    exec(code, main_module.__dict__)


def load(path: str) -> tuple[Any, Any]:
    """Return the loader and the code object of a Python file.

    Like Python, treat a file as bytecode if its name ends with .pyc, or if its content begins with
    Python's magic number.
    """
    import io
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader
    from importlib.util import MAGIC_NUMBER

    with io.open_code(path) as file:
        source = file.read()
    if not path.endswith(".pyc") and not source.startswith(MAGIC_NUMBER):
        return SourceFileLoader("__main__", path), compile(source, path, "exec", dont_inherit=True)
    import marshal

    if not source.startswith(MAGIC_NUMBER):
        raise RuntimeError("Bad magic number in .pyc file")
    return SourcelessFileLoader("__main__", path), marshal.loads(source[16:])


def is_archive(path: str) -> bool:
    """Whether Python would run this file as a zip archive."""
    import zipfile

    return zipfile.is_zipfile(path)


def run_module(name: str, new_path: str | None = None) -> None:
    """Run a module as `python -m NAME` does."""
    import os
    import runpy

    if new_path is None and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    new_main()
    runpy._run_module_as_main(name, alter_argv=new_path is None)  # type: ignore[attr-defined]


def new_main() -> Any:
    """Create an empty `__main__` module for the program, and put it into sys.modules.

    This file's own module remains available there as `__ddpjob_worker__`.
    """
    import builtins
    from types import ModuleType

    sys.modules["__ddpjob_worker__"] = sys.modules["__main__"]
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    # In a process that multiprocessing has spawned, the same module is also named __mp_main__.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    return module


# ---- errors


def remove_own_frames(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without this file's frames.

    If there are no other frames, as for a syntax error in the program, return None.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def program_frames(error: BaseException) -> TracebackType | None:
    """Return the error's traceback from the program's first frame on.

    The earlier frames, which belong to this file and to `python -m`, are removed.
    """
    trace = remove_own_frames(error)
    while trace is not None and "runpy" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace


def record(error: BaseException, path: str, code: int) -> None:
    """Write the error to torchrun's error file, in the format of torch.distributed.elastic.

    `path` names the error file. Without torchrun, `path` is empty, and nothing is written. `code`
    is this process's exit code.
    """
    import json
    import time
    import traceback

    if not path:
        return
    text = "".join(traceback.format_exception(type(error), error, program_frames(error)))
    said = with_inner_error(f"{type(error).__name__}: {text_of(error)}")
    said += refused_arguments(error) or causes(error, said)
    content: Any = {"message": {"message": said, "extraInfo": {
        "py_callstack": text, "timestamp": str(int(time.time()))}}}  # fmt: skip
    try:
        with open(path) as file:  # noqa: PTH123
            written = json.load(file)  # The program's own @record wrote the file.
        if isinstance(written["message"]["extraInfo"], dict):
            said = with_inner_error(written["message"]["message"])
            written["message"]["message"] = said + causes(error, said)
            content = written
    except (OSError, ValueError, KeyError, TypeError):
        pass
    content["message"]["extraInfo"]["ddpjob_exit"] = code
    is_init = isinstance(error, (ImportError, SyntaxError)) and not group_exists()
    if is_init:
        content["message"]["extraInfo"]["ddpjob_init"] = True
    if Reason.wanted:
        extra = content["message"]["extraInfo"]
        Reason(code, is_init, str(content["message"]["message"]), str(extra.get("py_callstack", text))).write()
    try:
        with open(path, "w") as file:  # noqa: PTH123
            json.dump(content, file)
    except OSError as problem:
        sys.stderr.write(f"ddpjob: cannot write the error file {path}: {problem}\n")


class Reason:
    """The reason why a rank failed, in the form of the container's termination message.

    termination_log.py describes such messages. If several ranks fail, only the first one writes its
    reason.
    """

    wanted = False
    """Whether this process writes the reason for its failure. It is True only in processes started
    by the torchrun of a `command`.
    """

    def __init__(self, code: int, is_init: bool, said: str, trace: str) -> None:
        import os

        number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self.restart = int(number) if number.isdigit() else 0
        rank = os.environ.get("RANK", "")
        self.fields = {"kind": "RankFailed", "rank": int(rank) if rank.isdigit() else 0, "exitCode": code,
            "init": is_init, "restart": self.restart}  # fmt: skip
        self.said, self.trace = said, trace

    def write(self) -> None:
        """Write the reason, unless another rank has failed since torchrun's last restart."""
        import fcntl
        import json
        import os

        named = os.environ.get("DDPJOB_TERMINATION_LOG")
        try:
            # If no file is configured, the container's own file is used, but only if it exists.
            made = os.O_CREAT if named else 0
            file = os.open(named or "/dev/termination-log", os.O_RDWR | made, 0o600)
        except OSError:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                before = json.loads(os.read(file, REASON_BYTES)).get("restart", 0)
            except (ValueError, AttributeError, RecursionError):
                before = None
            if not isinstance(before, int) or before < self.restart:
                os.ftruncate(file, 0)
                os.pwrite(file, self.text(), 0)
        except OSError as problem:
            sys.stderr.write(f"ddpjob: cannot write the termination message: {problem}\n")
        finally:
            os.close(file)

    def text(self) -> bytes:
        """Return the reason as JSON of at most REASON_BYTES.

        If the message is too long, its beginning is kept. If the traceback is too long, its end is
        kept.
        """
        import json

        room = REASON_BYTES
        while True:
            parts = {"message": self.said[: room // 3], "traceback": self.trace[-(room // 2) :]}
            text = json.dumps({**self.fields, **parts}).encode()
            if len(text) <= REASON_BYTES:
                return text
            room = room * 3 // 4


def end_in_time() -> None:
    """Make the kernel end this process after STAY_SECONDS, unless it ends earlier.

    Call this when the program has failed. Its exit handlers, threads and destructors may wait
    forever for other ranks, which in turn wait for this rank.

    A Python thread could not end the process. Threads do not run while the interpreter shuts down,
    nor while a library holds the GIL.
    """
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, STAY_SECONDS)


def text_of(error: BaseException) -> str:
    """Return the error's message. If its __str__ fails, return what Python would print instead."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def with_inner_error(said: str) -> str:
    """Add a subprocess's error to the first line of a message that quotes the subprocess's
    traceback.

    If a subprocess fails, mp.spawn and DataLoader raise an exception whose message quotes its
    traceback. Most displays show only the first line of a message, which does not contain the
    error. The empty line at the beginning of mp.spawn's message is removed.
    """
    lines = [line for line in said.splitlines() if line.strip()]
    heads = [number for number, line in enumerate(lines) if "Traceback (most recent call last):" in line]
    inner = next((line for line in lines[heads[-1] + 1 :] if not line[0].isspace()), "") if heads else ""
    if not inner:
        return said
    first = lines.pop(0).rstrip()
    if first.endswith(":") and heads[0] > 1:
        first += f" {lines.pop(0)}"
    return "\n".join([f"{first.rstrip('.:')}: {inner}", *lines])


def causes(error: BaseException, said: str) -> str:
    """Describe the exceptions that led to `error`, except those that the message `said` already
    contains.

    A program may catch an exception and then call sys.exit(1) or raise a different exception. Only
    the original exception's message shows whether the failure is a consequence of a lost peer.
    """
    found: list[str] = []
    seen = [error]
    while len(seen) <= MOST_CAUSES:
        cause = error.__cause__
        if cause is None and not error.__suppress_context__:
            cause = error.__context__
        if cause is None or any(cause is other for other in seen):
            break
        name, words = type(cause).__name__, text_of(cause)
        if (words or name) not in said:
            found.append((f"{name}: {words}" if words else name)[:MOST_OF_A_CAUSE])
        seen.append(cause)
        error = cause
    return f" (after {'; '.join(found)})" if found else ""


def refused_arguments(error: BaseException) -> str:
    """Return the message that argparse printed before it ended the program; empty for any other
    error.

    The SystemExit that argparse raises contains only the exit code.
    """
    parsers = getattr(sys.modules.get("argparse"), "ArgumentParser", ())
    trace = error.__traceback__ if isinstance(error, SystemExit) else None
    while trace is not None:
        names = trace.tb_frame.f_locals
        if trace.tb_frame.f_code.co_name == "error" and isinstance(names.get("self"), parsers):
            return f": {names['self'].prog}: error: {names.get('message')}"
        trace = trace.tb_next
    return ""


def group_exists() -> bool:
    """Whether the program has created torch.distributed's default process group."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized())


def collectives() -> int:
    """Return how many collectives the program's process groups have run; 0 if unknown."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return sum(group._get_sequence_number_for_group() for group in list(c10d._world.pg_map))  # type: ignore[union-attr]
    # There is no group, or else this version of torch or the backend does not count collectives.
    except Exception:
        return 0


def ignores_group() -> bool:
    """Whether Accelerate has formed a process group, but still lets this rank train alone.

    Without a GPU and without `cpu=True`, Accelerate calls init_process_group, but then acts as if
    this were the only process. Hugging Face's Trainer uses Accelerate, so it does the same.

    If the groups have run collectives, the result is False. In that case, the script uses only
    parts of Accelerate and exchanges data itself.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    return isinstance(shared, dict) and shared.get("num_processes") == 1 and not collectives()


def exchanges_otherwise() -> bool:
    """Whether the program might exchange data with other ranks by RPC or another library."""
    rpc = sys.modules.get("torch.distributed.rpc.api")
    by_rpc = rpc is not None and hasattr(rpc, "_is_current_rpc_agent_set") and rpc._is_current_rpc_agent_set()
    return by_rpc or any(name in sys.modules for name in OTHER_EXCHANGES)


# ---- progress


def count_steps() -> None:
    """Count the optimizers' steps on rank 0, and post the count.

    Counting begins once torch.optim is imported.
    """
    import os

    if os.environ.get("RANK") != "0" or not os.environ.get("DDPJOB_COORDINATOR") or not os.environ.get("DDPJOB_TOKEN"):
        return
    after_import("torch.optim.optimizer", hook_steps)


def hook_steps(optimizer_module: Any) -> None:
    """Start counting the optimizers' steps, if this version of torch has the necessary hook."""
    if hasattr(optimizer_module, "register_optimizer_step_post_hook"):
        StepCounter(optimizer_module)


class StepCounter:
    """Counts each optimizer's steps, and posts the highest count to the coordinator.

    A thread posts the count at most twice a second.
    """

    def __init__(self, optimizer_module: Any) -> None:
        import os

        self.counts: dict[int, int] = {}
        self.process, self.posted = os.getpid(), 0
        self.world, self.grouped = int(os.environ.get("WORLD_SIZE") or 1), False
        self.said = self.captured = self.said_uncountable = False
        self.compiled = 0
        # The id of the first optimizer's state. Storing the state itself would keep it alive.
        self.state = 0
        self.has_state = self.loaded = False
        # The number of collectives so far, and the number of consecutive steps that ran any.
        self.made = self.exchanged = 0
        self.address, self.token = os.environ["DDPJOB_COORDINATOR"], os.environ["DDPJOB_TOKEN"]
        self.instance = ""
        self.environment: dict[str, Any] = {}
        # The `instance` of the coordinator that has received the environment.
        self.described: str | None = None
        self.round = {"round": fence} if (fence := os.environ.get("DDPJOB_FENCE")) else {}
        counts = self.counts

        def count_step(optimizer: Any, arguments: Any, keywords: Any) -> None:
            torch = sys.modules["torch"]
            if torch.compiler.is_compiling():  # Counting a compiled step would cause a graph break.
                return
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                # A captured CUDA graph is replayed without Python code, so its steps cannot be
                # counted.
                self.captured = True
                return
            self.captured, self.compiled = False, count_compiled_frames()
            if not counts:
                self.start()
            key = id(optimizer)
            counts[key] = counts.get(key, 0) + 1
            self.grouped = self.grouped or (group_exists() and not ignores_group())
            if counts[key] <= STEPS_OF_EXCHANGE and key == next(iter(counts)):
                made = collectives()
                self.exchanged = self.exchanged + 1 if made > self.made and counts[key] > 1 else 0
                self.made = made
            if knows_state and counts[key] <= 2 and len(counts) == 1:
                state = getattr(optimizer, "state", None)
                # Loading a checkpoint replaces the state object. DCP takes an empty step before
                # loading.
                self.loaded = self.loaded or (counts[key] == 2 and id(state) != self.state)
                self.state, self.has_state = id(state), isinstance(state, dict) and bool(state)

        def note_state(optimizer: Any, arguments: Any, keywords: Any) -> None:
            if not counts and not sys.modules["torch"].compiler.is_compiling():
                state = getattr(optimizer, "state", None)
                self.loaded = self.loaded or (isinstance(state, dict) and bool(state))

        knows_state = hasattr(optimizer_module, "register_optimizer_step_pre_hook")
        if knows_state:
            optimizer_module.register_optimizer_step_pre_hook(note_state)
        optimizer_module.register_optimizer_step_post_hook(count_step)

    def resumed(self, steps: int) -> str:
        """Return whether a checkpoint was loaded into the first optimizer before the optimizer's
        first step.

        The result is "yes", "no" or "unknown". Unless a load was seen, the result is "unknown"
        before the second step, and for an optimizer that keeps no state.
        """
        if self.loaded:
            return "yes"
        return "no" if steps > 1 and self.has_state else "unknown"

    def start(self) -> None:
        """Start the thread that posts the count. Call this at the first step.

        The count is also posted when the process ends.
        """
        import atexit
        import contextlib
        import encodings.idna  # noqa: F401  (encodes names; the thread must not be the first to import it)
        import socket
        import threading

        with contextlib.suppress(OSError):
            # glibc reads the environment when a process looks up its first host name, and may crash
            # if the program changes the environment at that moment. The thread must therefore not
            # be the first to look up a name.
            socket.getaddrinfo("localhost", None)
        threading.Thread(target=self.run, name="ddpjob-progress", daemon=True).start()
        atexit.register(self.post, 0.0, last=True)

    def run(self) -> None:
        """Post the count whenever it has grown.

        When the counter might begin to miss steps, post the count once more.
        """
        import time

        pace, last = load_of_pod("pace").Pace(), 0
        while True:
            time.sleep(POST_SECONDS if last else 0.01)
            steps, now = max(self.counts.values(), default=0), time.monotonic()
            if steps > last:
                pace.add(steps, now)
                last = steps
                self.post(pace.per_second or 0.0)
            elif not self.said_uncountable and self.is_uncountable():
                self.posted, self.said_uncountable = -1, True
                self.post(0.0)

    def is_uncountable(self) -> bool:
        """Whether the counter might miss the next steps.

        It might if code was compiled or a CUDA graph was captured after the last counted step.
        """
        return self.captured or count_compiled_frames() > self.compiled

    def post(self, steps_per_second: float, *, last: bool = False) -> None:
        """Post the count to the coordinator.

        A failed post is not repeated, because the next post includes the same steps. `last` means
        that the program is ending and can no longer form a process group.
        """
        import json
        import os

        steps = max(self.counts.values(), default=0)
        if os.getpid() != self.process:
            return
        alone = self.trains_alone(steps, 1 if last else STEPS_WITHOUT_GROUP)
        if steps == self.posted and not (last and alone):
            return
        report: dict[str, Any] = {"step": steps, "automatic": True, **self.round}
        if steps_per_second:
            report["metrics"] = {"stepsPerSecond": round(steps_per_second, 3)}
        if alone:
            report["ungrouped"] = True
        if self.is_uncountable():
            report["uncountable"] = True
        else:
            self.said_uncountable = False
        report["resumed"] = self.resumed(steps)
        if self.exchanged >= STEPS_OF_EXCHANGE - 1:
            report["exchanging"] = True
        if not self.environment:
            self.environment = load_of_pod("versions").read_environment()
        if self.described != self.instance:  # This coordinator still lacks the environment.
            report["environment"] = self.environment
        body = json.dumps(report).encode()
        try:
            status, instance = self.ask(body)
            if status == "401" and instance != self.instance:
                # The proof contained an old instance. Only the coordinator with that instance
                # accepts it.
                self.instance = instance
                body = json.dumps({**report, "environment": self.environment}).encode()
                status, _ = self.ask(body)
        except OSError:
            return
        if status == "200":
            self.posted, self.described = steps, self.instance

    def trains_alone(self, steps: int, least: int) -> bool:
        """Return whether each rank seems to train its own model. If so, log this once.

        The result is False before the step `least`, because the ranks might still form a group.
        """
        alone = self.world > 1 and steps >= least and not self.grouped and not exchanges_otherwise()
        if alone and not self.said:
            self.said = True
            why = "torch.distributed is not initialized"
            if group_exists():
                why = "without a GPU, Accelerate needs cpu=True, and the Trainer needs use_cpu=True"
            sys.stderr.write(
                f"ddpjob: rank 0 has taken {steps} steps without a process group ({why}), so each of the "
                f"{self.world} ranks trains a separate model\n"
            )
        return alone

    def ask(self, body: bytes) -> tuple[str, str]:
        """Post the body, and return the response's status and the coordinator's random number.

        The request does not contain the token, because the coordinator's address may now belong to
        a stranger.
        """
        import os
        import socket

        nonce, path = os.urandom(16).hex(), "/v1/progress"
        proof = seal(self.token, "request", self.instance, nonce, "POST", path, body)
        head = f"POST {path} HTTP/1.1\r\nHost: coordinator\r\nDDPJob-Nonce: {nonce}\r\nDDPJob-Proof: {proof}\r\n"
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = connection.recv(4096).decode("latin-1")
        lines = [line.partition(": ") for line in answer.partition("\r\n\r\n")[0].split("\r\n")]
        return answer[9:12], next((value for name, _, value in lines if name == "DDPJob-Instance"), "")


def count_compiled_frames() -> int:
    """Return how many frames torch's compiler has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(utils, "counters", None)
    return int(counters["frames"]["ok"]) if counters is not None else 0


def seal(token: str, *parts: Any) -> str:
    """Return a proof that the sender knows the token, as protocol.seal does."""
    import hashlib
    import hmac

    mac = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        mac.update(b"%d:" % len(data) + data)
    return mac.hexdigest()


if __name__ == "__main__":
    main()
