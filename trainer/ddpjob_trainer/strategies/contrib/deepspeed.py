"""strategy=deepspeed: DeepSpeed's engine with ZeRO.

ZeRO shards the optimizer's state over the ranks, and at higher stages also the gradients and the
weights (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
2020). As with any strategy, a checkpoint holds the whole state under the model's own names.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import OptimizerName
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.process_group import Group, destroy
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ddpjob_trainer.optim.precision import Autocasting, Precision, Update
from ddpjob_trainer.strategies.strategy import State, Strategy, refuse_scalars

_DECIDED = {
    "train_batch_size": "data.batch",
    "train_micro_batch_size_per_gpu": "data.batch and train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "optimizer": "optim.*",
    "scheduler": "optim.schedule",
    "gradient_clipping": "optim.clip_norm",
    "fp16": "amp.*",
    "bf16": "amp.*",
    "amp": "amp.*",
    "torch_autocast": "amp.*",
}
"""Maps each key that is ignored in DeepSpeed's file to the trainer's keys that replace it."""


class DeepSpeed(Strategy):
    """Lets DeepSpeed's engine take the steps of the trainer's own optimizer.

    This class, not DeepSpeed, determines the micro-batches, the weight of each loss, and the
    micro-batch that ends an accumulation of gradients.
    """

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        super().__init__(config, group, device)
        self._stage = config.deepspeed.stage
        self._settings = settings(config, group)
        self.precision: _ByEngine = _ByEngine(config.amp, config.optim.clip_norm, device)
        if self.precision.scales:
            raise ConfigError(
                f"amp.level={config.amp.level}, amp.loss_scale={config.amp.loss_scale}: strategy=deepspeed does"
                " not scale losses; set amp.dtype=bfloat16 and leave out amp.loss_scale, or set strategy=ddp"
                " or fsdp"
            )
        # From stage 2 on, each backward pass sends gradients to the ranks that own them, so all
        # ranks must run the same number of passes.
        self.equal = self._stage >= 2
        self._deepspeed = _import_deepspeed(device)
        self._alone = group.world == 1 and not dist.is_initialized()
        if self._alone:
            os.environ.setdefault("LOCAL_RANK", "0")  # The engine gets its device from this variable.
            backend = devices.choose(config.train.backend, group.local_rank).backend
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Wrap the model and the optimizer in DeepSpeed's engine."""
        refuse_scalars(model, "deepspeed")
        super().prepare(model, shape)
        # The engine's forward pass leaves the autocast context, so `Autocasting` enters it again.
        network = Autocasting(self.model, self.precision)
        engine, *_ = self._deepspeed.initialize(
            model=network, optimizer=self.optimizer, config=self._settings, dist_init_required=False
        )
        self._engine: Any = engine
        self._engine.set_gradient_accumulation_boundary(True)
        self.network, self.optimizer, self.precision.engine = engine, engine.optimizer, engine
        # The engine has moved the weights to which the base class's average refers, so create a new
        # average.
        if self.average is not None:
            self.average = self.moving_average()

    # ------------------------------------------------------------ training

    def weight(self, count: int) -> float:
        """Return the factor by which each sample's loss is multiplied.

        DeepSpeed averages gradients over the ranks, so the factor includes the number of ranks.
        """
        return self.group.world / count

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Accumulate gradients within this context, without sending them to other ranks.

        A rank's last micro-batch runs outside the context, and ends the accumulation. DeepSpeed's
        own count of micro-batches is ignored.
        """
        self._engine.set_gradient_accumulation_boundary(False)
        yield
        self._engine.set_gradient_accumulation_boundary(True)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by `factor`.

        With ZeRO, each rank multiplies only the part of the gradients that it owns.
        """
        if self._stage == 0:
            super().scale_gradients(factor)
            return
        for part in self._engine.optimizer.averaged_gradients.values():
            torch._foreach_mul_(list(part), factor)

    def update(self, rate: float) -> Update:
        """Take an optimizer step.

        With ZeRO, DeepSpeed itself clips the gradients, and skips the step if they are not finite.
        """
        # At stage 0, DeepSpeed would take the step even if the gradients were not finite.
        if self._stage == 0:
            return super().update(rate)
        set_learning_rate(self.optimizer, rate)
        self._engine.step()
        update = Update(float(self._engine.get_global_grad_norm()), bool(self._engine.optimizer.overflow))
        if self.average is not None:
            self.average.update(update.skipped)
        return update

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores that the engine computes for the images."""
        with self.precision.autocast():
            outputs: torch.Tensor = self.network(images)
        return outputs

    # ------------------------------------------------------------ checkpoints

    def state(self) -> State:
        """Return the whole state.

        To gather the state, every rank needs enough memory for all of it.
        """
        if self._stage == 0:
            return super().state()
        with self._gathered():
            model = {name: value.clone() for name, value in self.model.state_dict().items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {
            "model": model,
            **({} if self.average is None else {"average": self.average.state()}),
            "optimizer": {"state": dict(self._gathered_optimizer_state()), "groups": groups},
            "precision": self.precision.state(),
        }

    def load_model(self, saved: dict[str, torch.Tensor]) -> None:
        """Load the whole model. Each rank keeps only its shard of every weight."""
        if self._stage == 0:
            super().load_model(saved)
            return
        with self._gathered(changes=True):
            self.model.load_state_dict(saved)
        for name, weight in self.parameters:
            self._fragments.safe_set_full_fp32_param(weight, saved[name].to(self.device, torch.float32))

    @property
    def _fragments(self) -> ModuleType:
        """The module with DeepSpeed's functions for whole weights and their optimizer state.

        These functions gather a value from all ranks' shards, or write a whole value into the
        shards.
        """
        from deepspeed import utils

        module: ModuleType = utils
        return module

    @property
    def _flat(self) -> list[torch.Tensor]:
        """The flat float32 vectors of weights that this rank's optimizer updates."""
        zero = self._engine.optimizer
        return list(zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups)

    def _gathered(self, changes: bool = False) -> AbstractContextManager[Any]:
        """Return a context inside which every rank has the model's whole weights.

        If `changes` is set, all ranks receive rank 0's weights when the context ends.
        """
        if self._stage < 3:
            return nullcontext()
        weights = list(self.model.parameters())
        gathered: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(
            weights, modifier_rank=0 if changes else None
        )
        return gathered

    def _gathered_optimizer_state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, optimizer state) for each weight, gathered from all ranks' shards.

        Numbers in the state, such as the step count, are the same for all weights.
        """
        own = self._engine.optimizer.optimizer.state.get(self._flat[0], {})
        self._link()
        for name, weight in self.parameters if own else []:
            numbers = {key: value for key, value in own.items() if not _is_per_weight(value)}
            vectors = [key for key, value in own.items() if _is_per_weight(value)]
            yield (
                name,
                numbers
                | {
                    key: self._fragments.safe_get_full_optimizer_state(weight, key).view(self._shape(weight))
                    for key in vectors
                },
            )

    def _link(self) -> None:
        """Make DeepSpeed look up the optimizer state of each weight again (ZeRO 1 and 2).

        DeepSpeed itself does so only once. At that time, only the first parameter group has taken a
        step, so the other groups do not have a state yet.
        """
        if self._stage < 3:
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def load_optimizer(self, saved: State) -> None:
        """Load the whole optimizer state. Each rank keeps only its shard of every tensor.

        A weight that was frozen when the state was saved gets zeros, and the step count of the
        other weights. Raises KeyError if the state belongs to different weights, and ValueError if
        a shape differs.
        """
        if self._stage == 0:
            super().load_optimizer(saved)
            return
        if unknown := sorted(saved["state"].keys() - dict(self.parameters)):
            raise KeyError(f"the optimizer's state belongs to different weights, such as {unknown[0]}")
        zero = self._engine.optimizer
        example: dict[str, Any] = next(iter(saved["state"].values()), {})
        for flat in self._flat:
            for key, value in example.items():
                zero.optimizer.state[flat][key] = torch.zeros_like(flat) if _is_per_weight(value) else _own(value, flat)
        if not example:
            return
        self._link()
        for name, weight in self.parameters:
            for key, value in saved["state"].get(name, {}).items():
                if not _is_per_weight(value):
                    continue
                if tuple(value.shape) != tuple(self._shape(weight)):
                    raise ValueError(
                        f"the optimizer's {key} of {name} has the shape {tuple(value.shape)},"
                        f" not {tuple(self._shape(weight))}"
                    )
                self._fragments.safe_set_full_optimizer_state(weight, value.to(self.device, torch.float32), key)

    @staticmethod
    def _shape(weight: nn.Parameter) -> torch.Size:
        shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
        return shape

    def close(self) -> None:
        """Destroy the engine, and the process group if this class created it."""
        self._engine.destroy()
        if self._alone:
            destroy()


class _ByEngine(Precision):
    """Lets DeepSpeed's engine run backward passes, because the engine processes the gradients."""

    engine: Any = None

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        self.engine.backward(loss)


def settings(config: Config, group: Group) -> dict[str, Any]:
    """Return the configuration for DeepSpeed's engine.

    The configuration combines the file `deepspeed.config` with settings that the trainer controls.
    Raises ConfigError if the file cannot be read, or if its ZeRO stage differs from
    deepspeed.stage.
    """
    path, stage = config.deepspeed.config, config.deepspeed.stage
    _check(config)
    found: dict[str, Any] = {} if path is None else _read(path)
    if left_out := sorted(key for key in _DECIDED if found.pop(key, "auto") != "auto"):
        instead = ", ".join(dict.fromkeys(_DECIDED[key] for key in left_out))
        text = f"deepspeed.config={path}: ignoring {', '.join(left_out)}, because the trainer controls these settings"
        if group.rank == 0:
            print(f"{text}; set {instead} instead", file=sys.stderr, flush=True)
    zero = found.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(
            f"deepspeed.config={path}: zero_optimization must be an object; use {{}}, and set deepspeed.stage={stage}"
        )
    if zero.get("stage", stage) not in (stage, "auto"):
        raise ConfigError(
            f"deepspeed.config={path}: zero_optimization.stage is {zero['stage']}, but deepspeed.stage is"
            f" {stage}; set deepspeed.stage={zero['stage']}, or remove zero_optimization.stage from the file"
        )
    ours = {
        # The trainer has already weighted the losses. With a batch size of 1 per rank and no
        # accumulation, DeepSpeed does not divide them again.
        "train_batch_size": group.world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.clip_norm,
        "zero_optimization": {**zero, "stage": stage},
    }
    quiet = {"steps_per_print": 2**62, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**quiet, **found, **ours}


def _check(config: Config) -> None:
    stage = config.deepspeed.stage
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"deepspeed.stage: {stage} is unknown; use 0, 1, 2 or 3")
    if stage and config.optim.name not in (OptimizerName.SGD, OptimizerName.ADAMW):
        raise ConfigError(
            f"optim.name={config.optim.name} needs whole layers, but deepspeed.stage={stage} gives the"
            " optimizer shards of them; set deepspeed.stage=0"
        )
    if stage == 3 and config.optim.ema_decay:
        raise ConfigError(
            "optim.ema_decay: deepspeed.stage=3 shards the weights; set deepspeed.stage=2, or optim.ema_decay=0"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"deepspeed.config: {path} does not exist; give the path of DeepSpeed's JSON file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"deepspeed.config: {path} cannot be read as JSON ({error}); give DeepSpeed's JSON file"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"deepspeed.config: {path} is not a JSON object, such as {{}}")
    return found


def _is_per_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _own(value: Any, flat: torch.Tensor) -> Any:
    """Return one value of an optimizer state, such as a step count, for one vector.

    A tensor is copied, because if several vectors shared a step count, each of them would increase
    it.
    """
    return value.to(flat.device, copy=True) if isinstance(value, torch.Tensor) else value


def _import_deepspeed(device: torch.device) -> ModuleType:
    """Import and return DeepSpeed, and make it log only errors.

    Raises ConfigError if DeepSpeed is missing.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"strategy=deepspeed: DeepSpeed cannot be imported ({error}); run pip install deepspeed, "
            "or use strategy=fsdp, which also shards weights"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # DeepSpeed warns about optimizers that are not its own.
    # On a CPU, DeepSpeed would compile a shared-memory reduction when it first starts. Prevent
    # this, because the reduction helps only ranks on the same node.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module: ModuleType = deepspeed
    return module
