"""NVIDIA DALI decodes training images. The tests use its CPU pipeline; on a GPU, the same code
runs.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.data import dali
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.data.decode import Box
from ddpjob_trainer.data.pool import Request
from ddpjob_trainer.errors import ConfigError
from PIL import Image


def is_installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False


needs_dali = pytest.mark.skipif(
    not is_installed(), reason="NVIDIA DALI is not installed: pip install nvidia-dali-cuda130 (200 MB)"
)


@pytest.fixture(autouse=True)
def _no_pipeline_stays() -> Iterator[None]:
    """Garbage-collect pipelines after each test. A forked rank does not have a pipeline's threads,
    so collecting one there would crash.
    """
    yield
    gc.collect()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder of photographs instead of noise, because the pixels of two decoders are
    compared.
    """
    from sklearn.datasets import load_sample_image

    for part in ("train", "val"):
        for name in ("china.jpg", "flower.jpg"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(4):
                image = Image.fromarray(load_sample_image(name)).resize((200 + 40 * number, 180))
                image.save(tmp_path / part / name / f"{number}.{'png' if number == 3 else 'jpg'}", quality=90)
    return tmp_path


def opened(folder: Path, *arguments: str) -> DataSet:
    return open_data(
        config.load(
            None, ["data.name=imagefolder", f"data.dir={folder}", "data.image_size=96", "data.workers=0", *arguments]
        ).data
    )


PARTS = [[0, 1, 2, 3, 4], [5, 6], [], [7]]


@needs_dali
def test_dali_gives_the_same_crops_and_flips(folder: Path) -> None:
    data = opened(folder, "data.decoder=dali")
    for epoch in (0, 1):
        for mine, other in zip(
            data.train_batches(PARTS, epoch), opened(folder).train_batches(PARTS, epoch), strict=True
        ):
            assert torch.equal(mine.labels, other.labels) and mine.images.shape == other.images.shape
            if len(mine.labels):
                assert (mine.images - other.images).abs().mean() < 0.02, (
                    "the difference is about one of 256 grey levels"
                )
                assert (mine.images.flip(-1) - other.images).abs().mean() > 0.1, "a mirrored image is detected"


@needs_dali
def test_a_broken_image_is_reported_and_dali_decodes_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "train" / "china.jpg" / "1.jpg"
    path.write_bytes(path.read_bytes()[:2000])
    (folder / "train" / "flower.jpg" / "2.jpg").write_bytes(b"text")
    unreadable = [
        batch.unreadable
        for batch in opened(folder, "data.decoder=dali").train_batches([[0, 2], [1, 0], [3], [6, 4], [5]], 0)
    ]
    assert unreadable == [0, 1, 0, 1, 0]
    reported = capsys.readouterr().err
    assert (
        f"image {path} cannot be read (" in reported
        and "flower.jpg/2.jpg cannot be read (not a known image format)" in reported
    )


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU and notes the calls that matter for its memory."""

    events: list[str] = []  # noqa: RUF012
    is_cuda = True

    def clone(self, **_: Any) -> torch.Tensor:  # type: ignore[override]
        self.events.append("copy")
        return super().clone()

    def record_stream(self, stream: Any) -> None:
        self.events.append(f"used by {stream}")


class Stream:
    """A stand-in for DALI's own CUDA stream."""

    def __init__(self, _: torch.device) -> None:
        OnGpu.events.clear()

    def __enter__(self) -> None:
        OnGpu.events.append("enter")

    def __exit__(self, *_: object) -> None:
        OnGpu.events.append("leave")

    def synchronize(self) -> None:
        OnGpu.events.append("wait")


class Pipeline:
    """A stand-in for DALI's pipeline, which writes each run's pixels into the same memory."""

    def __init__(self) -> None:
        self.pixels, self.runs = np.zeros((2, 5, 5, 3), dtype=np.uint8), 0

    def feed_input(self, *_: Any) -> None:
        pass

    def run(self) -> tuple[Pipeline]:
        self.runs += 1
        self.pixels[:] = self.runs
        return (self,)

    def as_tensor(self) -> np.ndarray[Any, Any]:
        return self.pixels


def test_pixels_are_copied_on_a_stream_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is complete before DALI runs again, and its memory is kept for the stream that
    trains. There is no GPU here, so stand-ins note what happens.
    """
    monkeypatch.setattr(dali.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "training")
    monkeypatch.setattr(dali, "from_dlpack", lambda dense: torch.from_numpy(dense).as_subclass(OnGpu))
    pipeline, content = Pipeline(), (folder / "train" / "china.jpg" / "0.jpg").read_bytes()
    monkeypatch.setattr(dali.DaliDecoder, "_build", lambda self, size, side: pipeline)
    decoder = dali.DaliDecoder(
        lambda numbers: [content] * len(numbers),
        lambda request, index: (lambda height, width: Box(0, 0, 5, 5), False),
        lambda request: pytest.fail("nothing is unreadable"),
        workers=1,
        device=torch.device("cuda"),
    )
    requests = iter([Request(False, 0, [0, 1], 5), Request(False, 0, [2, 3], 5)])
    chunks = [chunk for (chunk,) in decoder.run(requests)]
    assert [int(chunk.pixels.max()) for chunk in chunks] == [1, 2]
    copied = ["enter", "copy", "leave", "wait"]
    assert [event for event in OnGpu.events if "used" not in event] == 2 * copied
    assert OnGpu.events.count("used by training") == 2


def test_without_dali_the_error_names_the_package_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(dali.importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=r"data.decoder=dali: .*install nvidia-dali-cuda120"):
        opened(folder, "data.decoder=dali")


def test_randaugment_cannot_be_combined_with_dali(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.decoder=dali does not support RandAugment.*data.decoder=auto"):
        opened(folder, "data.decoder=dali", "data.randaugment_ops=1")
