# ruff: noqa: E501 (programs, one a line where that is enough)
"""Small programs. Each shows something that a script can notice about the process that runs it.

`differential.py` runs each one as plain torchrun does, in mode Standard and in mode Fast. The
output of every program is deterministic: it has no process ids, times or addresses.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """A program.

    `run` is worker.py's mode, the target and its arguments, and `files` are other files in the
    folder. `environment` is set for the worker, and `container` for the launcher as well. `differs`
    maps a mode to the row of the table in docs/protocol.md that explains the difference from
    torchrun. `oldest` is the first Python that can run the program.
    """

    text: str
    run: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    oldest: tuple[int, int] = (3, 9)


PYTHON = {"PYTHONIOENCODING": "latin-1", "PYTHONWARNINGS": "error::UserWarning", "PYTHONHASHSEED": "7"}
PROGRAMS: dict[str, Program] = {}


def add(name: str, text: str, *run: str, **more: object) -> None:
    """Define a program `p_NAME.py`, run as a script without arguments unless `run` is given."""
    PROGRAMS[name] = Program(textwrap.dedent(text).lstrip("\n"), run or ("--script", f"p_{name}.py"), **more)  # type: ignore[arg-type]


# ---- how a program is started

add(
    "argparse",
    """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("data", nargs="*")
    print(parser.parse_args(), parser.prog)
    """,
    "--script", "p_argparse.py", "--lr", "0.1", "a b", "", "ü",
)  # fmt: skip
add(
    "argparse_error",
    "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "--script", "p_argparse_error.py", "--unknown",
)  # fmt: skip
add(
    "subcommands",
    """
    import sys
    COMMANDS = {}
    def command(function):  # as click and typer do
        COMMANDS[function.__name__] = function
        return function
    @command
    def fit(*words):
        print("fit", words, fit.__module__, fit.__qualname__)
    if __name__ == "__main__":
        sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
    """,
    "--script", "p_subcommands.py", "fit", "model.depth=3", "+x=y",
)  # fmt: skip
add(
    "hydra_like",
    """
    import functools, inspect, os, sys
    def main(config):
        def wrap(function):
            @functools.wraps(function)
            def run():
                caller = sys.modules[function.__module__]
                folder = os.path.dirname(os.path.abspath(inspect.getfile(function)))
                with open(os.path.join(folder, config)) as file:
                    function(dict(line.split(": ") for line in file.read().splitlines()), caller.__file__)
            return run
        return wrap
    @main("p_hydra.yaml")
    def train(config, where):
        print(config, os.path.basename(where), inspect.getsource(train).count("config"))
    if __name__ == "__main__":
        train()
    """,
    files={"p_hydra.yaml": "lr: 0.1\nsize: 3\n"},
)
SEEN = """
    import json, sys
    def f(): pass
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path, "package": __package__, "doc": __doc__,
        "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(), "of": f.__module__,
        "names": sorted(n for n in globals()), "loader": type(__loader__).__name__, "cached": globals().get("__cached__"),
        "flags": str(sys.flags), "warnings": sys.warnoptions, "x": sys._xoptions, "executable": sys.executable,
        "orig": getattr(sys, "orig_argv", [])[:2] if __spec__ is None else [],
    }, indent=1))
"""
add("seen", '"""A docstring."""\n' + textwrap.dedent(SEEN), "--script", "p_seen.py", "--a", "b")
add("seen_absolute", SEEN, "--script", "FOLDER/p_seen_absolute.py")
add("seen_in_a_folder", "", "--script", "p_sub/p_script.py", files={"p_sub/p_script.py": textwrap.dedent(SEEN)})
add("seen_as_module", SEEN, "--module", "p_seen_as_module", "x", "--y")
PACKAGE = {
    "p_package/__init__.py": "STATE = []\n",
    "p_package/part.py": "from . import STATE\nSTATE.append(__name__)\n",
    "p_package/train.py": "from . import STATE, part\nfrom .sub.deep import up\n"
    + textwrap.dedent(SEEN)
    + "print(STATE, up)\n",
    "p_package/__main__.py": "from .part import STATE\n" + textwrap.dedent(SEEN) + "print(STATE)\n",
    "p_package/sub/__init__.py": "",
    "p_package/sub/deep.py": "from ..part import __name__ as up\n",
}
add("module_of_a_package", "", "--module", "p_package.train", "a", files=PACKAGE)
add("package", "", "--module", "p_package", "a")
add("folder_as_script", "", "--script", "p_package", "a")
add(
    "folder",
    "",
    "--script",
    "p_folder",
    "b",
    files={"p_folder/__main__.py": textwrap.dedent(SEEN), "p_folder/p_own.py": ""},
)
add("archive", "", "--script", "p_archive.zip", "b", files={"p_archive.zip/__main__.py": "import p_own\n" + textwrap.dedent(SEEN),
    "p_archive.zip/p_own.py": "print(__name__)\n"})  # fmt: skip
add("relative_import_of_a_script", "from . import other\n")
add("bytecode", "", "--script", "p_bytecode.pyc", "c", files={"p_bytecode.pyc": textwrap.dedent(SEEN)})
add("link", "", "--script", "p_linked.py", files={"p_target/p_real.py": "import sys, p_beside\nprint(sys.path[0], __file__)\n",
    "p_target/p_beside.py": "", "p_linked.py": "-> p_target/p_real.py"})  # fmt: skip
add("imports_beside", "import p_helper\nprint(p_helper.NAME)\n", files={"p_helper.py": "NAME = __name__\n"})
add("runtime_is_invisible", """
    import sys
    names = ("client", "forkserver", "protocol", "shutdown", "worker", "pid1", "stacks", "agent", "rendezvous")
    print([name for name in names if name in sys.modules], [p for p in sys.path if "ddpjob" in p])
    try:
        import ddpjob_runtime
    except ImportError as error:
        print(error)
    """)  # fmt: skip
add("future", "from __future__ import annotations\ndef f(a: nothing) -> also_nothing: pass\nprint(f.__annotations__)\n")
add("annotations", "x: int = 3\nprint(globals().get('__annotations__'))\n")
add("source_encoding", "# -*- coding: latin-1 -*-\nprint('\xe9', len('\xe9'))\n")

# ---- how a program ends

add("exit_codes", "import sys\nsys.exit(3)\n")
add("exit_large", "import sys\nsys.exit(300)\n")
add("exit_negative", "import sys\nsys.exit(-1)\n")
add("exit_true", "import sys\nsys.exit(True)\n")
add("exit_none", "import sys\nsys.exit(None)\n")
add("exit_text", "import sys\nsys.exit('a message: ü')\n")
add("exit_object", "import sys\nsys.exit({'a': 1})\n")
add("exit_array", """
    import sys
    class Array:
        def __eq__(self, other): return self
        def __ne__(self, other): return self
        def __bool__(self): raise ValueError("ambiguous, as with numpy's and torch's")
        def __str__(self): return "[1 2]"
    sys.exit(Array())
    """)  # fmt: skip
add("exit_builtin", "exit(4)\n")
add("os_exit", "import atexit, os\natexit.register(print, 'no')\nprint('yes')\nos._exit(9)\n")
add("killed", "import os, signal\nprint('x')\nos.kill(os.getpid(), signal.SIGKILL)\n")
add("terminated", "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)\n")
add("aborted", "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.abort()\n")
add("traceback", """
    def f(n):
        return f(n - 1) if n else 1 / n
    class Model:
        def forward(self):
            with open(__file__):
                return f(2)
    Model().forward()
    """)  # fmt: skip
add("traceback_chain", "try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise RuntimeError('because') from e\n")
add("traceback_notes", "e = ValueError('x')\nif hasattr(e, 'add_note'):\n    e.add_note('a note')\nraise e\n")
add("traceback_without_text", "class E(Exception):\n    def __str__(self): return self.missing\nraise E\n")
add("traceback_group", "raise ExceptionGroup('many', [ValueError(1), KeyError('k')])\n", oldest=(3, 11))
add(
    "traceback_in_a_module",
    "import p_raises\n",
    files={"p_raises.py": "def f():\n    raise LookupError('deep')\nf()\n"},
)
add("module_raises", "raise ValueError('as a module')\n", "--module", "p_module_raises")
add("syntax_error", "def broken(:\n")
add("indentation_error", "if True:\nprint(1)\n")
add("missing_import", "import no_such_module_anywhere\n")
add(
    "recursion",
    "import sys\nsys.setrecursionlimit(200)\nsys.excepthook = lambda k, *_: print(k.__name__)\ndef f(): f()\nf()\n",
)
add(
    "own_hook",
    "import sys\nsys.excepthook = lambda *a: print('own', a[0].__name__, a[2].tb_lineno)\nraise KeyError(1)\n",
)
add("hook_fails", """
    import sys
    def hook(*_):
        raise LookupError("in the hook", sys.exc_info())
    sys.excepthook = hook
    raise KeyError(1)
    """)  # fmt: skip
add("hook_exits", "import sys\nsys.excepthook = lambda *_: sys.exit(5)\nraise KeyError(1)\n")
add("keyboard_interrupt", """
    import atexit, os, signal, time
    atexit.register(print, "at exit")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def wait():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    wait()
    """)  # fmt: skip
add(
    "keyboard_interrupt_raised",
    "class C:\n    def __del__(self): print('gone')\nc = C()\nraise KeyboardInterrupt('by hand')\n",
)
add("atexit", """
    import atexit, sys
    for i in range(3):
        atexit.register(print, "exit", i)
    @atexit.register
    def wrong():
        raise ValueError("in a callback")
    sys.unraisablehook = lambda info: print("unraisable", info.exc_type.__name__)
    sys.excepthook = lambda kind, *_: print("hook", kind.__name__)
    sys.stderr = sys.stdout
    sys.exit(5)
    """)  # fmt: skip
add("atexit_after_an_exception", "import atexit\natexit.register(print, 'bye')\nraise SystemError('x')\n")
add("files_left_open", """
    class Last:
        def __init__(self, name): self.name = name
        def __del__(self): print("deleted", self.name)
    import atexit, p_keeps
    file = open("p_left_open.txt", "w")
    file.write("not closed")
    p_keeps.file = open("p_left_open_too.txt", "w")
    p_keeps.file.write("not closed either")
    last, cycle = Last("main"), Last("cycle")
    cycle.me = cycle
    import os, subprocess, sys
    reader, writer = os.pipe()  # closed when this process exits
    code = "import sys\\nsys.stdin.read()\\nprint(open('p_left_open.txt').read(), open('p_left_open_too.txt').read())"
    subprocess.Popen([sys.executable, "-c", code], stdin=reader)
    """, files={"p_keeps.py": "file = None\n"})  # fmt: skip
add("threads", """
    import atexit, threading, time
    atexit.register(print, "at exit")
    seen = threading.Event()
    def work():
        seen.wait()
        time.sleep(0.1)
        print("worked", threading.current_thread().daemon)
    threading.Thread(target=work).start()
    threading.Thread(target=lambda: time.sleep(99), daemon=True).start()
    print(threading.main_thread() is threading.current_thread(), threading.active_count(), threading.current_thread().name)
    seen.set()
    """)  # fmt: skip
add(
    "thread_raises",
    "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()\nprint('on')\n",
)
add("busy_daemon", """
    import threading, time
    def work():
        while True:
            time.sleep(0.0005)
            helper()
    def helper(): return [n * n for n in range(100)]
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
    """)  # fmt: skip

# ---- output and input

add("stdout", """
    import sys
    print("a line")
    sys.stdout.write("no newline, ")
    sys.stdout.buffer.write(b"bytes \\xff\\x00, ")
    print("ünïcode", end="")
    print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.mode, sys.stdout.name, sys.stdout.encoding,
          sys.stdout.errors, type(sys.stdout.buffer).__name__, sys.stdout.fileno(), sys.stdout.isatty(), sys.stdout.newlines)
    print(sys.stderr.line_buffering, sys.stderr.write_through, sys.stderr.mode, sys.stderr.name, sys.stderr.encoding,
          sys.stderr.errors, type(sys.stderr.buffer).__name__, sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr)
    """)  # fmt: skip
add("stdout_unbuffered", """
    import os, sys
    print("text", end="")
    sys.stdout.buffer.write(b" bytes")
    sys.stderr.write("error without newline")
    os._exit(0)  # loses buffered output
    """)  # fmt: skip
add("stdout_interleaved", "import os\nfor i in range(3):\n    print('text', i)\n    os.write(1, b'raw %d\\n' % i)\n")
add("stdout_of_c", """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.printf(b"by printf\\n")
    print("by print")
    """)  # fmt: skip
add(
    "stdout_replaced",
    "import io, sys\nsys.stdout = io.StringIO()\nprint('nowhere')\nsys.stdout = sys.__stdout__\nprint('here')\n",
)
add("stdout_large", "import sys\nfor _ in range(300):\n    print('x' * 1000)\n")
add("stdout_surrogates", "import sys\nsys.stderr.write('\\udcff\\n')\nprint('\\udcff')\n")
add("stdin", "import sys\nprint(repr(sys.stdin.read()), sys.stdin.isatty(), sys.stdin.name)\ninput()\n")
add("io_encoding", "import sys\nprint('\\xe9', sys.stdout.encoding, sys.stderr.errors)\n", container=PYTHON)
add("logging", """
    import logging
    print(logging.getLogger().handlers, logging.getLogger().level, logging.getLevelName(logging.getLogger().getEffectiveLevel()))
    logging.warning("before it is configured")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(module)s %(processName)s %(message)s", force=True)
    logging.getLogger("train").info("info")
    logging.captureWarnings(True)
    __import__("warnings").warn("captured")
    """)  # fmt: skip
add("warnings", """
    import warnings
    warnings.warn("plain")
    warnings.warn("old", DeprecationWarning)
    for _ in range(2):
        warnings.warn("twice")
    """)  # fmt: skip
add("warnings_as_errors", "import warnings\nwarnings.warn('x')\n", container=PYTHON)
add("faulthandler", "import faulthandler, sys\nprint(faulthandler.is_enabled())\nfaulthandler.dump_traceback(file=sys.stdout)\n",
    differs={"Standard": "stack", "Fast": "stack"})  # fmt: skip
add("segfault", "import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nctypes.string_at(0)\n")
add("segfault_shown", "import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nctypes.string_at(0)\n",
    environment={"PYTHONFAULTHANDLER": "1"}, differs={"Standard": "stack", "Fast": "stack"})  # fmt: skip

# ---- the process

add(
    "environment",
    "import os\nfor name in sorted(os.environ):\n    print(name, os.environ[name])\n",
    environment={"EMPTY": "", "Ü": "ö=1"},
)
add("environment_of_a_child", "import subprocess\nsubprocess.run('env | sort', shell=True)\n")
add("environment_is_set", """
    import ctypes, os, subprocess
    os.environ["MADE"] = "1"
    os.environ.pop("RANK")
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    print(getenv(b"MADE"), getenv(b"RANK"), subprocess.run("echo $MADE $RANK", shell=True, capture_output=True).stdout)
    """)  # fmt: skip
add("process", """
    import os, resource, signal, sys
    print("session", os.getsid(0) == os.getpid(), "group", os.getpgid(0) == os.getpid(), "cwd", os.getcwd())
    old = os.umask(0)
    print("umask", oct(old), "nice", os.nice(0), "affinity", len(os.sched_getaffinity(0)))
    for name in sorted(n for n in dir(resource) if n.startswith("RLIMIT_")):
        print(name, resource.getrlimit(getattr(resource, name))[name == "RLIMIT_NOFILE":])  # Its soft one is raised.
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        print(int(number), getattr(handler, "name", None) or getattr(handler, "__name__", handler))
    print("mask", signal.pthread_sigmask(signal.SIG_BLOCK, []), "wakeup", signal.set_wakeup_fd(-1), signal.getitimer(0))
    print("frames", sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile(), sys.exc_info())
    """)  # fmt: skip
add("descriptors", """
    import os
    for number in range(100):
        try:
            print(number, os.get_inheritable(number), os.readlink(f"/proc/self/fd/{number}").split(":")[0].split("/")[1:2])
        except OSError:
            pass
    """, differs={"Standard": "descriptor", "Fast": "descriptor"})  # fmt: skip
add("descriptors_of_a_child", "import subprocess\nsubprocess.run(['ls', '/proc/self/fd'])\n")
add(
    "locale",
    "import locale\nprint(locale.getlocale(), locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False))\n",
)
add("hooks", "import sys\nprint(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.unraisablehook is "
    "sys.__unraisablehook__, sys.breakpointhook is sys.__breakpointhook__, sys.path_hooks.__len__())\n")  # fmt: skip
add("signals", """
    import os, signal
    seen = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: seen.append((int(number), frame.f_code.co_name)))
        os.kill(os.getpid(), number)
    print(seen)
    """)  # fmt: skip
add("alarm", "import signal, time\nsignal.alarm(1)\ntime.sleep(9)\n")
add(
    "broken_pipe",
    "import os, signal\nr, w = os.pipe()\nos.close(r)\ntry:\n    os.write(w, b'x')\nexcept BrokenPipeError:\n    print('error')\n",
)
add("random", """
    import os, random, secrets, uuid
    first, second = random.random(), secrets.token_hex(8)
    random.seed(1)
    print(0 <= first < 1, len(second), random.random(), random.getrandbits(32), uuid.uuid4().version)
    """)  # fmt: skip
add("hash_seed", "print(hash('a'), hash(b'a'))\n", container=PYTHON)
add("temporary_folder", """
    import os
    os.environ["TMPDIR"] = "/var/tmp"
    import tempfile
    print(tempfile.gettempdir())
    """)  # fmt: skip
add("loggers_of_torch", """
    import logging.config
    logging.config.dictConfig({"version": 1, "root": {"level": "INFO"}})
    print(sorted(name for name in logging.root.manager.loggerDict if name.startswith("torch")))
    mine = logging.getLogger("torch.distributed")
    import torch.distributed
    torchs = torch.distributed.distributed_c10d.logger
    print(mine is logging.getLogger("torch.distributed"), torchs.disabled, torchs.parent.name, torchs.getEffectiveLevel())
    """)  # fmt: skip
add("hash_seed_of_the_worker", "print(hash('a'))\n", environment={"PYTHONHASHSEED": "7"}, differs={"Fast": "hashes"})

# ---- child processes

add("subprocess", """
    import subprocess, sys
    print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv, sys.stdin.read()); sys.exit(3)", "x"], input="in",
                         capture_output=True, text=True))
    subprocess.run([sys.executable, __file__.replace("p_subprocess", "p_exit_codes")])
    print(subprocess.run("kill -9 $$", shell=True).returncode)
    """)  # fmt: skip
add("run_self_again", """
    import os, sys
    if len(sys.argv) == 1:
        os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
    print(sys.argv)
    """)  # fmt: skip
add("fork", """
    import atexit, os, sys
    atexit.register(lambda: print("exit of", "child" if child == 0 else "parent"))
    child = os.fork()
    if child == 0:
        sys.exit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)  # fmt: skip
add("fork_raises", "import os\nif os.fork() == 0:\n    raise ValueError('in a child')\nos.wait()\n")
POOL = """
    import multiprocessing, os, sys
    from dataclasses import dataclass
    @dataclass
    class Item:
        n: int
    def double(item):
        return Item(item.n * 2), __name__ == "__main__", sys.argv[1:]
    def initialize(value):
        os.environ["POOL"] = value
    if __name__ == "__main__":
        print(multiprocessing.get_start_method(), multiprocessing.current_process().name, multiprocessing.parent_process())
        context = multiprocessing.get_context(METHOD)
        with context.Pool(2, initialize, ("x",)) as pool:
            print(pool.map(double, [Item(n) for n in range(3)]))
        queue = context.Queue()
        child = context.Process(target=queue.put, args=(Item(1),), name="child")
        child.start()
        print(queue.get(), child.name)
        child.join()
        print(child.exitcode)
"""
for method in ("fork", "spawn", "forkserver"):
    add(
        f"multiprocessing_{method}",
        POOL.replace("METHOD", repr(method)),
        "--script",
        f"p_multiprocessing_{method}.py",
        "--flag",
    )
add(
    "multiprocessing_of_a_module",
    POOL.replace("METHOD", "'spawn'"),
    "--module",
    "p_multiprocessing_of_a_module",
    "--flag",
)
add(
    "multiprocessing_sets_method",
    "import multiprocessing\nmultiprocessing.set_start_method('spawn')\nprint(multiprocessing.get_start_method())\n",
)
add("multiprocessing_shared", """
    import multiprocessing
    from multiprocessing import shared_memory
    def add(value, array):
        with value.get_lock():
            value.value += 1
        array[0] = 2.5
    if __name__ == "__main__":
        value, array = multiprocessing.Value("i", 1), multiprocessing.Array("d", 2)
        children = [multiprocessing.Process(target=add, args=(value, array)) for _ in range(2)]
        [c.start() for c in children], [c.join() for c in children]
        memory = shared_memory.SharedMemory(create=True, size=10)
        memory.buf[0] = 7
        again = shared_memory.SharedMemory(memory.name)
        print(value.value, array[:], again.buf[0])
        again.close()
        memory.close()
        memory.unlink()
        with multiprocessing.Manager() as manager:
            print(manager.list([1, 2]))
    """)  # fmt: skip
add("process_pool", """
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    import multiprocessing
    def square(n): return n * n
    def fails(n): raise ValueError(n)
    if __name__ == "__main__":
        for pool in (ProcessPoolExecutor(2), ThreadPoolExecutor(2), ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))):
            with pool:
                print(list(pool.map(square, range(4))), type(pool.submit(fails, 1).exception()).__name__)
    """)  # fmt: skip
add("unguarded_spawn", "import multiprocessing, os, sys\nif multiprocessing.current_process().name == 'MainProcess':\n"
    "    p = multiprocessing.get_context('spawn').Process(target=print, args=('child',))\n    p.start()\n    p.join()\n    print(p.exitcode)\n")  # fmt: skip
add(
    "process_left_behind",
    "import multiprocessing, time\np = multiprocessing.Process(target=time.sleep, args=(9,), daemon=True)\np.start()\nprint('end')\n",
)

# ---- libraries

add("pickle", """
    import copy, dataclasses, enum, pickle, typing
    @dataclasses.dataclass(frozen=True)
    class Config:
        lr: float
        names: typing.List[str] = dataclasses.field(default_factory=list)
    class Kind(enum.Enum):
        A = 1
    Pair = typing.NamedTuple("Pair", [("a", int)])
    for thing in (Config(0.1, ["x"]), Kind.A, Pair(3)):
        data = pickle.dumps(thing)
        print(pickle.loads(data) == thing == copy.deepcopy(thing), b"__main__" in data, type(thing).__module__)
    print(typing.get_type_hints(Config))
    """)  # fmt: skip
add("inspect", """
    import inspect, linecache, sys, traceback
    def f(): return [frame.filename.rsplit("/", 1)[-1] for frame in inspect.stack()][:2]
    print(f(), inspect.getsource(f), inspect.getmodule(f).__name__, linecache.getline(__file__, 1))
    """)  # fmt: skip
add("asyncio", """
    import asyncio
    async def main():
        process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
        print(await process.stdout.read(), await process.wait(), await asyncio.to_thread(lambda: 3) if hasattr(asyncio, "to_thread") else 3)
        asyncio.get_running_loop().call_exception_handler({"message": "handled"})
    asyncio.run(main())
    """)  # fmt: skip
add(
    "importlib_resources",
    "import importlib.util, pkgutil\nprint(importlib.util.find_spec('__main__') if __spec__ else None, pkgutil.get_data('p_package', 'part.py'))\n",
)
add(
    "tempfile",
    "import os, tempfile\nf = tempfile.TemporaryDirectory()\nopen(os.path.join(f.name, 'x'), 'w').write('1')\nprint(sorted(os.listdir(f.name)))\n",
)
add(
    "decimal_and_time", "import decimal, time\nprint(decimal.getcontext().prec, time.tzname, time.process_time() < 5)\n"
)
add(
    "sockets",
    "import socket\ns = socket.create_server(('127.0.0.1', 0))\nc = socket.create_connection(s.getsockname())\nprint(s.accept()[0].fileno() > 2, socket.getdefaulttimeout())\n",
)
add("modules_at_start", """
    import sys
    print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "sympy", "ctypes", "asyncio"}))
    """, differs={"Standard": "modules", "Fast": "modules"})  # fmt: skip
add("command_line", """
    words = open("/proc/self/cmdline").read().split("\\0")
    print([word.rsplit("/", 1)[-1] for word in words[1:3]])
    """, differs={"Standard": "command line", "Fast": "command line"})  # fmt: skip

# ---- torch

add("torch_state", """
    import os, sys
    print("torch" in sys.modules, "torch.nn" in sys.modules)
    import importlib.util
    spec = importlib.util.find_spec("torch")
    print(spec.name, os.path.basename(spec.origin), len(spec.submodule_search_locations))
    from torch.nn import Linear
    import torch, numpy
    from torch.distributed.elastic.multiprocessing.errors import record
    print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
    print(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.distributed.is_initialized())
    print(torch.multiprocessing.get_sharing_strategy(), torch.cuda.is_initialized(), type(torch.__spec__.loader).__name__)
    torch.manual_seed(3), numpy.random.seed(1)
    print(torch.rand(2), numpy.random.rand(), Linear(2, 1), numpy.geterr())
    @record
    def main():
        raise ValueError("recorded")
    if __name__ == "__main__":
        main()
    """)  # fmt: skip
add("torch_variables", """
    import os, sys
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    os.environ["TORCH_LOGS"] = "-torch.export"
    os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
    os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch, logging, torch.distributed as dist, torch._dynamo, torch._inductor.config as inductor
    print(torch.get_num_threads(), dist.get_debug_level(), torch._dynamo.config.suppress_errors)
    print(inductor.fx_graph_cache, inductor.max_autotune)
    print(logging.getLogger("torch.export").getEffectiveLevel())
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    print(settings and settings())
    os._exit(0)  # torch 2.15 may hang at exit with these settings
    """)  # fmt: skip
add("torch_variables_read_once", """
    import os
    os.environ["KMP_AFFINITY"] = "none"
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    import torch
    """, differs={"Fast": "environment"})  # fmt: skip
