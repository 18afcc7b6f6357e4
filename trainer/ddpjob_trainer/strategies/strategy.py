"""The interface of a strategy, which is one way in which ranks share a model's training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.data.dataset import Batch, MicroBatches
from ddpjob_trainer.data.randomness import seed_torch
from ddpjob_trainer.data.sampler import DataShare, Micro
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.distributed.step_clock import StepClock, StepPhase
from ddpjob_trainer.errors import ConfigError, TrainingError
from ddpjob_trainer.model.batchnorm_stats import BatchStatistics
from ddpjob_trainer.model.depths import depths
from ddpjob_trainer.model.shared_parts import SharedParts
from ddpjob_trainer.optim.ema import MovingAverage
from ddpjob_trainer.optim.loss import Loss
from ddpjob_trainer.optim.optimizer_state import laid_out_as, load_named_optimizer_state, named_optimizer_state
from ddpjob_trainer.optim.optimizers import build_optimizer
from ddpjob_trainer.optim.parameter_groups import set_learning_rate
from ddpjob_trainer.optim.precision import Precision, Update
from ddpjob_trainer.strategies.step_region import StepRegion, compiler_options

State = dict[str, Any]
"""The whole training state; "average" exists only if optim.ema_decay is set:

`{"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "groups": [...]},
"precision": {...}, "average": {...}}`.

Names and shapes are the same as for the whole model in one process, so that a different strategy or
number of ranks can continue from this state.
"""


def require_torch(minimum: str, what: str) -> None:
    """Raise ConfigError if torch is older than `minimum`, "MAJOR.MINOR"."""
    if TorchVersion(torch.__version__) < minimum:
        raise ConfigError(
            f"{what} needs torch {minimum} or later, but this is {torch.__version__}; install a later torch, or"
            " set strategy=ddp"
        )


def refuse_scalars(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a zero-dimensional parameter, because it could not be sharded."""
    if names := [name for name, weight in model.named_parameters() if not weight.dim()]:
        raise ConfigError(
            f"strategy={strategy} shards parameters along their first dimension, but {', '.join(names[:3])} of"
            " the model has no dimensions; give it the shape (1,), or set strategy=ddp"
        )


class Strategy:
    """The training of a model on one process; subclasses override only what differs."""

    model: nn.Module
    """The whole model or this rank's stage, not wrapped."""
    network: nn.Module
    """The module that computes a micro-batch: `model`, or a wrapper around it."""
    optimizer: torch.optim.Optimizer
    statistics: BatchStatistics
    parameters: list[tuple[str, nn.Parameter]]
    """The optimizer's parameters by the model's names, except frozen ones."""
    shape: tuple[int, ...]
    """The shape of an image: (channels, height, width)."""
    equal = False
    """Whether all ranks need the same number of micro-batches because a forward pass is a
    collective."""
    divides = False
    """Whether micro-batches may be divided if some ranks would be idle without that."""
    recomputes = False
    """Whether the backward pass repeats the forward pass. If it does, ranks cannot exchange the
    statistics of shared micro-batches in the forward pass (see `sampler.Part`)."""
    parts: SharedParts | None = None
    stages = 1
    """Ranks r, r + stages, r + 2 * stages, ... do the same work; other ranks do different work."""
    compiles_step = False
    """Whether the whole step can be compiled, not only the network."""
    region: StepRegion | None = None
    """The compiled step, if model.compile is set."""
    depths: dict[str, int] | None = None
    """Depths of all the model's parameters, if optim.layer_decay needs them."""

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        """Check the settings.

        Raises ConfigError if the settings or the number of ranks do not suit the strategy.
        """
        self.config, self.group, self.device = config, group, device
        self.precision = Precision(config.amp, config.optim.clip_norm, device)
        self.clock = StepClock(device)
        self.average: MovingAverage | None = None
        self.criterion = Loss(config.optim)

    @property
    def data_share(self) -> DataShare:
        """The samples that this rank takes."""
        return DataShare(self.group.rank, self.group.world)

    @property
    def waits_apart(self) -> bool:
        """Whether a rank's own work can be distinguished from waiting for others."""
        return False

    @property
    def portions(self) -> int:
        """Number of portions into which a rank divides its share of a global batch."""
        return self.config.train.accumulate

    # ------------------------------------------------------------ training

    def share_parts(self) -> None:
        """Allow micro-batches to have parts. Must be called before the first step."""
        self.parts = SharedParts(self.model, self.group)

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Take a model for images of `shape` (channels, height, width), and build the optimizer.

        The model's weights are the same on every rank, and on `self.device`. All ranks must call
        this together.
        """
        self.shape = shape
        if self.depths is None and self.config.optim.layer_decay != 1:
            self.depths = depths(model)
        self.model = self.precision.convert(model)
        mode = self.config.model.compile
        if mode and self.compiles_step:
            self.region = StepRegion(self.model, self.criterion, mode)
        self.network = self.wrap(self.region or self.model)
        self.statistics = self.batch_statistics()
        own = dict(self.model.named_parameters())
        self.parameters = [pair for pair in self.precision.parameters(self.model) if own[pair[0]].requires_grad]
        self.optimizer = build_optimizer(self.config.optim, self.parameters, self.depths, self.precision.dtype)
        if self.config.optim.ema_decay:
            self.average = self.moving_average()
        if mode and self.region is None:
            # If the sizes of batches differ, torch compiles the network again, for any size.
            self.network.compile(**compiler_options(mode, dynamic=None))

    def moving_average(self) -> MovingAverage:
        """Return a moving average of the weights and of the running statistics.

        Buffers outside the state dict are constants. A mask of -inf would become NaN.
        """
        saved = self.model.state_dict()
        running = [
            (name, buffer)
            for name, buffer in self.model.named_buffers()
            if name in saved and buffer.is_floating_point() and bool(buffer.isfinite().all())
        ]
        first: dict[torch.Tensor, str] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        others = {name: known for name, weight in named if (known := first.setdefault(weight, name)) != name}
        return MovingAverage(self.config.optim.ema_decay, [*self.parameters, *running], others)

    def batch_statistics(self) -> BatchStatistics:
        """Return the model's statistics, over the ranks that compute the model."""
        return BatchStatistics(self.model, self.group)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, wrapped in a module that exchanges gradients."""
        return model

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute the gradients of the global batch's mean loss, and return the sum of losses.

        The mean is over the global batch's `count` samples. `micro_batches` are this rank's
        micro-batches in the step, and all of them must be processed. The result is this rank's sum
        of losses (a float64 scalar on the device), without micro-batches that do not count. All
        ranks must call this together.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.region is not None:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        for number, (micro, batch) in enumerate(micro_batches, 1):
            with nullcontext() if number == len(micro_batches) else self.without_exchange():
                total += self.backward_one(micro, batch, count)
        self.statistics.exchange()
        return total

    def backward_one(self, micro: Micro, batch: Batch, count: int) -> torch.Tensor:
        """Add one micro-batch's gradients to the earlier ones, and return its sum of losses."""
        self.seed(micro.key)
        shared = self.parts.of_micro(micro) if self.parts else nullcontext()
        with self.statistics.of_micro(micro, count), shared, self.precision.autocast():
            # If statistics cover all ranks' samples, a micro-batch that does not count must not
            # contribute to them.
            images = batch.images if micro.counts or not self.config.model.sync_batchnorm else batch.images[:0]
            if self.region is None:
                loss = self.loss(self.network(images), batch, micro)
            else:
                summed = self.network(images, batch.labels, batch.unreadable)
                loss = summed if micro.counts else summed * 0.0
        weighted = self.weighted(loss, count)
        if apart := self.waits_apart:
            self.clock.lap(StepPhase.FORWARD)
            self.clock.watch(weighted)
        self.precision.backward(weighted)
        if apart:
            self.clock.lap(StepPhase.EXCHANGE)
        return loss.detach()

    def seed(self, key: int) -> None:
        """Seed dropout with a micro-batch's key, before computing the micro-batch."""
        seed_torch(key, self.device)

    def loss(self, scores: torch.Tensor, batch: Batch, micro: Micro) -> torch.Tensor:
        """Return a micro-batch's sum of losses; 0, with zero gradients, if it does not count."""
        total = self.criterion.sum(scores, batch)
        return total if micro.counts else total * 0.0

    def weight(self, count: int) -> float:
        """Return the factor for a sample's loss.

        With this factor, the ranks' gradient reduction (sum or mean) gives the gradients of the
        global mean.
        """
        return 1 / count

    def weighted(self, loss: torch.Tensor, count: int) -> torch.Tensor:
        """Return a micro-batch's sum of losses with the factor of `weight`.

        If the loss is not finite, the factor is NaN. All gradients are then NaN on all ranks, so
        that they skip the step even if the loss's own gradients are finite.
        """
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on the model's trained parameters; look in model.name and optim.loss for"
                " detach(), torch.no_grad() or operations without a gradient, such as argmax()"
            )
        return loss * (loss.detach().float() * 0.0 + self.weight(count))

    def without_exchange(self) -> AbstractContextManager[Any]:
        """Accumulate gradients inside this `with` without sending them.

        The `with` surrounds each of a rank's micro-batches except the last one.
        """
        return nullcontext()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by `factor`.

        Used in steps with unreadable samples, because the mean is then over the readable samples.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def update(self, rate: float) -> Update:
        """Take the optimizer's step at a learning rate, and clear the gradients.

        All ranks must call this together.
        """
        set_learning_rate(self.optimizer, rate)
        update = self.precision.step(self.optimizer, [parameter for _, parameter in self.parameters])
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(update.skipped)
        return update

    # ------------------------------------------------------------ evaluation

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Compute scores (n, classes) for images (n, channels, height, width) on the device.

        Ranks with the same `data_share.part` call this together.
        """
        with self.precision.autocast():
            outputs: torch.Tensor = self.model(images) if self.region is None else self.region.scores(images)
        return outputs

    def train_mode(self, training: bool) -> None:
        """Switch between training and evaluation, as nn.Module.train does.

        In evaluation, the weights are replaced by their moving average, if there is one.
        """
        self.network.train(training)
        if self.average is not None:
            if training:
                self.average.put_back()
            else:
                self.average.put_in_place()
            self.precision.refresh()

    # ------------------------------------------------------------ checkpoints

    def state(self) -> State:
        """Return the whole state, for a checkpoint. All ranks must call this together.

        Its tensors may be DTensors, and may change as training continues.
        """
        return {
            "model": self.precision.model_state(self.model),
            **({} if self.average is None else {"average": self.average.state()}),
            "optimizer": named_optimizer_state(self.optimizer, self.parameters),
            "precision": self.precision.state(),
        }

    def layout(self, place: tuple[str | int, ...], shape: torch.Size) -> Any:
        """Return a DTensor with the layout that `load` needs for a tensor in the state.

        `shape` is the shape of the whole tensor. Return None if `load` takes the whole tensor.
        """
        return None

    def load(self, state: State) -> None:
        """Continue from a state, on every rank.

        Raises RuntimeError, ValueError or KeyError if the state does not fit.
        """
        self.precision.load_model(self.model, state["model"])
        if self.average is not None and "average" in state:
            # A weight that was frozen does not have an average, so its value is used.
            averages = {**state["model"], **state["average"]["averages"]}
            self.average.load({**state["average"], "averages": averages})
        frozen = {name for name, weight in self.model.named_parameters() if not weight.requires_grad}
        load_named_optimizer_state(self.optimizer, self.parameters, state["optimizer"], frozen)
        self.precision.load(state["precision"])

    def close(self) -> None:
        """Leave all groups that this rank has joined, when training ends in an orderly way.

        All ranks must call this together.
        """


def flat_gradients(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """Concatenate the weights' gradients, and append a 1 for each weight.

    Gradient and flag are 0 for a weight without a gradient.
    """
    found = torch.tensor([weight.grad is not None for weight in weights]).to(weights[0])
    gradients = [(torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten() for weight in weights]
    return torch.cat([*gradients, found])


def set_gradients(weights: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Set gradients from a result of `flat_gradients`, or from a sum of several.

    A weight that has no gradient in any of these results remains without one, as on a single rank.
    If its gradient were zero, the optimizer would decay the weight.
    """
    flat, found_by = flat[: -len(weights)], flat[-len(weights) :]
    # If all weights have a gradient, there is no need to wait for the device.
    idle = any(weight.grad is None for weight in weights)
    numbers = found_by.tolist() if idle else [1] * len(weights)
    for weight, gradient, found in zip(weights, pieces_like(weights, flat), numbers, strict=True):
        weight.grad = gradient if found else None


def pieces_like(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces of `flat` with the shapes, dtypes, layouts and devices of `tensors`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [
        laid_out_as(piece.view_as(tensor).to(tensor), tensor) for piece, tensor in zip(pieces, tensors, strict=True)
    ]
