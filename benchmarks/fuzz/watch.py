"""Runs a parser on one input, and reports forbidden behaviour."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import CHECKOUT
from benchmarks.fuzz.mutate import Form

SECONDS = 5.0
"""Maximum CPU seconds per input, far more than any known input needs."""
MEMORY = 2**32
"""Maximum memory per input in bytes. The largest image that is decoded takes 3.3 GiB."""
_ACTS = frozenset({
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn", "os.kill",
    "socket.connect", "socket.getaddrinfo", "socket.bind", "shutil.rmtree", "os.putenv", "builtins.input",
})  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def scratch_of(pid: int) -> Path:
    """Return the only folder in which the parsers of a process write files."""
    return Path(tempfile.gettempdir()) / f"ddpjob-fuzz-{pid}"


SCRATCH = scratch_of(os.getpid())


@dataclass(frozen=True)
class Target:
    """A callable parser. `refusals` are the exceptions named in its docstring."""

    read: Callable[[bytes], object]
    seeds: list[bytes]
    """Good inputs, which it accepts."""
    refusals: tuple[type[Exception], ...]


@dataclass(frozen=True)
class Parser:
    """A parser of untrusted input. `make` imports it, which may take seconds."""

    name: str
    what: str
    form: Form
    make: Callable[[], Target]


@dataclass(frozen=True)
class Finding:
    """A fault that an input causes. `where` is the file and line in the project that caused it."""

    kind: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Outcome:
    """The outcome of an input."""

    refused: bool
    seconds: float
    finding: Finding | None = None


def scratch(name: str) -> Path:
    """Create a folder for a parser that reads files. The outermost `watching` removes it."""
    folder = SCRATCH / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Overdue(BaseException):
    """The input takes too much CPU time.

    This is not an Exception, so that parsers do not catch it.
    """


class _Nothing(io.TextIOBase):
    """Discards the logs of parsers."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Prepare the process for `warm` and `attempt`. Works only in the main thread."""
    _install_hook()
    before = signal.signal(signal.SIGPROF, _interrupt)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    _State.depth += 1
    try:
        yield
    finally:
        _State.depth -= 1
        if not _State.depth:
            shutil.rmtree(SCRATCH, ignore_errors=True)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def warm(target: Target) -> None:
    """Read the seeds once, because the first calls import modules, and limit memory from then on.

    Raises AssertionError if the first seed is refused.
    """
    for number, seed in enumerate(target.seeds):
        with contextlib.redirect_stderr(_Nothing()):
            try:
                target.read(seed)
            except target.refusals as error:
                assert number, f"the first seed is refused: {error}"
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY, hard))


def attempt(target: Target, data: bytes, seconds: float = SECONDS) -> Outcome:
    """Run the parser on an input."""
    _State.acts.clear()
    began, refused, finding = time.process_time(), False, None
    try:
        with contextlib.redirect_stderr(_Nothing()):
            _State.armed = True
            # Raise repeatedly, because a parser may catch everything.
            signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
            try:
                target.read(data)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                _State.armed = False
    except target.refusals as error:
        refused, finding = True, _hidden(error)
    except KeyboardInterrupt:
        raise
    except _Overdue as error:
        finding = Finding("hang", f"more than {seconds:g} s of CPU time", _place(error))
    except MemoryError as error:
        finding = Finding("memory", f"more than {MEMORY >> 20} MiB", _place(error))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace").decode()
        finding = Finding("crash", text[:200], _place(error))
    if _State.acts:
        finding = Finding("act", _State.acts[0])
    return Outcome(refused, time.process_time() - began, finding)


class _State:
    armed = False
    hooked = False
    depth = 0
    acts: list[str] = []  # noqa: RUF012


def _install_hook() -> None:
    """Install the audit hook once, because it lasts as long as the process."""
    if not _State.hooked:
        sys.addaudithook(_note_act)
        _State.hooked = True


def _note_act(event: str, arguments: tuple[Any, ...]) -> None:
    if not _State.armed:
        return
    if event in _ACTS or (event == "open" and _writes_elsewhere(*arguments)):
        _State.acts.append(f"{event} {ascii(arguments[:1])[:100]}")


def _writes_elsewhere(path: Any, mode: Any, flags: Any) -> bool:
    if not isinstance(flags, int) or not flags & _WRITES or isinstance(path, int):
        return False
    text = os.fsdecode(path)
    # A late import may write its module's bytecode.
    return not text.startswith(str(SCRATCH)) and "__pycache__" not in text


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Overdue


def _hidden(error: BaseException | None) -> Finding | None:
    """Return a memory finding if the refusal was caused by the memory limit; otherwise None."""
    for _ in range(20):
        if isinstance(error, MemoryError):
            return Finding("memory", f"more than {MEMORY >> 20} MiB", _place(error))
        error = error and (error.__cause__ or error.__context__)
    return None


def _place(error: BaseException) -> str:
    """Return the innermost line of the project in the exception's traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    ours = [frame for frame in frames if frame.filename.startswith(str(CHECKOUT)) and ".venv" not in frame.filename]
    if not frames:
        return ""
    last = (ours or frames)[-1]
    return f"{last.filename.removeprefix(f'{CHECKOUT}/')}:{last.lineno}"


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
