"""The training loop: steps on any number of ranks, evaluation, checkpoints and SIGTERM."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import tee
from typing import Any

import torch
from ddpjob_pod import late_dynamo
from ddpjob_runtime import protocol

from ddpjob_trainer import run_plan
from ddpjob_trainer.checkpoints import compatibility
from ddpjob_trainer.checkpoints.folder import CheckpointFolder
from ddpjob_trainer.checkpoints.index import prepare_folder
from ddpjob_trainer.checkpoints.memory import NodeMemory
from ddpjob_trainer.checkpoints.pretrained import load_pretrained
from ddpjob_trainer.checkpoints.snapshot import Snapshot
from ddpjob_trainer.checkpoints.snapshot import check as check_state
from ddpjob_trainer.config.config import Config
from ddpjob_trainer.config.sections import StrategyName
from ddpjob_trainer.data import mixup
from ddpjob_trainer.data.augment import build_erasers
from ddpjob_trainer.data.batch_transform import BatchTransform
from ddpjob_trainer.data.catalog import open_data
from ddpjob_trainer.data.corrupt import CorruptCount, check_test_images
from ddpjob_trainer.data.dataset import Batch, DataSet, Targets, describe
from ddpjob_trainer.data.sampler import Dividing, ElasticSampler, Micro, SamplerState, Step
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.init_method import join_group
from ddpjob_trainer.distributed.process_group import Group
from ddpjob_trainer.distributed.step_clock import OWN, StepPhase, peak_memory
from ddpjob_trainer.errors import CheckpointError, TrainingError
from ddpjob_trainer.evaluation.evaluate import evaluate
from ddpjob_trainer.evaluation.views import over_views
from ddpjob_trainer.lifecycle.fence import agree_on_incarnation
from ddpjob_trainer.lifecycle.signals import EXIT_STEPPED_ASIDE, Agreement, Due, StopRequest
from ddpjob_trainer.lifecycle.stack_dumps import StackDumps
from ddpjob_trainer.model.airbench import find_filters, whiten
from ddpjob_trainer.model.models import build_model, choose_layout, is_own, is_tied_to_micro_batches
from ddpjob_trainer.optim.nonfinite import NonFiniteGuard
from ddpjob_trainer.optim.optimizers import Position, learning_rate
from ddpjob_trainer.optim.precision import Update, agree_on_amp
from ddpjob_trainer.reporting.callbacks import Callbacks
from ddpjob_trainer.reporting.flops import device_peak, flops_of_run
from ddpjob_trainer.reporting.ledger import Ledger
from ddpjob_trainer.reporting.profiler import Profile
from ddpjob_trainer.reporting.reporter import Machines, Plan, Reporter
from ddpjob_trainer.strategies.registry import computes_on, enter, open_strategy

_SAVING = "saving a checkpoint"


def run(config: Config) -> int:
    """Train as configured, and return the exit code. Resume from the latest checkpoint, if any.

    The code is 0 if training is complete, and 75 if SIGTERM stopped the training and a checkpoint
    was saved. Raises TrainerError with a message for the user if the input is invalid, and
    RuntimeError if a peer is gone.
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
    devices.keep_freed_memory(placement.device)
    data = open_data(config.data, placement.device)
    checkpoints = CheckpointFolder(config.checkpoint, config.checkpoint_dir, group)
    if checkpoints.writes or config.train.ledger:
        prepare_folder(config.run_dir, "train.run_dir")
    one_device, flops = devices.devices_per_rank(config) == 1, 0.0
    if group.rank == 0 and device_peak(config, placement.device, torch.float32):
        flops = flops_of_run(config, data.shape, data.classes, whole_numbers=data.whole_numbers)
    with join_group(group, placement, config.train.timeout_seconds, one_device=one_device), checkpoints:
        same = run_plan.check_same_data(group, data, config)
        trainer = Trainer(config, group, placement.device, data, checkpoints, flops, same)
        with closing(trainer.stacks), closing(trainer.reporter):
            trainer.resume()
            return trainer.train()


class _StepBatches:
    """The micro-batches of one step with their data, taken from the stream of all steps."""

    def __init__(
        self, micros: list[Micro], loaded: Iterator[tuple[Micro, Batch]], complete: Callable[[], None]
    ) -> None:
        """Prepare one step.

        `complete` is called as soon as the step's last micro-batch is loaded.
        """
        self._micros, self._loaded, self._complete = micros, loaded, complete

    def __len__(self) -> int:
        return len(self._micros)

    def __iter__(self) -> Iterator[tuple[Micro, Batch]]:
        for number, micro in enumerate(self._micros, 1):
            found, batch = next(self._loaded)
            if found is not micro:
                raise AssertionError(f"expected micro-batch {micro.number}, but got {found.number} of a different step")
            if number == len(self._micros):
                self._complete()
            yield micro, batch


class Trainer:
    """Runs the training loop on one rank, and holds that rank's state of the run."""

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
        """Prepare the run.

        `flops` is the number of FLOPs per sample, and `fingerprint` is the hash that identifies the
        data. For both, 0 means unknown.
        """
        self.config, self.group, self.device = config, group, device
        self.data, self.checkpoints = data, checkpoints
        self._fingerprint, self._other_data, self._changed = fingerprint, False, ""
        claim = agree_on_incarnation(group)
        checkpoints.claim(claim)

        amp, self._float32_for = agree_on_amp(config.amp, device, group)
        self.strategy = open_strategy(replace(config, amp=amp), group, device)
        run_plan.check_fit(config, data, self.strategy)
        self._scores = over_views(self.strategy.logits, config.eval.tta, data.shape)
        layout = choose_layout(config.model, amp, data.shape, device)
        model = build_model(layout, data.shape, data.classes, config.data.seed, device)
        self._notes = run_plan.check_optimizer(group, config, data, model)
        # The user's function may draw initial weights from generators that are not seeded, so give
        # all ranks rank 0's weights.
        if is_own(config.model):
            group.broadcast_tensors([*model.parameters(), *model.buffers()])
        self._filters = find_filters(model, data)
        parameters = sum(weight.numel() for weight in model.parameters())
        self._erasers = build_erasers(config.data, data.shape)
        own = config.data.batch_transform
        # The user's own loss function may support labels of any kind, so 0 turns off the check of
        # labels.
        classes = 0 if ":" in config.optim.loss or data.targets is not Targets.CLASSES else data.classes
        self._transform = BatchTransform(own, device, classes) if own else None
        tied = is_tied_to_micro_batches(model)
        with run_plan.explain_sizes(config, data):
            self.strategy.prepare(model, data.shape)

        sharded = config.strategy is StrategyName.FSDP and group.world > 1
        self.memory = NodeMemory(group, claim.order, self.strategy.layout, sharded=sharded)
        self.division = run_plan.Division.choose(config, data, self.strategy, group, model, tied=tied)
        self.corrupt = CorruptCount(data.train_size, config.data)
        first = SamplerState(seed=config.data.seed)
        self.sampler = ElasticSampler(
            data.train_size, config.data.batch, self.division.dealing, first, config.data.repeats
        )
        self.callbacks = Callbacks(config.train.callbacks)
        self.callbacks.check_evaluations(config.train.eval_every)
        check_state({"sampler": {}, "callbacks": self.callbacks.state()})
        self.step = 0
        self.epochs_evaluated = 0
        self.ended_by: list[str] = []
        self.last_update = Update(0.0, False)
        self._begun = 0  # Number of steps that this process has taken.
        self._agreement: Agreement | None = None
        self._clock, self._window = self.strategy.clock, (0, 0)
        self._flops, self._peaks = flops, self._exchange_peaks()

        self.stop = StopRequest(group, checkpoints)
        self.ledger = Ledger(config.run_dir, group, claim, wanted=config.train.ledger)
        ahead = Plan(config.train.epochs, self._steps_left, data.train_size, claim.round)
        self.reporter = Reporter(
            ahead,
            config,
            group,
            writes=checkpoints.writes,
            class_names=data.class_names,
            device=device.type,
            model=f"{config.model.name} with {parameters:,} parameters",
        )
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

    # ------------------------------------------------------------ the loop

    def train(self) -> int:
        """Train the remaining epochs and return the exit code."""
        began = time.monotonic()
        if self.division.dividing is Dividing.EXACT and self.sampler.dealing.passes(self.config.data.batch):
            self.strategy.share_parts()
        if (region := self.strategy.region) is not None:
            keys = self.config
            raw = not (self._erasers or self._transform or mixup.is_wanted(keys.data))
            normalize = self.data.defer_normalization() if raw else None
            region.fix(self.division.full_sizes(self.sampler.state), keys.train.eval_batch, normalize)
        self.stop.listen()
        self.ledger.start(self.step, self.data.train_size, self.config.train.epochs, self.config.data.repeats)
        epoch, precision = self.sampler.state.epoch + 1, self.strategy.precision.name
        self.reporter.start(
            self.step, self._steps_left, epoch, self.division.explain_waits(), precision, self._list_notes()
        )
        self.callbacks.call("on_train_begin", self.strategy.model)
        stopped = self._evaluate_if_due()
        self._steps, ahead = tee(self.sampler.upcoming(self.config.train.epochs))
        self._batches = self._load(ahead)
        while not (stopped or self.ended_by) and self.sampler.state.epoch < self.config.train.epochs:
            stopped = self._train_epoch()
        self.stop.over()
        self._save()  # This call does nothing if a checkpoint already holds exactly this state.
        with self.reporter.during(_SAVING):
            self.checkpoints.finish(self.stop.seconds_left if stopped else None)
        self._report_checkpoints()
        if stopped:
            self.reporter.stopped(self.step)
        else:
            self.ledger.end(self.step, self.sampler.state.epoch if self.ended_by else None)
            self.checkpoints.release()
            self.reporter.end(self.step, time.monotonic() - began)
        self.reporter.close()
        self.profile.close()
        self.memory.close()
        self.strategy.close()
        # torchrun ends all ranks when one of them exits, so wait until rank 0 has saved.
        self.group.barrier()
        return EXIT_STEPPED_ASIDE if stopped else 0

    def _train_epoch(self) -> bool:
        """Train the rest of the current epoch, and evaluate if an evaluation is due.

        Return whether all ranks agreed to stop.
        """
        self.reporter.restart_clock()
        self.memory.interrupt()
        self._restart_clock()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        samples: int | torch.Tensor = 0
        self.corrupt.begin_epoch()
        while not self.sampler.epoch_is_done:
            step = next(self._steps)
            self.stacks.alive()
            self.profile.before(self.step + 1)
            self._agreement = None
            if not self.corrupt.possible and self.stop.is_due(self._is_milestone(step)):
                self._agreement = self.stop.agreement(self._save_due(step))
            losses, counted = self._optimize(step)
            loss_sum, samples = loss_sum + losses, samples + counted
            self.sampler.done(step)
            self.step += 1
            if self.step % self.config.train.log_every == 0 or self.sampler.epoch_is_done:
                self._report(loss_sum, samples)
                loss_sum, samples = torch.zeros((), dtype=torch.float64, device=self.device), 0
            stop, save = self._agreement.wait() if self._agreement else (False, False)
            complete = self.sampler.epoch_is_done
            if complete:
                self.sampler.next_epoch()
            self.reporter.post_memory(self.memory.take(self.step, self._snapshot))
            if stop or save:
                self._save()
            self._report_checkpoints()
            if stop or complete:
                break
        return stop or self._evaluate_if_due()

    def _optimize(self, step: Step) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Take one optimizer step.

        Return (this rank's sum of losses, the number of readable samples in the global batch). Both
        are zero if the step was skipped.

        If the data set can have unreadable images, the ranks exchange the numbers of images that
        they could not read. If the strategy `divides` micro-batches, this exchange begins before
        the last forward pass, except in the first two steps of a process. In all other cases, it
        begins after all passes. There are two reasons for the late exchange. Ranks may load data at
        different points between their other messages, and DDP's first forward pass in the second
        step sends the new order of its buckets.
        """

        def agree() -> None:
            if self.corrupt.possible and self._agreement is None:
                self._agreement = self.stop.agreement(self._save_due(step), self.corrupt.take())

        state, size = self.sampler.state, self.data.train_size
        at = Position(state.epoch * size + state.consumed, size, self.config.data.batch, self.config.train.epochs)
        self._rate = learning_rate(self.config.optim, at)
        self.ledger.step(self.step + 1, step if self.strategy.data_share.counts else replace(step, micros=[]))
        count = len(step.samples)
        self._clock.lap(StepPhase.OTHER)
        with run_plan.explain_sizes(self.config, self.data) if not self._begun else nullcontext():
            loaded = agree if self.strategy.divides and self._begun > 1 else lambda: None
            losses = self.strategy.backward(_StepBatches(step.micros, self._batches, loaded), count)
        self._begun += 1
        self._clock.lap(self._end_of_passes)
        self._window = self._window[0] + 1, self._window[1] + self._count_computed(step)
        unreadable = 0
        agree()
        if self.corrupt.possible and self._agreement is not None:
            unreadable = self.corrupt.add(self._agreement.unreadable())
        if unreadable:
            self.ledger.unreadable(self.step + 1, unreadable)
            self.strategy.scale_gradients(count / max(1, count - unreadable))
        self.last_update = self.strategy.update(self._rate)
        self._clock.lap(StepPhase.UPDATE)
        samples = [number % size for number in step.mine] if self.sampler.repeats > 1 else step.mine
        return self.guard.record(self.step + 1, samples, losses, count - unreadable, self.last_update)

    def _load(self, steps: Iterator[Step]) -> Iterator[tuple[Micro, Batch]]:
        """Yield each micro-batch of `steps` with its data.

        The data has been erased, mixed and transformed as configured.

        The steps may span several epochs. A data set that reads ahead of training also takes items
        of `steps` ahead of training. The time that training spends waiting for data is reported.
        """
        asked, micros = tee((step.epoch, micro) for step in steps for micro in step.micros)
        loaded = self.data.train_stream((epoch, mixup.samples_for(self.config.data, micro)) for epoch, micro in asked)
        for epoch, micro in micros:
            # The time before this line belongs to the passes of the previous micro-batch.
            self._clock.lap(self._end_of_passes)
            waiting = time.perf_counter()
            batch = next(loaded)
            self.reporter.waited(time.perf_counter() - waiting)
            for erase in self._erasers:
                erase(batch.images, mixup.samples_for(self.config.data, micro), epoch)
            mixed = mixup.mix_micro(self.config.data, batch, micro, self.data.classes)
            if self._transform is not None:
                mixed = self._transform(mixed, micro.key)
            if micro.counts and self.strategy.data_share.counts:
                self.corrupt.met(mixed.unreadable)
            self._clock.lap(StepPhase.DATA)
            yield micro, mixed

    @property
    def _end_of_passes(self) -> StepPhase:
        """The phase that counts the time until a micro-batch's passes end.

        The phase is EXCHANGE if the strategy measures waiting separately (`waits_apart`), and
        COMPUTE if it does not.
        """
        return StepPhase.EXCHANGE if self.strategy.waits_apart else StepPhase.COMPUTE

    def _count_computed(self, step: Step) -> int:
        """Return the number of samples that pass through this rank's model in a step.

        Samples whose results do not count are included.
        """
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
                f" optim.warmup_epochs; the checkpoints in {self.checkpoints.path} are from earlier steps"
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
        self.callbacks.call("on_step", self.step, mean)

    def _exchange_figures(self, loss: torch.Tensor) -> tuple[float, Machines]:
        """Return the sum of all ranks' losses, and figures about each rank since the last report.

        `loss` is this rank's loss, (1,). A single collective sums everything: each rank writes its
        figures into its own columns, in which all other ranks have zeros.
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
                # Scale the time to an even share, because a rank is not slow just because it has
                # more samples.
                own / steps * even / taken if taken else 0.0,
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
        # The FLOPs of convolutions grow with the number of pixels, which data.early_sizes changes.
        size = math.prod(self.data.shape_in(self.sampler.state.epoch)) / max(1, math.prod(self.data.shape))
        return summed, Machines(own_seconds, even_seconds, data, memory, share, self._flops * size, peak, stages)

    def _exchange_peaks(self) -> list[float]:
        """Return the peak FLOP/s of each rank's devices; 0 means unknown.

        The ranks may have different devices. All ranks must call this together.
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
        """Evaluate if an evaluation is due at the end of the last complete epoch.

        Return whether all ranks agreed to stop.
        """
        complete, epochs = self.sampler.state.epoch, self.config.train.epochs
        # If training has resumed in the middle of an epoch, the weights have changed since the end
        # of the last complete epoch. That epoch is therefore not evaluated, even if a new value of
        # train.eval_every asks for it.
        passed = self.sampler.state.consumed > 0 and complete < epochs
        every = self.config.train.eval_every
        due = every > 0 and ((complete % every == 0 and not passed) or complete == epochs)
        if complete == 0 or complete <= self.epochs_evaluated or not due:
            return False
        strategy = self.strategy
        strategy.train_mode(False)
        with self.reporter.during("evaluating"):
            result = evaluate(
                self._scores,
                strategy.data_share,
                self.data,
                self.config.train.eval_batch,
                self.group,
                self.stop,
                adding=self.callbacks.summing(run_plan.make_accumulator(self.config, self.data, strategy)),
                alive=self._report_alive,
            )
        strategy.train_mode(True)
        if result is None:
            return True
        check_test_images(result.unreadable, self.data.test_size, self.config.data)
        self.epochs_evaluated = complete
        self.reporter.evaluated(complete, self.step, result)
        self.checkpoints.scored(self.step, result.scalars())
        if names := self.callbacks.ends(complete, result.scalars(), self.group):
            self.ended_by = names
            self.reporter.ended_early(complete, names)
        return False

    def _report_alive(self) -> None:
        self.stacks.alive()
        self.reporter.alive()

    def _is_milestone(self, step: Step) -> bool:
        """Return whether `step` ends an epoch or is a multiple of checkpoint.every_steps.

        A save may be due after exactly such a step.
        """
        every = self.config.checkpoint.every_steps
        return step.after.consumed >= self.data.train_size or bool(every and (self.step + 1) % every == 0)

    def _save_due(self, step: Step) -> Due:
        complete = step.after.epoch + 1 if step.after.consumed >= self.data.train_size else None
        return self.checkpoints.due(self.step + 1, epoch=complete, last=complete == self.config.train.epochs)

    def _save(self) -> None:
        """Save the state after the last step. The state is written while training continues."""
        # A run that resumes from this state does not repeat the earlier steps, so check and record
        # their results first.
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
        # Record only checkpoints that a restart is certain to find. With checkpoint.url, the local
        # folder may be lost together with its machine, so only uploaded checkpoints are recorded.
        for step in copied if self.config.checkpoint.url else [save.step for save in completed]:
            self.ledger.checkpoint(step)

    def _snapshot(self) -> Snapshot:
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "fingerprint": self._fingerprint,
            "epochs_evaluated": self.epochs_evaluated,
            "micro_batches": self.division.micro_batches,
            **({"callbacks": self.callbacks.state(), "ended": self.ended_by} if self.config.train.callbacks else {}),
            **self.strategy.state(),
            "config": self._recorded,
            "data": describe(self.data),
        }

    @property
    def _recorded(self) -> dict[str, Any]:
        """The configuration to store in checkpoints.

        data.shape and data.classes come from the data set, because every data set except synthetic
        ignores the configured values.
        """
        return {**self.config.flat(), "data.shape": list(self.data.shape), "data.classes": self.data.classes}

    def resume(self) -> None:
        """Continue from the latest training state, which is in a checkpoint or the nodes' memory.

        If there is no such state, begin a new run. Raises CheckpointError if the state belongs to a
        different model, optimizer or data set.
        """
        kept = self.memory.restore()
        newer_than = -1 if kept is None else int(kept["step"])
        snapshot = self.checkpoints.newest(self.strategy.layout, newer_than)
        self._continue_from(snapshot or kept)
        source = protocol.STORAGE if snapshot else protocol.MEMORY if kept else protocol.SCRATCH
        self.reporter.post_memory(self.memory.begin(self.step, source))

    def _continue_from(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            self.division.check_work()
            self.division.check_smallest_micro_batch(self.sampler.state)
            self._load_weights()
            return
        now = self._recorded
        compatibility.check_resume(snapshot, self.strategy.state()["model"], now, self.checkpoints.path)
        self._changed = compatibility.describe_changes(snapshot["config"], now)
        try:
            self.strategy.load(snapshot)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {snapshot['step']} in {self.checkpoints.path} does not fit this "
                f"optimizer or precision ({error}); use the configuration that it was saved with, or set a "
                "different checkpoint.dir to start over"
            ) from error
        self.sampler.load_state_dict(snapshot["sampler"])
        self._other_data = snapshot.get("fingerprint", self._fingerprint) != self._fingerprint
        self.step, self.epochs_evaluated = int(snapshot["step"]), int(snapshot["epochs_evaluated"])
        self._notes += self.callbacks.load(snapshot.get("callbacks", {}))
        self.ended_by = self.callbacks.still_ending(snapshot.get("ended", []))
        self.division = self.division.resume(snapshot)
        self.sampler.dealing = self.division.dealing
        self.division.check_smallest_micro_batch(self.sampler.state)

    def _load_weights(self) -> None:
        """Set the weights that a new run starts with.

        If the model's first layer is computed from the data, compute that layer first. If
        checkpoint.load or model.pretrained is set, load the weights that this key names.
        """
        if self._filters:
            state = self.strategy.state()
            self.strategy.load({**state, "model": whiten(state["model"], self._filters, self.data, self.group)})
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
        elif self.config.model.pretrained:
            state = self.strategy.state()
            weights = load_pretrained(
                self.config.model, self.data.shape[0], state["model"], self.group, self.stacks.alive
            )
            self.strategy.load({**state, "model": weights})

    @property
    def _steps_left(self) -> int:
        return self.division.steps_left(self.sampler.state)

    def _list_notes(self) -> list[str]:
        changed = [f"changed since the checkpoint: {self._changed}"] if self._changed else []
        if self._other_data:
            changed.append(run_plan.note_changed_data(self.sampler.state.epoch + 1))
        steps = range(self.step + 1, self.step + 1 + self._steps_left)
        return (
            changed
            + self._notes
            + run_plan.note_choices(self.config, self.strategy, self._float32_for, steps, self._peaks, self._flops)
        )
