"""Worker processes that read and decode images: one pool for as long as the data set lives, for training and test."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ddpjob_trainer import leaving
from ddpjob_trainer.errors import DataError

_CHUNK = 16
_REQUESTS_AHEAD = 2


class Request(NamedTuple):
    """Samples of the training or the test set that are read together; `epoch` None: not augmented."""

    test: bool
    epoch: int | None
    numbers: list[int]


class Chunk(NamedTuple):
    """Pixels (n, 3, size, size) uint8, and which of them could not be read: (position, reason)."""

    pixels: torch.Tensor
    unreadable: list[tuple[int, str]]


class Pool:
    """Runs `read` on requests in worker processes, in order, ahead of whoever takes the results; in this process where there are none."""

    def __init__(self, read: Callable[[Request], Chunk], workers: int, pinned: bool) -> None:
        self._read, self._workers, self._pinned = read, workers, pinned
        self._waiting = _Waiting()
        self._loader: DataLoader[Chunk] | None = None

    def run(self, requests: Iterator[Request]) -> Iterator[list[Chunk]]:
        """For each request its parts, in order: it is divided so that all workers share it. Raises DataError where `read` does.

        One run at a time: a new one ends the one before it.
        """
        first = next(requests, None)
        if first is None:
            return
        counts: list[int] = []
        self._waiting.requests = self._divided(chain([first], requests), counts)
        if self._loader is None:
            self._loader = self._open(len(first.numbers))
        chunks = iter(self._loader)
        while (chunk := _next(chunks)) is not None:
            yield [chunk, *(part for _ in range(counts.pop(0) - 1) if (part := _next(chunks)) is not None)]

    def _divided(self, requests: Iterable[Request], counts: list[int]) -> Iterator[Request]:
        """Parts of at most 16 images; `counts` tells how many parts each request has."""
        for request in requests:
            each = max(1, min(_CHUNK, -(-len(request.numbers) // max(1, self._workers))))
            parts = [request.numbers[begin : begin + each] for begin in range(0, len(request.numbers), each)] or [[]]
            counts.append(len(parts))
            yield from (request._replace(numbers=numbers) for numbers in parts)

    def _open(self, size: int) -> DataLoader[Chunk]:
        """Forks the workers. While a request of `size` samples is trained on, they go on with the next two."""
        workers = self._workers
        return DataLoader(
            _Reader(self._read),
            batch_size=None,
            sampler=self._waiting,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=self._pinned,
            prefetch_factor=max(2, -(-_REQUESTS_AHEAD * size // (_CHUNK * workers))) if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=_stay_with_the_rank,
            # Only a fork has the images' list at no cost, and needs nothing that can be pickled.
            multiprocessing_context="fork" if workers and "fork" in multiprocessing.get_all_start_methods() else None,
            generator=torch.Generator(),  # Else each epoch would draw from the generator that dropout uses.
        )


class _Waiting(Sampler[Request]):
    """What the loader asks for at the beginning of each run."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class _Reader(Dataset[Chunk]):
    def __init__(self, read: Callable[[Request], Chunk]) -> None:
        self._read = read

    def __getitem__(self, request: Request) -> Chunk:
        return self._read(request)


def _stay_with_the_rank(_: int) -> None:
    """A worker is the rank's to end: torchrun's SIGTERM and Ctrl-C go to the rank's process group, which a worker's end would break off
    before it has saved. On Linux the kernel ends the worker when the rank has gone; elsewhere the loader looks each few seconds."""
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and not leaving.end_with(parent.pid, signal.SIGKILL):
        os._exit(1)  # It went before the kernel was told.


def _as_it_is(chunk: Any) -> Any:
    return chunk


def _next(chunks: Iterator[Chunk]) -> Chunk | None:
    try:
        return next(chunks, None)
    except DataError as error:  # A worker process wraps the sentence in its traceback.
        raise DataError(str(error).strip().rsplit("DataError: ", 1)[-1]) from error
