"""Custom data and losses (`data.name`, `optim.loss`) are exact on any number of ranks, and mistakes
are reported.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import count_workers
from ddpjob_trainer import config
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.config.sections import DataConfig, Flip, OptimConfig, Padding
from ddpjob_trainer.data import own
from ddpjob_trainer.data.augment import CropAndFlip
from ddpjob_trainer.data.batch_transform import BatchTransform
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import Batch, Normalize, Targets
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError, DataError, TrainerError
from ddpjob_trainer.evaluation.accumulate import ValueAccumulator
from ddpjob_trainer.optim.loss import Loss
from ranks import TINY, final_losses, good, metrics, run, stop_at
from torch import nn

SOURCE = '''
import random
import time

import numpy as np
import torch
from torch import nn

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(130, 6, generator=GENERATOR)
Y = torch.stack([X.sum(1), X[:, 0] * X[:, 1]], 1)


def regression(folder):
    return (X[:101], Y[:101]), (X[101:], Y[101:])


def labels(folder):
    return (X[:101], (Y[:101] > 0).float()), (X[101:], (Y[101:] > 0).float())


class Noisy(torch.utils.data.Dataset):
    """Draws from three generators, as augmentations do."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        noise = random.random() + np.random.rand() + torch.rand(6)
        return X[self.first + number] + 0.3 * noise, int(Y[self.first + number, 0] > 0)


def noisy(folder):
    return Noisy(0, 101), Noisy(101, 29), ["below", "above"]


def net(shape, outputs):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, outputs))


def normalized(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


def points(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))


def length(scores, targets):
    return (scores.norm(dim=1) - targets.reshape(-1)).square()


def boxed(folder):
    targets = (Y > 0).long()[:, :1]
    return (X[:101], targets[:101]), (X[101:], targets[101:]), 2


def quantile(scores, targets):
    error = targets - scores
    return torch.maximum(0.9 * error, -0.1 * error).mean(1)


def mean(scores, targets):
    return (scores - targets).square().mean()


def nothing(folder):
    return 3


def arrays(folder):
    x, y = X.numpy(), (Y[:, 0] > 0).long().numpy()
    return (x[:101], y[:101]), (x[101:], y[101:]), y.max() + 1


def mirrored(folder):
    (x, y), test, classes = arrays(folder)
    return (x[:, ::-1], y), (X[101:].clone().requires_grad_(), test[1]), classes


def flags(folder):
    return (X, Y.long()), (X, Y.long()), np.array([True, False])


def uneven(folder):
    return (X[:5], Y[:4]), (X, Y)


def unnamed(folder):
    return (X, Y.long()[:, 0] * 0), (X, Y.long()[:, 0] * 0)


def outside(folder):
    return (X, torch.arange(len(X))), (X, torch.arange(len(X))), 100


def bytes_(folder):
    return ((X * 10).byte(), Y), ((X * 10).byte(), Y)


PIXELS = torch.randint(256, (120, 3, 12, 16), generator=GENERATOR, dtype=torch.uint8)
CLASSES = torch.arange(120) % 5


class Pictures(torch.utils.data.Dataset):
    """uint8 images with the channels last, as numpy arrays."""

    def __init__(self, first, size):
        self.first, self.size = first, size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        return PIXELS[self.first + number].permute(1, 2, 0).numpy(), CLASSES[self.first + number]


def pictures(folder):
    return Pictures(0, 90), Pictures(90, 30), 5


def pixels(folder):
    return (PIXELS[:90], CLASSES[:90]), (PIXELS[90:], CLASSES[90:]), 5


def grey(folder):
    return (PIXELS[:90, 0], CLASSES[:90]), (PIXELS[90:, 0], CLASSES[90:]), 5


def other_test(folder):
    return (X, Y), (X[:, :3], Y)


def same(images, labels, generator):
    return 2 * images, labels


def shares(images, labels, generator):
    return 2 * images, nn.functional.one_hot(labels, 2).float()


class Growing(Noisy):
    def __getitem__(self, number):
        return X[number][: 6 - number // 50], 1


def growing(folder):
    return Growing(0, 101), Noisy(101, 29), 2


def endless(folder):
    return iter(()), (X, Y)


def tokens(folder):
    return (X.long(), X[:, 0].long() * 0), (X.long(), X[:, 0].long() * 0), 2


class Lazy(torch.utils.data.Dataset):
    """Opens its file at the first sample, as is usual for HDF5 and zip files; a number per sample."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return 256

    def __getitem__(self, number):
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)
        self.file.seek(8 * number)
        time.sleep(0.0005)
        return np.frombuffer(self.file.read(8)).copy(), 1.5


class Marked(Lazy):
    def fingerprint(self):
        return [float(self[number][0][0]) for number in range(len(self))]


def lazy(folder):
    return Lazy(folder / "numbers"), Marked(folder / "numbers")


def doubles(folder):
    of_torch = torch.utils.data.TensorDataset
    whole = of_torch(X.double(), Y[:, 0].int().clamp(0, 1))
    return whole, of_torch(*whole.tensors), 2


class Pairs(torch.utils.data.TensorDataset):
    """Its second tensor is no target."""

    def __getitem__(self, number):
        return self.tensors[0][number], int(number % 2)


def pairs(folder):
    return Pairs(X, 9 + X.long()), Pairs(X, 9 + X.long()), 2


class Described(Noisy):
    targets = None


def described(folder):
    train, test = Described(0, 101), Described(101, 29)
    train.targets = [[0] * (1 + number % 3) for number in range(101)]
    test.targets = [{"box": object()} for _ in range(29)]
    return train, test, 2


class Strange(Noisy):
    def __getitem__(self, number):
        return X[number], (1 if number < 60 else object())


class Ended(Noisy):
    def __getitem__(self, number):
        return super().__getitem__(number) if number != 5 else next(iter(()))


def ended(folder):
    return Noisy(0, 101), Ended(101, 29), 2


def strange(folder):
    return Strange(0, 101), Noisy(101, 29), 2
'''
KEYS = [
    *TINY,
    "data.batch=16",
    "data.workers=0",
    "model.name=somebodys_data:net",
    "data.micro_batches=4",
    "optim.lr=0.02",
]
REGRESSION = "data.name=somebodys_data:regression"
TOKENS = "data.name=somebodys_data:tokens"
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "somebodys_data.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("somebodys_data", None)


def walk(folder: Path, keys: list[str], prepare: Any = None) -> None:
    """Train on 1, 2 and 3 ranks in turn, and then on 1 rank to the end."""
    for world, stop in ((1, 3), (2, 6), (3, 9), (1, None)):

        def both(rank: int, stop: int | None = stop) -> None:
            if prepare:
                prepare(rank)
            if stop:
                stop_at(stop)(rank)

        ended = run(world, [*keys, f"checkpoint.dir={folder}"], prepare=both)
        assert [end.code for end in ended] == [75 if stop else 0] * world, ended


def numbers(folder: Path) -> list[float]:
    """Return the loss of every step and the last evaluation."""
    last = metrics(folder / "run", "eval")[-1]
    return [
        *final_losses(folder / "run"),
        *(value for key, value in sorted(last.items()) if isinstance(value, float) and key != "time"),
    ]


def mean_of_the_share(rank: int) -> None:
    """Deliberate defect: each rank divides by the number of only its own samples."""
    loss_sum = Loss.sum
    Loss.sum = lambda self, scores, batch: loss_sum(self, scores, batch) * (1.05 if rank else 1)  # type: ignore[method-assign]


def draws_of_the_process(rank: int) -> None:
    """Deliberate defect: random numbers for a sample come from the generators in their current
    state.
    """
    random.seed(rank)
    own.seed_draws = lambda key: nullcontext()
    own.OwnData.fingerprint = lambda self: 0  # type: ignore[method-assign]  # Which would see it.


@pytest.mark.parametrize(
    ("keys", "shown", "defect"),
    [
        (["data.name=somebodys_data:regression", "optim.loss=mse"], {"loss", "mae", "rmse"}, mean_of_the_share),
        (["data.name=somebodys_data:noisy"], {"loss", "accuracy", "top5", "mae"}, draws_of_the_process),
    ],
    ids=["regression", "dataset"],
)
def test_custom_data_trains_on_1_2_3_1_ranks_as_on_one(
    keys: list[str], shown: set[str], defect: Any, tmp_path: Path
) -> None:
    keys = [*KEYS, *keys]
    good(1, [*keys, f"checkpoint.dir={tmp_path / 'alone'}"])
    walk(tmp_path / "walk", keys)
    alone, walked = numbers(tmp_path / "alone"), numbers(tmp_path / "walk")
    evaluated = set(metrics(tmp_path / "walk" / "run", "eval")[-1])
    assert evaluated - {"event", "time", "round", "epoch", "step"} == shown
    np.testing.assert_allclose(walked, alone, rtol=TOLERANCE, atol=TOLERANCE)
    assert verify(read([tmp_path / "walk" / "run"])).epochs == {1: 101, 2: 101}
    good(2, [*keys, f"checkpoint.dir={tmp_path / 'defect'}"], prepare=defect)
    assert np.abs(np.array(numbers(tmp_path / "defect")) - alone).max() > 10 * TOLERANCE


def test_the_metrics_of_a_regression_match_torch_on_any_number_of_ranks() -> None:
    torch.manual_seed(0)
    scores, targets = torch.randn(20, 2), torch.randn(20, 2)
    for name, of_torch in (("mse", nn.MSELoss()), ("l1", nn.L1Loss()), ("huber", nn.HuberLoss())):
        loss = Loss(OptimConfig(loss=name))
        assert float(loss.sum(scores, Batch(scores, targets))) / 20 == pytest.approx(float(of_torch(scores, targets)))
    adding = ValueAccumulator(Loss(OptimConfig(loss="mse")).each)
    for part in (slice(0, 3), slice(3, 20)):
        adding.add(scores[part], targets[part])
    found = adding.reduce(Group(), 20)
    assert found.mae == pytest.approx(float(nn.L1Loss()(scores, targets)))
    assert found.rmse == pytest.approx(float(nn.MSELoss()(scores, targets)) ** 0.5)
    assert found.accuracy is None and "accuracy" not in found.scalars()


def test_the_metrics_of_binary_labels_match_scikit_learn() -> None:
    from sklearn.metrics import accuracy_score, f1_score

    torch.manual_seed(0)
    scores, targets = torch.randn(50, 3), (torch.rand(50, 3) > 0.7).float()
    adding = ValueAccumulator(Loss(OptimConfig(loss="bce")).each, decisions=True)
    adding.add(scores, targets)
    found, guesses = adding.reduce(Group(), 50), scores > 0
    assert found.accuracy == pytest.approx(accuracy_score(targets.flatten(), guesses.flatten()))
    assert found.f1 == pytest.approx(f1_score(targets, guesses, average="micro"))
    assert found.loss == pytest.approx(float(nn.BCEWithLogitsLoss()(scores, targets)))


def test_a_binary_score_that_is_nan_never_counts_as_correct() -> None:
    adding = ValueAccumulator(lambda scores, targets: scores[:, 0], decisions=True)
    adding.add(torch.tensor([[torch.nan], [torch.nan], [-1.0], [1.0]]), torch.tensor([[0.0], [1.0], [0.0], [1.0]]))
    assert adding.reduce(Group(), 4).accuracy == 0.5


def test_an_evaluation_reports_bce_targets_that_are_not_probabilities() -> None:
    """On an accelerator, the loss does not check its targets."""
    adding = ValueAccumulator(lambda scores, targets: scores[:, 0], decisions=True)
    adding.add(torch.randn(2, 1), torch.ones(2))
    with pytest.raises(ConfigError, match=r"optim.loss=bce: a target is 3; make all targets probabilities"):
        adding.add(torch.randn(2, 1), torch.tensor([0.5, 3]))


def test_scores_and_targets_of_one_value_are_not_broadcast() -> None:
    loss, scores, targets = Loss(OptimConfig(loss="mse")), torch.randn(4, 1), torch.randn(4)
    assert float(loss.sum(scores, Batch(scores, targets))) == pytest.approx(
        float((scores[:, 0] - targets).square().sum())
    )
    assert float(loss.sum(scores[:0], Batch(scores[:0], targets[:0]))) == 0


def test_bce_over_classes_excludes_unreadable_samples() -> None:
    scores, loss = torch.randn(3, 4), Loss(OptimConfig(loss="bce"))
    whole = loss.sum(scores, Batch(scores, torch.tensor([1, 3, -100]), unreadable=1))
    shares = torch.tensor([[0.0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    torch.testing.assert_close(whole, loss.sum(scores[:2], Batch(scores[:2], torch.tensor([1, 3]))))
    torch.testing.assert_close(whole, loss.sum(scores, Batch(scores, shares, unreadable=1)))
    assert loss.sum(scores, Batch(scores, shares)) > whole, "a sample without any label still counts"


def test_a_samples_random_numbers_are_the_same_in_each_process_and_isolated() -> None:
    state = torch.get_rng_state(), random.getstate()
    data = [open_data(DataConfig(name="somebodys_data:noisy", workers=workers)) for workers in (0, 1)]
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
    first, again, other = (
        next(data[which].train_batches([[5, 7]], epoch)).images for which, epoch in ((0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(next(data[0].train_batches([[7]], 0)).images[0], first[1])
    assert next(data[0].train_batches([[]], 0)).images.shape == (0, 6)
    assert data[0].fingerprint() == data[1].fingerprint() and data[0].class_names == ["below", "above"]


def test_workers_do_not_share_a_file_that_a_dataset_opens_when_first_read(tmp_path: Path) -> None:
    np.arange(256.0).tofile(tmp_path / "numbers")
    data = open_data(DataConfig(name="somebodys_data:lazy", dir=tmp_path, workers=2))
    fingerprint = data.fingerprint()
    train, test = next(data.train_batches([list(range(256))], 0)), next(data.test_batches([list(range(256))]))
    assert train.images[:, 0].tolist() == test.images[:, 0].tolist() == list(range(256))
    assert fingerprint == open_data(DataConfig(name="somebodys_data:lazy", dir=tmp_path, workers=0)).fingerprint()


def test_reading_the_first_samples_in_advance_has_no_side_effects(tmp_path: Path) -> None:
    np.arange(256.0).tofile(tmp_path / "numbers")
    others = set(multiprocessing.active_children())
    open_data(DataConfig(name="somebodys_data:lazy", dir=tmp_path, workers=2)).fingerprint()
    assert set(multiprocessing.active_children()) <= others


def test_a_tensor_dataset_is_converted_as_its_tensors_would_be() -> None:
    batch = next(open_data(DataConfig(name="somebodys_data:doubles")).train_batches([[3, 5]], 0))
    assert batch.images.dtype is torch.float32 and batch.labels.dtype is torch.int64


def test_arrays_and_numbers_of_numpy_are_treated_like_torch_tensors() -> None:
    """Regression: a pair of arrays was treated as a Dataset of two samples."""
    data = open_data(DataConfig(name="somebodys_data:arrays"))
    assert (data.train_size, data.shape, data.classes) == (101, (6,), 2)
    batch = next(data.train_batches([[3, 5]], 0))
    assert batch.images.dtype is torch.float32 and batch.labels.dtype is torch.int64


def test_mirrored_arrays_and_tensors_with_gradients_are_read() -> None:
    """Regression: the first were refused as not being arrays, the second failed without a name."""
    data, plain = (open_data(DataConfig(name=f"somebodys_data:{name}")) for name in ("mirrored", "arrays"))
    batch, other = (next(each.train_batches([[3, 5]], 0)) for each in (data, plain))
    assert data.fingerprint() != plain.fingerprint() and torch.equal(batch.images, other.images.flip(1))
    assert not next(data.test_batches([[0]])).images.requires_grad


def test_a_subclass_of_tensor_dataset_has_the_targets_that_it_returns() -> None:
    data = open_data(DataConfig(name="somebodys_data:pairs", workers=0))
    assert next(data.train_batches([[3, 4]], 0)).labels.tolist() == [1, 0]


def test_targets_of_uneven_length_and_objects_are_not_in_the_fingerprint() -> None:
    first, again = (open_data(DataConfig(name="somebodys_data:described", workers=0)) for _ in range(2))
    assert first.fingerprint() == again.fingerprint()


def test_a_mistake_in_a_data_worker_is_reported_like_one_in_the_rank() -> None:
    data = open_data(DataConfig(name="somebodys_data:strange", workers=1))
    with pytest.raises(ConfigError, match=r"^data.name=somebodys_data:strange: the target of a sample of train is obj"):
        next(data.train_batches([[3, 70]], 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_stop_iteration_does_not_end_an_evaluation(workers: int) -> None:
    """Regression: the evaluation covered only the samples before it, without a warning."""
    data = open_data(DataConfig(name="somebodys_data:ended", workers=workers))
    with pytest.raises(RuntimeError, match="a Dataset raised StopIteration for a sample"):
        list(data.test_batches([[3], [5], [7]]))


@pytest.mark.parametrize("name", ["pictures", "pixels"])
@pytest.mark.parametrize(
    ("shift", "flip", "padding"),
    [
        (2, True, Padding.ZEROS),
        (0, True, Padding.ZEROS),
        (3, False, Padding.REFLECT),
        (1, Flip.ALTERNATING, Padding.REFLECT),
    ],
)
def test_bytes_are_shifted_mirrored_and_normalized_like_cifar_images(
    name: str, shift: int, flip: bool | Flip, padding: Padding
) -> None:
    """They stay bytes until they have been cropped on the device, whether they are in memory or
    read by workers.
    """
    import somebodys_data

    mean, std, numbers = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), [5, 88, 0, 91]
    keys = DataConfig(
        name=f"somebodys_data:{name}",
        shift=shift,
        padding=padding,
        flip=flip,
        mean=mean,
        std=std,
        workers=1,
        seed=3,
        repeats=2,
    )
    data = open_data(keys)
    assert (data.shape, data.whole_numbers, data.train_size) == ((3, 12, 16), False, 90)
    normalize = Normalize(255.0, mean, std, torch.device("cpu"))
    of_cifar = CropAndFlip(somebodys_data.PIXELS[:90], 3, padding=shift, flip=flip, repeats=2, border=padding)
    for epoch in range(2):
        batch = next(data.train_batches([numbers], epoch))
        assert torch.equal(batch.images, normalize(of_cifar(torch.tensor(numbers), epoch)))
        assert batch.labels.tolist() == [0, 3, 0, 1]
    assert torch.equal(next(data.test_batches([[4]])).images, normalize(somebodys_data.PIXELS[94:95]))
    assert next(data.train_batches([[]], 0)).images.shape == (0, 3, 12, 16)
    plain = open_data(replace(keys, augment=False, repeats=1))
    assert torch.equal(next(plain.train_batches([[91]], 0)).images, normalize(somebodys_data.PIXELS[1:2]))


@pytest.mark.parametrize("name", ["pictures", "pixels"])
@pytest.mark.parametrize("workers", [-1, 1025, 2**63])
def test_a_number_of_workers_that_would_exhaust_the_machine_is_refused(name: str, workers: int) -> None:
    with pytest.raises(ConfigError, match=rf"^data.workers={workers}: must be from 0 to 1024 \(per rank\)$"):
        open_data(DataConfig(name=f"somebodys_data:{name}", workers=workers))


def test_workers_end_when_their_data_is_dropped() -> None:
    assert count_workers(lambda: open_data(DataConfig(name="somebodys_data:pictures", workers=2))) == (2, 0)


def test_grey_images_without_a_channel_dimension_get_one() -> None:
    batch = next(open_data(DataConfig(name="somebodys_data:grey")).train_batches([[3, 5]], 0))
    assert batch.images.shape == (2, 1, 12, 16) and -1 <= float(batch.images.min()) < 0 < float(batch.images.max()) <= 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "regression", "flip": True}, r"data.flip needs uint8 images, but the inputs .* are torch.float32"),
        ({"name": "pixels", "mean": (0.5,)}, r"data.mean=\[0.5\], .* have 3 channels; set a finite mean"),
        ({"name": "pixels", "std": (1.0, 0.0, 1.0)}, r"and a std above 0 for each of them"),
        ({"name": "pixels", "padding": Padding.REFLECT}, r"data.padding has no effect .* without data.shift; leave"),
        ({"name": "pixels", "shift": 12}, r"data.shift=12: must be from 0 to 11 pixels"),
    ],
)
def test_settings_that_do_not_apply_to_images_as_bytes_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_data(DataConfig(**{**keys, "name": f"somebodys_data:{keys['name']}"}))


def test_a_transform_gets_no_unreadable_samples() -> None:
    labels = torch.tensor([1, -100, 0])
    batch = Batch(torch.ones(3, 1, 2, 2), labels, unreadable=1)
    for name, expected in (("same", [1, -100, 0]), ("shares", [[0, 1], [0, 0], [1, 0]])):
        found = BatchTransform(f"somebodys_data:{name}", torch.device("cpu"))(batch, 7)
        assert found.labels.tolist() == expected and found.unreadable == 1
        assert found.images.flatten(1).sum(1).tolist() == [8, 0, 8]


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    def change(rank: int) -> None:
        import somebodys_data

        somebodys_data.Y[50] += rank

    ended = run(
        2, [*KEYS, "data.name=somebodys_data:regression", "optim.loss=mse", f"checkpoint.dir={tmp_path}"], change
    )
    assert all("the ranks see different data in somebodys_data:regression" in end.error for end in ended), ended
    assert "same samples in the same order on all ranks" in ended[0].error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:data", r"data.name=nowhere:data: No module named 'nowhere'; put the module's folder on PYTHONPATH"),
        ("somebodys_data:regresion", r"has no function 'regresion'; did you mean somebodys_data:regression\?"),
        ("somebodys_data:nothing", r"returned 3; return \(train, test\), or \(train, test, classes\)"),
        (
            "somebodys_data:uneven",
            r"train is a pair of tensors of shapes \(5, 6\) and \(4, 2\); provide as many targets",
        ),
        ("somebodys_data:unnamed", r"returned no classes, .*; return \(train, test, classes\), where classes is"),
        ("somebodys_data:flags", r"returned array\(\[ True, False\]\) as classes, .*; return \(train, test, classes\)"),
        ("somebodys_data:outside", r"the target of train\[100\] is outside 0..99; correct this target"),
        ("somebodys_data:bytes_", r"sample of train is torch.uint8; use a float or int64 tensor or numpy array"),
        (
            "somebodys_data:other_test",
            r"the input of test\[0\] is torch.float32 of shape \(3,\), .* \(6,\); pad or crop",
        ),
        ("somebodys_data:endless", r"train is a .*iterator; provide a torch Dataset with __len__ and __getitem__"),
    ],
)
def test_mistakes_in_data_are_reported_before_training(name: str, message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        open_data(DataConfig(name=name))


def test_a_sample_with_a_different_shape_is_reported() -> None:
    data = open_data(DataConfig(name="somebodys_data:growing", workers=0))
    with pytest.raises(DataError, match=r"the input of train\[60\] is torch.float32 of shape \(5,\), .*pad or crop"):
        next(data.train_batches([[3, 60]], 0))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([REGRESSION], r"optim.loss=cross_entropy does not support .*float values.*; set optim.loss to bce, mse, l1"),
        (["optim.loss=mse"], r"does not support .*class numbers.; set optim.loss to cross_entropy"),
        (["optim.loss=msee"], r"optim.loss: 'msee' is unknown; .*did you mean 'mse'\?"),
        (
            ["optim.loss=bce", "optim.label_smoothing=0.1"],
            r"optim.label_smoothing=0.1 has no effect with optim.loss=bce",
        ),
        ([REGRESSION, "optim.loss=bce", "data.mixup=0.2"], r"data.mixup mixes classes, but the targets"),
        (["optim.loss=somebodys_data:quantile", "data.cutmix=1"], r"data.cutmix turns classes into fractions"),
        ([REGRESSION, "optim.loss=mse", "checkpoint.keep_best=1"], r"set checkpoint.best_by=loss"),
        ([REGRESSION, "optim.loss=mse", "eval.pr=exact"], r"eval.pr=exact needs class numbers as targets"),
        ([REGRESSION, "optim.loss=mse", "model.name=small_cnn"], r"model.name=small_cnn needs images"),
        ([REGRESSION, "optim.loss=somebodys_data:mean"], r"returned shape \(\) for 4 samples; return one loss"),
        (  # 101 = 6 * 16 + 5.
            [REGRESSION, "optim.loss=mse", "model.name=somebodys_data:normalized"],
            r"a single sample, but somebodys_data:normalized needs more than one value per channel; set",
        ),
        ([TOKENS, "data.mixup=0.2"], r"data.mixup=0.2 blends inputs, but .*:tokens are integers"),
        ([TOKENS, "data.cutmix=1"], r"data.cutmix=1.0 needs images .* have the shape \(6,\); leave out data.cutmix"),
        ([TOKENS, "model.channels_last=true"], r"model.channels_last needs images"),
        ([TOKENS, "strategy=pipeline"], r"strategy=pipeline needs a model with float inputs, .*; set strategy=ddp"),
        ([REGRESSION, "optim.loss=bce"], r"optim.loss=bce: a target is .*; make all targets probabilities from 0 to 1"),
    ],
)  # fmt: skip
def test_contradictory_options_of_custom_data_are_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    from ddpjob_trainer import train

    model = [] if REGRESSION in keys else ["model.name=small_cnn"]
    with pytest.raises(ConfigError, match=message):
        train.run(config.load(None, [*KEYS, *model, *keys, f"checkpoint.dir={tmp_path / 'c'}"]))


def test_a_custom_loss_over_classes_requires_matching_outputs_at_the_first_step(tmp_path: Path) -> None:
    """Regression: other outputs were rejected only in the first evaluation, an epoch later. A loss
    for targets of shape (1,) accepts any outputs.
    """
    keys = [*TINY, "model.name=somebodys_data:points", "optim.loss=somebodys_data:length", "train.epochs=1"]
    (end,) = run(1, [*keys, f"checkpoint.dir={tmp_path / 'classes'}"])
    assert "(200, 3) for 200 samples of 10 classes; use a model whose last layer has 10 outputs" in end.error
    assert not metrics(tmp_path / "classes" / "run", "step")
    good(1, [*keys, "data.name=somebodys_data:boxed", f"checkpoint.dir={tmp_path / 'boxed'}"])
    (row,) = metrics(tmp_path / "boxed" / "run", "eval")
    assert row["loss"] > 0 and "accuracy" not in row


def test_models_with_custom_losses_and_binary_labels_can_be_trained_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ddpjob_trainer.commands import evaluate_checkpoint

    quantile = [*KEYS, "data.name=somebodys_data:regression", "optim.loss=somebodys_data:quantile", "train.epochs=1"]
    good(1, [*quantile, f"checkpoint.dir={tmp_path / 'q'}", "checkpoint.keep_best=1", "checkpoint.best_by=loss"])
    labels = [*KEYS, "data.name=somebodys_data:labels", "optim.loss=bce", "train.epochs=8", "optim.lr=0.5"]
    good(2, [*labels, f"checkpoint.dir={tmp_path / 'b'}"])
    (*_, last) = metrics(tmp_path / "b" / "run", "eval")
    assert last["accuracy"] > 0.6 and last["f1"] > 0.5 and "mae" not in last
    evaluate_checkpoint.main([str(tmp_path / "b"), "-o", str(tmp_path / "out")])
    assert f"accuracy  {last['accuracy']:.6f}" in capsys.readouterr().out
    assert Targets.VALUES is open_data(DataConfig(name="somebodys_data:labels")).targets
