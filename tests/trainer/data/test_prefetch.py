"""Images are copied to a GPU on a separate stream. Stand-ins for streams show the order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import write_image_folder
from ddpjob_trainer.config.sections import DataConfig
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.images import ImageData
from ddpjob_trainer.data.pool import Request
from torch.utils._python_dispatch import TorchDispatchMode

WAIT, KEEP = "training waits for the copies", "the copies' memory is kept for training"


class StreamStandIn:
    """A stream that records for which other streams it waits."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: StreamStandIn) -> None:
        self.events.append(f"{self.name} waits for the {other.name}")


class Operations(TorchDispatchMode):
    """Records each operation with the current stream."""

    def __init__(self, events: list[str], current: list[str]) -> None:
        super().__init__()
        self.events, self.current = events, current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ != "lift_fresh":  # torch.from_numpy, in main memory
            self.events.append(f"{self.current[-1]}: {func.overloadpacket.__name__}")
        return func(*args, **(kwargs or {}))


def test_training_uses_images_only_after_their_copies_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image_folder(tmp_path, 8)
    data = open_data(DataConfig(name="imagefolder", dir=tmp_path, image_size=8, workers=0), torch.device("cpu"))
    assert isinstance(data, ImageData)
    chunks = [data._read(Request(False, 0, part, 8)) for part in ([0, 1], [2])]
    whole = Request(False, 0, [0, 1, 2], 8)
    plain = data._batch(data._train, whole, chunks)
    events: list[str] = []
    current = ["training"]

    @contextmanager
    def stream(chosen: StreamStandIn) -> Iterator[None]:
        current.append(chosen.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: StreamStandIn(current[-1], events))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, chosen: events.append(KEEP))
    data._copies = StreamStandIn("copies", events)
    with Operations(events, current):
        batch = data._batch(data._train, whole, chunks)
    assert torch.equal(batch.images, plain.images) and torch.equal(batch.labels, plain.labels)
    ready = events.index(WAIT)
    before, after = events[:ready], events[ready + 2 :]
    assert before.count("copies: copy_") == 2 and all(event.startswith("copies: ") for event in before)
    assert events[ready + 1] == KEEP
    assert "training: mul_" in after and all(event.startswith("training: ") for event in after)
