"""Measures, in any training loop, how long each rank itself works per step, and finds lagging
ranks.

Problem: in a group, a step takes equally long on every rank, because all ranks wait for the slowest
one. The duration of a step therefore does not show which rank is slow.

Rule: a rank's own work is the time from one step of its first optimizer to the next, excluding
waits for other ranks. `WorkClock` recognizes two kinds of waits:

- DDP waits at the end of a backward pass. Callbacks at the end of a pass run in the order they were
  queued, and this module queues its callback before DDP does. So DDP's wait lasts from this
  module's callback until `torch.autograd.backward` returns.
- All other waits are calls to `Work.wait`. On GPUs, newer versions of torch also wait in the calls
  to the collectives themselves.

On a GPU, the stream waits, not the host, so waits are measured by events in the GPU's stream. If a
version of torch waits in other functions, all ranks show equal times, and no rank is named. The
measurement has not been tested on several GPUs yet.

Only the median over many steps counts, because a step with an evaluation or a checkpoint is an
outlier. A *check* takes place every LOOK_SECONDS: each rank writes its median into the group's
store, and rank 0 reads and judges all medians (`stragglers.py`). If there were no new steps, no
rank is judged.

Example: two ranks compute for 100 ms and a third one for 200 ms, and all exchange gradients.

    rank 0    step 210 ms, of which it waits 110 ms    own work 100 ms
    rank 2    step 210 ms, of which it waits  10 ms    own work 200 ms: it lags, at a cost of 0.48

Why: docs/decisions/0026.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment
from ddpjob_pod.stragglers import Straggler, Stragglers

LOOK_SECONDS = 5.0
FACTOR, SECONDS = 1.5, 30.0
"""A rank is named as lagging if, for SECONDS, its own work has taken FACTOR times as long as the
others' work. Both values are also the defaults of the built-in trainer.
"""
COLLECTIVES = (
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "broadcast", "reduce"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "alltoall_base"),
    *("send", "recv"),
)
"""Methods of torch's ProcessGroup in which a GPU's stream can wait for other ranks. Each version of
torch has only some of them.
"""
_OPTIMIZER = "torch.optim.optimizer"
_RECENT = 200
"""Maximum number of steps from which a median is computed."""
_FEWEST = 3
"""Minimum number of steps from which a median is computed. If there are fewer steps, they are kept
for the next check.
"""
_LEFT = 100
"""If another optimizer takes this many steps without a step of the first one, it counts as the
first one from then on.
"""
_MOST_WAITS = 10_000
"""Maximum number of waits in a step. A step with more waits is not measured."""
_UNREAD = 100
"""Maximum number of measured steps whose CUDA events have not been read yet. While there are this
many, new steps are not measured.
"""


class WorkClock:
    """Measures how long this rank itself works in each step.

    `step_ends` must be called in the training thread, but `waited` can be called in any thread.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._first: int | None = None  # The id of the first optimizer that took a step. Only its steps count.
        self._others: dict[int, int] = {}  # The other optimizers' steps since the first one's last step, by id.
        self._mark: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._unread: collections.deque[tuple[Any, Any, list[tuple[Any, Any]]]] = collections.deque()
        self._thread: int | None = None
        self._steps: collections.deque[tuple[float, float]] = collections.deque(maxlen=_RECENT)

    def mark(self) -> Any:
        """Return a mark for the present moment.

        On a GPU, the mark is an event in the GPU's stream. Without a GPU, it is the time.
        """
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return time.perf_counter()
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self, begin: Any, end: Any) -> None:
        """Count the time between two marks as a wait, if the training thread is calling.

        On a GPU, torch's own threads count as well, because they run the backward pass. Their names
        begin with "Dummy-", because Python did not start them.
        """
        thread = threading.current_thread()
        if thread.ident == self._thread or (thread.name.startswith("Dummy-") and not isinstance(begin, float)):
            if len(self._waits) >= _MOST_WAITS:
                self._mark, self._waits = None, []
            self._waits.append((begin, end))

    def step_ends(self, optimizer: Any) -> None:
        """Record the end of a step. Only steps of the first optimizer count."""
        if self._first is None:
            self._first = id(optimizer)
        if self.is_hidden():
            return
        if id(optimizer) != self._first:
            self._others[id(optimizer)] = steps = self._others.get(id(optimizer), 0) + 1
            if steps < _LEFT:
                return
            self._first, self._mark = id(optimizer), None
        self._others.clear()
        self._thread = threading.get_ident()
        now, before, waits = self.mark(), self._mark, self._waits
        self._mark, self._waits = now, []
        if before is not None and type(before) is type(now) and len(self._unread) < _UNREAD:
            self._unread.append((before, now, waits))

    def is_hidden(self) -> bool:
        """Whether torch is compiling this code or capturing it in a CUDA graph. In both cases,
        measured times mean nothing.
        """
        cuda = self._torch.cuda
        compiling = getattr(getattr(self._torch, "compiler", None), "is_compiling", lambda: False)
        return bool(compiling() or (cuda.is_initialized() and cuda.is_current_stream_capturing()))

    def take(self) -> tuple[float, float] | None:
        """Return the median own work and the median duration of a step, in seconds.

        Both medians cover the steps since the last call that returned medians. Return None if there
        are too few of these steps. Steps that the GPU has not finished yet are left for the next
        call.
        """
        while self._unread and _is_over(self._unread[0][1]):
            begin, end, waits = self._unread.popleft()
            whole = _seconds(begin, end)
            waited = sum(_seconds(*wait) for wait in waits if type(wait[1]) is type(end) and _is_over(wait[1]))
            self._steps.append((max(0.0, whole - waited), whole))
        if len(self._steps) < _FEWEST:
            return None
        steps = list(self._steps)
        self._steps.clear()
        return statistics.median(own for own, _ in steps), statistics.median(whole for _, whole in steps)


def _is_over(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000)


class Lookout:
    """Compares how long each rank itself works. On rank 0, passes the lagging ranks to `say`."""

    def __init__(
        self, say: Callable[[list[dict[str, float]]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._said: list[dict[str, float]] = []
        self._judge = Stragglers(FACTOR, SECONDS)

    def look(self, clock: WorkClock, store: Any, rank: int, world: int) -> None:
        """Write this rank's figures into the group's store. On rank 0, also compare the figures of
        all ranks.
        """
        figures = clock.take()
        if figures is None:
            return
        own, step = figures
        store.set(_key(rank), f"{own:.6g}")
        keys = [_key(number) for number in range(world)]
        if rank or not store.check(keys):
            return
        found = self._judge.add(self._clock(), read_seconds(store.multi_get(keys)), step=step)
        self.report(found)

    def report(self, found: tuple[Straggler, ...]) -> None:
        """Pass the lagging ranks to `say`, unless nothing has changed since the last call."""
        entries = [straggler.as_figures() for straggler in found]
        if entries != self._said:
            self._said = entries
            self._say(entries)


def _key(rank: int) -> str:
    """Return the key under which a rank writes its figure.

    The key contains the round, because the store can outlive a round.
    """
    return f"ddpjob/own-work/{JobEnvironment.read().fence}/{rank}"


def read_seconds(values: Iterable[bytes]) -> list[float]:
    """Parse the ranks' figures as seconds. A value that is not a positive number becomes 0
    (unknown).
    """
    found = []
    for value in values:
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        found.append(seconds if 0 < seconds < float("inf") else 0.0)
    return found


_begun: list[Lookout] = []


def begin(say: Callable[[list[dict[str, float]]], None]) -> None:
    """Start measuring this process's steps as soon as the program has imported torch.

    Whenever the lagging ranks change, `say` is called with the entries for a progress report. If
    there is only one rank, nothing is measured. Later calls do nothing.
    """
    if not _begun and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        _begun.append(Lookout(say))
        if _OPTIMIZER in sys.modules:
            _measure(sys.modules[_OPTIMIZER])
        else:
            sys.meta_path.insert(0, _TorchImport())


class _TorchImport:
    """Import hook that starts the measurement as soon as the program has imported torch.

    The hook waits for torch itself, not for torch.optim. In a forked worker, the import of torch
    makes all of its modules appear at once, so a hook for torch.optim would not be called.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torch as the other import hooks do, and start measuring once torch has been
        executed.
        """
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_measure(module: Any) -> None:
            execute(module)
            _measure(importlib.import_module(_OPTIMIZER))

        spec.loader.exec_module = execute_and_measure  # type: ignore[method-assign]
        return spec


def _measure(optimizer_module: Any) -> None:
    """Register a hook that is called after each optimizer step.

    The hook's first call also starts the measurement of waits, because torch may not be completely
    imported before then.
    """
    hook = getattr(optimizer_module, "register_optimizer_step_post_hook", None)
    if hook is None:
        return  # torch before 2.0 has no such hook
    clocks: list[WorkClock] = []

    def step_ends(optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not clocks:
            clocks.append(_start(sys.modules["torch"]))
        clocks[0].step_ends(optimizer)

    hook(step_ends)


def _start(torch: Any) -> WorkClock:
    clock = WorkClock(torch)
    if torch.distributed.is_available():
        torch.distributed.Work.wait = count_waits(torch.distributed.Work.wait, clock)
        group = torch.distributed.ProcessGroup
        for name in COLLECTIVES if torch.cuda.is_available() else ():
            if hasattr(group, name):
                setattr(group, name, count_waits(getattr(group, name), clock))
        torch.autograd.backward = count_tail(torch.autograd.backward, clock, torch)
        process = os.getpid()
        arguments = clock, torch.distributed, process
        threading.Thread(target=_look_on, args=arguments, name="ddpjob-own-work", daemon=True).start()
    return clock


def count_waits(wait: Callable[..., Any], clock: WorkClock) -> Callable[..., Any]:
    """Return a version of `wait` that counts its own duration as a wait."""

    @functools.wraps(wait)
    def counted(*given: Any, **named: Any) -> Any:
        if clock.is_hidden():
            return wait(*given, **named)
        began = clock.mark()
        try:
            return wait(*given, **named)
        finally:
            clock.waited(began, clock.mark())

    return counted


def count_tail(backward: Callable[..., Any], clock: WorkClock, torch: Any) -> Callable[..., Any]:
    """Return a version of torch's backward that counts the time after this rank's last gradient as
    a wait.
    """
    queue = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)
    if queue is None:
        return backward

    @functools.wraps(backward)
    def counted(tensors: Any, *given: Any, **named: Any) -> Any:
        ends: list[Any] = []
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        handle = None
        # With compiled autograd, the wait is not measured, because the hook would be compiled into
        # the backward pass.
        compiled = getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False)
        if not compiled and isinstance(roots, (list, tuple)) and roots and getattr(roots[0], "requires_grad", False):
            handle = roots[0].register_hook(lambda _: queue(lambda: ends.append((clock.mark(), len(clock._waits)))))
        try:
            return backward(tensors, *given, **named)
        finally:
            if handle is not None:
                handle.remove()
            if ends:
                began, known = ends[0]
                del clock._waits[known:]  # The wait recorded next includes these waits.
                clock.waited(began, clock.mark())

    return counted


def _look_on(clock: WorkClock, distributed: Any, process: int) -> None:
    """Compare the ranks every LOOK_SECONDS, until the store is gone."""
    while os.getpid() == process:
        time.sleep(LOOK_SECONDS)
        if not distributed.is_initialized() or distributed.get_world_size() < 2:
            continue
        try:
            store = distributed.distributed_c10d._get_default_store()
            _begun[0].look(clock, store, distributed.get_rank(), distributed.get_world_size())
        except Exception:  # The store's host is gone, or this version of torch has no such store.
            return
