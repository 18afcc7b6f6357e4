"""The interface of a strategy. A strategy defines how the ranks divide the work of training."""

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
    """Raise ConfigError if the installed torch is older than `minimum` ("MAJOR.MINOR")."""
    if TorchVersion(torch.__version__) < minimum:
        raise ConfigError(
            f"{what} needs torch {minimum} or later, but this is {torch.__version__}; install a later torch, or"
            " set strategy=ddp"
        )


def refuse_scalars(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError if a parameter has zero dimensions, because it could not be sharded."""
    if names := [name for name, weight in model.named_parameters() if not weight.dim()]:
        raise ConfigError(
            f"strategy={strategy} shards parameters along their first dimension, but {', '.join(names[:3])} of"
            " the model has no dimensions; give it the shape (1,), or set strategy=ddp"
        )


class Strategy:
    """Trains a model on one rank. Subclasses override only what they do differently."""

    model: nn.Module
    """The whole model, or this rank's stage of it. The model is never wrapped; see `network`."""
    network: nn.Module
    """The module that training calls for a micro-batch: `model`, or a wrapper around it."""
    optimizer: torch.optim.Optimizer
    statistics: BatchStatistics
    parameters: list[tuple[str, nn.Parameter]]
    """A pair (name in the model, parameter) for each parameter that the optimizer updates. Frozen
    parameters are left out.
    """
    shape: tuple[int, ...]
    """The shape of an image: (channels, height, width)."""
    equal = False
    """Whether every rank must run the same number of micro-batches in a step, because the ranks
    communicate in each pass."""
    divides = False
    """Whether several ranks can share a micro-batch. Ranks share micro-batches only if some ranks
    would otherwise be idle.
    """
    recomputes = False
    """Whether the backward pass repeats the forward pass. If it does, the forward pass cannot
    exchange the statistics of micro-batches that several ranks share (see `sampler.Part`)."""
    parts: SharedParts | None = None
    stages = 1
    """Number of stages into which the model is divided, one per rank. Ranks r, r + stages, r + 2 *
    stages, ... run the same stage on different samples.
    """
    compiles_step = False
    """Whether torch.compile can compile the whole step (see `step_region`), not just the network.
    """
    region: StepRegion | None = None
    """The compiled step, if model.compile is set."""
    depths: dict[str, int] | None = None
    """The depth of each of the model's parameters. None if optim.layer_decay does not need depths.
    """

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
        """This rank's share of the samples."""
        return DataShare(self.group.rank, self.group.world)

    @property
    def waits_apart(self) -> bool:
        """Whether the clock can distinguish a rank's own work from its waits for other ranks."""
        return False

    @property
    def portions(self) -> int:
        """Number of portions into which a rank divides its share of a global batch."""
        return self.config.train.accumulate

    # ------------------------------------------------------------ training

    def share_parts(self) -> None:
        """Let several ranks share a micro-batch, so that each computes a part of it.

        Must be called before the first step.
        """
        self.parts = SharedParts(self.model, self.group)

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Take a model for images of `shape` (channels, height, width), and build its optimizer.

        The model must have the same weights on every rank, and be on `self.device`. All ranks must
        call this together.
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
            # torch compiles the network for the size of the first batch. When the first batch of a
            # different size arrives, torch compiles it once more, this time for any size.
            self.network.compile(**compiler_options(mode, dynamic=None))

    def moving_average(self) -> MovingAverage:
        """Return a moving average of the weights and of the running statistics.

        Buffers that the state dict does not contain are constants, and are not averaged. Buffers
        with infinite values are not averaged either, because the average of a mask of -inf would be
        NaN.
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
        """Return the model's batch statistics, combined over the ranks that compute this model."""
        return BatchStatistics(self.model, self.group)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, or a wrapper around it that exchanges gradients."""
        return model

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute the gradients of the global batch's mean loss, and return the sum of losses.

        The mean is over the global batch's `count` samples. `micro_batches` are this rank's
        micro-batches in the step, and all of them must be processed. The returned sum, a float64
        scalar on the device, leaves out micro-batches that do not count. All ranks must call this
        together.
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
        """Add one micro-batch's gradients to the gradients of the step's earlier micro-batches.

        Return the micro-batch's sum of losses.
        """
        self.seed(micro.key)
        shared = self.parts.of_micro(micro) if self.parts else nullcontext()
        with self.statistics.of_micro(micro, count), shared, self.precision.autocast():
            # With model.sync_batchnorm, statistics cover the samples of all ranks. A micro-batch
            # that does not count must not contribute to them, so its images are left out.
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
        """Seed the random numbers of dropout with a micro-batch's key.

        Must be called before the micro-batch is computed.
        """
        seed_torch(key, self.device)

    def loss(self, scores: torch.Tensor, batch: Batch, micro: Micro) -> torch.Tensor:
        """Return a micro-batch's sum of losses.

        If the micro-batch does not count, its loss and its gradients are 0.
        """
        total = self.criterion.sum(scores, batch)
        return total if micro.counts else total * 0.0

    def weight(self, count: int) -> float:
        """Return the factor by which each sample's loss is multiplied.

        Depending on the strategy, the ranks' gradients are then summed or averaged. The factor
        makes the result equal to the gradient of the global batch's mean loss.
        """
        return 1 / count

    def weighted(self, loss: torch.Tensor, count: int) -> torch.Tensor:
        """Return a micro-batch's sum of losses, multiplied by `weight`.

        If the loss is not finite, the factor is NaN. All ranks then get NaN gradients and skip the
        step, even if the gradients of the loss itself are finite.
        """
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on the model's trained parameters; look in model.name and optim.loss for"
                " detach(), torch.no_grad() or operations without a gradient, such as argmax()"
            )
        return loss * (loss.detach().float() * 0.0 + self.weight(count))

    def without_exchange(self) -> AbstractContextManager[Any]:
        """Accumulate gradients within this context, without sending them to other ranks.

        In each step, all of a rank's micro-batches except the last one run within this context.
        """
        return nullcontext()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by `factor`.

        Needed after a step with unreadable samples, because the step's mean loss covers only the
        readable samples.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def update(self, rate: float) -> Update:
        """Take an optimizer step with the learning rate `rate`, and clear the gradients.

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

        Ranks that take the same share of the samples (`data_share.part`) must call this together.
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
        """Return the whole training state, for a checkpoint. All ranks must call this together.

        The returned tensors may be DTensors. Their values can change when training continues.
        """
        return {
            "model": self.precision.model_state(self.model),
            **({} if self.average is None else {"average": self.average.state()}),
            "optimizer": named_optimizer_state(self.optimizer, self.parameters),
            "precision": self.precision.state(),
        }

    def layout(self, place: tuple[str | int, ...], shape: torch.Size) -> Any:
        """Return a DTensor that has the sharding that `load` needs for a tensor of the state.

        `place` is the path of keys that leads to the tensor in the state, and `shape` is the shape
        of the whole tensor. Return None if `load` takes the whole tensor.
        """
        return None

    def load(self, state: State) -> None:
        """Continue training from a state, on every rank.

        Raises RuntimeError, ValueError or KeyError if the state does not fit.
        """
        self.load_model(state["model"])
        if self.average is not None and "average" in state:
            # A weight that was frozen when the state was saved has no average in the state. Use the
            # weight's value as its average.
            averages = {**state["model"], **state["average"]["averages"]}
            self.average.load({**state["average"], "averages": averages})
        self.load_optimizer(state["optimizer"])
        self.precision.load(state["precision"])

    def load_model(self, saved: dict[str, torch.Tensor]) -> None:
        """Load the model's part of a state."""
        self.precision.load_model(self.model, saved)

    def load_optimizer(self, saved: State) -> None:
        """Load the optimizer's part of a state.

        A weight that was frozen when the state was saved has no state in `saved`.
        """
        frozen = {name for name, weight in self.model.named_parameters() if not weight.requires_grad}
        load_named_optimizer_state(self.optimizer, self.parameters, saved, frozen)

    def close(self) -> None:
        """Leave all groups that this rank has joined, when training ends in an orderly way.

        All ranks must call this together.
        """


def flat_gradients(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """Concatenate the weights' gradients, followed by one flag for each weight.

    The flag is 1 if the weight has a gradient. A weight without a gradient contributes zeros, and
    its flag is 0.
    """
    found = torch.tensor([weight.grad is not None for weight in weights]).to(weights[0])
    gradients = [(torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten() for weight in weights]
    return torch.cat([*gradients, found])


def set_gradients(weights: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Set the weights' gradients from a result of `flat_gradients`, or from a sum of such results.

    A weight that has no gradient in any of these results keeps the gradient None, as in training on
    a single rank. If its gradient were set to zero, the optimizer would apply weight decay to it.
    """
    flat, found_by = flat[: -len(weights)], flat[-len(weights) :]
    # If every weight has a gradient on this rank, no flag can be 0. Reading the flags would only
    # make the host wait for the device.
    idle = any(weight.grad is None for weight in weights)
    numbers = found_by.tolist() if idle else [1] * len(weights)
    for weight, gradient, found in zip(weights, pieces_like(weights, flat), numbers, strict=True):
        weight.grad = gradient if found else None


def pieces_like(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Split `flat` into pieces with the shapes, dtypes, layouts and devices of `tensors`."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [
        laid_out_as(piece.view_as(tensor).to(tensor), tensor) for piece, tensor in zip(pieces, tensors, strict=True)
    ]
