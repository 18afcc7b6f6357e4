"""Worker processes that read and decode samples. Training and testing each have a pool."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ddpjob_trainer.errors import ConfigError, TrainerError
from ddpjob_trainer.lifecycle import fast_exit

_CHUNK = 16
_REQUESTS_AHEAD = 2
_MOST_WORKERS = 1024
_GROUP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class Request(NamedTuple):
    """Samples of one set that are read together.

    If `epoch` is None, the samples are not augmented. `side` is the side of decoded images in
    pixels, or 0 for the user's own data.
    """

    test: bool
    epoch: int | None
    numbers: list[int]
    side: int = 0


class Chunk(NamedTuple):
    """Decoded pixels (n, 3, size, size) uint8.

    `unreadable` has a pair (index, reason) for each image that could not be read.
    """

    pixels: torch.Tensor
    unreadable: list[tuple[int, str]]


C = TypeVar("C")


class Pool(Generic[C]):
    """Calls `read` for each request in worker processes, in order and ahead of the consumer.

    If there are 0 workers, `read` runs in this process. If `read` is a bound method, the pool holds
    only a weak reference to its object. A strong reference would form a cycle of the object and the
    loader. The garbage collector would then close the loader's queues before the loader itself.
    Each worker would miss the request to exit, and would be killed after 5 s.
    """

    def __init__(self, read: Callable[[Request], C], workers: int, pinned: bool) -> None:
        """Prepare the pool. Raises ConfigError if `workers` is negative or would exhaust the
        machine.
        """
        if not 0 <= workers <= _MOST_WORKERS:
            raise ConfigError(f"data.workers={workers}: must be from 0 to {_MOST_WORKERS} (per rank)")
        self._read = weakref.WeakMethod(read) if isinstance(read, MethodType) else lambda: read
        self._workers, self._pinned = workers, pinned
        self._waiting = _Waiting()
        self._loader: DataLoader[C] | None = None

    def run(self, requests: Iterator[Request]) -> Iterator[list[C]]:
        """Yield each request's chunks, in the order of the requests.

        A request is divided among all workers. Only one run is possible at a time, so a new run
        ends the previous one. Raises TrainerError if `read` raises it.
        """
        first = next(requests, None)
        if first is None:
            return
        counts: list[int] = []
        self._waiting.requests = _divide(chain([first], requests), counts, self._workers)
        if self._loader is None:
            self._loader = self._open(len(first.numbers))
        with _without_signals():
            chunks = iter(self._loader)  # The first run forks the workers.
        while (chunk := _next(chunks)) is not None:
            yield [chunk, *(part for _ in range(counts.pop(0) - 1) if (part := _next(chunks)) is not None)]

    def _open(self, size: int) -> DataLoader[C]:
        """Return a loader whose workers read ahead of training.

        While training uses a request of `size` samples, the workers read the next two requests.
        """
        workers = self._workers
        return DataLoader(
            _Reader(self._read),
            batch_size=None,
            sampler=self._waiting,
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=self._pinned,
            prefetch_factor=max(2, -(-_REQUESTS_AHEAD * size // (_CHUNK * workers))) if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=_stay_with_the_rank,
            # Only forked workers share the list of images without copying or pickling it.
            multiprocessing_context="fork" if workers and "fork" in multiprocessing.get_all_start_methods() else None,
            # Without a generator of its own, the loader would draw from dropout's generator in each
            # epoch.
            generator=torch.Generator(),
        )


def _divide(requests: Iterable[Request], counts: list[int], workers: int) -> Iterator[Request]:
    """Divide requests into parts of at most 16 samples, and yield the parts.

    The number of parts in each request is appended to `counts`.
    """
    for request in requests:
        each = max(1, min(_CHUNK, -(-len(request.numbers) // max(1, workers))))
        parts = [request.numbers[begin : begin + each] for begin in range(0, len(request.numbers), each)] or [[]]
        counts.append(len(parts))
        yield from (request._replace(numbers=numbers) for numbers in parts)


class _Waiting(Sampler[Request]):
    """Gives the requests of the current run to the loader, as a sampler."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class _Reader(Dataset[C]):
    def __init__(self, read: Callable[[], Callable[[Request], C] | None]) -> None:
        self._read = read

    def __getitem__(self, request: Request) -> C:
        read = self._read()
        assert read is not None, "the pool is running, but its owner has been deleted"
        try:
            return read(request)
        # The loader would treat StopIteration as the end of the data.
        except StopIteration as error:
            raise RuntimeError("a Dataset raised StopIteration for a sample") from error


@contextmanager
def _without_signals() -> Iterator[None]:
    """Block SIGTERM and SIGINT in processes that are forked during the `with` block.

    Each new process unblocks the signals at the end of `_stay_with_the_rank`. The signal mask
    applies only to this thread, so another thread can still receive Ctrl-C. KeyboardInterrupt is
    therefore delayed until the end of the block. If it were raised in a fork hook, Python would
    only print it, and training would continue.
    """
    handler, interrupts = signal.getsignal(signal.SIGINT), list[Any]()
    held = handler if callable(handler) and threading.current_thread() is threading.main_thread() else None
    if held is not None:
        signal.signal(signal.SIGINT, lambda *interrupt: interrupts.append(interrupt))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held is not None:
            signal.signal(signal.SIGINT, held)
            if interrupts:
                held(*interrupts[0])


def _stay_with_the_rank(_: int) -> None:
    """Make sure that only the rank stops this worker.

    torchrun's SIGTERM and Ctrl-C reach the rank's whole process group. If such a signal ended a
    worker, the rank would abort before it has saved, so the worker leaves the group. On Linux, the
    kernel kills the worker once the rank is gone. Elsewhere, the worker checks every few seconds
    whether the rank still runs.
    """
    os.setpgid(0, 0)
    for signum in signal.sigpending() & _GROUP_SIGNALS:
        # The signal was meant for the rank, but arrived before this worker had left the rank's
        # group.
        signal.sigwait({signum})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and not fast_exit.end_with(parent.pid, signal.SIGKILL):
        # The rank ended before this worker could ask to be killed with it.
        os._exit(1)


def _identity(chunk: Any) -> Any:
    return chunk


def _next(chunks: Iterator[C]) -> C | None:
    try:
        return next(chunks, None)
    # An error from a worker process contains a traceback that ends with the original message.
    except TrainerError as error:
        kind = type(error)
        raise kind(str(error).strip().rsplit(f"{kind.__name__}: ", 1)[-1]) from error
