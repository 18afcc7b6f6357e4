"""The moving average of the weights equals torch's AveragedModel, is used for evaluation, and is
bit-identical after restarts.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from ddpjob_trainer import config
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model
from ddpjob_trainer.optim.ema import MovingAverage
from ddpjob_trainer.strategies.registry import open_strategy
from ranks import TINY, final_losses, good, metrics, run, stop_at
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

AVERAGE = [*TINY, "model.norm=batch", "data.micro_batches=2", "optim.ema_decay=0.7"]


def test_the_average_matches_torchs_averaged_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    running = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    ours = MovingAverage(0.9, [*model.named_parameters(), *running])
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(5):
        with torch.no_grad():
            for tensor in (*model.parameters(), *(buffer for _, buffer in running)):
                tensor.add_(torch.randn(tensor.shape))
        ours.update()
        torchs.update_parameters(model)
    expected = dict(torchs.module.state_dict())
    for name, average in ours.state()["averages"].items():
        torch.testing.assert_close(average, expected[name])
    before = copy.deepcopy(model.state_dict())
    ours.put_in_place()
    torch.testing.assert_close(model[0].weight.detach(), expected["0.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    ours.put_back()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_skipped_steps_do_not_count_in_the_average() -> None:
    """This holds whether the skip is known immediately or only on the device."""
    weight = torch.zeros(3)
    known, later = MovingAverage(0.9, [("w", weight)]), MovingAverage(0.9, [("w", weight)])
    for step in range(6):
        weight += 1
        known.update(step % 2 == 1)
        later.update(torch.tensor(step % 2 == 1))
    expected = 0.9 * (0.9 * 1 + 0.1 * 3) + 0.1 * 5
    for average in (known, later):
        torch.testing.assert_close(average.state()["averages"]["w"], torch.full((3,), expected))


def test_an_overflow_does_not_change_the_average() -> None:
    settings = config.load(None, ["strategy=single", "model.width=4", "optim.ema_decay=0.5"])
    strategy = open_strategy(settings, Group(), torch.device("cpu"))
    strategy.prepare(build_model(settings.model, (1, 8, 8), 10, 0), (1, 8, 8))
    for gradient in (1.0, float("inf")):
        for weight in strategy.model.parameters():
            weight.grad = torch.full_like(weight, gradient)
        strategy.update(0.1)
    assert strategy.state()["average"]["updates"] == 1


@pytest.mark.parametrize("amp", ["O0", "O2"])
def test_a_model_in_half_precision_is_averaged_in_float32(amp: str) -> None:
    settings = config.load(
        None, ["strategy=single", "model.width=4", "model.norm=batch", "optim.ema_decay=0.5", f"amp.level={amp}"]
    )
    strategy = open_strategy(settings, Group(), torch.device("cpu"))
    strategy.prepare(build_model(settings.model, (1, 8, 8), 10, 0), (1, 8, 8))
    averages = strategy.state()["average"]["averages"]
    assert {average.dtype for average in averages.values()} == {torch.float32}
    own = dict(strategy.model.named_parameters())
    before = {name: value.clone() for name, value in own.items()}
    strategy.update(0.1)
    for average in averages.values():
        average.add_(1.0)
    strategy.train_mode(False)
    assert all(torch.equal(value, averages[name].to(value.dtype)) for name, value in own.items())
    strategy.train_mode(True)
    assert all(torch.equal(value, before[name]) for name, value in own.items())


def saved(folder: Path) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    state: dict[str, dict[str, dict[str, torch.Tensor]]] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    return state


def forgetful(rank: int) -> None:
    """Deliberate defect: the average starts over after a restart."""
    MovingAverage.load = lambda self, state: None  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    good(1, [*AVERAGE, f"checkpoint.dir={folder}"])
    return folder


@pytest.mark.parametrize("defect", [None, forgetful])
def test_a_restart_changes_neither_losses_nor_the_average(defect: object, undisturbed: Path, tmp_path: Path) -> None:
    assert [end.code for end in run(1, [*AVERAGE, f"checkpoint.dir={tmp_path}"], prepare=stop_at(11))] == [75]
    good(1, [*AVERAGE, f"checkpoint.dir={tmp_path}"], prepare=defect)  # type: ignore[arg-type]
    assert final_losses(tmp_path / "run") == final_losses(undisturbed / "run"), "training itself never uses the average"
    one, other = (saved(folder)["average"]["averages"] for folder in (undisturbed, tmp_path))
    same = all(torch.equal(value, other[name]) for name, value in one.items())
    evaluated = [metrics(folder / "run", "eval")[-1]["loss"] for folder in (undisturbed, tmp_path)]
    assert same is (defect is None) and (evaluated[0] == evaluated[1]) is (defect is None)


def test_the_average_is_the_same_on_several_ranks_as_on_one(undisturbed: Path, tmp_path: Path) -> None:
    good(2, [*AVERAGE, f"checkpoint.dir={tmp_path}"])
    one, two = (saved(folder)["average"]["averages"] for folder in (undisturbed, tmp_path))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)


def test_the_average_is_used_for_evaluation(undisturbed: Path) -> None:
    settings = config.load(None, AVERAGE)
    data = open_data(settings.data)
    (batch,) = data.test_batches([list(range(data.test_size))])
    losses = {}
    for name, weights in (("raw", saved(undisturbed)["model"]), ("average", saved(undisturbed)["average"]["averages"])):
        model = build_model(settings.model, data.shape, data.classes, 0).eval()
        model.load_state_dict(weights, strict=False)  # type: ignore[arg-type]
        with torch.no_grad():
            losses[name] = float(nn.functional.cross_entropy(model(batch.images), batch.labels))
    assert metrics(undisturbed / "run", "eval")[-1]["loss"] == pytest.approx(losses["average"], rel=1e-5)
    assert abs(losses["raw"] - losses["average"]) > 1e-3 * losses["raw"]


def test_masks_and_buffers_that_are_not_saved_are_not_averaged() -> None:
    """Regression: the average of a mask of -inf was NaN, and a checkpoint's average did not fit the
    model if a buffer was not persistent.
    """
    model = build_model(config.load(None, ["model.width=4", "model.norm=batch"]).model, (1, 8, 8), 10, 0)
    model.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))
    model.register_buffer("places", torch.arange(3.0), persistent=False)
    settings = config.load(None, ["strategy=single", "optim.ema_decay=0.5"])
    strategy = open_strategy(settings, Group(), torch.device("cpu"))
    strategy.prepare(model, (1, 8, 8))
    for _ in range(2):
        strategy.update(0.1)
    strategy.train_mode(False)
    assert torch.equal(model.get_buffer("mask"), nn.Transformer.generate_square_subsequent_mask(3))
    averages = strategy.state()["average"]["averages"]
    floats = {name for name, value in model.state_dict().items() if value.is_floating_point()}
    assert averages.keys() == floats - {"mask"}


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_invalid_decays_are_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"optim.ema_decay=.* for example 0.999"):
        MovingAverage(decay, [])
