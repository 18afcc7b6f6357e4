"""The training loop: steps shared by any number of ranks, evaluation, checkpoints, SIGTERM."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import tee

import torch
from ddpjob_pod import late_dynamo
from ddpjob_runtime import protocol

from ddpjob_trainer.checkpoints import compatibility
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.index import prepare_folder
from ddpjob_trainer.checkpoints.memory import NodeMemory
from ddpjob_trainer.checkpoints.snapshot import Snapshot
from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import Metric, StrategyName
from ddpjob_trainer.data import mixup
from ddpjob_trainer.data.augment import erasers
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.corrupt import CorruptCount, check_test_images
from ddpjob_trainer.data.dataset import Batch, DataSet, Targets
from ddpjob_trainer.data.sampler import Dealing, Dividing, ElasticSampler, Micro, SamplerState, Step, steps_per_epoch
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.init_method import joined
from ddpjob_trainer.distributed.process_group import Group, wanted_world
from ddpjob_trainer.distributed.step_clock import OWN, StepPhase, peak_memory
from ddpjob_trainer.errors import CheckpointError, ConfigError, DataError, TrainingError
from ddpjob_trainer.evaluation.accumulate import Adding, open_accumulator
from ddpjob_trainer.evaluation.evaluate import evaluate
from ddpjob_trainer.lifecycle.fence import agree_on_incarnation
from ddpjob_trainer.lifecycle.signals import EXIT_STEPPED_ASIDE, Agreement, Due, StopRequest
from ddpjob_trainer.lifecycle.stack_dumps import StackDumps
from ddpjob_trainer.model.depths import shares
from ddpjob_trainer.model.models import (
    build_model,
    check_image_size,
    explaining_image_size,
    is_own,
    is_tied_to_micro_batches,
    needs_two_samples,
)
from ddpjob_trainer.model.shared_parts import can_be_shared
from ddpjob_trainer.optim.nonfinite import NonFiniteGuard
from ddpjob_trainer.optim.optimizers import Position, learning_rate
from ddpjob_trainer.optim.precision import Update, agreed
from ddpjob_trainer.reporting.flops import device_peak, flops_of_run
from ddpjob_trainer.reporting.ledger import Ledger
from ddpjob_trainer.reporting.profiler import Profile
from ddpjob_trainer.reporting.reporter import Machines, Plan, Reporter
from ddpjob_trainer.strategies.registry import computes_on, enter, open_strategy

_SAVING = "saving a checkpoint"


def run(config: Config) -> int:
    """Train as configured, from the newest checkpoint if there is one.

    Returns the exit code: 0 when training is complete, 75 when SIGTERM stopped it and a checkpoint is saved. Raises
    TrainerError, whose message is for the user, for bad input, and RuntimeError when a peer is gone.
    """
    if not config.model.compile:
        late_dynamo.put_off()
    enter(config)
    group = Group.from_env()
    if config.preflight.run:
        from ddpjob_trainer.preflight.conduct import require

        require(config, group)
    placement = devices.choose_for(config, group.local_rank)
    repeatable = config.ddp.ordered and placement.device.type == "cpu"
    devices.limit_threads(config.train.threads, group.local_world, repeatable=repeatable)
    devices.search_algorithms(placement.device, repeatable=config.ddp.ordered)
    data = open_data(config.data, placement.device)
    checkpoints = CheckpointFolder(config.checkpoint, config.checkpoint_dir, group)
    if checkpoints.writes or config.train.ledger:
        prepare_folder(config.run_dir, "train.run_dir")
    one_device, flops = devices.devices_per_rank(config) == 1, 0.0
    if group.rank == 0 and device_peak(config, placement.device, torch.float32):
        flops = flops_of_run(config, data.shape, data.classes, whole_numbers=data.whole_numbers)
    with joined(group, placement, config.train.timeout_seconds, one_device=one_device), checkpoints:
        same = check_same_data(group, data, config)
        trainer = Trainer(config, group, placement.device, data, checkpoints, flops, same)
        with closing(trainer.stacks), closing(trainer.reporter):
            trainer.resume()
            return trainer.train()


def check_same_data(group: Group, data: DataSet, config: Config) -> int:
    """Return the data's fingerprint, which must be the same on all ranks.

    Raises DataError on every rank if they see different data, because a sample number would then
    mean different images.
    """
    seen = group.gather(data.fingerprint())
    if len(set(seen)) == 1:
        return seen[0]
    names = f" ({', '.join(data.class_names[:5])}{', ...' * (data.classes > 5)})" if data.class_names else ""
    things = "samples" if ":" in config.data.name else "images"
    own = (
        f"{data.train_size} training {things}, {data.test_size} test {things}, {data.classes} classes{names},"
        f" fingerprint {seen[group.rank]:016x}"
    )
    which = []
    for rank in sorted(map(seen.index, set(seen))):
        sent = own.encode(errors="surrogateescape") if rank == group.rank else None
        described = group.broadcast_bytes(sent, rank).decode(errors="replace")
        which.append(f"rank {rank}{' and others' if seen.count(seen[rank]) > 1 else ''}: {described}")
    where, of = (
        config.data.url or config.data.dir or config.data.name,
        "names of classes and files, of sizes and of labels",
    )
    remedy = "make data.dir the same on all nodes"
    if ":" in config.data.name:
        where, of = config.data.name, "sizes, shapes, classes, targets and some inputs"
        remedy = "let the function return the same samples in the same order on all ranks, such as by a seed of its own"
    raise DataError(
        f"the ranks see different data in {where} ({'; '.join(which)}): {remedy}. The fingerprint is of the {of}"
    )


class _StepBatches:
    """The micro-batches of one step with their data, taken from the whole training's stream."""

    def __init__(self, micros: list[Micro], loaded: Iterator[tuple[Micro, Batch]]) -> None:
        self._micros, self._loaded = micros, loaded

    def __len__(self) -> int:
        return len(self._micros)

    def __iter__(self) -> Iterator[tuple[Micro, Batch]]:
        for micro in self._micros:
            found, batch = next(self._loaded)
            if found is not micro:
                raise AssertionError(f"micro-batch {micro.number} was to come and {found.number} of another step came")
            yield micro, batch


class Trainer:
    """The state of a run on one rank, and the loop."""

    def __init__(
        self,
        config: Config,
        group: Group,
        device: torch.device,
        data: DataSet,
        checkpoints: CheckpointFolder,
        flops: float = 0.0,
        fingerprint: int = 0,
    ) -> None:
        """`flops` are those of one sample, `fingerprint` is the data's; 0 means unknown."""
        self.config, self.group, self.device = config, group, device
        self.data, self.checkpoints = data, checkpoints
        self._fingerprint, self._other_data = fingerprint, False
        claim = agree_on_incarnation(group)
        checkpoints.claim(claim)

        amp, self._float32_for = agreed(config.amp, device, group)
        self.strategy = open_strategy(replace(config, amp=amp), group, device)
        self._check_data()
        model = build_model(config.model, data.shape, data.classes, config.data.seed, device)
        if is_own(config.model):  # It may draw from a generator that nobody has seeded.
            group.broadcast_tensors([*model.parameters(), *model.buffers()])
        self._erasers = erasers(config.data, data.shape)
        tied = is_tied_to_micro_batches(model)
        with self._explaining_image_size():
            self.strategy.prepare(model, data.shape)

        sharded = config.strategy is StrategyName.FSDP and group.world > 1
        self.memory = NodeMemory(group, claim.order, self.strategy.layout, sharded=sharded)
        self.micro_batches = self._micro_batches(tied or config.ddp.ordered or mixup.wanted(config.data))
        self._dividing = self._how_to_divide(model)
        self.corrupt = CorruptCount(data.train_size, config.data)
        first = SamplerState(seed=config.data.seed)
        self.sampler = ElasticSampler(data.train_size, config.data.batch, self._dealing(), first, config.data.repeats)
        self.step = 0
        self.epochs_evaluated = 0
        self.last_update = Update(0.0, False)
        self._first_pass = True
        self._clock, self._window = self.strategy.clock, (0, 0)
        self._flops, self._peaks = flops, self._exchange_peaks()

        self.stop = StopRequest(group, checkpoints)
        self.ledger = Ledger(config.run_dir, group, claim, wanted=config.train.ledger)
        plan = Plan(config.train.epochs, self._steps_left(), data.train_size, claim.round)
        self.reporter = Reporter(plan, config, group, writes=checkpoints.writes, class_names=data.class_names)
        if (copies := checkpoints.copies) is not None:
            copies.on_copied = lambda: self.reporter.post_copies(copies.figures())
        dynamic = self.strategy.precision.scale_is_dynamic
        self.guard = NonFiniteGuard(
            config.train.nonfinite_limit,
            group,
            self.reporter.skipped,
            dynamic_scale=dynamic,
            left_out=self.ledger.left_out,
        )
        self.profile = Profile(config.report.profile_steps, config.run_dir, group.rank)
        self.stacks = StackDumps(config.run_dir, group.rank, config.train.timeout_seconds)
        checkpoints.alive = self.stacks.alive

    def _check_data(self) -> None:
        """Raise ConfigError if loss, evaluation, checkpoints or strategy do not suit the data."""
        self._check_inputs()
        criterion, keys = self.strategy.criterion, self.config.checkpoint
        criterion.check(self.config.data, self.data.targets, self.data.classes)
        self._accumulator()
        has_accuracy = self.data.targets is Targets.CLASSES or criterion.of_decisions
        if keys.keep_best and keys.best_by is Metric.ACCURACY and not has_accuracy:
            raise ConfigError(
                f"checkpoint.best_by=accuracy: optim.loss={criterion.name} of {self.data.targets.value} has none; set"
                " checkpoint.best_by=loss"
            )

    def _explaining_image_size(self) -> AbstractContextManager[None]:
        keys = self.config.data
        return explaining_image_size(self.config.model, self.data.shape, self.data.classes, keys.size_key)

    def _check_inputs(self) -> None:
        keys, data, strategy = self.config.data, self.data, self.config.strategy
        # Otherwise the error would come only after an epoch of training.
        if side := keys.size_tested:
            check_image_size(self.config.model, (3, side, side), data.classes, "data.test_image_size")
        if keys.cutmix and len(data.shape) != 3:
            raise ConfigError(
                f"data.cutmix={keys.cutmix}: takes a rectangle of images (channels, height, width), and the inputs of"
                f" data.name={keys.name} have the shape {data.shape}; leave it out, or set data.mixup"
            )
        if not data.whole_numbers:
            return
        if keys.mixup:
            raise ConfigError(
                f"data.mixup={keys.mixup}: blends inputs, and those of data.name={keys.name} are whole numbers; leave"
                " it out"
            )
        if strategy in (StrategyName.PIPELINE, StrategyName.DDP_MP):
            raise ConfigError(
                f"strategy={strategy.value}: splits models of float inputs only, and those of data.name={keys.name} are"
                " whole numbers; set strategy=ddp or fsdp"
            )

    def _accumulator(self) -> Adding:
        data, criterion = self.data, self.strategy.criterion
        return open_accumulator(
            data.targets, data.classes, criterion.each, self.config.eval, decisions=criterion.of_decisions
        )

    def _micro_batches(self, tied: bool) -> int:
        """Return how many a global batch has in this run; 0 deals samples out one by one."""
        parts = self.strategy.data_share.parts * max(self.group.world, wanted_world()) // self.group.world
        return self.config.data.micro_batches or (parts * self.strategy.portions if tied else 0)

    def _how_to_divide(self, model: torch.nn.Module) -> Dividing:
        # Sums over parts differ in the last bits from sums over whole micro-batches.
        if self.config.ddp.ordered or not self.strategy.divides:
            return Dividing.NO
        if not self.config.data.exact:
            return Dividing.LOCAL
        return Dividing.EXACT if can_be_shared(model) else Dividing.NO

    def _dealing(self) -> Dealing:
        share, strategy = self.strategy.data_share, self.strategy
        return Dealing(
            share.part,
            share.parts,
            self.micro_batches,
            strategy.portions,
            strategy.equal,
            self._dividing,
            self.config.data.stretch,
        )

    # ------------------------------------------------------------ the loop

    def train(self) -> int:
        """Train the remaining epochs and return the exit code."""
        began = time.monotonic()
        if self._dividing is Dividing.EXACT and self.sampler.dealing.passes(self.config.data.batch):
            self.strategy.share_parts()
        self.stop.listen()
        self.ledger.start(self.step, self.data.train_size, self.config.train.epochs, self.config.data.repeats)
        epoch, precision = self.sampler.state.epoch + 1, self.strategy.precision.name
        self.reporter.start(self.step, self._steps_left(), epoch, self._uneven(), precision, self._notes())
        stopped = self._evaluate_if_due()
        self._steps, ahead = tee(self.sampler.upcoming(self.config.train.epochs))
        self._batches = self._loaded(ahead)
        while not stopped and self.sampler.state.epoch < self.config.train.epochs:
            stopped = self._train_epoch()
        self.stop.over()
        self._save()  # Does nothing if this very state is saved already.
        with self.reporter.during(_SAVING):
            self.checkpoints.finish(self.stop.seconds_left if stopped else None)
        self._report_checkpoints()
        if stopped:
            self.reporter.stopped(self.step)
        else:
            self.ledger.end(self.step)
            self.checkpoints.release()
            self.reporter.end(self.step, time.monotonic() - began)
        self.reporter.close()
        self.profile.close()
        self.memory.close()
        self.strategy.close()
        # Wait until rank 0 has saved, because torchrun ends all ranks when one exits.
        self.group.barrier()
        return EXIT_STEPPED_ASIDE if stopped else 0

    def _train_epoch(self) -> bool:
        """Train the rest of the current epoch and evaluate.

        Return whether all ranks agreed to stop.
        """
        self.reporter.restart_clock()
        self._restart_clock()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        samples: int | torch.Tensor = 0
        self.corrupt.begin_epoch()
        while not self.sampler.epoch_is_done:
            step = next(self._steps)
            self.stacks.alive()
            self.profile.before(self.step + 1)
            agreement = None if self.corrupt.possible else self.stop.agreement(self._save_due(step))
            losses, counted, agreement = self._optimize(step, agreement)
            loss_sum, samples = loss_sum + losses, samples + counted
            self.sampler.done(step)
            self.step += 1
            if self.step % self.config.train.log_every == 0 or self.sampler.epoch_is_done:
                self._report(loss_sum, samples)
                loss_sum, samples = torch.zeros((), dtype=torch.float64, device=self.device), 0
            stop, save = agreement.wait()
            complete = self.sampler.epoch_is_done
            if complete:
                self.sampler.next_epoch()
            self.memory.take(self.step, self._snapshot)
            if stop or save:
                self._save()
            self._report_checkpoints()
            if stop or complete:
                break
        return stop or self._evaluate_if_due()

    def _optimize(self, step: Step, agreement: Agreement | None) -> tuple[torch.Tensor, int | torch.Tensor, Agreement]:
        """Take one optimizer step.

        Returns this rank's sum of losses, the number of readable samples in the global batch, and
        the agreement. Both numbers are zero if the step was skipped. If images may be unreadable,
        the agreement also carries their number; it is then None on entry and made here.
        """
        state, size = self.sampler.state, self.data.train_size
        at = Position(state.epoch * size + state.consumed, size, self.config.data.batch, self.config.train.epochs)
        self._rate = learning_rate(self.config.optim, at)
        self.ledger.step(self.step + 1, step if self.strategy.data_share.counts else replace(step, micros=[]))
        count = len(step.samples)
        self._clock.lap(StepPhase.OTHER)
        with self._explaining_image_size() if self._first_pass else nullcontext():
            losses = self.strategy.backward(_StepBatches(step.micros, self._batches), count)
        self._first_pass = False
        self._clock.lap(self._end_of_passes)
        self._window = self._window[0] + 1, self._window[1] + self._computed(step)
        unreadable = 0
        if agreement is None:
            agreement = self.stop.agreement(self._save_due(step), self.corrupt.take())
            unreadable = self.corrupt.add(agreement.unreadable())
        if unreadable:
            self.ledger.unreadable(self.step + 1, unreadable)
            self.strategy.scale_gradients(count / max(1, count - unreadable))
        self.last_update = self.strategy.update(self._rate)
        self._clock.lap(StepPhase.UPDATE)
        samples = [number % size for number in step.mine] if self.sampler.repeats > 1 else step.mine
        counted = self.guard.record(self.step + 1, samples, losses, count - unreadable, self.last_update)
        return (*counted, agreement)

    def _loaded(self, steps: Iterator[Step]) -> Iterator[tuple[Micro, Batch]]:
        """Yield each micro-batch of `steps` with its data, mixed if that is configured.

        The steps may span several epochs. They are requested as far ahead as the data set reads.
        The time spent waiting for data is reported.
        """
        asked, micros = tee((step.epoch, micro) for step in steps for micro in step.micros)
        loaded = self.data.train_stream((epoch, mixup.samples_for(self.config.data, micro)) for epoch, micro in asked)
        for epoch, micro in micros:
            self._clock.lap(self._end_of_passes)  # Ends the passes of the previous micro-batch.
            waiting = time.perf_counter()
            batch = next(loaded)
            self.reporter.waited(time.perf_counter() - waiting)
            for erase in self._erasers:
                erase(batch.images, mixup.samples_for(self.config.data, micro), epoch)
            mixed = mixup.mix_micro(self.config.data, batch, micro, self.data.classes)
            if micro.counts and self.strategy.data_share.counts:
                self.corrupt.met(mixed.unreadable)
            self._clock.lap(StepPhase.DATA)
            yield micro, mixed

    @property
    def _end_of_passes(self) -> StepPhase:
        """The phase that the end of a micro-batch's passes is counted as."""
        return StepPhase.EXCHANGE if self.strategy.waits_apart else StepPhase.COMPUTE

    def _computed(self, step: Step) -> int:
        """Return how many samples this rank's model computes, whether they count or not."""
        if self.config.model.sync_batchnorm:
            return len(step.mine)
        return sum(len(micro.samples) for micro in step.micros)

    # ------------------------------------------------------------ around the loop

    def _report(self, loss_sum: torch.Tensor, counted: int | torch.Tensor) -> None:
        self.guard.check()
        own, samples = loss_sum.cpu().reshape(1) * self.strategy.data_share.counts, int(counted)
        summed, machines = self._exchange_figures(own)
        mean = summed / samples if samples else math.nan
        state = self.sampler.state
        if samples and not math.isfinite(mean):
            raise TrainingError(
                f"the loss is {mean} at step {self.step} (epoch {state.epoch + 1}): lower optim.lr or lengthen"
                f" optim.warmup_epochs; the checkpoints in {self.checkpoints.path} are from before"
            )
        left = (self.config.train.epochs - state.epoch) * self.data.train_size - state.consumed
        self.reporter.report(
            epoch=state.epoch + 1,
            step=self.step,
            loss=mean,
            learning_rate=self._rate,
            samples=samples,
            samples_left=left,
            gradient_norm=float(self.last_update.norm),
            skipped_steps=self.guard.skipped,
            corrupt_images=self.corrupt.epoch,
            machines=machines,
        )

    def _exchange_figures(self, loss: torch.Tensor) -> tuple[float, Machines]:
        """Return the ranks' sum of `loss`, (1,), and each machine's figures since the last report.

        This takes one collective: each rank adds its own columns to zeros.
        """
        (steps, taken), phases = self._window, self._clock.take()
        spent = sum(phases.values())
        own = sum(phases.get(phase, 0.0) for phase in OWN) if self.strategy.waits_apart else 0.0
        even = steps * min(self.config.data.batch, self.data.train_size) / self.strategy.data_share.parts
        figures = torch.zeros(1 + 4 * self.group.world, dtype=torch.float64)
        figures[0] = loss
        figures[1 + self.group.rank :: self.group.world] = torch.tensor(
            [
                own / steps,
                own / steps * even / taken if taken else 0.0,  # A rank with more samples is not slower.
                phases.get(StepPhase.DATA, 0.0) / spent if spent else 0.0,
                float(peak_memory(self.device)),
            ],
            dtype=torch.float64,
        )
        summed, *columns = self.group.sum(figures).tolist()
        self._restart_clock()
        world = self.group.world
        own_seconds, even_seconds, data, memory = (columns[k * world : (k + 1) * world] for k in range(4))
        share = {phase.value: seconds / steps for phase, seconds in phases.items()}
        peak = sum(self._peaks) if all(self._peaks) else 0.0
        stages = self.strategy.stages
        return summed, Machines(own_seconds, even_seconds, data, memory, share, self._flops, peak, stages)

    def _exchange_peaks(self) -> list[float]:
        """Return the FLOP/s of each rank's devices, which may differ; 0 means unknown.

        All ranks must call this together.
        """
        own = device_peak(self.config, self.device, self.strategy.precision.dtype)
        peaks = torch.zeros(self.group.world, dtype=torch.float64)
        peaks[self.group.rank] = own * computes_on(self.config, self.device)
        return [float(peak) for peak in self.group.sum(peaks)]

    def _restart_clock(self) -> None:
        self._clock.take()
        self._clock.restart()
        self._window = 0, 0

    def _evaluate_if_due(self) -> bool:
        """Evaluate after the last complete epoch if that is due.

        Return whether all ranks agreed to stop.
        """
        complete, epochs = self.sampler.state.epoch, self.config.train.epochs
        # If a resume with a different train.eval_every falls within the next epoch, the weights are
        # no longer those of the last complete epoch.
        passed = self.sampler.state.consumed > 0 and complete < epochs
        due = (complete % self.config.train.eval_every == 0 and not passed) or complete == epochs
        if complete == 0 or complete <= self.epochs_evaluated or not due:
            return False
        strategy = self.strategy
        strategy.train_mode(False)
        with self.reporter.during("evaluating"):
            result = evaluate(
                strategy.logits,
                strategy.data_share,
                self.data,
                self.config.train.eval_batch,
                self.group,
                self.stop,
                adding=self._accumulator(),
                alive=self._alive,
            )
        strategy.train_mode(True)
        if result is None:
            return True
        check_test_images(result.unreadable, self.data.test_size, self.config.data)
        self.epochs_evaluated = complete
        self.reporter.evaluated(complete, self.step, result)
        self.checkpoints.scored(self.step, result.scalars())
        return False

    def _alive(self) -> None:
        self.stacks.alive()
        self.reporter.alive()

    def _save_due(self, step: Step) -> Due:
        complete = step.after.epoch + 1 if step.after.consumed >= self.data.train_size else None
        return self.checkpoints.due(self.step + 1, epoch=complete, last=complete == self.config.train.epochs)

    def _save(self) -> None:
        """Save the state after the last step. It is written while training continues."""
        # A restart does not repeat these steps, so check and record their results first.
        self.guard.check()
        with self.reporter.during(_SAVING):
            self.checkpoints.save(self._snapshot, self.step)

    def _report_checkpoints(self) -> None:
        completed = self.checkpoints.completed()
        for save in completed:
            self.reporter.checkpoint(save.step, save.write_seconds)
        copies = self.checkpoints.copies
        copied = copies.completed() if copies is not None else []
        if copies is not None:
            self.reporter.copies = copies.figures()
        for step in copied:
            self.reporter.copied(step)
        # The checkpoints that a restart is certain to find: with checkpoint.url, the folder may be
        # lost with its machine.
        for step in copied if self.config.checkpoint.url else [save.step for save in completed]:
            self.ledger.checkpoint(step)

    def _snapshot(self) -> Snapshot:
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "fingerprint": self._fingerprint,
            "epochs_evaluated": self.epochs_evaluated,
            "micro_batches": self.micro_batches,
            **self.strategy.state(),
            "config": self.config.flat(),
        }

    def resume(self) -> None:
        """Continue from the newest state in the nodes' memory or checkpoint, if there is one.

        Raises CheckpointError if it belongs to a different model, optimizer or data set.
        """
        kept = self.memory.restore()
        newer_than = -1 if kept is None else int(kept["step"])
        snapshot = self.checkpoints.newest(self.strategy.layout, newer_than)
        self._load(snapshot or kept)
        source = protocol.STORAGE if snapshot else protocol.MEMORY if kept else protocol.SCRATCH
        self.memory.begin(self.step, source)

    def _load(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            self._check_that_ranks_have_work()
            self._check_smallest_micro_batch()
            self._load_weights()
            return
        compatibility.check_resume(snapshot, self.strategy.state()["model"], self.config.flat(), self.checkpoints.path)
        try:
            self.strategy.load(snapshot)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot['step']} in {self.checkpoints.path} does not fit this optimizer or"
                f" precision ({error}); give the configuration that it was made with, or another checkpoint.dir to"
                " start from scratch"
            ) from error
        self.sampler.load_state_dict(snapshot["sampler"])
        self._other_data = snapshot.get("fingerprint", self._fingerprint) != self._fingerprint
        self.step, self.epochs_evaluated = int(snapshot["step"]), int(snapshot["epochs_evaluated"])
        if not self.config.data.micro_batches and not self.config.model.sync_batchnorm:
            # A different number of ranks changes nothing here. A different train.accumulate does,
            # because users raise it when memory is short.
            kept, before = int(snapshot["micro_batches"]), int(snapshot["config"].get("train.accumulate", 1))
            self.micro_batches = max(1, kept * self.config.train.accumulate // before) if kept else self.micro_batches
        self.sampler.dealing = self._dealing()
        self._check_smallest_micro_batch()

    def _load_weights(self) -> None:
        """Start from the weights in checkpoint.load, if it is given."""
        if (path := self.config.checkpoint.load) is not None:
            state = self.strategy.state()
            keys = self.config.checkpoint
            weights = compatibility.load_weights(
                path,
                keys.load_except,
                state["model"],
                self.group,
                average=keys.load_average,
                alive=self.stacks.alive,
            )
            self.strategy.load({**state, "model": weights})

    def _steps_left(self) -> int:
        """Return the number of steps until the configured training is complete."""
        state, size, batch = self.sampler.state, self.data.train_size, self.config.data.batch
        epochs = self.config.train.epochs - state.epoch
        if epochs <= 0:
            return 0
        return steps_per_epoch(size - state.consumed, batch) + (epochs - 1) * steps_per_epoch(size, batch)

    def _notes(self) -> list[str]:
        """Return notes on decisions made for the user that nothing else would show."""
        notes = []
        if self._other_data:
            notes.append(
                "warning: the data look other than those of the checkpoint (names of classes or files, sizes, labels,"
                " content). Where sample numbers mean other samples now, epoch"
                f" {self.sampler.state.epoch + 1} takes some twice and leaves others out"
            )
        if self._float32_for:
            ranks = ", ".join(map(str, self._float32_for[:8])) + ", ..." * (len(self._float32_for) > 8)
            notes.append(
                f"computing in float32 on all ranks, since the devices of rank(s) {ranks} have no bfloat16"
                " (amp.level=auto)"
            )
        if self.strategy.depths is not None:
            notes.append(shares(self.strategy.depths, self.config.optim.layer_decay))
        steps, last = self.config.report.profile_steps, self.step + self._steps_left()
        if steps and self.step < last < steps[0]:
            notes.append(
                f"no profile: report.profile_steps begins at step {steps[0]}, and the last is {last}; write less"
            )
        if any(self._peaks) and not all(self._peaks):
            notes.append(
                f"no MFU: the peak of rank {self._peaks.index(0)}'s device is not known; set report.peak_flops if all"
                " ranks have the same"
            )
        elif any(self._peaks) and not self._flops:
            notes.append(
                f"no MFU: the FLOPs of model.name={self.config.model.name} cannot be counted on a model without values"
            )
        return notes

    def _uneven(self) -> str:
        """Return why ranks or pipelines wait in each step; empty if a full batch divides evenly."""
        batch, parts, dealing = self.config.data.batch, self.strategy.data_share.parts, self.sampler.dealing
        if dealing.passes(batch):
            return ""
        if (idle := parts - min(self.micro_batches or batch, batch)) > 0:
            return (
                f"{idle} rank(s) are idle: the global batch has fewer micro-batches or samples than ranks"
                " (data.micro_batches, data.batch)"
            )
        if dealing.busiest > 1.1:
            return (
                f"{self.micro_batches} micro-batches cannot be dealt out evenly to {parts} ranks: a step takes"
                f" {dealing.busiest:.2f} times as long as an even share would; take a number of ranks that divides"
                " data.micro_batches, or data.exact=false (strategy=ddp or fsdp, without ddp.ordered)"
            )
        return ""

    def _check_that_ranks_have_work(self) -> None:
        """Raise ConfigError if a rank would be idle in a new run.

        Ranks that join later may be idle; their weight is zero.
        """
        parts, batch, micro_batches = self.strategy.data_share.parts, self.config.data.batch, self.micro_batches
        if parts > batch:
            raise ConfigError(
                f"data.batch={batch} cannot be divided among {parts} ranks: each needs at least one sample;"
                f" set data.batch to {parts} or more, or start {batch} ranks"
            )
        portions = self.strategy.portions
        if micro_batches > batch and portions > 1 and not self.config.data.micro_batches:
            key = "pipeline.micro_batches" if self.config.strategy is StrategyName.PIPELINE else "train.accumulate"
            raise ConfigError(
                f"{key}={portions}: makes {micro_batches} micro-batches of data.batch={batch}, with none for some; set"
                f" it to {max(1, batch * portions // micro_batches)}, or data.batch to {micro_batches} or more"
            )
        shared = self.sampler.dealing.passes(batch) > 0
        if (0 < micro_batches < parts and not shared) or micro_batches > batch:
            raise ConfigError(
                f"data.micro_batches={micro_batches} does not fit {parts} ranks and data.batch={batch}:"
                f" set it to {parts} or a multiple of it, and to {batch} at most"
            )

    def _check_smallest_micro_batch(self) -> None:
        """Raise ConfigError if a later micro-batch has one sample and the model needs two."""
        size, batch, parts = self.data.train_size, self.config.data.batch, self.micro_batches
        to_come = {size - self.sampler.state.consumed, size}  # Samples of this epoch, and of the next ones.
        # Each rank's share is a micro-batch by itself.
        if parts and self._dividing is Dividing.LOCAL:
            parts = max(parts, self.strategy.data_share.parts * self.sampler.dealing.passes(batch))

        def single(batch: int) -> set[int]:
            """Return the sizes of steps that would have a micro-batch of one sample."""
            steps = {samples % batch for samples in to_come} | {min(batch, size)}
            return {step for step in steps if 0 < step < 2 * parts}

        if not parts or not (short := single(batch)) or self.config.model.sync_batchnorm or not self._steps_left():
            return
        if not needs_two_samples(self.config.model, self.data.shape, self.data.classes):
            return
        fitting = next((other for other in range(batch, 1, -1) if not single(other)), None)
        remedy = f"data.batch={fitting}" if fitting else "fewer data.micro_batches"
        pixels = f" (images of {' x '.join(map(str, self.data.shape[1:]))})" if len(self.data.shape) == 3 else ""
        raise ConfigError(
            f"data.batch={batch}: an epoch of {size} samples has a step of {min(short)}, and one of its {parts}"
            f" micro-batches a single sample, of which {self.config.model.name} takes statistics of one value per"
            f" channel{pixels}; set {remedy}, or take a model that normalizes each sample by itself"
        )
