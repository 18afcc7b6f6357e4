"""data.decoder=dali: NVIDIA DALI decodes training images, on a GPU if there is one.

DALI decodes the same crops that worker processes would choose, and nothing outside a crop
(decoders.image_slice, https://docs.nvidia.com/deeplearning/dali). If DALI cannot decode a batch,
this process decodes the batch as a worker would, and reports the broken image. Test images are
always decoded by worker processes.

A separate CUDA stream copies the pixels, so a batch that is decoded ahead does not wait for
training's kernels. This module has not been run on a GPU.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ddpjob_trainer.data.decode import Box, UnreadableImage, size_of
from ddpjob_trainer.data.pool import Chunk, Request
from ddpjob_trainer.errors import ConfigError

_AHEAD = 2

Contents = list[bytes | OSError]
Crop = tuple[tuple[int, int], tuple[int, int], int]
"""A crop as ((top, left), (height, width), mirrored), where `mirrored` is 0 or 1."""


class DaliDecoder:
    """Decodes two batches ahead of training, in threads of this process."""

    def __init__(
        self,
        read: Callable[[list[int]], Contents],
        choose: Callable[[Request, int], tuple[Callable[[int, int], Box], bool]],
        fallback: Callable[[Request], Chunk],
        *,
        workers: int,
        device: torch.device,
    ) -> None:
        """Prepare the decoder. Raises ConfigError if DALI is not installed.

        `choose(request, index)` is called for each image of a request. It returns a function that
        computes the crop from the image's height and width, and a flag that indicates whether to
        mirror the image. `fallback` decodes a request without DALI.
        """
        self._read, self._choose, self._fallback = read, choose, fallback
        self._threads, self._device = max(1, workers), device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        try:
            self._dali = importlib.import_module("nvidia.dali")
        except ImportError as error:
            raise ConfigError(
                f"data.decoder=dali: NVIDIA DALI cannot be imported ({error}); install "
                "nvidia-dali-cuda120 or nvidia-dali-cuda130 with pip, or set data.decoder=auto"
            ) from error
        self._readers = ThreadPoolExecutor(self._threads, thread_name_prefix="read")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="dali")
        self._pipelines: dict[tuple[int, int], Any] = {}

    def run(self, requests: Iterator[Request]) -> Iterator[list[Chunk]]:
        """Yield the decoded pixels of each request, in order, as `Pool.run` does."""
        waiting: deque[Future[Chunk]] = deque()
        for request in requests:
            waiting.append(self._ahead.submit(self._decode, request))
            if len(waiting) > _AHEAD:
                yield [self._hand_over(waiting.popleft().result())]
        while waiting:
            yield [self._hand_over(waiting.popleft().result())]

    def _hand_over(self, chunk: Chunk) -> Chunk:
        """Make a chunk safe to use on the calling thread's current stream, and return the chunk."""
        if chunk.pixels.is_cuda:
            # Without `record_stream`, a later copy could reuse the memory before training has read
            # the pixels.
            chunk.pixels.record_stream(torch.cuda.current_stream(chunk.pixels.device))
        return chunk

    def _decode(self, request: Request) -> Chunk:
        size = len(request.numbers)
        contents: Contents = [b""] * size
        parts = [request.numbers[first :: self._threads] for first in range(self._threads)]
        for first, part in enumerate(self._readers.map(self._read, parts)):
            contents[first :: self._threads] = part
        try:
            crops = [self._crop(request, index, content) for index, content in enumerate(contents)]
            return Chunk(self._pixels(contents, crops, request.side), []) if crops else self._fallback(request)
        except UnreadableImage:
            return self._fallback(request)
        # DALI cannot decode an image. Discard the pipeline, because it is unusable after this
        # error.
        except RuntimeError:
            self._pipelines.pop((size, request.side), None)
            return self._fallback(request)

    def _pixels(self, contents: Contents, crops: list[Crop], side: int) -> torch.Tensor:
        """Return the pixels of the crops, (n, 3, side, side) uint8.

        The result is a copy, because DALI reuses its own memory.
        """
        pipeline = self._pipelines.get((len(crops), side)) or self._build(len(crops), side)
        pipeline.feed_input(
            "contents", [np.frombuffer(content, dtype=np.uint8) for content in contents if isinstance(content, bytes)]
        )
        for name, column in zip(("corners", "sizes", "mirrored"), zip(*crops, strict=True), strict=True):
            pipeline.feed_input(name, [np.array(value, dtype=np.int32) for value in column])
        (images,) = pipeline.run()
        dense = images.as_tensor()
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            found = from_dlpack(dense) if self._stream else torch.from_numpy(np.array(dense))
            copied = found.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        # The copy is asynchronous. Wait for it, because DALI's next run overwrites the original.
        if self._stream:
            self._stream.synchronize()
        return copied

    def _crop(self, request: Request, index: int, content: bytes | OSError) -> Crop:
        if isinstance(content, OSError):
            raise UnreadableImage(str(content))
        choose, mirrored = self._choose(request, index)
        box = choose(*size_of(content))
        return (box.top, box.left), (box.height, box.width), int(mirrored)

    def _build(self, size: int, side: int) -> Any:
        fn, types = importlib.import_module("nvidia.dali.fn"), importlib.import_module("nvidia.dali.types")
        on_gpu = self._device.type == "cuda"
        pipeline = self._dali.Pipeline(
            batch_size=size,
            num_threads=self._threads,
            device_id=(self._device.index or 0) if on_gpu else None,
            exec_async=False,
            exec_pipelined=False,
            prefetch_queue_depth=1,
        )
        with pipeline:
            contents = fn.external_source(name="contents", dtype=types.UINT8, ndim=1)
            corners, sizes = (fn.external_source(name=name, dtype=types.INT32, ndim=1) for name in ("corners", "sizes"))
            mirrored = fn.external_source(name="mirrored", dtype=types.INT32, ndim=0)
            images = fn.decoders.image_slice(
                contents, corners, sizes, axes=[0, 1], device="mixed" if on_gpu else "cpu", output_type=types.RGB
            )
            images = fn.resize(images, size=[side] * 2, interp_type=types.INTERP_LINEAR, antialias=True)
            pipeline.set_outputs(fn.flip(images, horizontal=mirrored))
        pipeline.build()
        self._pipelines[size, side] = pipeline
        return pipeline
