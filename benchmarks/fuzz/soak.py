"""Runs parsers for a long time, each in a separate process, which may die, hang or grow.

Parsers take turns of equal CPU time. Their processes stay alive, so that memory growth from
turn to turn is detected.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fuzz import CORPUS
from benchmarks.fuzz.mutate import LONGEST, Mutator
from benchmarks.fuzz.watch import SECONDS, Finding, Parser, Target, attempt, scratch_of, warm, watching
from benchmarks.processes import memory, processor_seconds

TURN = 2.0
"""CPU seconds that a parser gets per turn."""
GROWTH = 32.0
"""Growth in MiB, from the first to the last tenth of a process's turns, that counts as a
finding."""
_FEWEST_TURNS = 10
_MOST_DEATHS = 10
"""Number of deaths after which a parser gets no more turns, because each start takes seconds."""


class _Current(ctypes.Structure):
    """The input that a process is working on, which the parent reports if the process dies."""

    _fields_ = (("number", ctypes.c_longlong), ("length", ctypes.c_int), ("content", ctypes.c_ubyte * LONGEST))


@dataclass
class _Turn:
    """The result of one turn.

    `findings` contains (count, first finding, its input) for each common cause.
    """

    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    findings: dict[str, tuple[int, Finding, bytes]] = field(default_factory=dict)


@dataclass
class Result:
    """The result of a parser. `memory` is in MiB after each turn of its newest process."""

    parser: Parser
    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    findings: dict[str, tuple[int, Finding, bytes]] = field(default_factory=dict)
    memory: list[float] = field(default_factory=list)
    deaths: int = 0

    def add(self, turn: _Turn) -> None:
        self.inputs += turn.inputs
        self.refused += turn.refused
        self.slowest = max(self.slowest, turn.slowest)
        for key, (count, finding, data) in turn.findings.items():
            before, *first = self.findings.get(key, (0, finding, data))
            self.findings[key] = (before + count, *first)  # type: ignore[assignment]

    @property
    def growth(self) -> float:
        """Return the growth in MiB from the first to the last tenth of the turns."""
        tenth = max(1, len(self.memory) // 10)
        # The first turn fills caches.
        return median(self.memory[-tenth:]) - median(self.memory[1 : 1 + tenth]) if len(self.memory) > 1 else 0.0


def inputs_of(parser: Parser, target: Target, seed: int, first: int = 0) -> Iterator[bytes]:
    """Yield the parser's inputs from number `first` on, endlessly. They are mutations of good
    inputs and of earlier findings.
    """
    mutator = Mutator(parser.form, [*target.seeds, *(file.read_bytes() for file in corpus_of(parser))])
    number = first
    while True:
        yield mutator.make(random.Random(f"{seed} {parser.name} {number}"))
        number += 1


def corpus_of(parser: Parser) -> list[Path]:
    """Return a parser's inputs that were once findings."""
    return sorted((CORPUS / parser.name).glob("*"))


def soak(
    parsers: Iterable[Parser],
    seed: int,
    is_over: Callable[[list[Result]], bool],
    *,
    turn: float = TURN,
    limit: float = SECONDS,
    progress: Callable[[list[Result]], None] = lambda results: None,
) -> list[Result]:
    """Give the parsers turns until `is_over`, which is checked after each round of turns."""
    results = [Result(parser) for parser in parsers]
    with ExitStack() as stack:
        runners = [_Runner(result, seed, turn, limit) for result in results]
        for runner in runners:
            stack.callback(runner.end)
        while not is_over(results) and any(result.deaths < _MOST_DEATHS for result in results):
            for runner in runners:
                if runner.result.deaths < _MOST_DEATHS:
                    runner.take_turn()
            progress(results)
    for result in results:
        if len(result.memory) >= _FEWEST_TURNS and result.growth > GROWTH:
            finding = Finding("growth", f"{result.growth:.0f} MiB in {len(result.memory)} turns")
            result.findings["growth"] = 1, finding, b""
    return results


class _Runner:
    """Runs a parser in a process, and starts a new process if that one dies."""

    def __init__(self, result: Result, seed: int, turn: float, limit: float) -> None:
        self.result, self._seed, self._turn, self._limit = result, seed, turn, limit
        self._context = multiprocessing.get_context("spawn")
        self._current: Any = RawValue(_Current)
        self._process: Any = None

    def take_turn(self) -> None:
        if self._process is None:
            self._start()
        self._connection.send(self._turn)
        before, since = -1, 0.0
        while not self._connection.poll(0.2):
            if not self._process.is_alive():
                self._bury(Finding("crash", f"the process has died: {self._ending()}"))
                return
            used = processor_seconds(self._process.pid)
            if self._current.number != before:
                before, since = self._current.number, used
            elif before >= 0 and used - since > 2 * self._limit + 1:  # Signals are not handled within a C function.
                self._process.kill()
                self._process.join()
                self._bury(Finding("hang", f"more than {2 * self._limit:g} s of CPU time in a C function"))
                return
        try:
            turn: _Turn = self._connection.recv()
        except EOFError:
            self._process.join()
            self._bury(Finding("crash", f"the process has died: {self._ending()}"))
            return
        self.result.add(turn)
        self.result.memory.append(memory(self._process.pid))

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            shutil.rmtree(scratch_of(self._process.pid), ignore_errors=True)
            self._process = None

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        first = self._current.number + 1 if self.result.deaths else 0
        self._current.number = -1
        arguments = (self.result.parser, self._seed, first, self._limit, self._current, theirs)
        self._process = self._context.Process(target=_work, args=arguments, daemon=True)
        with _one_thread():
            self._process.start()
        theirs.close()
        self.result.memory.clear()

    def _bury(self, finding: Finding) -> None:
        current = self._current
        if current.number < 0:
            raise RuntimeError(f"the parser {self.result.parser.name} cannot be started: {self._ending()}")
        content = bytes(current.content[: current.length])
        # The earlier inputs of the turn are not counted.
        self.result.add(_Turn(1, findings={f"{finding} {current.number}": (1, finding, content)}))
        self.result.deaths += 1
        self.end()

    def _ending(self) -> str:
        code = self._process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Allow libraries only one thread, because more would need the other CPUs."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _work(parser: Parser, seed: int, first: int, limit: float, current: Any, orders: Connection) -> None:
    """Run a parser's turns in its own process. Each order is the length of a turn."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent terminates this process.
    with watching():
        target = parser.make()
        warm(target)
        inputs = enumerate(inputs_of(parser, target, seed, first), first)
        # Run until the parent has exited.
        with suppress(EOFError, BrokenPipeError):
            while True:
                turn = _turn(target, inputs, orders.recv(), limit, current)
                gc.collect()  # The parent measures memory as soon as the turn is reported.
                orders.send(turn)


def _turn(target: Target, inputs: Iterator[tuple[int, bytes]], seconds: float, limit: float, current: Any) -> _Turn:
    turn, end = _Turn(), time.process_time() + seconds
    while time.process_time() < end:
        number, data = next(inputs)
        ctypes.memmove(current.content, data, len(data))
        current.length, current.number = len(data), number
        outcome = attempt(target, data, limit)
        turn.inputs += 1
        turn.refused += outcome.refused
        turn.slowest = max(turn.slowest, outcome.seconds)
        if (finding := outcome.finding) is not None:
            key = f"{finding.kind} {finding.what.partition(':')[0]} {finding.where}"
            count, *first = turn.findings.get(key, (0, finding, data))
            turn.findings[key] = (count + 1, *first)  # type: ignore[assignment]
    return turn


def write_findings(result: Result, folder: Path) -> Iterator[tuple[int, Finding, Path | None]]:
    """Write the first input of each finding to a file, and yield (count, finding, file)."""
    for count, finding, data in result.findings.values():
        path = None
        if finding.kind != "growth":
            path = folder / result.parser.name / f"{finding.kind}-{hashlib.sha256(data).hexdigest()[:8]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        yield count, finding, path
