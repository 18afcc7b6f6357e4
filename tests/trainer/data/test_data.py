"""Data sets are read in their real on-disk formats, augmentation does not depend on the number of
ranks, and errors are clear.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import jordan
import numpy as np
import pytest
import torch
from datasets import IMAGES, RANDOM, write_cifar_binary, write_cifar_python, write_image_folder
from ddpjob_trainer import config, train
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.config.sections import Flip, Padding
from ddpjob_trainer.data.augment import CropAndFlip, resized_crop_box
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import DataSet
from ddpjob_trainer.data.imagefolder import Folder
from ddpjob_trainer.errors import ConfigError, DataError
from machine import slowness
from ranks import TINY, final_losses, good, metrics, run
from torch.utils._python_dispatch import TorchDispatchMode


def opened(*arguments: str) -> DataSet:
    return open_data(config.load(None, list(arguments)).data)


def test_cifar10_python_and_binary_versions_give_the_same_as_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    (tmp_path / "py").mkdir()
    (tmp_path / "bin").mkdir()
    write_cifar_python(tmp_path / "py")
    write_cifar_binary(tmp_path / "bin")
    batches = [
        next(
            iter(
                opened("data.name=cifar10", "data.augment=false", f"data.dir={tmp_path / kind}").train_batches(
                    [list(range(50))], 0
                )
            )
        )
        for kind in ("py", "bin")
    ]
    assert torch.equal(batches[0].images, batches[1].images) and torch.equal(batches[0].labels, batches[1].labels)

    monkeypatch.setattr(
        torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True
    )  # MD5 checksums of the official files
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    (tmp_path / "py" / "cifar-10-batches-py" / "batches.meta").write_bytes(
        pickle.dumps({"label_names": list("abcdefghij")})
    )
    reference = torchvision.datasets.CIFAR10(str(tmp_path / "py"), train=True)
    normalize = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ]
    )
    for number in (0, 17, 49):
        image, label = reference[number]
        torch.testing.assert_close(batches[0].images[number], normalize(image), rtol=1e-5, atol=1e-5)
        assert batches[0].labels[number] == label


def test_cifar100_binary_uses_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    fine = RANDOM.integers(0, 100, 60).astype(np.uint8)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(np.hstack([np.full((60, 1), 3, np.uint8), fine[:, None], IMAGES]).tobytes())
    data = opened("data.name=cifar100", f"data.dir={tmp_path}")
    assert data.classes == 100
    assert next(iter(data.test_batches([list(range(60))]))).labels.tolist() == fine.tolist()


@pytest.mark.parametrize("write", [write_cifar_python, write_cifar_binary])
def test_cifar_trains_on_two_ranks_as_on_one(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    arguments = [
        "data.name=cifar10",
        f"data.dir={tmp_path}",
        "data.batch=16",
        "model.width=4",
        "train.epochs=2",
        "train.log_every=1",
    ]
    arguments.append("train.ledger=true")
    for world in (1, 2):
        good(world, [*arguments, f"checkpoint.dir={tmp_path / str(world)}"])
    np.testing.assert_allclose(final_losses(tmp_path / "2" / "run"), final_losses(tmp_path / "1" / "run"), rtol=1e-4)
    assert verify(read([tmp_path / "2"])).epochs == {1: 50, 2: 50}


def test_resnet18_trains_on_cifar_on_two_ranks(tmp_path: Path) -> None:
    write_cifar_python(tmp_path)
    arguments = [
        "data.name=cifar10",
        f"data.dir={tmp_path}",
        "data.batch=25",
        "model.name=resnet18_cifar",
        "train.epochs=1",
    ]
    good(2, [*arguments, f"checkpoint.dir={tmp_path}/c"])
    assert len(metrics(tmp_path / "c" / "run", "eval")) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_jpeg_folder_trains_on_two_ranks_as_on_one(workers: int, tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    arguments = [
        "data.name=imagefolder",
        f"data.dir={tmp_path}",
        "data.batch=5",
        "data.image_size=16",
        f"data.workers={workers}",
        "model.width=4",
        "train.epochs=2",
        "train.log_every=1",
        "train.ledger=true",
    ]
    for world in (1, 2):
        good(world, [*arguments, f"checkpoint.dir={tmp_path / str(world)}"])
    np.testing.assert_allclose(final_losses(tmp_path / "2" / "run"), final_losses(tmp_path / "1" / "run"), rtol=1e-3)
    assert verify(read([tmp_path / "2"])).epochs == {1: 12, 2: 12}


def test_digits_match_scikit_learn_and_the_split_is_stratified() -> None:
    from ddpjob_trainer.data.digits import read_digits
    from sklearn.datasets import load_digits

    images, labels = read_digits()
    reference = load_digits()
    assert np.array_equal(images[:, 0].numpy(), reference.images) and np.array_equal(labels.numpy(), reference.target)
    data = opened("data.name=digits")
    test = next(iter(data.test_batches([list(range(data.test_size))]))).labels
    assert (data.train_size, data.test_size) == (1438, 359)
    for label in range(10):
        assert abs(int((test == label).sum()) - 0.2 * int((labels == label).sum())) <= 0.5


def test_augmentation_depends_only_on_sample_and_epoch() -> None:
    images = torch.from_numpy(IMAGES.reshape(-1, 3, 32, 32))
    whole = CropAndFlip(images, 1, padding=4, flip=True)(torch.arange(60), 0)
    shown = CropAndFlip(images, 1, padding=4, flip=True)
    some = torch.tensor([41, 3, 17])
    assert not torch.equal(shown(torch.arange(60), 1), whole)
    assert torch.equal(shown(some, 0), whole[some]), (
        "after a different epoch, in a different order, and in a different batch"
    )


def test_the_crop_and_flip_augmentation_shifts_and_mirrors_images() -> None:
    image = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5)
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))[0, 0]
    expected = {
        tuple(crop.flatten().tolist())
        for top in range(3)
        for left in range(3)
        for crop in (padded[top : top + 5, left : left + 5], padded[top : top + 5, left : left + 5].flip(1))
    }
    many = CropAndFlip(image.repeat(2000, 1, 1, 1), 0, padding=1, flip=True)(torch.arange(2000), 0)
    counts = dict.fromkeys(expected, 0)
    for crop in many:
        counts[tuple(crop.flatten().tolist())] += 1
    assert min(counts.values()) > 2000 / 18 / 2, "all 18 outcomes occur about equally often"


def test_crop_and_flip_uses_the_random_numbers_drawn_for_each_sample() -> None:
    """The reference is a plain loop over torchvision's functions with the same draws."""
    from ddpjob_trainer.data.randomness import uniform
    from torchvision.transforms.v2 import functional

    images = torch.from_numpy(IMAGES.reshape(-1, 3, 32, 32))
    draws = uniform(3, 2, np.arange(60), 3)
    for number, shown in enumerate(CropAndFlip(images, 3, padding=4, flip=True)(torch.arange(60), 2)):
        top, left = (int(draw * 9) for draw in draws[number, :2])
        crop = functional.crop(functional.pad(images[number], [4]), top, left, 32, 32)
        assert torch.equal(shown, functional.hflip(crop) if draws[number, 2] < 0.5 else crop)


def test_reflected_borders_and_alternating_flips_match_airbench() -> None:
    """airbench mirrors half of the images in the first epoch, then all of them in odd epochs."""
    from ddpjob_trainer.data.randomness import uniform

    images, numbers = torch.from_numpy(IMAGES.reshape(-1, 3, 32, 32)), torch.arange(60)
    ours = CropAndFlip(images, 3, padding=2, flip=Flip.ALTERNATING, border=Padding.REFLECT)
    once = torch.where(
        torch.from_numpy(uniform(3, 0, np.arange(60), 3)[:, 2] < 0.5).view(-1, 1, 1, 1), images.flip(-1), images
    )
    padded = torch.nn.functional.pad(images.float(), (2,) * 4, "reflect").byte()
    for epoch in (0, 1, 2, 5):
        shifts = torch.from_numpy(uniform(3, epoch, np.arange(60), 3)[:, :2] * 5).long() - 2
        crops = jordan.batch_crop(padded, shifts, 32)
        mirrored = (once == images).flatten(1).all(1) == bool(epoch % 2)
        wanted = torch.where(mirrored.view(-1, 1, 1, 1), crops.flip(-1), crops)
        assert torch.equal(ours(numbers, epoch), wanted), epoch
        every_epoch = CropAndFlip(images, 3, padding=2, flip=True, border=Padding.REFLECT)(numbers, epoch)
        assert torch.equal(every_epoch, wanted) is (epoch == 0)
    zeros = CropAndFlip(images, 3, padding=2, flip=Flip.ALTERNATING)(numbers, 0)
    assert 40 < (zeros != ours(numbers, 0)).flatten(1).any(1).sum() < 60, "24 of 25 shifts show the border"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.name=digits", "data.flip=alternating"], r"data.flip has no effect with data.name=digits; leave it out"),
        (["data.name=shapes", "data.flip=true"], r"data.flip has no effect with data.name=shapes; leave it out"),
        (
            ["data.name=synthetic", "data.padding=reflect"],
            r"data.padding has no effect with data.name=synthetic; leave",
        ),
        (
            ["data.shift=2", "data.augment=false"],
            r"data.shift has no effect with data.name=digits with data.augment=fa",
        ),
        (["data.shift=8"], r"data.shift=8: must be from 0 to 7 pixels"),
        (["data.shift=-1"], r"data.shift=-1: must be from 0 to 7 pixels"),
    ],
)
def test_shifts_and_flips_without_effect_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(*arguments)


def test_the_generated_and_small_sets_are_shifted_as_configured() -> None:
    for name, side, flip in (("digits", 8, "false"), ("shapes", 16, "alternating")):
        keys = [f"data.name={name}", "data.size=40"]
        data = opened(*keys, "data.shift=3", "data.padding=reflect", f"data.flip={flip}")
        plain = opened(*keys, "data.augment=false")
        shown, images = (next(each.train_batches([list(range(40))], 1)).images for each in (data, plain))
        padded = torch.nn.functional.pad(images, (3,) * 4, "reflect")
        crops = [padded[..., y : y + side, x : x + side] for y in range(7) for x in range(7)]
        crops += [crop.flip(-1) for crop in crops] if flip != "false" else []
        assert torch.stack([(shown == crop).flatten(1).all(1) for crop in crops]).any(0).all()


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 2), (2**31, 10**6)])
def test_numbers_drawn_on_a_device_and_on_the_host_are_bit_identical(seed: int, epoch: int) -> None:
    from ddpjob_trainer.data.randomness import uniform, uniform_for_all

    found = uniform_for_all(seed, epoch, 5000, 3, torch.device("cpu"))
    assert found.numpy().tobytes() == uniform(seed, epoch, np.arange(5000), 3).tobytes()


def test_an_epochs_crops_are_drawn_on_the_device() -> None:
    """Copying the numbers from the host would keep the device idle at the start of each epoch."""
    on_host = list[str]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            on_host.extend(f"{func}" for each in args if isinstance(each, torch.Tensor) and each.device.type == "cpu")
            return func(*args, **(kwargs or {}))

    images = torch.zeros(60, 3, 32, 32, dtype=torch.uint8, device="meta")
    crops, numbers = CropAndFlip(images, 3, padding=4, flip=True), torch.arange(8, device="meta")
    with Watch():
        assert crops(numbers, 2).shape == (8, 3, 32, 32)
    assert on_host == []


def test_boxes_of_resized_crops_are_inside_the_image_and_within_their_ranges() -> None:
    from ddpjob_trainer.data.randomness import uniform

    for draws in uniform(0, 0, np.arange(300), 40).reshape(300, 10, 4):
        box = resized_crop_box(draws, 300, 400)
        top, left, height, width = box.top, box.left, box.height, box.width
        assert top >= 0 and left >= 0 and top + height <= 300 and left + width <= 400
        assert 0.07 < height * width / 120000 <= 1 and 0.74 < width / height < 1.35


def test_unusable_data_folders_are_reported_with_the_remedy(tmp_path: Path) -> None:
    cases = [
        (["data.name=cifar10"], "needs data.dir"),
        (
            ["data.name=cifar10", "data.dir=/nowhere"],
            "data folder /nowhere does not exist .* unpack the official archive",
        ),
        (["data.name=cifar10", f"data.dir={tmp_path}"], f"data folder {tmp_path} is empty .* data.download=true"),
        (["data.name=imagefolder", f"data.dir={tmp_path}"], "is empty .* put train/CLASS/"),
    ]
    for arguments, message in cases:
        with pytest.raises(DataError, match=message):
            train.run(config.load(None, arguments))


def test_damaged_files_of_a_data_set_are_reported(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"data_batch_3.bin is truncated"):
        opened("data.name=cifar10", f"data.dir={tmp_path}")
    path.write_bytes(b"\xff" + whole[1:])
    with pytest.raises(DataError, match=r"label 255 is outside 0\.\.9"):
        opened("data.name=cifar10", f"data.dir={tmp_path}")
    path.unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_3.bin"):
        opened("data.name=cifar10", f"data.dir={tmp_path}")
    write_cifar_python(tmp_path)  # This version is preferred.
    batch = {"labels": [9, -1], "data": IMAGES[:2]}
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=r"label -1 is outside 0\.\.9"):
        opened("data.name=cifar10", f"data.dir={tmp_path}")


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_cifar_python(tmp_path)

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps({"data": Evil()}))
    with pytest.raises(DataError, match="print does not belong in a CIFAR batch"):
        opened("data.name=cifar10", f"data.dir={tmp_path}")


def test_a_pickle_without_records_is_refused(tmp_path: Path) -> None:
    write_cifar_python(tmp_path)
    empty = {"data": np.zeros((0, 3072), np.uint8), "labels": []}
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(empty))
    with pytest.raises(DataError, match="test_batch has no records"):
        opened("data.name=cifar10", f"data.dir={tmp_path}")


def test_train_and_val_folders_must_have_the_same_classes(tmp_path: Path) -> None:
    write_image_folder(tmp_path, 1)
    (tmp_path / "val" / "n01443537").rename(tmp_path / "val" / "other")
    with pytest.raises(DataError, match=r"different class folders .*n01443537, other"):
        opened("data.name=imagefolder", f"data.dir={tmp_path}")


def test_invalid_settings_of_data_are_refused() -> None:
    for arguments, message in (
        (["data.batch=0"], "data.batch=0: must be at least 1"),
        (["data.name=synthetic", "data.shape=3,32"], "data.shape"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(*arguments)


def test_a_small_data_set_is_kept_on_the_training_device(tmp_path: Path) -> None:
    """`meta` stands for an accelerator: its tensors have no content and cannot be copied back to
    the CPU.
    """
    write_cifar_binary(tmp_path)
    settings = config.load(None, ["data.name=cifar10", f"data.dir={tmp_path}"]).data
    data = open_data(settings, torch.device("meta"))
    (batch,) = data.train_batches([[3, 1, 2]], 0)
    assert batch.images.device.type == batch.labels.device.type == "meta" and batch.images.shape == (3, 3, 32, 32)


def test_test_images_are_never_augmented(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    plain, augmented = (
        opened("data.name=cifar10", f"data.dir={tmp_path}", f"data.augment={on}") for on in ("false", "true")
    )
    (one,), (other,) = (data.test_batches([list(range(10))]) for data in (plain, augmented))
    assert torch.equal(one.images, other.images)
    (one,), (other,) = (data.train_batches([list(range(50))], 0) for data in (plain, augmented))
    assert not torch.equal(one.images, other.images)


def test_workers_are_kept_across_epochs_and_also_read_the_test_set(tmp_path: Path) -> None:
    """This works even if an epoch ends early: its prefetched batches are not used in the next
    epoch.
    """
    write_image_folder(tmp_path)
    arguments = ["data.name=imagefolder", f"data.dir={tmp_path}", "data.image_size=16"]
    data, reference = opened(*arguments, "data.workers=2"), opened(*arguments, "data.workers=0")
    parts = [[0, 1, 2, 3, 4], [5, 6, 7], [], [8]]

    def same(mine: Any, theirs: Any) -> None:
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)

    others = children()  # workers of earlier tests, until their pools are collected
    same(data.train_batches(parts, 0), reference.train_batches(parts, 0))
    workers = children() - others
    assert len(workers) == 2
    left = data.train_batches(parts, 1)
    next(left)
    same(data.test_batches(parts), reference.test_batches(parts))
    assert children() > workers and len(children() - others) == 4, "an evaluation has its own workers"
    # The evaluation in between has no effect on the training batches.
    same(left, list(reference.train_batches(parts, 1))[1:])
    workers, left = children() - others, data.train_batches(parts, 1)
    next(left)
    same(data.train_batches(parts, 2), reference.train_batches(parts, 2))
    assert children() - others == workers


def test_sigterm_to_the_process_group_while_workers_start_does_not_end_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun may send SIGTERM after the fork but before the worker has left the rank's process
    group.
    """
    from ddpjob_trainer.data import pool

    def signalled(index: int) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)
        leave(index)

    leave = pool._stay_with_the_rank
    monkeypatch.setattr(pool, "_stay_with_the_rank", signalled)
    write_image_folder(tmp_path)
    data = opened("data.name=imagefolder", f"data.dir={tmp_path}", "data.image_size=16", "data.workers=2")
    (batch,) = data.train_batches([[0, 1, 2, 3]], 0)
    assert len(batch.labels) == 4


def test_ctrl_c_while_workers_start_interrupts_training(tmp_path: Path) -> None:
    """This also holds if another thread receives the signal, so that the main thread would raise
    the exception in a fork hook.
    """
    write_image_folder(tmp_path)
    data = opened("data.name=imagefolder", f"data.dir={tmp_path}", "data.image_size=16", "data.workers=1")

    def train() -> None:
        other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        other.start()

        def interrupt() -> None:
            signal.pthread_kill(cast(int, other.ident), signal.SIGINT)
            time.sleep(0.5)

        os.register_at_fork(before=interrupt)
        try:
            list(data.train_batches([[0, 1, 2, 3]], 0))
        except KeyboardInterrupt:
            os._exit(3)
        os._exit(0)

    rank = multiprocessing.get_context("fork").Process(target=train)
    rank.start()
    rank.join(60 * slowness())
    assert rank.exitcode == 3


def children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def test_the_reported_share_of_time_spent_on_waiting_for_data_is_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an image takes much longer than a step here, so nearly all time is spent waiting,
    from the first step on.
    """
    from ddpjob_trainer.data import imagefolder

    write_image_folder(tmp_path)
    read = imagefolder._content
    monkeypatch.setattr(imagefolder, "_content", lambda path: (time.sleep(0.05 * slowness()), read(path))[1])
    arguments = [
        "data.name=imagefolder",
        f"data.dir={tmp_path}",
        "data.batch=4",
        "data.image_size=8",
        "data.workers=0",
        "model.width=4",
    ]
    good(1, [*arguments, "train.epochs=1", "train.log_every=1", f"checkpoint.dir={tmp_path}/slow"])
    waits = [row["dataWait"] for row in metrics(tmp_path / "slow" / "run", "step")]
    assert len(waits) == 3 and min(waits) > 0.5
    monkeypatch.setattr(imagefolder, "_content", read)
    good(
        1,
        [
            "data.name=digits",
            "model.width=32",
            "train.epochs=1",
            "train.log_every=1",
            f"checkpoint.dir={tmp_path}/fast",
        ],
    )
    assert max(row["dataWait"] for row in metrics(tmp_path / "fast" / "run", "step")[1:]) < 0.5


def test_ranks_that_see_different_data_are_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "0", 6)
    write_image_folder(tmp_path / "1", 5)
    arguments = [
        *TINY,
        "data.name=imagefolder",
        "data.image_size=8",
        "data.workers=0",
        "data.batch=4",
        f"checkpoint.dir={tmp_path}/c",
    ]
    ends = run(2, arguments, env=lambda rank: {"DDPJOB_DATA_DIR": str(tmp_path / str(rank))})
    assert [end.code for end in ends] == [1, 1]
    for end in ends:
        assert end.error.startswith("DataError") and "make data.dir the same on all nodes" in end.error, end
        assert "rank 0: 12 training images, 12 test images, 2 classes" in end.error, end
        assert "rank 1: 10 training images, 10 test images, 2 classes" in end.error, end


@pytest.mark.parametrize("name", ["imagefolder", "cifar10", "shards"])
def test_data_without_read_permission_is_reported_with_the_users_id(name: str, tmp_path: Path) -> None:
    root = tmp_path / "closed"
    root.mkdir(mode=0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=rf"closed.* cannot be read .*data.dir readable for uid {os.geteuid()}"):
            opened(f"data.name={name}", f"data.dir={root}")
    finally:
        os.seteuid(before)


def test_an_image_that_the_machine_cannot_read_is_not_mistaken_for_a_damaged_one(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    data = opened("data.name=imagefolder", f"data.dir={tmp_path}", "data.image_size=16", "data.workers=0")
    next(data.train_batches([[0]], 0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # all allowed descriptors are in use
    try:
        with pytest.raises(
            DataError, match=r"image .*n01440764_0.JPEG cannot be read \(Too many open files\); .*ulimit -n"
        ):
            next(data.train_batches([[0]], 0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_names_of_images_are_not_kept_in_a_list_that_workers_would_copy(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    strange = tmp_path / "train" / "n01440764" / os.fsdecode(b"z-\xff \xc3\xa4.jpg")
    strange.touch()
    folder = Folder(tmp_path / "train")
    found = [folder.name(number) for number in range(13)]
    assert found == sorted(map(str, (tmp_path / "train").glob("*/*"))) and str(strange) in found
    assert not [value for value in vars(folder).values() if isinstance(value, list) and len(value) > 2]
