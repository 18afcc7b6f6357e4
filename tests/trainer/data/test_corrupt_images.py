"""Images that cannot be decoded are reported and counted and have no weight. Training is the same
on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import write_image_folder
from ddpjob_trainer import config
from ddpjob_trainer.commands.check_ledger import read, table, verify
from ddpjob_trainer.data import corrupt, images
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import UNREADABLE
from ddpjob_trainer.data.sampler import permutation
from ddpjob_trainer.errors import DataError
from ddpjob_trainer.model.models import build_model
from ddpjob_trainer.strategies.strategy import Strategy
from ranks import Ended, final_losses, good, metrics, run

BATCH, SIZE = 6, 24
CORRUPT = (
    1,
    2,
    14,
    20,
)  # indices of sorted training files; two are in one micro-batch of the first or the second epoch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create 24 training images in two classes, four of them damaged in different ways."""
    root = tmp_path / "images"
    root.mkdir()
    write_image_folder(root, SIZE // 2)
    for number, content in zip(CORRUPT, (b"", b"text", None, None), strict=True):
        path = path_of(root, number)
        path.write_bytes(path.read_bytes()[:300] if content is None else content)
    return root


def path_of(root: Path, number: int) -> Path:
    """Return the file of a training sample."""
    return sorted((root / "train").rglob("*.JPEG"))[number]


def arguments(folder: Path, *more: str) -> list[str]:
    return [
        "data.name=imagefolder", f"data.dir={folder}", f"data.batch={BATCH}", "data.image_size=16",
        "data.corrupt_limit=0.2", "data.workers=0", "model.width=4", "train.epochs=2", "train.log_every=1",
        "optim.lr=0.05", "optim.schedule=constant",
        "train.eval_every=2", *more,
    ]  # fmt: skip


def reference(folder: Path) -> list[float]:
    """Return the losses of a plain loop that takes the mean over the readable samples of each
    global batch.
    """
    settings = config.load(None, arguments(folder))
    data = open_data(settings.data)
    torch.set_num_threads(1)
    model = build_model(settings.model, data.shape, data.classes, settings.data.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    losses = []
    for epoch in range(2):
        order = permutation(0, epoch, SIZE)
        for start in range(0, SIZE, BATCH):
            readable = [number for number in order[start : start + BATCH] if number not in CORRUPT]
            (batch,) = data.train_batches([readable], epoch)
            loss = torch.nn.functional.cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def trained(world: int, folder: Path, where: Path, prepare: Callable[[int], None] | None = None) -> list[float]:
    good(world, [*arguments(folder), f"checkpoint.dir={where}"], prepare=prepare)
    return final_losses(where / "run")


def test_training_equals_a_plain_loop_over_only_the_readable_images(folder: Path, tmp_path: Path) -> None:
    expected = reference(folder)
    for world in (1, 2, 3):
        np.testing.assert_allclose(
            trained(world, folder, tmp_path / str(world)), expected, rtol=2e-5, err_msg=f"{world} ranks"
        )
        counts = [row.get("corruptImages", 0) for row in metrics(tmp_path / str(world) / "run", "step")]
        assert (counts[3], counts[7]) == (len(CORRUPT), len(CORRUPT)), (
            "the count is reported with the progress, and reset in each epoch"
        )


def test_the_ledger_shows_unreadable_images(folder: Path, tmp_path: Path) -> None:
    good(2, arguments(folder, "train.ledger=true", f"checkpoint.dir={tmp_path / 'c'}"))
    summary = verify(read([tmp_path / "c"]))
    assert summary.unreadable == 2 * len(CORRUPT)
    assert "unreadable: 8 images were given weight zero" in table(summary)


def no_scaling(rank: int) -> None:
    Strategy.scale_gradients = lambda *_: None  # type: ignore[method-assign]


def counted_by_each_rank_alone(rank: int) -> None:
    take, add, own = corrupt.CorruptCount.take, corrupt.CorruptCount.add, []

    def taken(self: corrupt.CorruptCount) -> int:
        own.append(take(self))
        return own[-1]

    corrupt.CorruptCount.take = taken  # type: ignore[method-assign]
    corrupt.CorruptCount.add = lambda self, step: add(self, own[-1])  # type: ignore[method-assign]


def taken_for_a_sample(rank: int) -> None:
    images.UNREADABLE = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("defect", [no_scaling, counted_by_each_rank_alone, taken_for_a_sample])
def test_the_comparison_detects_deliberate_defects(defect: Callable[[int], None], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(trained(2, folder, tmp_path / "defect", defect), reference(folder), rtol=2e-5)


def test_with_unreadable_images_normalization_and_mixing_do_not_depend_on_ranks(folder: Path, tmp_path: Path) -> None:
    more = ["model.norm=batch", "data.micro_batches=3", "data.mixup=0.4", "data.cutmix=1"]
    for world in (1, 2, 3):
        good(world, [*arguments(folder, *more), f"checkpoint.dir={tmp_path / str(world)}"])
    # Statistics over a few images amplify rounding differences to at most 1e-4 in eight steps.
    # Gradients that are not weighted by the number of readable images differ by more.
    expected = final_losses(tmp_path / "1" / "run")
    for world in (2, 3):
        np.testing.assert_allclose(final_losses(tmp_path / str(world) / "run"), expected, rtol=1e-3)
    good(2, [*arguments(folder, *more), f"checkpoint.dir={tmp_path / 'defect'}"], prepare=no_scaling)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(final_losses(tmp_path / "defect" / "run"), expected, rtol=1e-3)


def test_ranks_with_different_numbers_of_micro_batches_do_not_block_each_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: in the second step, ranks sent their messages in different orders, and waited for
    each other until the timeout. Of four micro-batches, one rank has two, and the others have one.
    """
    source = "from torch import nn\n\n\ndef net(shape, classes):\n    "
    source += "return nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.Linear(9, classes))\n"
    (tmp_path / "somebodys_net.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ["model.name=somebodys_net:net", "data.micro_batches=4", "train.timeout_seconds=20"]
    for world in (1, 3):
        good(world, [*arguments(folder, *more), f"checkpoint.dir={tmp_path / str(world)}"])
    alone, three = (final_losses(tmp_path / world / "run") for world in ("1", "3"))
    np.testing.assert_allclose(three, alone, rtol=1e-4)


def test_a_batch_keeps_its_size_and_a_label_marks_images_without_weight(folder: Path) -> None:
    data = open_data(config.load(None, arguments(folder)).data)
    (batch, gone) = data.train_batches([[0, 1, 2, 3], [1, 2]], 0)
    assert batch.images.shape == (4, 3, 16, 16) and batch.unreadable == 2
    assert batch.labels.tolist() == [0, UNREADABLE, UNREADABLE, 0]
    assert torch.equal(batch.images[1], batch.images[0]), (
        "filled with a copy of an image, so that normalization statistics include only images"
    )
    assert gone.labels.tolist() == [UNREADABLE] * 2 and torch.isfinite(gone.images).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_each_file_and_its_reason_are_reported_once(
    workers: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = open_data(config.load(None, arguments(folder, f"data.workers={workers}")).data)
    for epoch in (0, 1):
        assert sum(batch.unreadable for batch in data.train_batches([list(range(12)), list(range(12, 24))], epoch)) == 4
    reported = capsys.readouterr().err
    for number in CORRUPT:
        assert reported.count(f"image {path_of(folder, number)} cannot be read (") == 1


def test_only_a_few_of_many_unreadable_files_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(SIZE):
        path_of(folder, number).write_bytes(b"")
    data = open_data(config.load(None, arguments(folder)).data)
    assert sum(batch.unreadable for batch in data.train_batches([list(range(24))], 0)) == 24
    reported = capsys.readouterr().err
    assert (
        reported.count("cannot be read (") == 5
        and "from now on, unreadable images are counted but not listed" in reported
    )


def test_a_file_that_no_longer_exists_counts_as_unreadable(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = open_data(config.load(None, arguments(folder)).data)
    path_of(folder, 0).unlink()
    (batch,) = data.train_batches([[0, 3]], 0)
    assert batch.unreadable == 1 and "(No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_with_corrupt_set_to_stop_the_first_unreadable_image_ends_training(workers: int, folder: Path) -> None:
    data = open_data(config.load(None, arguments(folder, "data.corrupt=stop", f"data.workers={workers}")).data)
    with pytest.raises(DataError, match=rf"^image {path_of(folder, 1)} cannot be read .*data.corrupt=skip"):
        list(data.train_batches([[0, 1]], 0))


def test_too_many_unreadable_images_end_training_at_the_same_step(folder: Path, tmp_path: Path) -> None:
    """Three unreadable images of 24 are allowed. At the step that reads the fourth, every rank
    exits with the same message.
    """
    order = permutation(0, 0, SIZE)
    last = max(order.index(number) for number in CORRUPT) // BATCH
    for world in (1, 2):
        where = tmp_path / str(world)
        ended: list[Ended] = run(world, [*arguments(folder, "data.corrupt_limit=0.125"), f"checkpoint.dir={where}"])
        said = "4 of 24 training images cannot be read, more than data.corrupt_limit=0.125 allows"
        assert all(end.code == 1 and said in end.error for end in ended), ended
        assert len(metrics(where / "run", "step")) == last


def test_too_many_unreadable_test_images_end_training_too(folder: Path, tmp_path: Path) -> None:
    """The remaining images would be a different test set. If none remained, the loss would be 0,
    the best possible one.
    """
    for path in (folder / "val").rglob("*.JPEG"):
        path.write_bytes(b"text")
    size = len(list((folder / "val").rglob("*.JPEG")))
    best = ["checkpoint.keep_best=1", "checkpoint.best_by=loss"]
    for world, limit in ((1, "1"), (2, "0.2")):
        where = tmp_path / str(world)
        more = [f"data.corrupt_limit={limit}", *best, f"checkpoint.dir={where}"]
        ended: list[Ended] = run(world, [*arguments(folder), *more])
        said = f"{size} of {size} test images cannot be read (data.corrupt_limit={limit}; "
        assert all(end.code == 1 and said in end.error for end in ended), ended
        assert not list(where.glob("best.pt")) and not metrics(where / "run", "eval")
        assert list(where.glob("step-*.pt")), "the checkpoint of the epoch is saved anyway"


def test_a_result_reports_how_many_test_images_it_is_based_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, *others = sorted((folder / "val").rglob("*.JPEG"))
    first.write_bytes(b"text")
    good(1, [*arguments(folder), "data.corrupt_limit=0.5", f"checkpoint.dir={tmp_path / 'c'}"])
    assert (
        f"warning: 1 test images could not be read; the result covers the other {len(others)}" in capfd.readouterr().out
    )
    assert metrics(tmp_path / "c" / "run", "eval")[0]["unreadable"] == 1
