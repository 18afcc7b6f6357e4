"""Apex's levels equal loops written by hand with torch's own functions. The tests cover the loss
scale, clipping, skipped steps, and exact resumes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddpjob_trainer import config, train
from ddpjob_trainer.config.sections import AmpConfig, AmpDtype, AmpLevel
from ddpjob_trainer.data.dataset import Batch
from ddpjob_trainer.data.sampler import Micro
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.models import build_model
from ddpjob_trainer.optim.precision import Precision, _dtype, _loss_scale, choose_amp
from ddpjob_trainer.strategies.registry import open_strategy
from ddpjob_trainer.strategies.strategy import Strategy
from ranks import TINY, final_losses, good, metrics, run, stop_at
from torch import nn
from torch.nn import functional

CPU = torch.device("cpu")
SETTINGS = [
    "strategy=single",
    "model.width=4",
    "model.norm=batch",
    "optim.lr=0.1",
    "optim.momentum=0.9",
    "optim.weight_decay=0.001",
]
CURVE = ["model.norm=batch", "data.micro_batches=2", "train.epochs=1"]
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, because the tensors are small and a second thread costs more than it
    saves.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(*arguments: str) -> Strategy:
    settings = config.load(None, [*SETTINGS, *arguments])
    strategy = open_strategy(settings, Group(), CPU)
    strategy.prepare(build_model(settings.model, (1, 8, 8), 10, 0), (1, 8, 8))
    return strategy


def plain() -> nn.Module:
    return build_model(config.load(None, SETTINGS).model, (1, 8, 8), 10, 0)


def batch(step: int, part: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + part)
    return Batch(torch.randn(6, 1, 8, 8, generator=generator), torch.randint(10, (6,), generator=generator))


def steps(strategy: Strategy, numbers: range, parts: int = 1) -> list[tuple[float, bool]]:
    """Take these steps and return (norm, skipped) of each."""
    updates = []
    for step in numbers:
        micros = [Micro(part, list(range(6)), part) for part in range(parts)]
        strategy.backward([(micro, batch(step, micro.number)) for micro in micros], 6 * parts)
        update = strategy.update(0.1)
        updates.append((float(update.norm), bool(update.skipped)))
    return updates


def loss_of(model: nn.Module, given: Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return functional.cross_entropy(model(given.images.to(dtype)).float(), given.labels)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.001, fused=True)  # type: ignore[arg-type]


def same(ours: nn.Module, by_hand: nn.Module) -> None:
    for name, value in by_hand.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], value, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------ the levels, by hand


@pytest.mark.parametrize("wrong_order", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [("float16", 65536.0), ("bfloat16", 1.0)])
def test_o1_is_autocast_with_gradscaler_and_clips_unscaled_gradients(
    dtype: str, scale: float, wrong_order: bool
) -> None:
    strategy = opened("amp.level=O1", f"amp.dtype={dtype}", "optim.clip_norm=0.5")
    updates = steps(strategy, range(5))
    model = plain()
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", enabled=scale != 1)
    for step in range(5):
        with torch.autocast("cpu", HALVES[dtype]):
            loss = loss_of(model, batch(step))
        scaler.scale(loss).backward()
        if not wrong_order:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if not wrong_order:
            assert updates[step] == (pytest.approx(float(norm), rel=1e-3), False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert min(norm for norm, _ in updates) > 0.5, "every step was clipped"
    if wrong_order and scale != 1:
        with pytest.raises(AssertionError, match="not close"):
            same(strategy.model, model)
    else:
        same(strategy.model, model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_is_a_half_model_with_float32_normalization_and_master_weights(dtype: str) -> None:
    strategy = opened("amp.level=O2", f"amp.dtype={dtype}", "amp.loss_scale=128.0", "optim.clip_norm=1.0")
    updates = steps(strategy, range(5), parts=2)
    half = HALVES[dtype]
    masters = plain()
    model = copy.deepcopy(masters).to(half)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    optimizer = sgd(masters.parameters())
    for step in range(5):
        for part in range(2):
            (loss_of(model, batch(step, part), half) / 2 * 128.0).backward()
        for master, short in zip(masters.parameters(), model.parameters(), strict=True):
            assert short.grad is not None
            master.grad = short.grad.float() / 128.0
        norm = nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        assert updates[step] == (pytest.approx(float(norm), rel=1e-3), False)
        optimizer.step()
        with torch.no_grad():
            for master, short in zip(masters.parameters(), model.parameters(), strict=True):
                short.copy_(master)
        model.zero_grad()
    same(strategy.model, model)
    saved = strategy.state()["model"]
    for name, master in masters.named_parameters():
        assert saved[name].dtype is torch.float32
        torch.testing.assert_close(saved[name], master.detach(), rtol=1e-4, atol=1e-6)
    assert {parameter.dtype for parameter in strategy.model.parameters()} == {half, torch.float32}
    assert any(not torch.equal(master, master.to(half).float()) for master in masters.parameters()), (
        "master weights are more precise than the model's"
    )


@pytest.mark.parametrize(("dtype", "scale"), [("float16", "128.0"), ("float16", "1"), ("bfloat16", "auto")])
def test_o3_computes_everything_in_half_precision(dtype: str, scale: str) -> None:
    strategy = opened("amp.level=O3", f"amp.dtype={dtype}", f"amp.loss_scale={scale}")
    steps(strategy, range(4))
    factor = 1.0 if scale == "auto" else float(scale)
    model = plain().to(HALVES[dtype])
    optimizer = sgd(model.parameters())
    for step in range(4):
        (loss_of(model, batch(step), HALVES[dtype]) * factor).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / factor)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(dict(strategy.model.named_parameters())[name], value, rtol=1e-2, atol=1e-3)
    assert {parameter.dtype for parameter in strategy.model.parameters()} == {HALVES[dtype]}


def test_o0_clips_like_torch() -> None:
    strategy = opened("optim.clip_norm=0.5")
    updates = steps(strategy, range(4), parts=2)
    model = plain()
    optimizer = sgd(model.parameters())
    for step in range(4):
        for part in range(2):
            (loss_of(model, batch(step, part)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert updates[step] == (pytest.approx(float(norm), rel=1e-5), False)
        optimizer.step()
        optimizer.zero_grad()
    same(strategy.model, model)


def test_threads_of_data_parallel_compute_in_the_configured_format() -> None:
    """Autocast's format is thread-local."""
    strategy = opened("strategy=dp", "amp.level=O1")
    assert strategy.network(batch(0).images).dtype is torch.bfloat16


def test_data_parallel_on_the_cpu_leaves_a_machines_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If train.backend=gloo is set on a machine with GPUs, torch's DataParallel would use all of
    them.
    """

    def taken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a GPU's")

    monkeypatch.setattr(nn, "DataParallel", taken)
    strategy = opened("strategy=dp")
    assert {weight.device.type for weight in strategy.model.parameters()} == {"cpu"}
    assert strategy.network(batch(0).images).device.type == "cpu"


def test_master_weights_are_on_the_devices_of_their_weights() -> None:
    """A strategy may have moved parts of the model to other devices."""
    precision = Precision(AmpConfig(level=AmpLevel.O2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    precision.convert(model)[1].to("meta")
    assert [weight.device.type for _, weight in precision.parameters(model)] == ["cpu", "cpu", "meta", "meta"]


# ------------------------------------------------------------ skipped steps


def spoiled(strategy: Strategy) -> None:
    """Compute a step's gradients and make one value NaN."""
    micro = Micro(0, list(range(6)), 0)
    strategy.backward([(micro, batch(99))], 6)
    next(iter(strategy.model.parameters())).grad.view(-1)[3] = float("nan")  # type: ignore[union-attr]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "amp", [["amp.level=O0"], ["amp.level=O1", "amp.dtype=float16"], ["amp.level=O2", "amp.dtype=float16"]]
)
@pytest.mark.parametrize("when", [0, 3])
def test_a_nonfinite_step_leaves_no_trace_in_weights_or_optimizer_state(
    amp: list[str], optimizer: str, when: int, waits: bool
) -> None:
    """This also holds for the first step, where torch's fused SGD would leave its momentum
    uninitialized. It holds whether or not the host waits for the result.
    """
    arguments = [
        *amp,
        f"optim.name={optimizer}",
        "optim.clip_norm=1.0",
        "amp.loss_scale=dynamic" if amp[0] != "amp.level=O0" else "model.width=4",
    ]
    strategy, undisturbed = opened(*arguments), opened(*arguments)
    for one in (strategy, undisturbed):
        one.precision._synchronous = waits
        steps(one, range(when))
    before = {
        name: value.clone()
        for name, value in strategy.state()["model"].items()
        if "running" not in name and "num" not in name
    }
    running = {name: value.clone() for name, value in strategy.model.named_buffers()}
    spoiled(strategy)
    assert bool(strategy.update(0.1).skipped)
    with torch.no_grad():
        for name, value in strategy.model.named_buffers():
            value.copy_(running[name])
    assert all(torch.equal(strategy.state()["model"][name], value) for name, value in before.items())
    # Halving the scale does not change the gradients at all if they neither overflow nor underflow.
    steps(strategy, range(when, 6))
    steps(undisturbed, range(when, 6))
    for name, value in undisturbed.state()["model"].items():
        torch.testing.assert_close(strategy.state()["model"][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_nonfinite_images_do_not_affect_running_statistics(level: str) -> None:
    """Otherwise one such image would make every later evaluation NaN."""
    strategy = opened(f"amp.level={level}")
    steps(strategy, range(2))
    before = {name: value.clone() for name, value in strategy.model.named_buffers() if value.is_floating_point()}
    given = batch(2)
    given.images[1, 0, 4, 4] = float("inf")
    strategy.backward([(Micro(0, list(range(6)), 0), given)], 6)
    assert bool(strategy.update(0.1).skipped)
    assert all(torch.equal(value, before[name]) for name, value in strategy.model.named_buffers() if name in before)


def test_the_dynamic_scale_changes_as_in_gradscaler() -> None:
    strategy = opened("amp.level=O1", "amp.dtype=float16", "amp.scale_window=3")
    scale = lambda: strategy.precision.state()["scaler"]["scale"]  # noqa: E731
    steps(strategy, range(2))
    spoiled(strategy)
    strategy.update(0.1)
    assert scale() == 32768.0
    steps(strategy, range(3))
    assert scale() == 65536.0
    static = opened("amp.level=O1", "amp.dtype=float16", "amp.loss_scale=128.0", "amp.scale_window=1")
    static.backward([(Micro(0, list(range(6)), 0), batch(0))], 6)
    unscaled = opened("amp.level=O1", "amp.dtype=float16", "amp.loss_scale=1")
    unscaled.backward([(Micro(0, list(range(6)), 0), batch(0))], 6)
    for scaled, one in zip(static.model.parameters(), unscaled.model.parameters(), strict=True):
        torch.testing.assert_close(scaled.grad / 128, one.grad, rtol=0.02, atol=1e-3)
    static.update(0.1)
    spoiled(static)
    assert (
        bool(static.update(0.1).skipped)
        and static.precision._scaler is not None
        and static.precision._scaler.get_scale() == 128.0
    )


def test_a_changed_scale_window_applies_after_a_resume() -> None:
    """Regression: the checkpoint's window was used silently."""
    keys = "amp.level=O1", "amp.dtype=float16"
    before, after = opened(*keys, "amp.scale_window=2000"), opened(*keys, "amp.scale_window=3")
    steps(before, range(2))
    after.load(before.state())
    steps(after, range(1))
    assert after.precision.state()["scaler"]["scale"] == 2 * 65536.0


def overflow_on_the_last_rank(step: int, folder: Path, defect: bool) -> object:
    """Make the last rank's loss infinite in one step. Each rank records the steps that it skips.
    With the defect, rank 0 does not check its gradients.
    """

    def prepare(rank: int) -> None:
        loss, update = Strategy.loss, Strategy.update
        taken = [0]
        if defect and rank == 0:
            Precision._norm = lambda self, gradients: torch.ones(())  # type: ignore[method-assign]

        def spoil(self: Strategy, *given: object) -> torch.Tensor:
            factor = float("inf") if taken[0] == step and rank == int(os.environ["WORLD_SIZE"]) - 1 else 1.0
            return loss(self, *given) * factor  # type: ignore[arg-type]

        def note(self: Strategy, rate: float) -> object:
            taken[0] += 1
            found = update(self, rate)
            with (folder / f"skipped-{rank}").open("a") as file:
                file.write(f"{int(found.skipped)}")
            if defect and taken[0] > step:
                os._exit(1)  # ranks that disagree would wait for each other
            return found

        Strategy.loss, Strategy.update = spoil, note  # type: ignore[method-assign, assignment]

    return prepare


@pytest.mark.parametrize(
    ("amp", "defect"),
    [(["amp.level=O0"], False), (["amp.level=O0"], True), (["amp.level=O2", "amp.dtype=float16"], False)],
)
def test_all_ranks_skip_the_same_step(amp: list[str], defect: bool, tmp_path: Path) -> None:
    arguments = [
        *TINY,
        *amp,
        "train.epochs=1",
        "train.log_every=100",
        "train.accumulate=2",
        f"checkpoint.dir={tmp_path}",
    ]
    run(2, arguments, prepare=overflow_on_the_last_rank(3, tmp_path, defect))  # type: ignore[arg-type]
    first, last = ((tmp_path / f"skipped-{rank}").read_text() for rank in (0, 1))
    assert last.startswith("0001"), last
    assert (first == last and first.count("1") == 1) is not defect, (first, last)


# ------------------------------------------------------------ curves, checkpoints


@pytest.fixture(scope="module")
def float32_curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("float32")
    good(1, [*TINY, *CURVE, f"checkpoint.dir={folder}"])
    return final_losses(folder / "run")


@pytest.mark.parametrize(
    ("world", "level", "dtype", "tolerance"),
    [
        (2, "O1", "float16", 0.01),
        (2, "O2", "float16", 0.01),
        (1, "O3", "float16", 0.02),
        (2, "O1", "bfloat16", 0.05),
        (1, "O2", "bfloat16", 0.05),
    ],
)
def test_the_loss_curve_of_each_level_matches_float32(
    world: int, level: str, dtype: str, tolerance: float, float32_curve: list[float], tmp_path: Path
) -> None:
    """The loss falls from 2.4 to about 1.6 in 8 steps. float16 has a relative rounding error of
    5e-4 and bfloat16 of 4e-3. A few times as much is allowed.
    """
    good(world, [*TINY, *CURVE, f"amp.level={level}", f"amp.dtype={dtype}", f"checkpoint.dir={tmp_path}"])
    np.testing.assert_allclose(final_losses(tmp_path / "run"), float32_curve, rtol=tolerance)


def saved(folder: Path) -> dict[str, object]:
    state: dict[str, object] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    return state


def forgetful(rank: int) -> None:
    Precision.load = lambda self, state: None  # type: ignore[method-assign]


@pytest.mark.parametrize(("world", "defect"), [(2, False), (1, True)])
def test_a_resume_restores_the_loss_scale_exactly(world: int, defect: bool, tmp_path: Path) -> None:
    """The window is 3, so the scale has doubled before the stop. The deliberate defect, a scale
    that starts over, is detected.
    """
    arguments = [
        *TINY,
        "amp.level=O2",
        "amp.dtype=float16",
        "amp.scale_window=3",
        "optim.clip_norm=1",
        f"checkpoint.dir={tmp_path / 'b'}",
    ]
    good(world, [*arguments, f"checkpoint.dir={tmp_path / 'a'}"])
    assert [end.code for end in run(world, arguments, prepare=stop_at(5))] == [75] * world
    good(world, arguments, prepare=forgetful if defect else None)
    straight, resumed = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert straight["precision"]["scaler"]["scale"] > 65536  # type: ignore[index]
    if defect:
        assert straight["precision"] != resumed["precision"]
        return
    assert straight["precision"] == resumed["precision"]
    assert final_losses(tmp_path / "a" / "run") == final_losses(tmp_path / "b" / "run")
    for name, value in straight["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(value, resumed["model"][name])  # type: ignore[index]


def test_a_run_can_continue_at_a_different_level() -> None:
    half = opened("amp.level=O2", "amp.dtype=float16")
    steps(half, range(3))
    whole = opened("amp.level=O0")
    whole.load(half.state())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, half.state()["model"][name])
    assert whole.state()["optimizer"]["state"].keys() == half.state()["optimizer"]["state"].keys()
    steps(whole, range(3, 5))
    again = opened("amp.level=O2", "amp.dtype=float16")
    again.load(whole.state())
    masters = dict(again.parameters)
    for name, short in again.model.named_parameters():
        assert torch.equal(short, masters[name].to(short.dtype))


# ------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    ("amp", "message"),
    [
        (
            AmpConfig(level=AmpLevel.O2, loss_scale="0.5"),
            r"amp.loss_scale=0.5: must be from 1 .*for example 128.0, or dynamic",
        ),
        (AmpConfig(level=AmpLevel.O2, loss_scale="nan"), r"amp.loss_scale=nan: must be from 1"),
        (AmpConfig(loss_scale="big"), r"amp.loss_scale='big': must be a number"),
        (AmpConfig(loss_scale="dynamic", scale_window=0), r"amp.scale_window=0: must be at least 1"),
    ],
)
def test_invalid_settings_of_precision_are_refused(amp: AmpConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Precision(amp)


def test_a_device_without_the_format_is_reported_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch has no float16 convolution on some CPUs."""

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")

    monkeypatch.setattr(functional, "conv2d", refuse)
    message = (
        r"amp.dtype=float16: cpu does not support it \(.*not implemented.*\); set amp.dtype=bfloat16, or amp.level=O0"
    )
    with pytest.raises(ConfigError, match=message):
        train.run(config.load(None, [*TINY, "amp.level=O1", "amp.dtype=float16", f"checkpoint.dir={tmp_path}"]))
    monkeypatch.undo()
    message = r"amp.dtype=float16: cuda does not support it \(.+\); set amp.dtype=bfloat16"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=message):
            Precision(AmpConfig(level=AmpLevel.O3), device=torch.device("cuda"))


def test_auto_uses_apexs_format_and_scale() -> None:
    assert Precision(AmpConfig(level=AmpLevel.O1)).dtype is torch.bfloat16
    assert "scaler" not in Precision(AmpConfig(level=AmpLevel.O1)).state()
    for level, dynamic in ((AmpLevel.O0, False), (AmpLevel.O1, True), (AmpLevel.O2, True), (AmpLevel.O3, False)):
        assert ("scaler" in Precision(AmpConfig(level=level, dtype=AmpDtype.FLOAT16)).state()) is dynamic


@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_can_be_switched_on_and_off(wanted: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        Precision(AmpConfig(tf32=wanted), device=torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == ("high" if wanted else "highest")
        assert torch.backends.cudnn.allow_tf32 is wanted
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("keys", "device", "bfloat16", "expected"),
    [
        ({}, "cpu", True, (AmpLevel.O0, torch.float32)),
        ({"dtype": AmpDtype.BFLOAT16}, "cpu", True, (AmpLevel.O0, torch.float32)),
        ({}, "cuda", True, (AmpLevel.O1, torch.bfloat16)),
        (
            {},
            "cuda",
            False,
            (AmpLevel.O0, torch.float32),
        ),  # before Ampere, bfloat16 is emulated and slower than float32
        ({"dtype": AmpDtype.FLOAT16}, "cuda", False, (AmpLevel.O1, torch.float16)),
        ({"level": AmpLevel.O0}, "cuda", True, (AmpLevel.O0, torch.float32)),
        ({"level": AmpLevel.O1}, "cuda", True, (AmpLevel.O1, torch.float16)),
        ({"level": AmpLevel.O2}, "cuda", True, (AmpLevel.O2, torch.float16)),
    ],
)
def test_the_default_level_depends_on_the_device(
    keys: dict[str, Any],
    device: str,
    bfloat16: bool,
    expected: tuple[AmpLevel, torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)
    found = choose_amp(AmpConfig(**keys), torch.device(device))
    assert (found.level, _dtype(found, torch.device(device))) == expected
    assert _loss_scale(found, expected[1]) == (None if expected[1] is torch.float16 else 1.0)


@pytest.mark.parametrize(("strategy", "with_it"), [("ddp", [1]), ("fsdp", [0]), ("ddp", [0, 1])])
def test_auto_chooses_the_same_format_on_all_ranks(
    strategy: str, with_it: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some ranks may have older GPUs or none. If any rank computes in float32, all do."""

    def prepare(rank: int) -> None:
        from ddpjob_trainer.optim import precision

        own = precision.choose_amp

        def as_on_a_gpu(config: AmpConfig, device: torch.device) -> AmpConfig:
            if config.level is not AmpLevel.AUTO:
                return config
            return replace(config, level=AmpLevel.O1, dtype=AmpDtype.BFLOAT16)

        precision.choose_amp = as_on_a_gpu if rank in with_it else own
        step = precision.Precision.step

        def tell(self: precision.Precision, *arguments: Any) -> Any:
            print(f"rank {rank} computes in {self.name}", flush=True)
            return step(self, *arguments)

        precision.Precision.step = tell  # type: ignore[method-assign]

    good(2, [*TINY, "train.epochs=1", f"strategy={strategy}", f"checkpoint.dir={tmp_path}"], prepare=prepare)
    out = capfd.readouterr().out
    expected = "bfloat16 (O1)" if len(with_it) == 2 else "float32"
    assert metrics(tmp_path / "run", "start")[0]["precision"] == expected
    assert all(f"rank {rank} computes in {expected}" in out for rank in (0, 1)), out
    without = [rank for rank in (0, 1) if rank not in with_it]
    assert out.count("computing in float32 on all ranks") == len(without)
    assert all(f"the devices of rank(s) {rank} have no bfloat16" in out for rank in without)


def test_a_format_that_the_device_does_not_use_by_default_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good(1, [*TINY, "train.epochs=1", "amp.dtype=bfloat16", f"checkpoint.dir={tmp_path}"])
    assert "amp.dtype=bfloat16 has no effect on this device with amp.level=auto; set" in capfd.readouterr().out


def test_the_default_on_the_cpu_is_bit_identical_to_float32(tmp_path: Path) -> None:
    saved = []
    for number, keys in enumerate([[], ["amp.level=O0"], ["amp.level=O1"]]):
        folder = tmp_path / str(number)
        good(1, [*TINY, "train.epochs=1", *keys, f"checkpoint.dir={folder}"])
        saved.append(torch.load(max(folder.glob("step-*.pt")), weights_only=True)["model"])
        assert metrics(folder / "run", "start")[0]["precision"] == ("bfloat16 (O1)" if number == 2 else "float32")
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())
    assert not all(torch.equal(value, saved[2][name]) for name, value in saved[0].items())  # the comparison can fail


def test_a_run_can_continue_in_a_different_format(tmp_path: Path) -> None:
    """The run moves from a GPU to the CPU and back: bfloat16, float32, bfloat16."""
    keys = [*TINY, f"checkpoint.dir={tmp_path}"]
    for epochs, level in ((1, "O1"), (2, "auto"), (3, "O1")):
        good(1, [*keys, f"train.epochs={epochs}", f"amp.level={level}", "optim.schedule=constant"])
        saved = torch.load(max(tmp_path.glob("step-*.pt")), weights_only=True)
        assert {value.dtype for value in saved["model"].values() if value.is_floating_point()} == {torch.float32}
    assert [line["precision"] for line in metrics(tmp_path / "run", "start")] == [
        "bfloat16 (O1)",
        "float32",
        "bfloat16 (O1)",
    ]
    losses = final_losses(tmp_path / "run")
    assert losses[-1] < losses[0]
