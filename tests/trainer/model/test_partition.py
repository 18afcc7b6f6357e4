"""A model that is a chain of modules is split into parts of nearly equal cost. Each part of ddp_mp
is on its own device.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from ddpjob_trainer import config as configuration
from ddpjob_trainer.config.sections import ModelConfig
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model
from ddpjob_trainer.model.partition import Layer, MetaModel, Stage, split, to_sequential
from ddpjob_trainer.strategies.contrib.ddp_mp import DdpMp
from ddpjob_trainer.strategies.fsdp import blocks
from torch import nn

CPU = torch.device("cpu")


def network(name: str, shape: tuple[int, int, int]) -> nn.Module:
    return build_model(ModelConfig(name=name, width=4), shape, 10, 0, CPU)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18_cifar", "torchvision:resnet18", "torchvision:alexnet"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_parts_of_a_chain_give_the_outputs_of_the_model(name: str, parts: int) -> None:
    shape = (3, 64, 64) if name == "torchvision:alexnet" else (3, 16, 16)
    model = network(name, shape).eval()
    layers = to_sequential(model)
    skeleton = MetaModel(layers)
    images = torch.randn(2, *shape)
    expected, values = model(images), images
    pieces = [Stage(part) for part in split(layers, skeleton.costs(shape), parts, "parts")]
    for piece in pieces:
        values = piece(values)
    assert torch.equal(values, expected)
    assert skeleton.outputs(images.shape)[-1].shape == expected.shape
    names = [name for piece in pieces for name in piece.state_dict()]
    assert sorted(names) == sorted(model.state_dict()), "each weight is in one part, under the model's name for it"


def test_the_parts_of_a_channels_last_model_compute_in_that_layout() -> None:
    """A part lacks the model's hook that converts images. A convolution takes the layout of its
    weights.
    """
    model = build_model(ModelConfig(name="resnet18_cifar", channels_last=True), (3, 16, 16), 10, 0, CPU)
    first = Stage(split(layers := to_sequential(model), MetaModel(layers).costs((3, 16, 16)), 3, "parts")[0])
    values = first(torch.randn(2, 3, 16, 16))
    assert values.is_contiguous(memory_format=torch.channels_last) and not values.is_contiguous()


def test_a_module_that_occurs_twice_in_a_sequence_is_kept_in_both_positions() -> None:
    """An activation may be created once and used twice; named_children yields only its first
    position.
    """
    activation = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 2))
    layers = to_sequential(model)
    assert [layer.name for layer in layers] == ["0", "1", "2", "3", "4"]
    values = inputs = torch.randn(16, 4)
    for part in split(layers, [1.0] * 5, 3, "parts"):
        values = Stage(part)(values)
    assert torch.equal(values, model(inputs))


class Residual(nn.Sequential):
    """Adds the output of its modules to the input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = input + super().forward(input)  # type: ignore[no-untyped-call]
        return added


def twice(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4), module)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Residual(nn.Linear(4, 4), nn.Linear(4, 4)), "a Residual cannot be split into stages"),
        (twice(nn.Linear(4, 4)), "layers 1 and 3 of the model share weights"),
        (twice(nn.BatchNorm1d(4, affine=False)), "layers 1 and 3 of the model share weights"),
    ],
)
def test_a_model_that_is_not_a_chain_of_modules_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_sequential(model)


@pytest.mark.parametrize("name", ["resnet18_cifar", "torchvision:resnet50", "torchvision:vgg16"])
def test_the_costs_of_two_parts_are_nearly_equal(name: str) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), (3, 64, 64), 10, 0, torch.device("meta"))
    layers = to_sequential(model)
    costs = MetaModel(layers).costs((3, 64, 64))
    first, _ = split(layers, costs, 2, "parts")
    assert 0.42 < sum(costs[: len(first)]) / sum(costs) < 0.58


def test_no_other_cut_is_cheaper() -> None:
    """The cut is compared with every possible cut."""
    draw = random.Random(7)
    for _ in range(200):
        modules = [nn.Linear(1, 1) if draw.random() < 0.6 else nn.ReLU() for _ in range(draw.randint(1, 9))]
        layers = [Layer(str(place), module) for place, module in enumerate([nn.Linear(1, 1), *modules])]
        costs = [float(draw.randint(0, 20)) for _ in layers]
        starts = [place for place, layer in enumerate(layers) if layer.has_weights][1:]
        for parts in range(1, len(starts) + 2):
            found = split(layers, costs, parts, "parts")
            assert [layer for part in found for layer in part] == layers
            assert len(found) == parts and all(part[0].has_weights for part in found)

            def dearest(bounds: tuple[int, ...], costs: list[float] = costs) -> float:
                return max(sum(costs[start:end]) for start, end in itertools.pairwise((0, *bounds, len(costs))))

            mine = tuple(itertools.accumulate(len(part) for part in found[:-1]))
            assert dearest(mine) == min(dearest(bounds) for bounds in itertools.combinations(starts, parts - 1))
        with pytest.raises(ConfigError, match=f"some.key: .* write at most {len(starts) + 1}"):
            split(layers, costs, len(starts) + 2, "some.key")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small_cnn", ["features"]),
        ("resnet18_cifar", ["stem", *(f"blocks.{number}" for number in range(8))]),
        ("torchvision:resnet18", [f"layer{layer}.{number}" for layer in range(1, 5) for number in range(2)]),
        ("torchvision:vit_b_16", [f"encoder.layers.encoder_layer_{number}" for number in range(12)] + ["heads"]),
    ],
)
def test_fsdp_gathers_parameters_block_by_block(name: str, expected: list[str]) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name), (3, 224, 224), 10, 0, torch.device("meta"))
    names = {module: name for name, module in model.named_modules()}
    assert [names[block] for block in blocks(model)] == expected


def spread(monkeypatch: pytest.MonkeyPatch, devices: list[torch.device]) -> DdpMp:
    monkeypatch.setattr(DdpMp, "devices", property(lambda self: devices))
    settings = configuration.load(None, ["strategy=ddp_mp", f"ddp_mp.devices={len(devices)}", "model.width=4"])
    strategy = DdpMp(settings, Group(), devices[0])
    strategy.prepare(network("small_cnn", (1, 8, 8)), (1, 8, 8))
    return strategy


def test_each_part_is_on_its_device_and_values_are_sent_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a second device. Values cannot be copied back from it, which shows
    where they are sent.
    """
    strategy = spread(monkeypatch, [CPU, torch.device("meta")])
    seen: list[tuple[str, str]] = []
    for name, module in strategy.model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: seen.append((inputs[0].device.type, output.device.type))
            )
    devices = [parameter.device.type for parameter in strategy.model.parameters()]
    assert devices == sorted(devices) and set(devices) == {"cpu", "meta"}
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        strategy.model(torch.randn(2, 1, 8, 8))
    assert seen == sorted(seen) and {output for _, output in seen} == {"cpu", "meta"}
    assert all(source == target for source, target in seen), "a module computes on the device of its weights"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_the_cpu_and_a_gpu_trains_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpjob_trainer.data.dataset import Batch
    from ddpjob_trainer.data.sampler import Micro

    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    trained = []
    for devices in ([CPU, CPU], [CPU, torch.device("cuda", 0)]):
        strategy = spread(monkeypatch, devices)
        for key in range(3):
            strategy.backward([(Micro(0, list(range(8)), key), Batch(images, labels))], 8)
            strategy.update(0.1)
        trained.append({name: value.cpu() for name, value in strategy.state()["model"].items()})
    assert {parameter.device.type for parameter in strategy.model.parameters()} == {"cpu", "cuda"}
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-3, atol=1e-4)


def test_devices_that_do_not_exist_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configuration.load(None, ["strategy=ddp_mp", "ddp_mp.devices=4", "amp.level=O0"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert [device.index for device in DdpMp(settings, Group(), torch.device("cuda", 0)).devices] == [0, 1, 2, 3]
    with pytest.raises(
        ConfigError,
        match="needs cuda devices 4 to 7, but 6 are visible; start 1 processes per node, or use fewer devices",
    ):
        _ = DdpMp(settings, Group(), torch.device("cuda", 4)).devices
