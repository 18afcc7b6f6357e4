"""The recipe cifar10-94 computes the steps of airbench94_muon, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jordan
import numpy as np
import pytest
import torch
from datasets import IMAGES, write_cifar_binary
from ddpjob_trainer import config
from ddpjob_trainer.config.loader import read_file
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.dataset import Normalize
from ddpjob_trainer.data.in_memory import MemoryData
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model import airbench
from ddpjob_trainer.model.airbench import Airbench, Whitening, filters, find_filters, whiten
from ddpjob_trainer.model.models import build_model
from ddpjob_trainer.model.partition import to_sequential
from ddpjob_trainer.optim.loss import loss_sum
from ddpjob_trainer.optim.optimizers import Position, build_optimizer, learning_rate
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ranks import final_losses, good, metrics, run, stop_at
from torch import nn

WIDTH, STEPS = 4, 5


def smooth_images(count: int) -> torch.Tensor:
    """Return images (count, 3, 32, 32) uint8 whose neighbouring pixels are similar."""
    coarse = torch.rand(count, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    return (255 * nn.functional.interpolate(coarse, (32, 32), mode="bilinear")).byte()


def their_names(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with airbench's names; the scales of its normalization are 1."""
    places = {"0": "conv1", "2": "norm1", "3": "norm1", "5": "conv2", "6": "norm2", "7": "norm2"}
    found = {}
    for name, value in ours.items():
        if name.startswith("features."):
            _, group, place, last = name.split(".")
            layer = f"layers.{group}.{places[place]}"
            name = f"{layer}.{last}"
            if last == "bias":
                found[f"{layer}.weight"] = torch.ones(len(value))
        found[name] = value
    return found


def both(width: int = WIDTH) -> tuple[Airbench, jordan.CifarNet]:
    torch.manual_seed(1)
    ours, theirs = Airbench((3, 32, 32), 10, width), jordan.CifarNet(width)
    theirs.load_state_dict(their_names(ours.state_dict()))
    return ours, theirs


def recipe(**changed: Any) -> list[str]:
    """Return the arguments of the recipe, with `__` in place of the dot of changed keys."""
    keys = read_file(Path(config.__file__).parent / "shipped" / "cifar10-94.yaml")
    keys |= {key.replace("__", "."): value for key, value in changed.items()}
    return [f"{key}={','.join(value) if isinstance(value, list) else value}" for key, value in keys.items()]


def test_the_model_computes_the_same_as_airbench() -> None:
    ours, theirs = both()
    images = torch.randn(6, 3, 32, 32)
    for training in (True, False):
        found, wanted = (model.train(training)(images) for model in (ours, theirs))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(their_names(ours.state_dict()), dict(theirs.state_dict()))


def test_the_model_starts_like_airbench() -> None:
    """Convolutions copy their inputs, and the head has a variance of 1."""
    for model in both(16):
        if isinstance(model, jordan.CifarNet):
            model.reset()
        layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        convolutions = [layer for layer in layers if layer.kernel_size == (3, 3)]
        assert len(convolutions) == 6
        for layer in convolutions:
            copied = layer.weight[: layer.in_channels]
            assert torch.equal(copied, nn.init.dirac_(torch.empty_like(copied)))
            free = layer.weight[layer.in_channels :]
            assert not len(free) or 0.5 < float(free.detach().abs().max()) * (9 * layer.in_channels) ** 0.5 < 1.01
        assert float(model.head.weight.detach().std()) == pytest.approx(1, abs=1e-5)


def test_the_filters_match_airbench_and_make_the_patches_uncorrelated() -> None:
    pixels, mean, std = smooth_images(150), (0.5, 0.4, 0.6), (0.2, 0.3, 0.25)
    labels = torch.zeros(150, dtype=torch.int64)
    data = MemoryData(
        (pixels, labels),
        (pixels[:9], labels[:9]),
        classes=10,
        normalize=Normalize(255.0, mean, std, torch.device("cpu")),
        augment=None,
    )
    reference = jordan.CifarNet(WIDTH)
    reference.init_whiten((pixels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
    # An eigenvector's sign is arbitrary, so a half and its negative may be exchanged.
    found, wanted = (values.detach()[:12].flatten(1).double() for values in (filters(data, 2), reference.whiten.weight))
    same = (found * wanted).sum(1).sign()[:, None]
    torch.testing.assert_close(found * same, wanted, rtol=1e-3, atol=1e-3)

    model = Airbench((3, 32, 32), 10, WIDTH)
    before = model.whiten.weight.clone()
    model.load_state_dict(whiten(model.state_dict(), find_filters(model, data), data, Group()))
    assert not torch.equal(model.whiten.weight, before) and torch.equal(model.whiten.weight, filters(data, 2).float())
    images = next(data.train_batches([list(range(150))], 0)).images
    maps = model.whiten(images) - model.whiten.bias[:, None, None]
    flat = maps[:, :12].transpose(0, 1).flatten(1).double()
    second = flat @ flat.T / flat.shape[1]
    # Eigenvalues far above the ridge get a variance of 1.
    assert (second - second.diagonal().diag()).abs().max() < 1e-3
    assert 0.9 < float(second.diagonal()[-1]) < 1.001


def test_a_layer_that_does_not_fit_the_images_is_refused() -> None:
    data = open_data(config.load(None, ["data.name=digits"]).data)
    with pytest.raises(
        ConfigError, match=r"takes 3 channels, but the data's images have 1; make the Whitening layer the first layer"
    ):
        find_filters(nn.Sequential(Whitening(3)), data)
    assert find_filters(nn.Sequential(nn.Linear(1, 1)), data) == ""
    assert find_filters(Whitening(1), data) == "weight"


@pytest.mark.parametrize("wrong", [None, "optim__muon_momentum", "optim__momentum", "optim__groups"])
def test_the_recipes_steps_match_airbench(wrong: str | None) -> None:
    """The reference adds up the losses of 2000 images; here, a mean over fewer ones is multiplied.
    A changed key must show.
    """
    changed: dict[str, Any] = {} if wrong is None else {wrong: 0.7}
    if wrong == "optim__groups":
        changed = {wrong: ["head.*=5583.33/2.98507e-6", "*.bias=441.667/3.8e-3"]}
    settings = config.load(None, recipe(amp__level="O0", **changed))
    # In float32, rounding would depend on the number of threads.
    ours, theirs = (model.double() for model in both())
    optimizer = build_optimizer(settings.optim, ours.named_parameters())
    filters = [p for p in theirs.parameters() if len(p.shape) == 4 and p.requires_grad]
    norm_biases = [p for n, p in theirs.named_parameters() if "norm" in n and p.requires_grad]
    bias_lr, head_lr, wd = 0.053, 0.67, 2e-6 * 2000
    references = [
        torch.optim.SGD(
            [
                {"params": params, "lr": lr, "weight_decay": wd / lr}
                for params, lr in (([theirs.whiten.bias, *norm_biases], bias_lr), ([theirs.head.weight], head_lr))
            ],
            momentum=0.85,
            nesterov=True,
        ),
        jordan.AirbenchMuon(filters, 0.24, 0.6),
    ]
    first = [[group["lr"] for group in each.param_groups] for each in references]
    labels, images = torch.arange(20) % 10, torch.randn(STEPS, 20, 3, 32, 32, dtype=torch.float64)
    for step in range(STEPS):
        loss_sum(ours(images[step]), labels, settings.optim.label_smoothing).div(20).backward()
        set_learning_rate(optimizer, learning_rate(settings.optim, Position(2000 * step, 2000 * STEPS, 2000, 1)))
        loss = nn.functional.cross_entropy(theirs(images[step]), labels, label_smoothing=0.2, reduction="mean") * 2000
        loss.backward()
        for each, rates in zip(references, first, strict=True):
            for group, rate in zip(each.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / STEPS)
        for one in (optimizer, *references):
            one.step()
            one.zero_grad()
    found, wanted = their_names(dict(ours.named_parameters())), dict(theirs.named_parameters())
    close = [
        torch.allclose(found[name], value, rtol=1e-3, atol=2e-4)
        for name, value in wanted.items()
        if value.requires_grad
    ]
    assert len(close) == 14 and all(close) is (wrong is None), close


@pytest.mark.parametrize("side", [9, 16, 33])
def test_stages_compute_the_same_as_the_model(side: int) -> None:
    model = Airbench((1, side, side), 7, 4).eval()
    images = torch.randn(3, 1, side, side)
    assert model(images).shape == (3, 7)
    layers = to_sequential(model)
    assert torch.equal(nn.Sequential(*(layer.module for layer in layers))(images), model(images))
    weights = dict(model.named_parameters())
    assert sum(any(name.startswith(layer.name) for layer in layers) for name in weights) == len(weights)


def test_invalid_sizes_are_refused() -> None:
    settings = config.load(None, ["model.name=airbench_cifar", "model.width=0"]).model
    with pytest.raises(ConfigError, match=r"^model.width=0: must be at least 1"):
        build_model(settings, (3, 32, 32), 10, 0)
    with pytest.raises(ConfigError, match=r"needs images of at least 9 x 9 pixels, but the data's have 8 x 8; set mod"):
        build_model(settings, (1, 8, 8), 10, 0)


def arguments(folder: Path, out: Path, **more: Any) -> list[str]:
    """Return the recipe on 50 images, with 3 steps per epoch and two micro-batches per step."""
    return recipe(
        data__dir=folder,
        data__batch=20,
        data__micro_batches=2,
        model__width=WIDTH,
        amp__level="O0",
        train__epochs=2,
        train__eval_every=1,
        train__log_every=1,
        train__timeout_seconds=60,
        eval__pictures="false",
        checkpoint__every_seconds=0,
        checkpoint__dir=out,
        **more,
    )


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[float], float]:
    weights = torch.load(max(folder.glob("step-*.pt")), weights_only=True)["model"]
    return weights, final_losses(folder / "run"), metrics(folder / "run", "eval")[-1]["loss"]


def noting_filters(path: Path, then: Any = lambda rank: None) -> Any:
    """Return a hook that appends to `path` whenever a rank computes filters."""

    def prepare(rank: int) -> None:
        then(rank)
        compute = airbench.filters

        def noted(*given: Any) -> torch.Tensor:
            with path.open("a") as file:
                file.write(f"{rank}")
            return compute(*given)

        airbench.filters = noted

    path.write_text("")
    return prepare


def test_a_run_of_the_recipe_is_exact_on_more_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """Two ranks differ from one by rounding at most, and a resume does not differ at all. Only rank
    0 of a new run computes filters, because a checkpoint contains them.
    """
    write_cifar_binary(tmp_path)
    computed = tmp_path / "computed"
    folders = [tmp_path / name for name in ("one", "two", "resumed")]
    good(1, arguments(tmp_path, folders[0]))
    # Without ddp.ordered, DDP would send rank 0's filters to all ranks by itself.
    good(2, arguments(tmp_path, folders[1], ddp__ordered="true"), prepare=noting_filters(computed))
    assert computed.read_text() == "0"
    stopped = run(1, arguments(tmp_path, folders[2]), prepare=noting_filters(computed, stop_at(5)))
    assert [end.code for end in stopped] == [75] and computed.read_text() == "0"
    good(1, arguments(tmp_path, folders[2]), prepare=noting_filters(computed))
    assert computed.read_text() == "", "a resume computes no filters"
    (one, losses, tested), (two, *of_two), (resumed, *of_resumed) = map(outcome, folders)
    assert of_resumed == [losses, tested] and all(torch.equal(one[name], resumed[name]) for name in one)
    np.testing.assert_allclose(of_two[0], losses, rtol=0, atol=1e-6)
    assert of_two[1] == pytest.approx(tested, abs=1e-6)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-6)
    assert len(losses) == 6 and len(IMAGES) == 60

    data = open_data(config.load(None, arguments(tmp_path, folders[0])).data)
    assert torch.equal(one["whiten.weight"], filters(data, 2).float()), "fixed since the start"
    with pytest.raises(AssertionError):
        plain = config.load(None, arguments(tmp_path, folders[0], data__flip="false", data__padding="zeros"))
        torch.testing.assert_close(one["whiten.weight"], filters(open_data(plain.data), 2).float())


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_ranks_that_hold_a_part_of_the_model_start_with_the_same_filters(strategy: str, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    keys = ["data.name=cifar10", f"data.dir={tmp_path}", "data.batch=20", "model.name=airbench_cifar"]
    keys += ["model.width=4", "optim.lr=0.01", "train.epochs=1", "train.timeout_seconds=60", "eval.pictures=false"]
    good(2, [*keys, "checkpoint.every_seconds=0", f"strategy={strategy}", f"checkpoint.dir={tmp_path / 'out'}"])
    weights = torch.load(max((tmp_path / "out").glob("step-*.pt")), weights_only=True)["model"]
    assert torch.equal(weights["whiten.weight"], filters(open_data(config.load(None, keys).data), 2).float())
