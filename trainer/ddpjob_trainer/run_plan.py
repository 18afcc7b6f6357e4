"""Decides how a run's batches are divided among its ranks, and rejects runs that cannot work.

Everything here depends on the configuration, data, strategy and number of ranks, but not on steps.
A run that cannot work therefore ends before its first step, with an error that names the key to
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ddpjob_trainer.checkpoints.snapshot import Snapshot
from ddpjob_trainer.config import patterns
from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import AmpDtype, AmpLevel, Metric, StrategyName
from ddpjob_trainer.config.strategy_limits import INTEGERS
from ddpjob_trainer.data import mixup
from ddpjob_trainer.data.dataset import DataSet, Targets
from ddpjob_trainer.data.sampler import Dealing, Dividing, SamplerState, steps_per_epoch
from ddpjob_trainer.distributed.process_group import Group, wanted_world
from ddpjob_trainer.errors import ConfigError, DataError
from ddpjob_trainer.evaluation.accumulate import Adding, open_accumulator
from ddpjob_trainer.model.depths import describe_shares
from ddpjob_trainer.model.models import (
    check_image_size,
    explain_image_size,
    needs_two_samples,
)
from ddpjob_trainer.model.shared_parts import can_be_shared
from ddpjob_trainer.optim.optimizers import Position, learning_rate
from ddpjob_trainer.optim.own_schedule import check_own
from ddpjob_trainer.optim.parameter_groups import check_rules
from ddpjob_trainer.strategies.strategy import Strategy

_STRETCH, _INEXACT_STRETCH = 1.25, 1.5
"""Defaults of data.stretch with data.exact=true and with data.exact=false. With larger values, a
job that lost ranks could run out of memory.
"""
_WORTH_A_NOTE = 1.1
"""The log warns about waiting ranks if the busiest rank has more than this many times an even share
of the work.
"""


def check_same_data(group: Group, data: DataSet, config: Config) -> int:
    """Return the data's fingerprint, after checking that it is the same on all ranks.

    Raises DataError on every rank if ranks see different data. With different data, a sample number
    would mean different samples on different ranks.
    """
    seen = group.gather(data.fingerprint())
    if len(set(seen)) == 1:
        return seen[0]
    names = f" ({', '.join(data.class_names[:5])}{', ...' * (data.classes > 5)})" if data.class_names else ""
    where, things = config.data.url or config.data.dir or config.data.name, "images"
    of, remedy = "names of classes and files, sizes and labels", "make data.dir the same on all nodes"
    if ":" in config.data.name:
        where, things = config.data.name, "samples"
        of = "sizes, shapes, classes, targets and some inputs"
        remedy = (
            "make the function return the same samples in the same order on all ranks, for example with a fixed seed"
        )
    own = (
        f"{data.train_size} training {things}, {data.test_size} test {things}, {data.classes} classes{names},"
        f" fingerprint {seen[group.rank]:016x}"
    )
    which = []
    for rank in sorted(map(seen.index, set(seen))):
        sent = own.encode(errors="surrogateescape") if rank == group.rank else None
        described = group.broadcast_bytes(sent, rank).decode(errors="replace")
        which.append(f"rank {rank}{' and others' if seen.count(seen[rank]) > 1 else ''}: {described}")
    raise DataError(
        f"the ranks see different data in {where} ({'; '.join(which)}): {remedy}. The fingerprint covers {of}"
    )


def check_fit(config: Config, data: DataSet, strategy: Strategy) -> None:
    """Raise ConfigError if the loss, evaluation, checkpoints or strategy does not suit the data."""
    keys, criterion = config.data, strategy.criterion
    # Check the test images' size and data.early_sizes now. Without these checks, an error would
    # occur only after an epoch of training.
    if side := keys.size_tested:
        check_image_size(config.model, (3, side, side), data.classes, "data.test_image_size")
    if keys.early_sizes:
        check_image_size(config.model, data.shape_in(0), data.classes, "data.early_sizes to [], or data.image_size")
    inputs = f"of data.name={keys.name}"
    _refuse(
        (
            keys.cutmix and len(data.shape) != 3,
            f"data.cutmix={keys.cutmix} needs images (channels, height, width), but the inputs "
            f"{inputs} have the shape {data.shape}; leave out data.cutmix, or set data.mixup",
        ),
        (
            keys.batch_transform and mixup.is_wanted(keys),
            f"data.batch_transform={keys.batch_transform} cannot be combined with data.mixup or "
            "data.cutmix; mix the samples in your function",
        ),
        (
            data.whole_numbers and keys.mixup,
            f"data.mixup={keys.mixup} blends inputs, but the inputs {inputs} are integers; leave out data.mixup",
        ),
        (
            data.whole_numbers and config.strategy in INTEGERS.reasons,
            f"strategy={config.strategy.value} {INTEGERS.reasons.get(config.strategy)}, but the inputs {inputs} are"
            " integers; set strategy=ddp or fsdp",
        ),
    )
    criterion.check(keys, data.targets, data.classes)
    make_accumulator(config, data, strategy)
    saved, has_accuracy = config.checkpoint, data.targets is Targets.CLASSES or criterion.of_decisions
    _refuse(
        (
            saved.keep_best and saved.best_by is Metric.ACCURACY and not has_accuracy,
            f"checkpoint.best_by=accuracy: optim.loss={criterion.name} with {data.targets.value} has no accuracy; set"
            " checkpoint.best_by=loss",
        )
    )


def check_optimizer(group: Group, config: Config, data: DataSet, model: nn.Module) -> list[str]:
    """Check settings of the optimizer against the model and data, and return notes for the log.

    The settings are optim.groups, optim.muon_except, and the user's own schedule. Raises
    ConfigError if a setting does not suit the model or the steps of the training. All ranks must
    call this together.
    """
    notes, optim, size, batch = [], config.optim, data.train_size, config.data.batch
    if optim.groups:
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        notes.append(check_rules(optim, trained, config.model.name))
    for pattern in optim.muon_except:
        patterns.select("optim.muon_except", pattern, [name for name, _ in model.named_parameters()], config.model.name)
    if ":" in optim.schedule:
        starts = [epoch * size + taken for epoch in range(config.train.epochs) for taken in range(0, size, batch)]
        notes.append(
            check_own(
                optim.schedule,
                lambda consumed: learning_rate(optim, Position(consumed, size, batch, config.train.epochs)),
                starts,
                group,
            )
        )
    return notes


def make_accumulator(config: Config, data: DataSet, strategy: Strategy) -> Adding:
    """Return a new accumulator for the results of one evaluation.

    Raises ConfigError if the section `eval` does not suit the data.
    """
    criterion = strategy.criterion
    return open_accumulator(data.targets, data.classes, criterion.each, config.eval, decisions=criterion.of_decisions)


def explain_sizes(config: Config, data: DataSet) -> AbstractContextManager[None]:
    """Return a context manager for the model's first pass.

    If the pass fails because of the image size, the context manager raises an error that explains
    the cause.
    """
    return explain_image_size(config.model, data.shape, data.classes, config.data.size_key)


@dataclass(frozen=True)
class Division:
    """How global batches are divided into micro-batches, and micro-batches among ranks.

    If `micro_batches` is 0, the samples themselves are divided among ranks.
    """

    config: Config
    data: DataSet
    strategy: Strategy
    micro_batches: int
    dividing: Dividing

    @classmethod
    def choose(
        cls, config: Config, data: DataSet, strategy: Strategy, group: Group, model: nn.Module, *, tied: bool
    ) -> Division:
        """Return the division for a new run.

        `tied` states whether, in training, the output of `model` for a sample depends on random
        numbers or on other samples in the micro-batch.
        """
        tied = tied or config.ddp.ordered or mixup.is_wanted(config.data) or bool(config.data.batch_transform)
        parts = strategy.data_share.parts * max(group.world, wanted_world()) // group.world
        micro_batches = config.data.micro_batches or (parts * strategy.portions if tied else 0)
        # ddp.ordered needs whole micro-batches, because sums over parts of micro-batches would
        # differ in the last bits.
        if config.ddp.ordered or not strategy.divides:
            return cls(config, data, strategy, micro_batches, Dividing.NO)
        if not config.data.exact:
            return cls(config, data, strategy, micro_batches, Dividing.LOCAL)
        shared = can_be_shared(model) and not (config.data.batch_transform or strategy.recomputes)
        return cls(config, data, strategy, micro_batches, Dividing.EXACT if shared else Dividing.NO)

    def resume(self, snapshot: Snapshot) -> Division:
        """Return the division with which training continues from a checkpoint.

        The division keeps the checkpoint's number of micro-batches, even if the number of ranks has
        changed. If train.accumulate has changed, the number of micro-batches changes in proportion,
        because users raise train.accumulate when memory is short.
        """
        kept = int(snapshot["micro_batches"])
        if not kept or self.config.data.micro_batches or self.config.model.sync_batchnorm:
            return self
        before = int(snapshot["config"].get("train.accumulate", 1))
        return replace(self, micro_batches=max(1, kept * self.config.train.accumulate // before))

    @property
    def parts(self) -> int:
        """The number of ranks, or of groups of ranks, that take different samples."""
        return self.strategy.data_share.parts

    @property
    def dealing(self) -> Dealing:
        """The rules by which the sampler distributes samples to this rank."""
        strategy, keys = self.strategy, self.config.data
        stretch = keys.stretch or (_STRETCH if keys.exact else _INEXACT_STRETCH)
        return Dealing(
            strategy.data_share.part,
            self.parts,
            self.micro_batches,
            strategy.portions,
            strategy.equal,
            self.dividing,
            stretch,
        )

    def full_sizes(self, state: SamplerState) -> set[int]:
        """Return the sizes of the micro-batches that this rank has in a full global batch."""
        samples = list(range(min(self.config.data.batch, self.data.train_size)))
        return {len(micro.samples) for micro in self.dealing.deal(samples, state)}

    def steps_left(self, state: SamplerState) -> int:
        """Return the number of steps from `state` until the configured training is complete."""
        size, batch, epochs = self.data.train_size, self.config.data.batch, self.config.train.epochs - state.epoch
        if epochs <= 0:
            return 0
        return steps_per_epoch(size - state.consumed, batch) + (epochs - 1) * steps_per_epoch(size, batch)

    def check_work(self) -> None:
        """Raise ConfigError if a rank would be idle.

        This is checked only in a new run. Ranks that join later are allowed to be idle, because an
        idle rank has a weight of zero.
        """
        keys, parts, batch, micro_batches = self.config.data, self.parts, self.config.data.batch, self.micro_batches
        portions = self.strategy.portions
        key = "pipeline.micro_batches" if self.config.strategy is StrategyName.PIPELINE else "train.accumulate"
        fitting = max(1, batch * portions // max(1, micro_batches))
        _refuse(
            (
                parts > batch,
                f"data.batch={batch} cannot be divided among {parts} ranks, because each needs a sample; set"
                f" data.batch to {parts} or more, or start {batch} ranks",
            ),
            (
                micro_batches > batch and portions > 1 and not keys.micro_batches,
                f"{key}={portions} makes {micro_batches} micro-batches, but data.batch={batch} has fewer "
                f"samples; set {key} to {fitting}, or data.batch to {micro_batches} or more",
            ),
            (
                micro_batches > batch or (0 < micro_batches < parts and not self.dealing.passes(batch)),
                f"data.micro_batches={micro_batches} does not fit {parts} ranks and data.batch={batch}; write a "
                f"multiple of {parts}, up to {batch}",
            ),
        )

    def check_smallest_micro_batch(self, state: SamplerState) -> None:
        """Raise ConfigError if a remaining step has a micro-batch of one sample, but the model
        needs two.
        """
        config, size, batch, parts = self.config, self.data.train_size, self.config.data.batch, self.micro_batches
        # The numbers of samples that are left in this epoch, and in each later epoch.
        to_come = {size - state.consumed, size}
        # With Dividing.LOCAL, each rank's share in a pass is a separate micro-batch.
        if parts and self.dividing is Dividing.LOCAL:
            parts = max(parts, self.parts * self.dealing.passes(batch))

        def single(batch: int) -> set[int]:
            """Return the sizes of the steps that would have a micro-batch of one sample if
            data.batch were `batch`.
            """
            steps = {samples % batch for samples in to_come} | {min(batch, size)}
            return {step for step in steps if 0 < step < 2 * parts}

        if not parts or not (short := single(batch)) or config.model.sync_batchnorm or not self.steps_left(state):
            return
        if not needs_two_samples(config.model, self.data.shape, self.data.classes, self.data.shape_in(state.epoch)):
            return
        fitting = next((other for other in range(min(batch, size), 1, -1) if not single(other)), None)
        remedy = f"data.batch={fitting}" if fitting else "a smaller data.micro_batches"
        pixels = f" (images of {' x '.join(map(str, self.data.shape[1:]))})" if len(self.data.shape) == 3 else ""
        raise ConfigError(
            f"data.batch={batch}: the smallest step has {min(short)} of the {size} samples, so one of its "
            f"{parts} micro-batches has a single sample, but {config.model.name} needs more than one value per "
            f"channel{pixels}; set {remedy}, or use a model that normalizes each sample separately"
        )

    def explain_waits(self) -> str:
        """Return the reason why ranks (or pipelines) wait in each step, or an empty text."""
        batch, dealing = self.config.data.batch, self.dealing
        if dealing.passes(batch):
            return ""
        if (idle := self.parts - min(self.micro_batches or batch, batch)) > 0:
            return (
                f"{idle} rank(s) are idle, because there are fewer micro-batches or samples in the global batch"
                " than ranks (data.micro_batches, data.batch)"
            )
        if dealing.busiest > _WORTH_A_NOTE:
            return (
                f"{self.micro_batches} micro-batches cannot be divided evenly among {self.parts} ranks, so a"
                " step takes"
                f" {dealing.busiest:.2f} times as long as with even shares; use a number of ranks that divides"
                " data.micro_batches, or set data.exact=false (strategy=ddp or fsdp, without ddp.ordered)"
            )
        return ""


def note_choices(
    config: Config, strategy: Strategy, float32_for: Sequence[int], steps: range, peaks: Sequence[float], flops: float
) -> list[str]:
    """Return notes for the log on choices that the user would otherwise not notice.

    `steps` are the numbers of the remaining steps. `float32_for` lists the ranks whose devices do
    not support bfloat16. `peaks` contains the peak FLOP/s of each rank's devices, and `flops` is
    the number of FLOPs per sample; 0 means unknown.
    """
    notes = []
    if float32_for:
        ranks = ", ".join(map(str, float32_for[:8])) + ", ..." * (len(float32_for) > 8)
        notes.append(
            f"computing in float32 on all ranks, since the devices of rank(s) {ranks} have no bfloat16 (amp.level=auto)"
        )
    given = config.amp.level is AmpLevel.AUTO and config.amp.dtype is not AmpDtype.AUTO
    if given and strategy.precision.dtype is torch.float32 and not float32_for:
        notes.append(
            f"amp.dtype={config.amp.dtype.value} has no effect on this device with amp.level=auto; "
            "set amp.level=O1 to compute in this type"
        )
    if not config.data.exact and (config.ddp.ordered or not strategy.divides):
        cause = "ddp.ordered=true" if config.ddp.ordered else f"strategy={config.strategy.value}"
        notes.append(f"data.exact=false has no effect with {cause}, because ranks take whole micro-batches")
    if strategy.depths is not None:
        notes.append(describe_shares(strategy.depths, config.optim.layer_decay))
    profiled = config.report.profile_steps
    if profiled and steps and steps.stop - 1 < profiled[0]:
        notes.append(
            f"no profile, because report.profile_steps starts at step {profiled[0]} but the last step is"
            f" {steps.stop - 1}; set an earlier step"
        )
    if any(peaks) and not all(peaks):
        notes.append(
            f"no MFU, because the peak FLOP/s of rank {list(peaks).index(0)}'s device is unknown; set"
            " report.peak_flops if all ranks have the same device"
        )
    elif any(peaks) and not flops:
        notes.append(
            f"no MFU, because the FLOPs of model.name={config.model.name} cannot be counted without tensor values"
        )
    return notes


def note_changed_data(epoch: int) -> str:
    """Return the warning that the data has changed since the checkpoint was saved."""
    return (
        "warning: the data differs from the checkpoint's (names of classes or files, sizes, labels, content)."
        f" If sample numbers now mean different samples, epoch {epoch} repeats some and omits others"
    )


def _refuse(*rules: tuple[object, str]) -> None:
    """Raise ConfigError with the message of the first rule that is broken.

    Each rule is (whether it is broken, the message).
    """
    for is_broken, message in rules:
        if is_broken:
            raise ConfigError(message)
