"""strategy=pipeline: each replica's model is divided into stages, which run on different ranks.

Micro-batches pass through the stages concurrently. Rank = replica * stages + stage. The trainer
itself chooses the micro-batches, so normalization statistics, dropout and mixed images are the same
as with any other strategy. The schedules are PyTorch's (Huang et al., GPipe, 2019; Narayanan et
al., PipeDream, 2019, for 1F1B).
"""

from __future__ import annotations

import importlib
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import PipelineSchedule
from ddpjob_trainer.data.dataset import Batch, MicroBatches
from ddpjob_trainer.data.randomness import derive
from ddpjob_trainer.data.sampler import DataShare, Micro
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.distributed.step_clock import StepPhase
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.model.batchnorm_stats import BatchStatistics
from ddpjob_trainer.model.depths import depths
from ddpjob_trainer.model.partition import Layer, MetaModel, Stage, split, to_sequential
from ddpjob_trainer.strategies.strategy import State, Strategy, flat_gradients, require_torch, set_gradients


@dataclass
class _Running:
    """The micro-batches in the pipeline, for the functions that PyTorch's schedule calls.

    `count` is the number of samples in the global batch, and `losses` is the sum of losses so far.
    """

    pairs: list[tuple[Micro, Batch]]
    count: int
    losses: torch.Tensor
    _entered: int = 0

    def enter(self) -> Micro:
        """Return the micro-batch whose forward pass begins now.

        A schedule begins the forward passes in the order of the micro-batches.
        """
        self._entered += 1
        return self.pairs[self._entered - 1][0]


class Pipeline(Strategy):
    """Keeps one stage of the model and its optimizer state on each rank.

    The parameters of a stage have the same names as in the whole model.
    """

    def __init__(self, config: Config, group: Group, device: torch.device) -> None:
        super().__init__(config, group, device)
        self.stages = _checked_stages(config, group)
        if self.stages > 1:
            # Before torch 2.7, pipeline schedules divide the gradients, although `weighted` has
            # already divided the loss.
            require_torch("2.7", "strategy=pipeline")
        replicas = group.world // self.stages
        self.replica, self.stage = divmod(group.rank, self.stages)
        timeout = config.train.timeout_seconds
        chains = [[replica * self.stages + stage for stage in range(self.stages)] for replica in range(replicas)]
        self._chain = group.subgroup(chains, timeout)  # The ranks that hold this replica's stages.
        # The ranks that hold this stage, one in each replica.
        self._peers = group.subgroup([list(ranks) for ranks in zip(*chains, strict=True)], timeout)
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._running: _Running | None = None

    @property
    def data_share(self) -> DataShare:
        """The share of the samples that this replica takes.

        Only the rank with the last stage counts these samples, because only this rank has the
        losses.
        """
        return DataShare(self.replica, self.group.world // self.stages, self.stage == self.stages - 1)

    @property
    def waits_apart(self) -> bool:
        """Whether the clock can distinguish a rank's own work from its waits for other stages."""
        return self.clock.sees_waits or self.group.world == 1

    @property
    def portions(self) -> int:
        """Number of micro-batches in the pipeline at the same time."""
        return self.config.pipeline.micro_batches

    def prepare(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Take a model, and keep only this rank's stage of it."""
        if self.config.optim.layer_decay != 1:
            self.depths = depths(model)
        layers = to_sequential(model)
        self._meta_model = MetaModel(layers)
        parts = split(layers, self._meta_model.costs(shape), self.stages, "pipeline.stages")
        self._ends = list(itertools.accumulate(map(len, parts)))
        self._names = set(model.state_dict()) | {name for name, _ in model.named_parameters()}
        self._first_that_draws = next((stage for stage, part in enumerate(parts) if _draws(part)), 0)
        super().prepare(Stage(parts[self.stage]), shape)
        if self.stages > 1:
            # Import this module now. The import takes more than a second, and would otherwise delay
            # the first step.
            importlib.import_module("torch.distributed.pipelining")
            self.precision.over_parts = self._chain.sum

    def batch_statistics(self) -> BatchStatistics:
        """Return this stage's batch statistics, combined over the ranks that hold this stage."""
        return BatchStatistics(self.model, self._peers)

    # ------------------------------------------------------------ training

    def backward(self, micro_batches: MicroBatches, count: int) -> torch.Tensor:
        """Compute the gradients of the global batch's mean loss.

        Only micro-batches of equal size pass through the pipeline together, because the pipeline's
        buffers have a fixed shape.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _, equal in itertools.groupby(list(micro_batches), key=lambda pair: pair[1].images.shape):
            together = list(equal)
            if self.stages == 1:
                total += torch.stack(
                    [self.backward_one(micro, batch, count).double() for micro, batch in together]
                ).sum()
            else:
                total += self._run(together, count)
                self.clock.lap(StepPhase.COMPUTE)
        self._sum_gradients()
        self.statistics.exchange()
        return total

    def _run(self, together: list[tuple[Micro, Batch]], count: int) -> torch.Tensor:
        """Run the micro-batches in `together` through the pipeline, forward and backward.

        Return the sum of their losses, which is 0 except on the last stage.
        """
        images = [batch.images for _, batch in together]
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        self._running = _Running(together, count, losses)
        inputs = [torch.cat(images)] if self.stage == 0 else []
        last = self.stage == self.stages - 1
        schedule = self._schedule(len(together), images[0].shape)
        schedule.step(*inputs, **({"target": torch.arange(len(together))} if last else {}))
        self._running = None
        if not last:
            # GradScaler refuses to unscale gradients on a rank that has never scaled a loss, so
            # scale a zero.
            self.precision.scaled(losses)
        return losses

    def _schedule(self, number: int, shape: torch.Size) -> Any:
        """Return PyTorch's schedule for `number` micro-batches with images of the shape `shape`."""
        if (number, shape) not in self._schedules:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

            inputs, outputs = self._boundaries(shape)
            module = _Pass(self.model, self._pass)
            stage = PipelineStage(
                module,
                self.stage,
                self.stages,
                self.device,
                inputs,
                outputs.requires_grad_(),
                group=self._chain.process_group,
            )
            interleave = (
                self.config.pipeline.schedule is PipelineSchedule.ONE_FORWARD_ONE_BACKWARD and number >= self.stages
            )
            kind = Schedule1F1B if interleave else ScheduleGPipe
            self._schedules[number, shape] = kind(stage, number, self._loss, scale_grads=False)
        return self._schedules[number, shape]

    def _boundaries(self, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty tensors with the shapes of this stage's input and output.

        `shape` is the shape of a micro-batch's images. The tensors are float32, on the `meta`
        device.
        """
        outputs = self._meta_model.outputs(shape)
        inputs = torch.empty(shape, device="meta")
        if self.stage > 0:
            inputs = torch.empty_like(outputs[self._ends[self.stage - 1] - 1]).requires_grad_()
        return inputs, torch.empty_like(outputs[self._ends[self.stage] - 1])

    def _pass(self, values: torch.Tensor) -> torch.Tensor:
        """Run one micro-batch through this stage.

        If only one stage draws random numbers, it draws the same numbers as the undivided model.
        """
        assert self._running is not None
        micro = self._running.enter()
        self.seed(micro.key if self.stage == self._first_that_draws else derive(micro.key, self.stage))
        with self.statistics.of_micro(micro, self._running.count), self.precision.autocast():
            outputs: torch.Tensor = self.network(values)
        return outputs.float().contiguous()

    def _loss(self, scores: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return the loss with which a micro-batch's backward pass begins on the last stage.

        `number` is the position of the micro-batch in the pipeline.
        """
        assert self._running is not None
        micro, batch = self._running.pairs[int(number)]
        loss = self.loss(scores, batch, micro)
        self._running.losses += loss.detach()
        return self.precision.scaled(self.weighted(loss, self._running.count))

    def _sum_gradients(self) -> None:
        """Add up this stage's gradients over all replicas."""
        if self._peers.world == 1:
            return
        weights = list(self.model.parameters())
        set_gradients(weights, self._peers.sum(flat_gradients(weights)))

    # ------------------------------------------------------------ evaluation

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the images, on every rank of the replica."""
        if self.stages == 1:
            return super().logits(images)
        found, sent = [], []
        for chunk in images.tensor_split(min(self.portions, len(images))):
            shapes, _ = self._boundaries(chunk.shape)
            values = chunk
            if self.stage > 0:
                values = self._chain.receive(torch.empty(shapes.shape, device=self.device), self.stage - 1)
            with self.precision.autocast():
                values = self.model(values)
            found.append(values.float().contiguous())
            if self.stage < self.stages - 1:
                sent.append(self._chain.send_begin(found[-1], self.stage + 1))
        for work in sent:
            work.wait()
        classes = self._meta_model.outputs(images.shape)[-1].shape[1:]
        last = self.stage == self.stages - 1
        scores = torch.cat(found) if last else torch.empty(len(images), *classes, device=self.device)
        self._chain.broadcast_tensors([scores], self.stages - 1)
        return scores

    # ------------------------------------------------------------ checkpoints

    def state(self) -> State:
        """Return the whole model's state, merged from all stages, on the CPU of every rank."""
        own = super().state()
        if self.stages == 1:
            return own
        buffer = io.BytesIO()
        torch.save(own, buffer)
        contents = [
            self._chain.broadcast_bytes(buffer.getvalue() if stage == self.stage else None, stage)
            for stage in range(self.stages)
        ]
        parts = [torch.load(io.BytesIO(content), map_location="cpu", weights_only=True) for content in contents]
        merged: State = _merged(parts)
        return merged

    def load(self, state: State) -> None:
        """Load this stage's part of the whole model's state."""
        own = set(self.model.state_dict()) | {name for name, _ in self.model.named_parameters()}
        super().load(_without(state, self._names - own))


class _Pass(nn.Module):
    """The module that PyTorch's schedule calls for each micro-batch.

    The module calls `run` instead of the model.
    """

    def __init__(self, model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Run one micro-batch through the stage."""
        return self._run(values)


def _checked_stages(config: Config, group: Group) -> int:
    given, world = config.pipeline.stages, group.world
    if given < 0 or (given and world % given):
        raise ConfigError(
            f"pipeline.stages={given}: must be at least 0 and divide the number of ranks ({world}); start a "
            f"multiple of {max(given, 1)} ranks, or set pipeline.stages=0 for one stage per rank"
        )
    if config.pipeline.micro_batches < 1:
        raise ConfigError(f"pipeline.micro_batches={config.pipeline.micro_batches}: must be at least 1, for example 4")
    return given or world


def _draws(layers: list[Layer]) -> bool:
    from torch.nn.modules.dropout import _DropoutNd

    return any(isinstance(module, _DropoutNd) and module.p > 0 for layer in layers for module in layer.module.modules())


def _merged(parts: list[Any]) -> Any:
    """Merge the dicts of several stages by key.

    A value that is not a dict is the same in all stages that have it.
    """
    if not isinstance(parts[0], dict):
        return parts[0]
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: _merged([part[key] for part in parts if key in part]) for key in keys}


def _without(tree: Any, names: set[str]) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {key: _without(value, names) for key, value in tree.items() if key not in names}
