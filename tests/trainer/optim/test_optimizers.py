"""Rates equal those of torch's schedulers at every step. Optimizers, parameter groups and losses
equal torch's own or the papers' formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddpjob_trainer.config import load
from ddpjob_trainer.config.sections import OptimConfig, OptimizerName, ScheduleName
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.loss import loss_sum
from ddpjob_trainer.optim.optimizers import Position, build_optimizer, learning_rate
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ddpjob_trainer.optim.precision import Precision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

STEPS, EPOCHS, BATCH = 7, 12, 32
TOTAL = STEPS * EPOCHS


def rate(config: OptimConfig, consumed: int, batch: int = BATCH) -> float:
    return learning_rate(config, Position(consumed, STEPS * BATCH, batch, EPOCHS))


def rates(config: OptimConfig) -> list[float]:
    return [rate(config, step * BATCH) for step in range(TOTAL)]


def reference(make: Callable[[torch.optim.Optimizer], LRScheduler]) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(optimizer)
    values = []
    for _ in range(TOTAL):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_the_cosine_schedule_matches_torch() -> None:
    assert rates(OptimConfig(lr=0.4)) == pytest.approx(reference(lambda o: CosineAnnealingLR(o, T_max=TOTAL)))


def test_the_linear_schedule_matches_torch() -> None:
    fall = reference(lambda o: LinearLR(o, start_factor=1, end_factor=0, total_iters=TOTAL))
    assert rates(OptimConfig(lr=0.4, schedule=ScheduleName.LINEAR)) == pytest.approx(fall)


def test_the_step_schedule_matches_torch() -> None:
    config = OptimConfig(lr=0.4, schedule=ScheduleName.STEP, milestones=(3.0, 8.0), gamma=0.2)
    assert rates(config) == pytest.approx(reference(lambda o: MultiStepLR(o, milestones=[21, 56], gamma=0.2)))


@pytest.mark.parametrize(("rise", "start", "end"), [(0.3, 0.04, 4e-6), (0.25, 0.1, 1e-3), (0.5, 1.0, 0.0)])
def test_the_one_cycle_schedule_matches_torch(rise: float, start: float, end: float) -> None:
    config = OptimConfig(lr=0.4, schedule=ScheduleName.ONE_CYCLE, rise=rise, start_factor=start, end_factor=end)
    final = start / end if end else 1e300

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = OneCycleLR(
        optimizer, max_lr=0.4, total_steps=TOTAL, pct_start=rise, div_factor=1 / start, final_div_factor=final
    )
    torchs_rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(TOTAL - 1):  # one step later, torch's scheduler raises an error
        optimizer.step()
        scheduler.step()
        torchs_rates.append(optimizer.param_groups[0]["lr"])
    assert rates(config) == pytest.approx(torchs_rates)


def test_the_one_cycle_schedule_works_with_few_steps() -> None:
    """The rise takes only one step, for which torch's scheduler divides by zero."""
    config = OptimConfig(lr=0.4, schedule=ScheduleName.ONE_CYCLE, rise=0.5)
    assert [learning_rate(config, Position(step, 2, 1, 1)) for step in range(2)] == pytest.approx([0.4, 0.4 * 4e-6])


def test_the_warmup_and_the_schedule_after_it_match_torch() -> None:
    def torchs(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rise = LinearLR(optimizer, start_factor=1 / 14, total_iters=13)
        return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, T_max=TOTAL - 14)], milestones=[14])

    assert rates(OptimConfig(lr=0.4, warmup_epochs=2)) == pytest.approx(reference(torchs))
    constant = rates(OptimConfig(lr=0.4, warmup_epochs=2, schedule=ScheduleName.CONSTANT))
    assert constant[14:] == reference(lambda o: ConstantLR(o, factor=1.0))[14:]


SCHEDULES = [
    OptimConfig(lr=0.4),
    OptimConfig(lr=0.4, warmup_epochs=2.5),
    OptimConfig(lr=0.4, schedule=ScheduleName.STEP, milestones=(3.0, 8.5), gamma=0.2, warmup_epochs=1),
    OptimConfig(lr=0.4, schedule=ScheduleName.CONSTANT, warmup_epochs=1),
    OptimConfig(lr=0.4, schedule=ScheduleName.LINEAR, warmup_epochs=2),
    OptimConfig(lr=0.4, schedule=ScheduleName.ONE_CYCLE),
]


@pytest.mark.parametrize("config", SCHEDULES, ids=lambda config: f"{config.schedule}-{config.warmup_epochs}")
@given(
    batches=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    changes=st.lists(st.integers(1, 2500), min_size=4, max_size=4),
)
def test_the_learning_rate_follows_the_samples_for_any_batch_sizes(
    config: OptimConfig, batches: list[int], changes: list[int]
) -> None:
    """The batch size may change at any sample. Each step's rate lies between the rates that the
    smallest possible steps would have in the same range of samples.

    After each change, the rate matches that of a run with the new batch size from the start. The
    last step has the final rate.
    """
    size, consumed, walk = (
        STEPS * BATCH,
        0,
        list(zip(batches, [*sorted(changes), EPOCHS * STEPS * BATCH], strict=False)),
    )
    finest = [rate(config, sample, 1) for sample in range(size * EPOCHS)]
    batch = walk[0][0]
    while consumed < size * EPOCHS:
        batch = next((each for each, until in walk if consumed < until), batch)
        found = rate(config, consumed, batch)
        # With one-cycle, the maximum is one step earlier than its position among the samples, so
        # the previous step also counts.
        near = finest[max(0, consumed - batch) : consumed + min(batch, size)]
        assert min(near) * (1 - 1e-9) <= found <= max(near) * (1 + 1e-9), (consumed, batch)
        consumed += min(batch, size - consumed % size)


@pytest.mark.parametrize("config", SCHEDULES[:5], ids=lambda config: f"{config.schedule}-{config.warmup_epochs}")
@given(consumed=st.integers(0, 2687), batches=st.tuples(st.integers(1, 224), st.integers(1, 224)))
def test_after_the_warmup_the_rate_does_not_depend_on_the_batch_size(
    config: OptimConfig, consumed: int, batches: tuple[int, int]
) -> None:
    if consumed >= config.warmup_epochs * STEPS * BATCH:
        assert rate(config, consumed, batches[0]) == rate(config, consumed, batches[1])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def named(weights: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(number), weight) for number, weight in enumerate(weights)]


def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[torch.Tensor]:
    model = network()
    optimizer = make(model)
    for step in range(8):
        torch.manual_seed(step)
        set_learning_rate(optimizer, 0.1 / (step + 1))
        optimizer.zero_grad()
        loss_sum(model(torch.randn(6, 1, 8, 8)), torch.randint(5, (6,))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def split(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Group parameters by the kind of their module, as a reference. The trainer groups them by
    their number of dimensions.
    """
    normalized = {
        id(p) for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()
    }
    free = [p for name, p in model.named_parameters() if name.endswith("bias") or id(p) in normalized]
    rest = [p for p in model.parameters() if all(p is not other for other in free)]
    return [{"params": rest, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("config", "torchs"),
    [
        (OptimConfig(momentum=0.0), lambda m: torch.optim.SGD(m.parameters(), lr=1, weight_decay=5e-4)),
        (
            OptimConfig(nesterov=True),
            lambda m: torch.optim.SGD(m.parameters(), lr=1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        ),
        (
            OptimConfig(name=OptimizerName.ADAMW, weight_decay=0.2, betas=(0.8, 0.95)),
            lambda m: torch.optim.AdamW(m.parameters(), lr=1, weight_decay=0.2, betas=(0.8, 0.95)),
        ),
        (
            OptimConfig(weight_decay=0.2, decay_norm_and_bias=False),
            lambda m: torch.optim.SGD(split(m, 0.2), lr=1, momentum=0.9),
        ),
        (
            OptimConfig(name=OptimizerName.ADAMW, weight_decay=0.2, decay_norm_and_bias=False),
            lambda m: torch.optim.AdamW(split(m, 0.2), lr=1),
        ),
    ],
)
def test_optimizers_match_torch(config: OptimConfig, torchs: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    ours, theirs = trained(lambda model: build_optimizer(config, model.named_parameters())), trained(torchs)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)  # fused kernels round once, other kernels twice


def test_groups_without_weight_decay_change_the_result() -> None:
    """This shows that the two comparisons with groups above can fail."""
    with_decay = trained(lambda model: build_optimizer(OptimConfig(weight_decay=0.2), model.named_parameters()))
    without = trained(
        lambda model: build_optimizer(
            OptimConfig(weight_decay=0.2, decay_norm_and_bias=False), model.named_parameters()
        )
    )
    assert all((own - other).abs().max() > 1e-3 for own, other in zip(with_decay, without, strict=True))


def small_transformers() -> Iterator[nn.Module]:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt
    from torchvision.models.swin_transformer import SwinTransformer
    from torchvision.models.vision_transformer import VisionTransformer

    yield VisionTransformer(16, 8, 1, 2, 8, 16, num_classes=3)
    yield SwinTransformer([4, 4], 8, [1, 1], [2, 2], [2, 2], num_classes=3)
    yield ConvNeXt([CNBlockConfig(8, None, 2)], num_classes=3)


def test_tokens_positions_and_layer_scales_are_not_decayed() -> None:
    """The remaining tensors with more than one dimension are matrices and convolutions."""
    for model in small_transformers():
        decayed, free = build_optimizer(OptimConfig(decay_norm_and_bias=False), model.named_parameters()).param_groups
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert free["weight_decay"] == 0 < decayed["weight_decay"]
        assert all(names[weight].endswith("weight") for weight in decayed["params"]), type(model)
        kinds = {names[weight].rpartition(".")[2] for weight in free["params"]} - {"weight", "bias", "in_proj_bias"}
        assert kinds in ({"class_token", "pos_embedding"}, {"relative_position_bias_table"}, {"layer_scale"}), kinds
        (whole,) = build_optimizer(OptimConfig(), model.named_parameters()).param_groups
        assert len(whole["params"]) == len(names)


@pytest.mark.parametrize("name", [OptimizerName.SGD, OptimizerName.ADAMW])
def test_sharded_weights_are_updated_together(name: OptimizerName) -> None:
    """By default, torch updates DTensors one by one."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    config = OptimConfig(name=name, lr=0.1)
    whole = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = [nn.Parameter(distribute_tensor(weight.detach().clone(), mesh)) for weight in whole]
        optimizers = build_optimizer(config, named(whole)), build_optimizer(config, named(parts))
        assert [optimizer.defaults["foreach"] for optimizer in optimizers] == [None, True]
        for optimizer in optimizers:
            for _ in range(3):
                sum((weight**2).sum() for weight in optimizer.param_groups[0]["params"]).backward()
                optimizer.step()
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(other.full_tensor(), one)  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def test_lars_matches_the_papers_algorithm() -> None:
    """The reference is algorithm 1 of You, Gitman, Ginsburg 2017 in float64 with numpy. Biases and
    normalization use plain SGD.
    """
    config = OptimConfig(name=OptimizerName.LARS, lr=3.0, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02)
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(2, 2))]
    expected = [weight.detach().double().numpy().copy() for weight in weights]
    speeds = [np.zeros_like(value) for value in expected]
    optimizer = build_optimizer(config, named(weights))
    for step in range(6):
        rate = 3.0 / (step + 1)
        set_learning_rate(optimizer, rate)
        for place, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + place))
            gradient, value = weight.grad.double().numpy(), expected[place]
            local = 1.0
            if weight.ndim > 1 and np.linalg.norm(value) > 0:
                local = 0.02 * np.linalg.norm(value) / (np.linalg.norm(gradient) + 0.01 * np.linalg.norm(value))
            speeds[place] = 0.9 * speeds[place] + rate * local * (gradient + 0.01 * value)
            expected[place] = value - speeds[place]
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), value, rtol=1e-5, atol=1e-6)


def test_lamb_matches_the_papers_algorithm() -> None:
    """The reference is algorithm 2 of You et al. 2019 with Adam's bias correction, in float64 with
    numpy. Parameters without decay use plain Adam.
    """
    config = OptimConfig(
        name=OptimizerName.LAMB, lr=0.1, weight_decay=0.02, betas=(0.8, 0.95), decay_norm_and_bias=False
    )
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(2, 2))]
    expected = [weight.detach().double().numpy().copy() for weight in weights]
    means, squares = ([np.zeros_like(value) for value in expected] for _ in range(2))
    optimizer = build_optimizer(config, named(weights))
    for step in range(1, 7):
        rate = 0.1 / step
        set_learning_rate(optimizer, rate)
        for place, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + place))
            gradient, value = weight.grad.double().numpy(), expected[place]
            means[place] = 0.8 * means[place] + 0.2 * gradient
            squares[place] = 0.95 * squares[place] + 0.05 * gradient**2
            update = means[place] / (1 - 0.8**step) / (np.sqrt(squares[place] / (1 - 0.95**step)) + 1e-6)
            if weight.ndim > 1:
                update = update + 0.02 * value
                size = np.linalg.norm(value)
                update = update * (size / np.linalg.norm(update) if size > 0 else 1.0)
            expected[place] = value - rate * update
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), value, rtol=1e-5, atol=1e-6)


def test_lamb_matches_timm() -> None:
    lamb = pytest.importorskip("timm.optim").Lamb
    config = OptimConfig(name=OptimizerName.LAMB, weight_decay=0.2, decay_norm_and_bias=False)
    ours = trained(lambda model: build_optimizer(config, model.named_parameters()))
    theirs = trained(lambda model: lamb(split(model, 0.2), lr=1, max_grad_norm=None))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_recipe_with_lamb_clips_like_timm(scale: float) -> None:
    """timm's LAMB clips the norm of all gradients to 1 by default. At the smaller scale, it does not
    clip the first step.
    """
    lamb = pytest.importorskip("timm.optim").Lamb
    config = load("imagenet-lamb", []).optim
    ours, theirs = network(), network()
    optimizer = build_optimizer(config, ours.named_parameters())
    reference = lamb(split(theirs, config.weight_decay), lr=config.lr)
    precision = Precision(clip_norm=config.clip_norm)
    for step in range(1, 6):
        # The size of gradients changes, because LAMB's first step does not depend on it.
        factor = scale * step**3
        for place, pair in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            drawn = torch.Generator().manual_seed(10 * step + place)
            gradient = factor * torch.randn(pair[0].shape, generator=drawn)
            pair[0].grad, pair[1].grad = gradient.clone(), gradient
        precision.step(optimizer, ours.parameters())
        reference.step()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [OptimizerName.LARS, OptimizerName.LAMB, OptimizerName.MUON])
def test_the_state_of_the_trainers_optimizers_can_be_saved_and_loaded(name: OptimizerName) -> None:
    config = OptimConfig(name=name)

    def go(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: range) -> None:
        for step in steps:
            for weight in weights:
                weight.grad = torch.full_like(weight, step + 1.0)
            optimizer.step()

    def fresh() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]

    straight, before, after = fresh(), fresh(), fresh()
    go(build_optimizer(config, named(straight)), straight, range(6))
    first, second = build_optimizer(config, named(before)), build_optimizer(config, named(after))
    go(first, before, range(3))
    with torch.no_grad():
        for new, old in zip(after, before, strict=True):
            new.copy_(old)
    second.load_state_dict(first.state_dict())
    go(second, after, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(straight, after, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_matches_torch_for_labels_probabilities_and_weights(smoothing: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, -100, 4, 0])
    shares = torch.rand(6, 5).softmax(1)
    by_hand = 0.0
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        target = torch.full((5,), smoothing / 5, dtype=torch.float64)
        if label >= 0:
            target[label] += 1 - smoothing
            by_hand -= float((target * torch.log_softmax(row, 0)).sum())
    assert float(loss_sum(logits, labels, smoothing)) == pytest.approx(by_hand, rel=1e-6)
    torchs = nn.functional.cross_entropy(logits, shares, reduction="sum", label_smoothing=smoothing)
    assert float(loss_sum(logits, shares, smoothing)) == pytest.approx(float(torchs), rel=1e-6)
    weights = torch.tensor([1.0, 0, 2, 1, 0.5, 1])
    each = nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    assert float(loss_sum(logits, labels, smoothing, weights)) == pytest.approx(float((each * weights).sum()), rel=1e-6)
    none = torch.cat([shares[:1], torch.zeros(1, 5)])
    torch.testing.assert_close(loss_sum(logits[:2], none, smoothing), loss_sum(logits[:1], shares[:1], smoothing))
    assert loss_sum(logits.half(), labels).dtype is torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimConfig(lr=-1), r"optim.lr=-1: must be a finite number"),
        (OptimConfig(weight_decay=float("nan")), r"optim.weight_decay=nan"),
        (OptimConfig(clip_norm=-1.0), r"optim.clip_norm=-1.0"),
        (OptimConfig(nesterov=True, momentum=0), r"optim.nesterov needs optim.momentum"),
        (OptimConfig(betas=(0.9,)), r"optim.betas=\[0.9\]: must be two numbers .* for example \[0.9, 0.999\]"),
        (OptimConfig(label_smoothing=1.0), r"optim.label_smoothing=1.0: must be at least 0 and below 1"),
        (OptimConfig(ema_decay=1.5), r"optim.ema_decay=1.5: must be at least 0 and below 1"),
        (
            OptimConfig(schedule=ScheduleName.ONE_CYCLE, warmup_epochs=1),
            r"optim.warmup_epochs: .*one_cycle has its own warm-up",
        ),
        (
            OptimConfig(schedule=ScheduleName.ONE_CYCLE, rise=1.0),
            r"optim.rise=1.0: must be between 0 and 1, for example 0.3",
        ),
    ],
)
def test_invalid_settings_of_optimizers_are_refused(config: OptimConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(config, named([nn.Parameter(torch.zeros(1))]))
