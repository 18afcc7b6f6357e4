"""Ranks train together only if their data is the same (names, sizes and labels), wherever the
folder is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from datasets import write_cifar_python, write_image_folder
from ddpjob_trainer import config
from ddpjob_trainer.commands import pack_shards
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import fingerprint
from ranks import good, run

TRAINING = ["data.batch=6", "data.image_size=16", "data.workers=0", "model.width=4", "train.epochs=1"]
TRAINING += ["eval.pictures=false", "checkpoint.every_seconds=0", "train.timeout_seconds=60"]


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Create the same images in two folders whose names differ in length."""
    first, second = tmp_path / "node0", tmp_path / "second-node"
    first.mkdir()
    write_image_folder(first, 4)
    shutil.copytree(first, second)
    return first, second


def other_classes(folder: Path) -> None:
    for split in ("train", "val"):
        (folder / split / "n01443537").rename(folder / split / "n00000001")


def other_image(folder: Path) -> None:
    image = folder / "train" / "n01440764" / "n01440764_1.JPEG"
    image.rename(image.with_name("n01440764_9.JPEG"))


def other_class_of_an_image(folder: Path) -> None:
    for one, other in (("n01440764", "n01443537"), ("n01443537", "n01440764")):
        (folder / "val" / one / f"{one}_2.JPEG").rename(folder / "val" / other / f"from-{one}.JPEG")


@pytest.mark.parametrize("change", [other_classes, other_image, other_class_of_an_image])
def test_ranks_with_different_images_of_the_same_number_are_refused(
    change: Callable[[Path], None], nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    change(nodes[1])
    keys = ["data.name=imagefolder", *TRAINING, f"checkpoint.dir={tmp_path / 'c'}"]
    ended = run(2, keys, env=lambda rank: {"DDPJOB_DATA_DIR": str(nodes[rank])})
    second = "n00000001, n01440764" if change is other_classes else "n01440764, n01443537"
    for end in ended:
        assert end.code == 1 and "DataError: the ranks see different data in" in end.error, end
        assert "rank 0: 8 training images, 8 test images, 2 classes (n01440764, n01443537), fingerprint " in end.error
        assert f"rank 1: 8 training images, 8 test images, 2 classes ({second}), fingerprint " in end.error


def test_the_path_of_the_folder_does_not_matter(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    keys = ["data.name=imagefolder", *TRAINING, f"checkpoint.dir={tmp_path / 'c'}"]
    good(2, keys, env=lambda rank: {"DDPJOB_DATA_DIR": str(nodes[rank])})


def test_a_resume_with_different_images_of_the_same_number_is_reported(
    nodes: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other_image(nodes[1])

    def resumed(node: Path, epochs: int) -> str:
        keys = ["data.name=imagefolder", f"data.dir={node}", f"checkpoint.dir={tmp_path / 'c'}"]
        good(1, [*TRAINING, *keys, f"train.epochs={epochs}"])
        return capfd.readouterr().out

    warning = "warning: the data differs from the checkpoint's"
    assert warning not in resumed(nodes[0], 1)
    assert warning not in resumed(nodes[0], 2)
    assert warning in (said := resumed(nodes[1], 3)) and "epoch 3 repeats some and omits others" in said
    assert warning not in resumed(nodes[1], 4)


def of(*keys: str) -> int:
    return open_data(config.load(None, [*TRAINING, *keys]).data).fingerprint()


def test_different_labels_in_shards_or_cifar_files_are_detected(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    for number, folder in enumerate(nodes):
        pack_shards.pack(folder, tmp_path / f"packed{number}", 20_000)
    shards = [of("data.name=shards", f"data.dir={tmp_path / f'packed{number}'}") for number in (0, 1)]
    assert shards[0] == shards[1]
    index = tmp_path / "packed1" / "train" / "index.npz"
    columns = dict(np.load(index))
    columns["labels"] = 1 - columns["labels"]
    np.savez(index, **columns)
    assert of("data.name=shards", f"data.dir={tmp_path / 'packed1'}") != shards[0]

    write_cifar_python(tmp_path)
    whole = of("data.name=cifar10", f"data.dir={tmp_path}")
    assert whole == of("data.name=cifar10", f"data.dir={tmp_path}")
    batches = tmp_path / "cifar-10-batches-py"
    for one, other in (("data_batch_1", "x"), ("data_batch_2", "data_batch_1"), ("x", "data_batch_2")):
        (batches / one).rename(batches / other)
    assert of("data.name=cifar10", f"data.dir={tmp_path}") != whole
    assert of("data.name=synthetic") != of("data.name=synthetic", "data.seed=1")


def test_the_hash_depends_on_the_boundaries_between_parts() -> None:
    assert fingerprint(b"ab", b"c") != fingerprint(b"a", b"bc")
    assert fingerprint(np.arange(3)) == fingerprint(np.arange(3).tobytes()) < 2**63
