"""Number formats of the model and optimizer, and the loss scale.

The levels are those of NVIDIA's Apex, implemented with torch.autocast and torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpjob_trainer.config.sections import AmpConfig, AmpDtype, AmpLevel
from ddpjob_trainer.distributed.dtensors import is_sharded, local
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.private_torch import find_overflow


@dataclass(frozen=True)
class Update:
    """The outcome of an optimizer step.

    `norm` is the norm of the gradient before clipping. `skipped` states whether the step was
    skipped because the norm is not finite. On an accelerator, both may be tensors. `float(norm)`
    and `bool(skipped)` then wait for the device, so convert them only for display.
    """

    norm: float | torch.Tensor
    skipped: bool | torch.Tensor


class Precision:
    """Applies the number formats and the loss scale of the section `amp` to one model.

    If ranks hold different parts of the gradients, `over_parts` sums a tensor over these ranks, in
    place.
    """

    over_parts: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(
        self, config: AmpConfig | None = None, clip_norm: float = 0.0, device: torch.device | None = None
    ) -> None:
        """Check the settings.

        Raises ConfigError for an invalid value, and for a number format that the device does not
        support.
        """
        self._device = device or torch.device("cpu")
        self.config = choose_amp(config or AmpConfig(), self._device)
        if clip_norm < 0:
            raise ConfigError(
                f"optim.clip_norm={clip_norm}: must be at least 0; set the largest norm allowed, such as 1.0,"
                " or 0 for no limit"
            )
        self._clip_norm = clip_norm
        self.dtype = _dtype(self.config, self._device)
        self._scale = _loss_scale(self.config, self.dtype)
        self._scaler = None if self._scale == 1 else _scaler(self._device, self._scale, self.config.scale_window)
        # Numbers can be read immediately only on the CPU. Reading a number from an accelerator
        # would wait until the accelerator's queue is empty.
        self._synchronous = self._device.type == "cpu"
        self._originals: dict[str, torch.Tensor] = {}
        self._masters: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        if self._device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.config.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.config.tf32
        if self.dtype is not torch.float32:
            _check_device(self.dtype, self._device)

    @property
    def name(self) -> str:
        """A human-readable name: float32, or the format and its level."""
        if self.config.level is AmpLevel.O0:
            return "float32"
        return f"{str(self.dtype).removeprefix('torch.')} ({self.config.level.value})"

    # ------------------------------------------------------------ the model

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the model to the number formats that it computes in, and return it.

        Must be called before the model is wrapped.
        """
        if self.config.level not in (AmpLevel.O2, AmpLevel.O3):
            return model
        if self.config.level is AmpLevel.O2:
            self._originals = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for module in model.modules():
            if self.config.level is AmpLevel.O3 or not isinstance(module, _BatchNorm):
                module._apply(self._short, recurse=False)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(lambda _, inputs: tuple(map(self._short, inputs)))
        return model

    def _short(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype) if values.is_floating_point() else values

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which to compute the forward pass and the loss."""
        return torch.autocast(self._device.type, self.dtype) if self.config.level is AmpLevel.O1 else nullcontext()

    def parameters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return (name in the model, parameter) for each parameter that the optimizer updates.

        At O2, the pairs contain float32 copies of the model's parameters. At other levels, they
        contain the model's own parameters.
        """
        own = dict(model.named_parameters())
        for name, original in self._originals.items():
            if is_sharded(own[name]):
                raise ConfigError(
                    "amp.level=O2 keeps a float32 copy of whole weights, but strategy=fsdp shards "
                    "them; set amp.level=O1"
                )
            if own[name].dtype is not original.dtype:
                self._masters[name] = (own[name], nn.Parameter(original.to(own[name].device)))
        self._originals = {}
        return [
            (name, self._masters[name][1] if name in self._masters else parameter) for name, parameter in own.items()
        ]

    def refresh(self) -> None:
        """Copy the optimizer's float32 copies of weights back into the model, if there are any."""
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(
                    [short for short, _ in self._masters.values()], [master for _, master in self._masters.values()]
                )

    # ------------------------------------------------------------ a step

    @property
    def scale_is_dynamic(self) -> bool:
        """Whether the loss scale adapts to non-finite gradients."""
        return self._scaler is not None and self._scale is None

    @property
    def scales(self) -> bool:
        """Whether losses are multiplied by a scale."""
        return self._scaler is not None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, multiplied by the loss scale, for the backward pass."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, multiplied by the loss scale."""
        torch.autograd.backward(self.scaled(loss))

    def step(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Update:
        """Unscale and clip the gradients, and take a step unless a gradient is not finite.

        All ranks with the same gradients make the same decision.
        """
        for short, master in self._masters.values():
            master.grad = None if short.grad is None else short.grad.to(master.dtype)
            short.grad = None
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        norm = self._norm(gradients)
        if self._clip_norm:  # The same formula as in nn.utils.clip_grad_norm_.
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for device in {gradient.device for gradient in gradients}:
                torch._foreach_mul_(
                    [gradient for gradient in gradients if gradient.device == device], factor.to(device)
                )
        skipped = (
            self._step_if_finite(optimizer, norm, len(gradients))
            if self._scaler is None
            else self._scaled_step(optimizer)
        )
        self.refresh()
        return Update(norm if isinstance(skipped, torch.Tensor) else float(norm), skipped)

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients, computed in one pass.

        A norm too large for float32 (3e38) counts as not finite.
        """
        norms = torch._foreach_norm(gradients, 2.0, torch.float32) if gradients else (torch.zeros(()),)
        norm = torch.linalg.vector_norm(torch.stack([norm.to(self._device) for norm in norms]))
        return norm if self.over_parts is None else self.over_parts(norm.square()).sqrt()

    def _step_if_finite(
        self, optimizer: torch.optim.Optimizer, norm: torch.Tensor, weights: int
    ) -> bool | torch.Tensor:
        fused = optimizer.defaults.get("fused") and not self._synchronous
        # The fused kernel can skip a step by itself, but it must not skip the first step, because
        # SGD's momentum would stay uninitialized.
        if fused and len(optimizer.state) >= weights:
            skipped = ~torch.isfinite(norm)
            optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            return skipped
        if finite := bool(torch.isfinite(norm)):
            optimizer.step()
        return not finite

    def _scaled_step(self, optimizer: torch.optim.Optimizer) -> bool:
        assert self._scaler is not None
        found = find_overflow(self._scaler, optimizer)
        if self.over_parts is not None:
            for flag in found:
                self.over_parts(flag)
        skipped = any(bool(flag) for flag in found)
        self._scaler.step(optimizer)
        self._scaler.update(None if self._scale is None else self._scale)
        return skipped

    # ------------------------------------------------------------ checkpoints

    def model_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state dict, in which float32 copies replace the converted weights.

        Weights without a float32 copy are included as they are. A run at a different level can
        therefore resume from this state.
        """
        state: dict[str, torch.Tensor] = model.state_dict()
        masters = {short: master.detach() for short, master in self._masters.values()}
        # Two modules may share a parameter, which then has two names.
        named = model.named_parameters(remove_duplicate=False)
        return {**state, **{name: masters[short] for name, short in named if short in masters}}

    def load_model(self, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Load a state dict from `model_state`. Raises RuntimeError if `state` does not fit."""
        model.load_state_dict(state)
        with torch.no_grad():
            for name, (_, master) in self._masters.items():
                master.copy_(state[name])

    def state(self) -> dict[str, Any]:
        """Return the state of the loss scale, for a checkpoint.

        The state is empty unless the scale is dynamic.
        """
        return {"scaler": self._scaler.state_dict()} if self._scaler is not None and self.scale_is_dynamic else {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint.

        If the checkpoint does not contain a dynamic loss scale, the scale starts at its initial
        value.
        """
        if self._scaler is not None and self.scale_is_dynamic and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
            # Do not use the saved growth interval. The configuration determines this value, and may
            # have changed.
            self._scaler.set_growth_interval(self.config.scale_window)


class Autocasting(nn.Module):
    """Wraps a model so that each forward pass enters the autocast context.

    The wrapper is for callers that run the model in their own threads, or after they have left the
    autocast context.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model, self._precision = model, precision

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the model's output."""
        with self._precision.autocast():
            scores: torch.Tensor = self.model(images)
        return scores


class _Scaler(torch.amp.GradScaler):
    """A GradScaler that also accepts float16 gradients and this rank's shards of DTensors.

    At O3, all gradients are float16.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parts = [
            _part(weight) for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
        ]
        here: Any = SimpleNamespace(param_groups=[{"params": parts}])
        return super()._unscale_grads_(here, inv_scale, found_inf, True)


def _part(weight: torch.Tensor) -> torch.Tensor:
    part = local(weight.detach())
    part.grad = None if weight.grad is None else local(weight.grad)
    return part


def choose_amp(config: AmpConfig, device: torch.device) -> AmpConfig:
    """Return the configuration with a definite level in place of `auto`.

    On a GPU, `auto` becomes O1 if the GPU supports bfloat16 or if amp.dtype is set. In all other
    cases, `auto` becomes O0. bfloat16 has the range of float32 and does not need a loss scale, so
    the rest of the configuration stays the same. At O0 and O1, weights, optimizer and checkpoints
    are float32, so a run can switch between O0 and O1 when it continues on a different device.
    """
    if config.level is not AmpLevel.AUTO:
        return config
    given = config.dtype is not AmpDtype.AUTO
    if device.type != "cuda" or not (given or torch.cuda.is_bf16_supported(including_emulation=False)):
        return replace(config, level=AmpLevel.O0)
    return replace(config, level=AmpLevel.O1, dtype=config.dtype if given else AmpDtype.BFLOAT16)


def agree_on_amp(config: AmpConfig, device: torch.device, group: Group) -> tuple[AmpConfig, list[int]]:
    """Return the configuration that all ranks use, and the ranks that do not support bfloat16.

    If `choose_amp` returns O0 on any rank, all ranks use O0. Ranks that computed in different
    formats would add up gradients of different precision. All ranks must call this together.
    """
    own = choose_amp(config, device)
    if config.level is not AmpLevel.AUTO:
        return own, []
    levels = group.gather(own.level is not AmpLevel.O0)
    if all(levels) or not any(levels):
        return own, []
    return replace(config, level=AmpLevel.O0), [rank for rank, short in enumerate(levels) if not short]


def _scaler(device: torch.device, scale: float | None, window: int) -> _Scaler:
    if window < 1:
        raise ConfigError(f"amp.scale_window={window}: must be at least 1; set a number of steps such as 2000")
    return _Scaler(device.type, init_scale=scale or 2.0**16, growth_interval=window)


def _dtype(config: AmpConfig, device: torch.device) -> torch.dtype:
    if config.level is AmpLevel.O0:
        return torch.float32
    if config.dtype is AmpDtype.AUTO:
        return torch.bfloat16 if device.type == "cpu" else torch.float16
    return torch.float16 if config.dtype is AmpDtype.FLOAT16 else torch.bfloat16


def _loss_scale(config: AmpConfig, dtype: torch.dtype) -> float | None:
    """Return the static loss scale, or None if the loss scale is dynamic."""
    if config.loss_scale == "dynamic":
        return None
    if config.loss_scale == "auto":
        return None if dtype is torch.float16 and config.level is not AmpLevel.O3 else 1.0
    try:
        scale = float(config.loss_scale)
    except ValueError:
        raise ConfigError(
            f"amp.loss_scale={config.loss_scale!r}: must be a number such as 128.0, or dynamic or auto"
        ) from None
    if not 1 <= scale < 2.0**32:
        raise ConfigError(f"amp.loss_scale={scale}: must be from 1 to 4e9, for example 128.0, or dynamic")
    return scale


def _check_device(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the device cannot compute in the number format `dtype`.

    The check runs a convolution and a matrix product, forward and backward.
    """
    name, other = str(dtype).removeprefix("torch."), "bfloat16" if dtype is torch.float16 else "float16"
    try:
        if (
            device.type == "cuda"
            and dtype is torch.bfloat16
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise RuntimeError(f"{torch.cuda.get_device_name(device)} only emulates it")
        images = torch.ones(1, 1, 3, 3, dtype=dtype, device=device)
        weights = [
            torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for shape in ((1, 1, 3, 3), (2, 9))
        ]
        features = nn.functional.conv2d(images, weights[0], padding=1)
        torch.autograd.backward(nn.functional.linear(features.flatten(1), weights[1]).sum())
    except RuntimeError as error:
        raise ConfigError(
            f"amp.dtype={name}: {device} does not support it ({error}); set amp.dtype={other}, or amp.level=O0"
        ) from error
