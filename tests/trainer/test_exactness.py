"""Any number of ranks computes the same gradients, loss curve and evaluation as a single
process.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.commands.check_ledger import read, verify
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.model.models import build_model
from ranks import TINY, final_losses, good, metrics, run, stop_at

# Covers float32 sums in a different order: one step differs by a relative 1e-6, and 16 steps of
# momentum SGD amplify this less than a hundredfold.
TOLERANCE, TINIEST = 1e-4, 2e-6
SAME = [*TINY, "data.micro_batches=6"]
"""The same micro-batches are used on 1, 2 and 3 ranks. Sums in a different order differ by 1e-7 at
first. After 16 steps, when the sign of an activation has changed, they differ by 2e-4 on some
CPUs.
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(folder.glob("step-*.pt"))
    return torch.load(newest, weights_only=True)["model"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one process without interruption."""
    folder = tmp_path_factory.mktemp("alone")
    good(1, [*SAME, f"checkpoint.dir={folder}"])
    return folder


@pytest.mark.parametrize("world", [2, 3])
def test_loss_curve_and_weights_of_several_ranks_match_one_rank(world: int, alone: Path, tmp_path: Path) -> None:
    good(world, [*SAME, f"checkpoint.dir={tmp_path}"])
    np.testing.assert_allclose(final_losses(tmp_path / "run"), final_losses(alone / "run"), rtol=TINIEST, atol=TINIEST)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(tmp_path)[name], value, rtol=TINIEST, atol=TINIEST)


@pytest.mark.parametrize("world", [2, 3])
def test_with_micro_batches_per_rank_the_loss_curve_matches_one_rank(world: int, alone: Path, tmp_path: Path) -> None:
    good(world, [*TINY, f"checkpoint.dir={tmp_path}"])
    np.testing.assert_allclose(final_losses(tmp_path / "run"), final_losses(alone / "run"), rtol=1e-3, atol=1e-3)


def test_ranks_without_samples_still_take_part_in_the_step(tmp_path: Path) -> None:
    """A run grows to 3 ranks with a global batch of 2 and a last batch of 1."""
    arguments = ["data.name=synthetic", "data.shape=1,8,8", "data.size=5", "data.batch=2"]
    arguments += ["model.width=4", "train.epochs=2", "train.log_every=1", "checkpoint.every_seconds=0"]
    good(1, [*arguments, f"checkpoint.dir={tmp_path / '1'}"])
    assert [end.code for end in run(1, [*arguments, f"checkpoint.dir={tmp_path / '3'}"], prepare=stop_at(2))] == [75]
    good(3, [*arguments, f"checkpoint.dir={tmp_path / '3'}"])
    curves = [final_losses(tmp_path / world / "run") for world in ("1", "3")]
    assert len(curves[0]) == 6
    np.testing.assert_allclose(curves[1], curves[0], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("world", "keys", "remedy"),
    [
        (3, ["data.batch=2"], "set data.batch to 3 or more"),
        (2, ["data.micro_batches=1", "ddp.ordered=true"], "write a multiple of 2, up to"),
    ],
)
def test_more_ranks_than_samples_in_a_batch_are_refused(
    world: int, keys: list[str], remedy: str, tmp_path: Path
) -> None:
    ended = run(world, [*TINY, *keys, f"checkpoint.dir={tmp_path}"])
    assert all(end.code == 1 and remedy in end.error for end in ended), ended


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["train.accumulate=6"],
            "train.accumulate=6 makes 12 micro-batches, but data.batch=8 has fewer samples; set "
            "train.accumulate to 4, or",
        ),
        (
            ["strategy=pipeline", "pipeline.micro_batches=9"],
            "pipeline.micro_batches=9 makes 9 .*; set pipeline.micro_batches to 8, or",
        ),
    ],
)
def test_the_error_about_too_many_micro_batches_names_the_key_that_was_set(
    keys: list[str], message: str, tmp_path: Path
) -> None:
    """Regression: the message reported a value of data.micro_batches that nobody had set, and that
    value was refused too.
    """
    for end in run(2, [*TINY, "model.norm=batch", "data.batch=8", *keys, f"checkpoint.dir={tmp_path}"]):
        assert re.match(f"ConfigError: {message} data.batch to", end.error), end


def test_a_run_on_1_2_3_1_ranks_has_the_loss_curve_of_an_undisturbed_run(alone: Path, tmp_path: Path) -> None:
    arguments = [*SAME, f"checkpoint.dir={tmp_path}"]
    for world, stop in ((1, 3), (2, 7), (3, 11)):
        ended = run(world, arguments, prepare=stop_at(stop))
        assert [end.code for end in ended] == [75] * world, ended
    good(1, arguments)
    assert [row["world"] for row in metrics(tmp_path / "run", "start")] == [1, 2, 3, 1]
    np.testing.assert_allclose(final_losses(tmp_path / "run"), final_losses(alone / "run"), rtol=TINIEST, atol=TINIEST)
    verdict = verify(read([tmp_path / "run"]))
    assert verdict.epochs == {1: verdict.size, 2: verdict.size} and len(verdict.incarnations) == 4


def test_evaluation_equals_sklearn_on_three_ranks(tmp_path: Path) -> None:
    """359 test samples can be divided evenly neither by 3 ranks nor into batches of 50."""
    from sklearn.metrics import accuracy_score, log_loss

    arguments = [*TINY, "train.epochs=1", "train.eval_batch=50", f"checkpoint.dir={tmp_path}"]
    good(3, arguments)
    settings = config.load(None, arguments)
    data = open_data(settings.data)
    model = build_model(settings.model, data.shape, data.classes, 0)
    model.load_state_dict(weights(tmp_path))
    batch = next(iter(data.test_batches([list(range(data.test_size))])))
    with torch.no_grad():
        probabilities = torch.softmax(model(batch.images).double(), 1).numpy()
    (line,) = metrics(tmp_path / "run", "eval")
    assert line["accuracy"] == pytest.approx(accuracy_score(batch.labels, probabilities.argmax(1)), abs=1e-12)
    assert line["loss"] == pytest.approx(log_loss(batch.labels, probabilities), rel=1e-5)


def test_digits_reach_97_percent_accuracy_on_two_ranks(tmp_path: Path) -> None:
    """The settings are a shorter form of the shipped configuration."""
    settings = [
        "data.batch=64",
        "model.width=16",
        "optim.lr=0.05",
        "optim.warmup_epochs=1",
        "train.epochs=8",
        "train.eval_every=8",
    ]
    good(2, [*settings, "checkpoint.every_seconds=0", f"checkpoint.dir={tmp_path}"])
    (line,) = metrics(tmp_path / "run", "eval")
    assert line["accuracy"] >= 0.97
